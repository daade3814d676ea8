"""Several rewards, each normalised in its group before they are added: against a loop, whatever the split or the order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor
from update_cases import collector_of, new_learner, new_player

from posttrain.algorithms.credit import Baselined, Decoupled
from posttrain.algorithms.earned_rewards import equal_rewards
from posttrain.algorithms.filters import DynamicSampling
from posttrain.algorithms.policy import PolicyObjective
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.settings import change
from posttrain.config.training import RL
from posttrain.core.batch import Scores
from posttrain.core.component import Need
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason, Task, UserError
from posttrain.training.adjust import adjust
from posttrain.training.loop import train
from posttrain.training.sources.collector import Size
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.scoreboard import named_parts, scoreboard

EPS = 1e-6


def board(parts: Mapping[str, Sequence[float]], group: Sequence[int]) -> Scores:
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in parts.items()}
    reward = torch.stack(list(columns.values())).sum(0)
    return Scores(reward, torch.tensor(group), torch.ones(len(group)), parts=columns)


def random_parts(rollouts: int, seed: int = 0) -> dict[str, list[float]]:
    """A part of two values, one of small spread, one of large spread far from 0, and one that is always the same."""
    drawn = torch.rand(3, rollouts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    right, small, large = drawn.tolist()
    return {
        "right": [float(x > 0.5) for x in right],
        "small": [0.01 * x for x in small],
        "large": [1000 + 50 * x for x in large],
        "same": [0.3] * rollouts,
    }


def of_the_paper(
    parts: Mapping[str, Sequence[float]], group: Sequence[int], weight: Mapping[str, float]
) -> list[float]:
    """GDPO, arXiv 2601.05242, rollout by rollout; the authors' code adds eps to both deviations."""
    total = []
    for i, own in enumerate(group):
        members = [j for j, other in enumerate(group) if other == own]
        a = 0.0
        for name, r in parts.items():
            of_group = [r[j] for j in members]
            a += weight.get(name, 1.0) * (r[i] - mean(of_group)) / (stdev(of_group) + EPS)
        total.append(a)
    centre, spread = mean(total), stdev(total)
    return [(a - centre) / (spread + EPS) for a in total]


GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 5, 5, 5]


@pytest.mark.parametrize("weight", [{}, {"right": 2.0, "large": 0.25}, {"small": -1.0, "right": 0.0}])
@pytest.mark.parametrize("seed", range(5))
def test_decoupled_advantage_is_the_loop_of_the_paper(weight: dict[str, float], seed: int) -> None:
    parts = random_parts(len(GROUPS), seed)
    part = Decoupled(tuple(f"{name}={w}" for name, w in weight.items()))
    assert part(board(parts, GROUPS)).tolist() == pytest.approx(of_the_paper(parts, GROUPS, weight), abs=1e-9)


def test_golden_decoupled_advantages() -> None:
    """Figure 2 of the paper: of two rollouts with two rewards of 0 or 1, GRPO tells (0, 1) and (0, 2) not apart."""
    parts = {"a": [0.0, 1.0, 0.0, 1.0], "b": [0.0, 0.0, 0.0, 1.0]}
    found = Decoupled(whiten=False)(board(parts, [0, 0, 1, 1])).tolist()
    half = math.sqrt(0.5)
    assert found == pytest.approx([-half, half, -2 * half, 2 * half], abs=1e-5)
    summed = Baselined("group", "group")(board(parts, [0, 0, 1, 1])).tolist()
    assert summed == pytest.approx([-half, half, -half, half], abs=1e-5)
    whitened = Decoupled()(board(parts, [0, 0, 1, 1])).tolist()
    assert whitened == pytest.approx([-0.5477226, 0.5477226, -1.0954451, 1.0954451], abs=1e-5)


def test_a_penalty_of_the_reward_touches_no_part() -> None:
    scores = board(random_parts(len(GROUPS)), GROUPS)
    taxed = replace(scores, penalty=tuple(torch.full((1,), float(i)) for i in range(len(GROUPS))))
    assert torch.equal(Decoupled()(taxed), Decoupled()(scores))


def test_one_part_without_whitening_is_grpo() -> None:
    scores = board({"right": random_parts(12)["right"]}, GROUPS)
    assert torch.equal(Decoupled(whiten=False)(scores), Baselined("group", "group")(scores))


def test_scale_and_offset_of_a_part_change_nothing() -> None:
    parts = random_parts(12)
    moved = {**parts, "small": [7 + 300 * x for x in parts["small"]]}
    same = [Decoupled()(board(own, GROUPS)) for own in (parts, moved)]
    assert torch.allclose(*same, atol=2e-3)  # eps beside a deviation of 0.003
    exact = [Decoupled(eps=1e-15)(board(own, GROUPS)) for own in (parts, moved)]
    assert torch.allclose(*exact, atol=1e-9)


def test_a_group_without_signal_has_advantage_exactly_0_and_equal_sums_of_unequal_parts_have_signal() -> None:
    parts = {"a": [0.1 + 0.2, 0.3, 0.0, 1.0], "b": [0.7, 0.7, 1.0, 0.0]}
    scores = board(parts, [0, 0, 1, 1])
    assert scores.reward[2] == scores.reward[3]
    assert equal_rewards(scores).tolist() == [True, True, False, False]
    assert DynamicSampling()(scores).tolist() == [False, False, True, True]
    weighted = Decoupled(("a=2",))(scores)
    assert weighted[:2].tolist() == [0.0, 0.0] and weighted[2] < 0 < weighted[3]
    assert equal_rewards(Scores(scores.reward, scores.group, scores.length)).all()


def test_processes_joined_in_any_order_give_each_rollout_the_same() -> None:
    parts = random_parts(12)
    whole = board(parts, GROUPS)
    expected = Decoupled()(whole)
    split = [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11], []]
    for order in permutations(range(4)):
        rows = [i for own in order for i in split[own]]
        joined = Scores.join([whole.of(torch.tensor(split[own], dtype=torch.int64)) for own in order])
        assert joined.parts.keys() == whole.parts.keys()
        assert torch.allclose(Decoupled()(joined), expected[torch.tensor(rows)], atol=1e-12)
    assert Scores.join([whole.of(torch.zeros(0, dtype=torch.int64))]).parts == {}


def test_processes_that_name_different_parts_cannot_be_joined() -> None:
    with pytest.raises(AssertionError, match="name the same parts"):
        Scores.join([board({"a": [1.0]}, [0]), board({"b": [1.0]}, [0])])


def rollout(rewards: dict[str, float], task: str = "t", steps: Sequence[tuple[int, float]] = ()) -> Rollout:
    transcript = Transcript()
    transcript.observe([5])
    transcript.sample(Completion(0, [7, 8], [-1.0, -1.0], "", StopReason.EOS, 0))
    return Rollout({"id": task}, task, [transcript], sum(rewards.values()), rewards, steps=list(steps))


def test_parts_stand_on_the_scoreboard_only_where_they_are_compared() -> None:
    rollouts = [rollout({"b": 1.0, "a": 0.5}), rollout({"a": 0.25, "b": 0.0})]
    assert scoreboard(rollouts).parts == {}
    found = scoreboard(rollouts, needs=frozenset({Need.PARTS})).parts
    assert {name: values.tolist() for name, values in found.items()} == {"a": [0.5, 0.25], "b": [1.0, 0.0]}
    assert list(found) == ["a", "b"] and named_parts([]) == {}


@pytest.mark.parametrize(
    ("rollouts", "told"),
    [
        ([rollout({"a": 1.0}), rollout({})], "task 't' has no named parts to compare: return a dict"),
        ([rollout({"a": 1.0}), rollout({"a": 1.0, "b": 0.0}, "u")], "'u' has the parts a, b, that of task 't' a:"),
        ([rollout({"a": 1.0, "b": 1.0}), rollout({"b": 1.0}, "u")], "'u' has the parts b, that of task 't' a, b:"),
        ([rollout({"a": 1.0}, steps=[(1, 0.5)])], "task 't' returns step rewards instead of named parts"),
    ],
)
def test_rewards_without_the_same_named_parts_end_the_run_in_one_line(rollouts: list[Rollout], told: str) -> None:
    with pytest.raises(UserError) as raised:
        named_parts(rollouts)
    assert told in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ("format", "'format' is not NAME=WEIGHT"),
        ("=1", "'=1' is not NAME=WEIGHT"),
        ("a=x", "'a=x' is not NAME=WEIGHT"),
        ("a=nan", "'a=nan' is not NAME=WEIGHT"),
        ("a=1,a=2", "names a twice"),
    ],
)
def test_weights_that_cannot_be_read_are_refused_before_the_run(weights: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        adjusted("grpo", advantage="decoupled", part_weights=weights)


def test_a_weight_of_a_part_that_no_reward_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        UserError, match=r"--part-weights names formal, not a part of the reward: name one of large, right"
    ):
        Decoupled(("formal=1",))(board({"large": [1.0, 2.0], "right": [0.0, 1.0]}, [0, 0]))


@pytest.mark.parametrize(
    ("row", "more", "told"),
    [
        ("grpo", {"kl_where": "reward"}, "from which no KL is subtracted"),
        ("dapo", {}, "set --overlong-cache 0"),
        ("grpo", {"length_reward": 0.1}, "leave out --length-reward"),
        ("grpo", {"group": 1}, "--group must be at least 2"),
    ],
)
def test_what_decoupled_parts_would_not_see_is_refused(row: str, more: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        adjusted(row, advantage="decoupled", **more)
    assert isinstance(adjusted("dapo", advantage="decoupled", overlong_cache=0).advantage, Decoupled)


def adjusted(row: str, group: int = 3, **settings: object):  # type: ignore[no-untyped-def]
    run = RL(tasks="rows", env="env", model="m", steps=10, prompts=2, group=group, max_tokens=6, settings=settings)
    return adjust(TABLE[row], run)


def two_rewards(task: Task, reply: str) -> dict[str, float]:
    return {"digits": sum(c.isdigit() for c in reply) / 8, "short": 50.0 - len(reply)}


@pytest.mark.parametrize("reward", [two_rewards, lambda task, reply: {**two_rewards(task, reply), "reward": 0.0}])
def test_any_split_into_micro_batches_moves_the_weights_alike(reward: object) -> None:
    """Also where the reward itself is always the same: it is the parts that are compared."""
    row = change(TABLE["grpo"], {"advantage": "decoupled", "kl": 0})
    tasks = [{"id": str(i), "prompt": f"{i}+1="} for i in range(4)]
    weights: list[list[Tensor]] = []
    for tokens in (16, 60, 4000):
        learner = new_learner(row, torch.float64)
        before = [p.detach().clone() for p in learner.model.parameters()]
        player = new_player(reward, learner.model, 6)
        source = RLSource(collector_of(tasks, player, row, Size(4, 4, tokens)), learner, row)
        silent: list[float] = []
        watch = [lambda t: silent.append(t.stats.means()["groups/no_signal"])]
        train(learner, source, PolicyObjective(row), watch, first=1, steps=1)
        assert len(silent) == 1 and silent[0] < 1
        weights.append([p.detach().clone() for p in learner.model.parameters()])
        assert any(not torch.equal(a, b) for a, b in zip(before, weights[-1], strict=True))
    assert all(
        torch.allclose(a, b, atol=1e-10) for other in weights[1:] for a, b in zip(weights[0], other, strict=True)
    )
