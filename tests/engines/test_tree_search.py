"""Searches on toy trees: they find the best reply that is known, keep their budget, and at width 1 follow the policy."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest

from posttrain.engines.search.tree_search import (
    SEARCHES,
    Propose,
    SearchNode,
    SearchSettings,
    SearchStep,
    SearchTree,
    best_first,
    puct,
    run,
)

DEPTH, BRANCHES = 3, 3


class Toy:
    """A tree of three levels of three steps; the n-th proposal after a node is its n-th step. Step lengths differ."""

    def __init__(self, seed: int = 0, falling: bool = False, lengths: Sequence[int] = (1,)) -> None:
        rng = random.Random(seed)
        self.worth: dict[tuple[int, ...], float] = {(): 1.0}
        for depth in range(1, DEPTH + 1):
            for path in product(range(BRANCHES), repeat=depth):
                own = rng.random()
                self.worth[path] = self.worth[path[:-1]] * own if falling else own
        self.lengths = lengths
        self.asked: Counter[tuple[tuple[int, ...], bool]] = Counter()
        self.requests: list[Propose] = []
        self.sampled = 0

    def path(self, node: SearchNode) -> tuple[int, ...]:
        return tuple(token for token in node.tokens if token >= 0)

    def propose(self, asked: Propose) -> list[SearchStep]:
        self.requests.append(asked)
        return [self.step(node, most, asked) for node, most in zip(asked.nodes, asked.most, strict=True)]

    def step(self, node: SearchNode, most: int, asked: Propose) -> SearchStep:
        path = self.path(node)
        number = self.asked[path, asked.greedy]
        self.asked[path, asked.greedy] += 1
        tokens: list[int] = []
        while len(path) < DEPTH and (not tokens or asked.whole):
            choice = 0 if asked.greedy else (number // BRANCHES ** (DEPTH - 1 - len(path)) if asked.whole else number)
            path = (*path, choice % BRANCHES)
            tokens += [path[-1]] + [-1] * (self.lengths[sum(path) % len(self.lengths)] - 1)
        cut = len(tokens) > most
        tokens = tokens[:most]
        self.sampled += len(tokens)
        logp = tuple(math.log(0.5 if token == 0 else 0.25) if token >= 0 else 0.0 for token in tokens)
        return SearchStep(tuple(tokens), logp, not cut and len(path) == DEPTH, cut, len(tokens))

    def value(self, nodes: Sequence[SearchNode]) -> list[float]:
        return [self.worth[self.path(node)] for node in nodes]

    @property
    def best(self) -> tuple[int, ...]:
        return max((path for path in self.worth if len(path) == DEPTH), key=self.worth.__getitem__)


def found(toy: Toy, name: str, **settings: int) -> SearchTree:
    return run(SEARCHES[name], SearchSettings(**{"tokens": 10**6, "longest": 100, **settings}), toy.propose, toy.value)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("seed", range(5))
def test_a_search_that_may_keep_everything_finds_the_best_reply(name: str, seed: int) -> None:
    toy = Toy(seed)
    width = BRANCHES**DEPTH
    tree = found(toy, name, width=width // BRANCHES if name == "best-of-n" else width, proposals=BRANCHES)
    assert toy.path(tree.chosen()) == toy.best
    assert len(tree.finished) == width


@pytest.mark.parametrize("name", SEARCHES)
def test_width_one_with_one_proposal_follows_the_first_proposals(name: str) -> None:
    toy = Toy(1)
    tree = found(toy, name, width=1, proposals=1)
    assert toy.path(tree.chosen()) == (0, 0, 0)
    rolled = sum(len(asked.nodes) for asked in toy.requests if asked.greedy)
    assert tree.spent == DEPTH + rolled and (rolled > 0) == (name == "lookahead")


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 17, 40, 61])
def test_no_token_is_sampled_beyond_the_budget_and_none_of_it_is_left_where_more_could_be_sampled(
    name: str, tokens: int
) -> None:
    toy = Toy(2, lengths=(2, 3, 1, 4))
    tree = found(toy, name, width=50, proposals=3, tokens=tokens, longest=12)
    assert tree.spent == toy.sampled == tokens
    for asked in toy.requests:
        assert sum(asked.most) <= tokens and min(asked.most) > 0
    reply = tree.chosen()
    assert 0 < reply.length <= 12 and (reply in tree.finished) == bool(tree.finished)


def test_without_a_whole_reply_the_longest_of_the_best_partial_ones_is_returned() -> None:
    toy = Toy(2, lengths=(3,))
    tree = found(toy, "beam", width=1, proposals=1, tokens=7, longest=12)
    assert not tree.finished and tree.chosen().tokens == [0, -1, -1, 0, -1, -1, 0]
    assert tree.chosen().value == toy.worth[0, 0]


def test_the_longest_partial_reply_is_found_in_a_tree_of_any_depth() -> None:
    tree = SearchTree(SearchSettings())
    node = tree.root
    for _ in range(5000):
        node.children.append(SearchNode(node, SearchStep((1,), (0.0,), False, False, 1)))
        node = node.children[0]
    assert tree.chosen() is node


def test_expansions_are_the_partial_replies_that_the_budget_reached() -> None:
    toy = Toy(2)
    tree = found(toy, "beam", width=3, proposals=3, tokens=12, longest=3)
    assert tree.expansions == len({toy.path(node) for asked in toy.requests for node in asked.nodes}) == 2


def test_a_rollout_that_was_cut_is_not_sampled_again() -> None:
    toy = Toy(2, lengths=(4,))
    found(toy, "lookahead", width=1, proposals=1, lookahead=4, longest=6, tokens=100)
    greedy = [toy.path(node) for asked in toy.requests if asked.greedy for node in asked.nodes]
    assert greedy and len(greedy) == len(set(greedy))


@pytest.mark.parametrize("seed", range(8))
def test_best_first_with_falling_values_finds_the_best_reply_without_seeing_all(seed: int) -> None:
    toy = Toy(seed, falling=True)
    tree = run(best_first, SearchSettings(1, BRANCHES, 10**6, 100), toy.propose, toy.value)
    assert toy.path(tree.chosen()) == toy.best
    seen = {toy.path(node) for asked in toy.requests for node in asked.nodes}
    assert seen == {path for path in toy.worth if len(path) < DEPTH and toy.worth[path] > toy.worth[toy.best]}


def test_a_beam_keeps_the_best_of_all_proposals_of_a_step() -> None:
    toy = Toy(3)
    tree = found(toy, "beam", width=2, proposals=BRANCHES)
    kept: list[tuple[int, ...]] = [()]
    for _ in range(DEPTH):
        below = [(*path, step) for path in kept for step in range(BRANCHES)]
        kept = sorted(below, key=lambda path: -toy.worth[path])[:2]
    assert toy.path(tree.chosen()) == max((toy.path(node) for node in tree.finished), key=toy.worth.__getitem__)
    assert set(kept) <= {toy.path(node) for node in tree.finished}
    assert tree.expansions == 1 + 2 * (DEPTH - 1)
    assert tree.spent == 2 * BRANCHES + (DEPTH - 1) * 2 * BRANCHES, "width x proposals at each step"


def test_whole_replies_keep_their_places_in_a_beam() -> None:
    """A whole reply with the highest value leaves room for one open reply among two, and ends the search when alone."""
    asked: list[list[tuple[int, ...]]] = []

    def propose(one: Propose) -> list[SearchStep]:
        asked.append([tuple(node.tokens) for node in one.nodes])
        steps = []
        for place, node in enumerate(one.nodes):
            first = not node.tokens and place == 0  # the very first proposal is a whole reply
            steps.append(SearchStep((place,), (-1.0,), first or node.length == 3))
        return steps

    def value(nodes: Sequence[SearchNode]) -> list[float]:
        return [9.0 if node.ended and node.length == 1 else 1.0 / (1 + sum(node.tokens)) for node in nodes]

    tree = run(SEARCHES["beam"], SearchSettings(2, 2, 10**6, 100), propose, value)
    assert asked == [[()] * 4, [(1,)] * 2, [(1, 0)] * 2, [(1, 0, 0)] * 2], "one open reply beside the whole one"
    assert tree.chosen().tokens == [0] and tree.expansions == 4


def test_lookahead_values_a_step_by_the_end_of_a_greedy_rollout() -> None:
    toy = Toy(4)
    tree = found(toy, "lookahead", width=1, proposals=BRANCHES, lookahead=2)
    path: tuple[int, ...] = ()
    for _ in range(DEPTH):
        options = [(*path, step) for step in range(BRANCHES)]
        path = max(options, key=lambda option: toy.worth[(*option, 0, 0)[:DEPTH]])
    assert toy.path(tree.chosen()) == max(((*path[:-1], step) for step in range(BRANCHES)), key=toy.worth.__getitem__)
    rollouts = 2 * BRANCHES + BRANCHES  # of two steps from the first level, of one from the second
    assert tree.spent == DEPTH * BRANCHES + rollouts


def test_puct_selects_as_computed_by_hand() -> None:
    """Two steps: the policy's own probabilities are 0.5 and 0.25, so the priors are 2/3 and 1/3. c = 1.

    Values 0.4 and 0.5. After the root's own visit: 0.4 + 2/3 > 0.5 + 1/3, so step 0 is expanded. Then
    N(root) = 2: 0.4 + 2/3 sqrt(2) / 2 = 0.871 < 0.5 + 1/3 sqrt(2) = 0.971, so step 1 is. Then N(root) = 3:
    0.4 + 2/3 sqrt(3) / 2 = 0.977 > 0.5 + 1/3 sqrt(3) / 2 = 0.789: below step 0.
    """
    toy = Toy()
    toy.worth |= {(0,): 0.4, (1,): 0.5, (0, 0): 0.1, (0, 1): 0.9}
    tree = found(toy, "mcts", proposals=2, tokens=8, exploration=1)
    expanded = list(dict.fromkeys(toy.path(node) for asked in toy.requests for node in asked.nodes))
    # below step 0: 0.1 + 2/3 < 0.9 + 1/3, with N = 1
    assert expanded == [(), (0,), (1,), (0, 1)]
    first, second = tree.root.children
    assert (first.prior, second.prior) == pytest.approx((2 / 3, 1 / 3))
    assert (first.visits, first.total) == (2, pytest.approx(0.4 + 0.9))
    assert (second.visits, second.total) == (1, pytest.approx(0.5))
    assert tree.root.visits == 4


def test_priors_are_the_policys_probabilities_of_whole_steps_whatever_their_lengths() -> None:
    steps = [SearchStep((1, 2), (math.log(0.5), math.log(0.4)), True), SearchStep((3,), (math.log(0.3),), True)]

    def propose(asked: Propose) -> list[SearchStep]:
        return steps[: len(asked.nodes)]

    settings = SearchSettings(proposals=2, tokens=4, longest=2)
    tree = run(SEARCHES["mcts"], settings, propose, lambda nodes: [0.0] * len(nodes))
    assert [child.prior for child in tree.root.children] == pytest.approx([0.2 / 0.5, 0.3 / 0.5])


def test_puct_is_the_mean_value_and_the_bonus_of_the_prior() -> None:
    parent = SearchNode(visits=9)
    node = SearchNode(parent, SearchStep((1,), (0.0,)), value=0.7, prior=0.3)
    assert puct(node, SearchSettings(exploration=2.0)) == pytest.approx(0.7 + 2 * 0.3 * 3 / 1)
    node.visits, node.total = 2, 0.8
    assert puct(node, SearchSettings(exploration=2.0)) == pytest.approx(0.4 + 2 * 0.3 * 3 / 3)


def test_mcts_visits_each_whole_reply_once_and_ends_when_all_is_expanded() -> None:
    tree = found(Toy(5), "mcts", proposals=BRANCHES)
    inner = sum(BRANCHES**depth for depth in range(DEPTH))
    assert tree.root.closed and tree.expansions == inner and tree.root.visits == inner + BRANCHES**DEPTH
    assert all(node.visits == 1 for node in tree.finished)


def test_equal_proposals_are_one_step_that_votes_as_often() -> None:
    def propose(asked: Propose) -> list[SearchStep]:
        return [SearchStep((token,), (-1.0,), True, spent=1) for token in (1, 1, 2, 3, 1, 3)]

    def value(nodes: Sequence[SearchNode]) -> list[float]:
        return [{1: 0.2, 2: 0.9, 3: 0.5}[node.tokens[0]] for node in nodes]

    tree = run(SEARCHES["best-of-n"], SearchSettings(2, 3, tokens=60, longest=10), propose, value)
    assert [(node.tokens, node.times) for node in tree.finished] == [([1], 3), ([2], 1), ([3], 2)]

    def answer(node: SearchNode) -> str:
        return str(node.tokens[0])

    assert tree.chosen("best", answer).tokens == [2]
    assert tree.chosen("majority", answer).tokens == [1]
    assert tree.chosen("weighted", answer).tokens == [3]  # 2 x 0.5 > 0.9 > 3 x 0.2
    assert tree.chosen("majority", lambda node: "odd" if node.tokens[0] % 2 else "even").tokens == [3]
