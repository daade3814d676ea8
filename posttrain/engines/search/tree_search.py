"""Search over the steps of a reply, without an engine: beam, best-first, lookahead, MCTS, and best-of-N.

A search is a generator. It yields `Propose` and receives as many steps, or yields `ScoreNodes` and receives as many numbers.
It fills a `SearchTree`. So one search runs on a toy tree (`run`), and many share an engine and a reward model. Each follows
from its answers alone. No algorithm samples more than its budget of tokens.

Sources: best-of-N, beam and lookahead are those of arXiv 2408.03314, section 5; MCTS selects with PUCT (AlphaGo Zero,
Methods), where the actions are sampled steps and the prior is the policy's own (arXiv 2309.17179, section 3).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Choice = Literal["best", "majority", "weighted"]


@dataclass(frozen=True)
class SearchStep:
    """A sampled step. Equal tokens are equal steps."""

    tokens: tuple[int, ...]
    logp: tuple[float, ...] = field(compare=False)
    ended: bool = False  # the reply is whole with it
    cut: bool = False  # tokens ran out with it, those of the reply or of the search: the reply is not whole
    spent: int = field(default=1, compare=False)  # tokens sampled for it, with those that were thrown away
    origin: Any = field(default=None, compare=False)  # of the engine: the request that sampled it


@dataclass(eq=False)
class SearchNode:
    """A partial reply: its steps are those of the nodes from the root to this one."""

    parent: SearchNode | None = None
    step: SearchStep | None = None
    value: float = 0.0
    times: int = 1  # proposals that were this step
    children: list[SearchNode] = field(default_factory=list)
    prior: float = 1.0  # MCTS: the policy's probability of the step, of the proposed ones
    visits: int = 0  # MCTS
    total: float = 0.0  # MCTS: of the values of all visits
    closed: bool = False  # MCTS: nothing is left to expand below it

    def __post_init__(self) -> None:
        step = self.step
        self.length: int = (self.parent.length if self.parent else 0) + (len(step.tokens) if step else 0)

    @property
    def ended(self) -> bool:
        """Whether the reply is whole."""
        return self.step is not None and self.step.ended

    @property
    def path(self) -> list[SearchStep]:
        """The steps of the partial reply, in order."""
        found, node = [], self
        while node.parent is not None and node.step is not None:
            found.append(node.step)
            node = node.parent
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        """The tokens of the partial reply."""
        return [token for step in self.path for token in step.tokens]


@dataclass(frozen=True)
class Propose:
    """Asks for a step after each of these partial replies, each of at most `most` tokens in all."""

    nodes: Sequence[SearchNode]
    most: Sequence[int]
    greedy: bool = False  # at temperature 0
    whole: bool = False  # the step is the rest of the reply


@dataclass(frozen=True)
class ScoreNodes:
    """Asks for the value of each of these partial replies."""

    nodes: Sequence[SearchNode]


Answers = list[SearchStep] | list[float]
Asking = Generator[Propose | ScoreNodes, Any, None]


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search. `tokens`: budget of sampled tokens per reply; `longest`: most tokens of a reply."""

    width: int = 4
    proposals: int = 4
    tokens: int = 1024
    longest: int = 256
    lookahead: int = 1  # steps of a rollout
    exploration: float = 1.25  # c of PUCT
    scored: bool = True  # whether partial replies have values: else each is 0


@dataclass
class SearchTree:
    """All that a search has sampled."""

    settings: SearchSettings
    root: SearchNode = field(default_factory=SearchNode)
    spent: int = 0  # sampled tokens
    expansions: int = 0  # partial replies after which steps were proposed
    finished: list[SearchNode] = field(default_factory=list)  # whole replies, in the order of their proposals
    cut: list[SearchNode] = field(default_factory=list)  # tokens ran out with them

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.settings.tokens - self.spent

    def grow(
        self, nodes: Sequence[SearchNode], count: int, whole: bool = False, score: bool = True
    ) -> Generator[Propose | ScoreNodes, Any, list[SearchNode]]:
        """Propose `count` steps after each node, as far as tokens last. Return the new nodes, equal steps merged.

        Steps that were cut are kept apart: no reply goes on from them.
        """
        steps = yield from self.sampled([node for node in nodes for _ in range(count)], whole=whole)
        self.expansions += len({id(parent) for parent, _ in steps})  # tokens may end before all nodes had their turn
        new: list[SearchNode] = []
        for parent, step in steps:
            same = next((node for node in parent.children if node.step == step), None)
            if same is not None:
                same.times += 1
            elif step.cut:
                self.cut.append(SearchNode(parent, step, parent.value))
            else:
                new.append(SearchNode(parent, step))
                parent.children.append(new[-1])
        if score:
            yield from self.valued(new)
        self.finished += [node for node in new if node.ended]
        return new

    def sampled(
        self, nodes: Sequence[SearchNode], greedy: bool = False, whole: bool = False
    ) -> Generator[Propose, Any, list[tuple[SearchNode, SearchStep]]]:
        """Sample a step after each node, as far as tokens last: together those that fit at their longest."""
        found: list[tuple[SearchNode, SearchStep]] = []
        while len(found) < len(nodes) and self.left > 0:
            together: list[SearchNode] = []
            most: list[int] = []
            for node in nodes[len(found) :]:
                longest = self.settings.longest - node.length
                if together and sum(most) + longest > self.left:
                    break
                together.append(node)
                most.append(min(longest, self.left))
            steps: list[SearchStep] = yield Propose(together, most, greedy, whole)
            for step, bound in zip(steps, most, strict=True):
                assert 0 < step.spent <= bound, f"a step took {step.spent} of at most {bound} tokens"
                self.spent += step.spent
            found += zip(together, steps, strict=True)
        return found

    def valued(self, nodes: Sequence[SearchNode]) -> Generator[ScoreNodes, Any, None]:
        """Give nodes their values."""
        if nodes and self.settings.scored:
            for node, value in zip(nodes, (yield ScoreNodes(nodes)), strict=True):
                node.value = value

    def chosen(self, choice: Choice = "best", answer: Callable[[SearchNode], str] | None = None) -> SearchNode:
        """Return the reply: of the whole ones by `choice`; without any, the partial reply of the highest value.

        best: the highest value. majority: the most frequent answer. weighted: the answer of the highest sum of values
        (weighted best-of-N). Of an answer, the reply of the highest value. The first one wins a tie.
        """
        if not self.finished:
            return max(self._leaves() + self.cut, key=lambda node: (node.value, node.length))
        if choice == "best" or answer is None:
            return max(self.finished, key=lambda node: node.value)
        votes: dict[str, float] = {}
        answers = [answer(node) for node in self.finished]
        for node, given in zip(self.finished, answers, strict=True):
            votes[given] = votes.get(given, 0.0) + node.times * (node.value if choice == "weighted" else 1.0)
        own = [node for node, given in zip(self.finished, answers, strict=True) if votes[given] == max(votes.values())]
        return max(own, key=lambda node: node.value)

    def _leaves(self) -> list[SearchNode]:
        """Return the nodes without children, from the first to the last, in a tree of any depth."""
        found, left = [], [self.root]
        while left:
            node = left.pop()
            left += reversed(node.children)
            if not node.children:
                found.append(node)
        return found


def best_of_n(tree: SearchTree) -> Asking:
    """Sample width x proposals whole replies, apart from each other: as many as the other searches propose at a step."""
    yield from tree.grow([tree.root], tree.settings.width * tree.settings.proposals, whole=True)


def beam(tree: SearchTree) -> Asking:
    """Keep the `width` best partial replies, propose steps after each, until all are whole (arXiv 2408.03314, 5.2)."""
    yield from _beam(tree, 0)


def lookahead(tree: SearchTree) -> Asking:
    """Beam search where the value of a step is that of a greedy rollout from it (arXiv 2408.03314, 5.2)."""
    yield from _beam(tree, tree.settings.lookahead)


def _beam(tree: SearchTree, ahead: int) -> Asking:
    width, kept = tree.settings.width, [tree.root]
    count = width * tree.settings.proposals  # all partial replies of the first step have the same beginning
    while (going := [node for node in kept if not node.ended]) and tree.left > 0:
        new = yield from tree.grow(going, count, score=not ahead)
        if ahead:
            yield from _looked_ahead(tree, new, ahead)
        kept = sorted([node for node in kept if node.ended] + new, key=lambda node: -node.value)[:width]
        count = tree.settings.proposals


def _looked_ahead(tree: SearchTree, nodes: Sequence[SearchNode], steps: int) -> Asking:
    """Give nodes the values of rollouts of so many steps at temperature 0, which end with the reply or with the tokens."""
    at, over = list(nodes), set[int]()  # places whose rollouts were cut: a greedy step would be cut again
    for _ in range(steps):
        places = [place for place, node in enumerate(at) if not node.ended and place not in over]
        rolled = yield from tree.sampled([at[place] for place in places], greedy=True)
        if not rolled:
            break
        for place, (node, step) in zip(places, rolled, strict=False):
            if step.cut:
                over.add(place)
            else:
                at[place] = SearchNode(node, step)
    yield from tree.valued(at)
    for node, end in zip(nodes, at, strict=True):
        node.value = end.value


def best_first(tree: SearchTree) -> Asking:
    """Expand the partial reply of the highest value, until `width` replies are whole and no open one is better.

    Where no step raises a value (product, min), the first such reply is the best of all that could be proposed.
    """
    queue = [(-math.inf, 0, tree.root)]
    number, done = 1, 0
    while queue and tree.left > 0:
        _, _, node = heapq.heappop(queue)
        if node.ended:
            done += 1
            if done == tree.settings.width:
                return
            continue
        for child in (yield from tree.grow([node], tree.settings.proposals)):
            heapq.heappush(queue, (-child.value, number, child))
            number += 1


def mcts(tree: SearchTree) -> Asking:
    """Expand the partial reply that PUCT selects, until tokens are spent; the scorer's value of it goes to all nodes above.

    The priors are the policy's probabilities of the distinct proposals, normalised. A node without visits has the scorer's
    value, which costs no tokens. A subtree in which nothing is left to expand is not selected again.
    """
    while not tree.root.closed and tree.left > 0:
        node = tree.root
        while node.children:
            node = max((child for child in node.children if not child.closed), key=lambda c: puct(c, tree.settings))
        if not node.ended:
            new = yield from tree.grow([node], tree.settings.proposals)
            for child, prior in zip(new, _priors(new), strict=True):
                child.prior = prior
        _back_up(node)


def puct(node: SearchNode, settings: SearchSettings) -> float:
    """Return Q + c P sqrt(N(parent)) / (1 + N): the mean value of its visits, and the bonus for what was visited little."""
    assert node.parent is not None, "the root is not selected"
    mean = node.total / node.visits if node.visits else node.value
    return mean + settings.exploration * node.prior * math.sqrt(node.parent.visits) / (1 + node.visits)


def _priors(nodes: Sequence[SearchNode]) -> list[float]:
    logp = [math.fsum(node.step.logp) for node in nodes if node.step is not None]
    odds = [math.exp(one - max(logp)) for one in logp]
    return [one / math.fsum(odds) for one in odds]


def _back_up(leaf: SearchNode) -> None:
    """Count a visit of a leaf's value in it and in all nodes above; close what has nothing left to expand."""
    node: SearchNode | None = leaf
    while node is not None:
        node.visits += 1
        node.total += leaf.value
        node.closed = all(child.closed for child in node.children)
        node = node.parent


SEARCHES: Mapping[str, Callable[[SearchTree], Asking]] = {
    "best-of-n": best_of_n,
    "beam": beam,
    "best-first": best_first,
    "lookahead": lookahead,
    "mcts": mcts,
}
"""Searches by their names in the options."""


def run(
    search: Callable[[SearchTree], Asking],
    settings: SearchSettings,
    propose: Callable[[Propose], list[SearchStep]],
    value: Callable[[Sequence[SearchNode]], list[float]],
) -> SearchTree:
    """Run one search with functions that answer at once."""
    tree = SearchTree(settings)
    asking, answer = search(tree), None
    while True:
        try:
            asked = asking.send(answer)
        except StopIteration:
            return tree
        answer = propose(asked) if isinstance(asked, Propose) else value(asked.nodes)
