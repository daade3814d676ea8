"""What a step says of every rollout it played: its fate, why, what else moved it, and the numbers of its tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rl_sources import digits, learned_from, one_of_a_kind, row, run, source

from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.algorithms.policy_table import TABLE
from posttrain.core.batch import Batch, Outputs, Stats, TrainingStep
from posttrain.core.rollouts import Fate, Outcome, Rollout
from posttrain.core.types import Invalid, Task
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.token_recording import GROUPS, TokenRecording

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in TABLE},
    "dynamic sampling with room": ("grpo", {"dynamic_sampling": 3, "kl": 0.0}),
    "dynamic sampling without": ("dr-grpo", {"dynamic_sampling": 1}),
    "shares of successes": (
        "dr-grpo",
        {"dynamic_sampling": 2, "settings": {"sampling.low": 0.3, "sampling.high": 0.6}},
    ),
    "overlong filter": ("dr-grpo", {"overlong_filter": "true"}),
    "overlong filter with a penalty": ("grpo", {"overlong_filter": "true"}),
    "top entropy": ("dr-grpo", {"top_entropy": 0.1}),
    "replay": ("reinforce-baseline", {"replay": 40, "minibatches": 3}),
    "several passes": ("dr-grpo", {"epochs": 2, "minibatches": 3}),
    "entropy bonus": ("dr-grpo", {"entropy": 0.01}),
}
"""Every row of the table, and every part that filters or samples, on a row that has none."""


def uneven() -> Callable[[Task, str], Any]:
    """Of task 0 all rewards are equal, of task 1 all but one are invalid, of task 2 one is; the others differ."""
    calls: dict[str, int] = {}

    def reward(task: Task, reply: str) -> Any:
        place = calls[task["id"]] = calls.get(task["id"], -1) + 1
        if task["id"] == "0":
            return 1.0
        if (task["id"] == "1" and place % 4) or (task["id"] == "2" and place % 4 == 1):
            return Invalid("nobody knows")
        return digits(task, reply) if place % 4 else 1.0

    return reward


def played(experience: RLSource, number: int) -> tuple[TrainingStep, set[int], dict[int, int]]:
    """A whole step; the rollouts that its batches held, by identity, and how often."""
    step, objective = experience.produce(number), PolicyObjective(experience.algorithm)
    stats, times = Stats(step.stats), dict[int, int]()
    for build in step.updates:
        rollouts = learned_from(build)
        batches = build()
        for batch in batches:
            for place in batch.rollout.unique().tolist() if batch.advantage is not None else ():
                times[id(rollouts[place])] = times.get(id(rollouts[place]), 0) + 1
        stats.merge(experience.learner.update(batches, objective))
    before = {id(r) for r in step.played}
    experience.learned(step, stats)
    return step, before, times


def expected(row: Algorithm, rollout: Rollout, group: list[Rollout], advantage: float | None, times: int) -> Fate:
    """The fate, from rewards and batches alone. `group`: those that it is compared with."""
    if isinstance(rollout.reward, Invalid):
        return Fate.INVALID
    if rollout.greedy:
        return Fate.BASELINE
    valid = [r.reward for r in group if not isinstance(r.reward, Invalid)]
    own = [r for r in group if not r.greedy]
    kept = [r for r in own if not isinstance(r.reward, Invalid)]
    lost = any(r.greedy and isinstance(r.reward, Invalid) for r in group)
    if lost or len(kept) < max(2, len(own) / 2):
        return Fate.SMALL
    if row.sampling is not None:
        share = sum(r >= 1.0 - 1e-6 for r in valid) / len(valid)
        open_ends = (row.sampling.low, row.sampling.high) == (0, 1)
        if len(set(valid)) == 1 or not (open_ends or row.sampling.low < share < row.sampling.high):
            return Fate.REPLACED
    if row.filters and rollout.stop.truncated:
        return Fate.FILTERED
    if times:
        return Fate.TRAINED
    equal = len(set(valid)) == 1 and not row.shaping and not (row.kl and row.kl.where == "reward")
    return Fate.EQUAL if equal and not row.replay else Fate.UNSELECTED


@pytest.mark.parametrize("case", [*one_of_a_kind(TABLE), *(name for name in SETTINGS if name not in TABLE)])
def test_fates_add_up_to_what_was_played_and_each_is_what_happened(tokenizer: Tokenizer, case: str) -> None:
    name, settings = SETTINGS[case]
    algorithm = row(name, prompts=6, **settings)
    experience = source(tokenizer, algorithm, uneven(), size=(6, 4))
    fates: set[Fate] = set()
    for number in (1, 2):
        step, before, times = played(experience, number)
        own = [o for o in step.outcomes if not o.replayed]
        assert {id(o.rollout) for o in own} == before and len(own) == len(before), (
            "one account for each that was played"
        )
        for outcome in own:
            group = [o.rollout for o in own if o.rollout.group_and_side == outcome.rollout.group_and_side]
            fed = times.get(id(outcome.rollout), 0)
            fate = expected(algorithm, outcome.rollout, group, outcome.advantage, fed)
            assert outcome.fate is fate, (outcome, fate)
            assert (outcome.fate is Fate.TRAINED) == bool(fed)
            assert outcome.why or outcome.fate is Fate.TRAINED
            assert (outcome.advantage is None) == (
                outcome.fate in (Fate.INVALID, Fate.SMALL, Fate.REPLACED, Fate.BASELINE)
            )
            still = outcome.advantage == 0 and "token_advantage" not in outcome.numbers
            told = outcome.flags or outcome.fate is not Fate.TRAINED
            assert told or not still, "whoever learns from a rollout without an advantage says why"
            fates.add(outcome.fate)
        again = [o for o in step.outcomes if o.replayed]
        assert not again or algorithm.replay
        assert len(again) == len(times.keys() - before)
    wanted = {Fate.INVALID, Fate.SMALL, Fate.TRAINED}
    wanted |= {Fate.REPLACED} if algorithm.sampling else set()
    wanted |= {Fate.FILTERED} if algorithm.filters else set()
    wanted |= {Fate.UNSELECTED} if algorithm.select or (algorithm.replay and name != "sac") else set()
    assert wanted <= fates, fates


class Watching:
    """The row's objective; beside it d loss / d log p, of log-probabilities that stand alone."""

    def __init__(self, row: Algorithm) -> None:
        self.loss, self.wants = PolicyObjective(row), PolicyObjective(row).wants
        self.seen: list[tuple[Batch, torch.Tensor, torch.Tensor | None]] = []

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> torch.Tensor:
        if batch.tap is not None:
            alone = outputs.logp.detach().clone().requires_grad_()
            loss = self.loss(replace(outputs, logp=alone), batch, Stats())
            (slope,) = torch.autograd.grad(loss, alone, allow_unused=True, retain_graph=True)
            self.seen.append((batch, alone.detach(), None if slope is None else -slope))
        return self.loss(outputs, batch, stats)


def often(task: Task, reply: str) -> float:
    """Half of all replies are right."""
    return 1.0 if reply[:1] in "0123456789abcdefghijk" else digits(task, reply)


def entropies(learner: LocalLearner, batch: Batch) -> torch.Tensor:
    """[N], from the whole distribution."""
    with torch.no_grad():
        logits = learner.model.head.logits(learner.model.hidden(batch.layout, batch.at)).double()
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.trust_region is None])
def test_numbers_of_tokens_are_those_of_their_updates(tokenizer: Tokenizer, name: str) -> None:
    algorithm = row(name, prompts=3)
    experience = source(tokenizer, algorithm, often, lr=1e-3)
    experience.recording, objective = TokenRecording("full", after=True), Watching(algorithm)
    step, learner = experience.produce(1), experience.learner
    last: dict[int, dict[str, torch.Tensor]] = {}  # by rollout
    seen: Counter[int] = Counter()  # updates that learned from it
    first: set[int] = set()  # of the first update
    weights: dict[int, torch.Tensor] = {}
    shares: dict[int, torch.Tensor] = {}  # of a loss that reads whole distributions
    stats, views = Stats(step.stats), experience._watched.views if experience._watched else {}
    known = list(experience._watched.rollouts) if experience._watched else []
    for build in step.updates:
        rollouts, batches = learned_from(build), build()
        entropy = {id(b): entropies(learner, b) for b in batches if b.tap is not None}
        objective.seen.clear()
        stats.merge(learner.update(batches, objective))
        for batch, logp, slope in objective.seen:
            for place in batch.rollout.unique().tolist():
                mine, key = batch.rollout == place, id(rollouts[place])
                last[key] = {"learner": logp[mine], "entropy": entropy[id(batch)][mine]}
                seen[key] += 1
                first |= {key} if build is step.updates[0] else set()
                shares[key] = shares.get(key, torch.zeros(int(mine.sum()))) + batch.weight[mine]
                if slope is not None:
                    weights[key] = weights.get(key, torch.zeros(int(mine.sum()))) + slope[mine]
    experience.learned(step, stats)
    assert last
    for outcome in (o for o in step.outcomes if id(o.rollout) in last):
        key, numbers = id(outcome.rollout), outcome.numbers
        assert numbers["learner"].tolist() == last[key]["learner"].tolist(), "bit for bit"
        assert numbers["entropy"] == pytest.approx(last[key]["entropy"].numpy(), abs=1e-5)
        assert numbers["weight"] == pytest.approx(weights.get(key, shares[key]).numpy(), abs=1e-7)
        if algorithm.teacher is not None:
            (said,) = experience.teachers.logp(learner, [outcome.rollout], 64)  # type: ignore[union-attr]
            assert numbers["teacher"] == pytest.approx(said.numpy(), abs=1e-5)
        at = next(i for i, r in enumerate(known) if r is outcome.rollout)
        for view, column in (("old", "before"), ("reference", "reference")):
            told = view in views and not (view == "old" and seen[key] == 1 and key in first)
            assert (column in numbers) == told, "before the first update it is what it is there"
            assert not told or numbers[column].tolist() == views[view][at].tolist()
            if view in views and not told:
                assert numbers["learner"] == pytest.approx(views[view][at].numpy(), abs=1e-5)
        single = algorithm.epochs * algorithm.minibatches == 1
        assert not single or not np.array_equal(numbers["after"], numbers["learner"]), "the update has moved it"
        assert len(numbers["after"]) == outcome.rollout.n_scored


def recorded(experience: RLSource) -> list[Outcome]:
    """What a step leaves of those that have an advantage."""
    experience.recording = TokenRecording("full", after=True)
    return [o for o in played(experience, 1)[0].outcomes if o.advantage is not None]


def test_advantage_and_weight_follow_from_the_record_alone(tokenizer: Tokenizer) -> None:
    algorithm = row("grpo", prompts=6, minibatches=1, epochs=1)
    told = recorded(source(tokenizer, algorithm, often, size=(6, 4)))
    used = {id(o): float(o.rollout.reward) + o.shaping - o.penalty for o in told}  # type: ignore[arg-type]
    assert algorithm.kl is not None
    assert any(o.fate is Fate.TRAINED and o.advantage for o in told)
    for outcome in told:
        assert outcome.advantage is not None
        group = np.array([used[id(o)] for o in told if o.rollout.group == outcome.rollout.group])
        advantage = (used[id(outcome)] - group.mean()) / (group.std(ddof=1) + 1e-6)
        assert outcome.advantage == pytest.approx(advantage, abs=1e-5)
        if outcome.fate is not Fate.TRAINED:
            continue
        numbers, own = outcome.numbers, outcome.rollout.n_scored
        away = algorithm.kl.beta * (np.exp(numbers["reference"] - numbers["learner"]) - 1)
        assert numbers["weight"] == pytest.approx((outcome.advantage + away) / (len(told) * own), abs=1e-6)


def test_values_returns_and_advantages_of_tokens_are_those_of_a_loop(tokenizer: Tokenizer) -> None:
    algorithm = row("ppo", prompts=3)
    told, beta = recorded(source(tokenizer, algorithm, often)), algorithm.kl.beta if algorithm.kl else 0.0
    found: list[np.ndarray] = []
    for outcome in told:
        numbers = outcome.numbers
        before = numbers.get("before", numbers["learner"])
        rewards = -beta * (before - numbers["reference"]).astype(np.float64)
        rewards[-1] += float(outcome.rollout.reward)  # type: ignore[arg-type]
        value, advantage = [*numbers["value"].tolist(), 0.0], [0.0] * (len(rewards) + 1)
        for t in reversed(range(len(rewards))):
            advantage[t] = rewards[t] + value[t + 1] - value[t] + 0.95 * advantage[t + 1]
        found.append(np.array(advantage[:-1]))
        assert numbers["returns"] == pytest.approx(found[-1] + numbers["value"], abs=1e-5)
        assert outcome.penalty == pytest.approx(-rewards.sum() + float(outcome.rollout.reward), abs=1e-5)  # type: ignore[arg-type]
    every = np.concatenate(found)
    for outcome, own in zip(told, found, strict=True):
        own = (own - every.mean()) / every.std(ddof=1)
        assert outcome.advantage == pytest.approx(own.mean(), abs=1e-5)
        assert outcome.numbers["token_advantage"] == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("name", one_of_a_kind(TABLE, but="trpo"))
def test_recording_changes_no_bit_of_a_run(tokenizer: Tokenizer, name: str) -> None:
    def ran(recording: TokenRecording) -> tuple[torch.Tensor, list[dict[str, float]]]:
        experience = source(tokenizer, row(name, prompts=3))
        experience.recording = recording
        return run(experience, steps=3)

    plain, figures = ran(TokenRecording("tokens"))
    for recording in (TokenRecording("sample"), TokenRecording("full", after=True)):
        other, seen = ran(recording)
        assert torch.equal(plain, other) and figures == seen


def test_a_sample_has_eight_groups_by_the_seed_alone_and_none_are_taken_of_ids_alone() -> None:
    groups = [f"{i}#0" for i in range(40)]
    sample = TokenRecording("sample", seed=3)
    chosen = sample.chosen(5, groups)
    assert len(chosen) == GROUPS == 8 and chosen == sample.chosen(5, reversed(groups)) <= set(groups)
    assert (
        len({sample.chosen(5, groups), sample.chosen(6, groups), TokenRecording("sample", seed=4).chosen(5, groups)})
        == 3
    )
    assert TokenRecording("full").chosen(5, groups) == set(groups) and not TokenRecording("tokens").chosen(5, groups)
    assert sample.chosen(5, groups[:3]) == set(groups[:3])


def test_what_recording_takes_beyond_the_row_is_said_before_the_run() -> None:
    assert TokenRecording().describe(frozenset(), False) == [] == TokenRecording("tokens").describe(frozenset(), False)
    assert TokenRecording("full").describe(frozenset({"entropy"}), True) == []
    (said,) = TokenRecording("full", after=True).describe(frozenset(), False)
    assert (
        "entropy of every token" in said
        and "no reference" in said
        and "a forward pass a step for --record-after" in said
    )
    assert "(8 groups)" in TokenRecording(after=True).describe(frozenset(), True)[0]


def outcomes(tokenizer: Tokenizer, algorithm: Algorithm, env: Any, **how: Any) -> list[Outcome]:
    experience = source(tokenizer, algorithm, env, **how)
    return played(experience, 1)[0].outcomes


def level(task: Task, reply: str) -> float:
    """Task 0 tells nothing."""
    return 1.0 if task["id"] == "0" else digits(task, reply)


@pytest.mark.parametrize(
    ("name", "settings", "flags"),
    [
        ("grpo", {}, {"moved by KL"}),
        ("dr-grpo", {"entropy": 0.01}, {"moved by entropy"}),
        ("trpo", {}, {"bounds the step"}),
        ("distill-reverse-kl", {}, {"moved by teacher"}),
        ("vapo", {"critic_warmup": 5}, {"critic warm-up"}),
    ],
)
def test_flags_say_what_moves_a_rollout_beside_its_advantage(
    tokenizer: Tokenizer, name: str, settings: dict[str, Any], flags: set[str]
) -> None:
    told = outcomes(tokenizer, row(name, prompts=6, **settings), level, size=(6, 4))
    equal = [o for o in told if o.rollout.task["id"] == "0"]
    assert equal and all(o.fate is Fate.TRAINED and set(o.flags) == flags for o in equal)
    moved = [o for o in told if o.advantage and o.fate is Fate.TRAINED]
    assert all(not o.flags for o in moved) or name == "vapo"


def test_group_of_equal_rewards_is_not_fed_where_nothing_else_moves_it(tokenizer: Tokenizer) -> None:
    told = outcomes(tokenizer, row("dr-grpo", prompts=6), level, size=(6, 4))
    equal = [o for o in told if o.rollout.task["id"] == "0"]
    assert [(o.fate, o.why, o.flags) for o in equal] == [(Fate.EQUAL, "all rewards of its group are 1", ())] * 4


def test_a_rollout_that_is_alone_in_its_group_is_no_equal_group(tokenizer: Tokenizer) -> None:
    told = outcomes(tokenizer, row("reinforce-baseline", prompts=3, group=1), lambda task, reply: 1.0, size=(3, 1))
    still = [o for o in told if not o.advantage]
    assert still and all(o.fate is not Fate.EQUAL and "of its group" not in o.why for o in still)


def test_an_update_that_was_skipped_is_flagged_on_what_it_was_given(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("dr-grpo", minibatches=3))
    experience.recording = TokenRecording("full")
    step, objective = experience.produce(1), PolicyObjective(experience.algorithm)
    skipped: set[int] = set()
    for place, build in enumerate(step.updates):
        skipped |= {id(r) for r in learned_from(build)} if place == 1 else set()
        batches = [replace(b, weight=b.weight * math.nan) for b in build()] if place == 1 else build()
        assert experience.learner.update(batches, objective)["skipped"][0] == (place == 1)
    experience.learned(step, Stats())
    for outcome in (o for o in step.outcomes if o.fate is Fate.TRAINED):
        there = id(outcome.rollout) in skipped
        assert outcome.flags == (("update skipped",) if there else ())
        assert outcome.why.endswith("of 3, which was skipped" if there else "of 3")
        assert ("weight" in outcome.numbers) != there and "learner" in outcome.numbers


def test_shaping_and_penalty_are_what_the_reward_gained_and_lost(tokenizer: Tokenizer) -> None:
    shaped = outcomes(tokenizer, row("dapo", prompts=6, overlong_filter="false"), digits, size=(6, 4))
    spent = [o for o in shaped if o.advantage is not None]
    assert {o.shaping for o in spent if o.rollout.stop.truncated} == {-1.0}, "a reply that is cut off loses all"
    assert all(o.penalty == 0 for o in shaped)
    experience = source(tokenizer, row("rloo", kl=0.5, prompts=6), size=(6, 4))
    experience.recording = TokenRecording("full")
    for outcome in played(experience, 1)[0].outcomes:
        before, reference = outcome.numbers["learner"], outcome.numbers["reference"]
        assert outcome.penalty == pytest.approx(0.5 * float((before - reference).sum()), abs=1e-5)
        assert outcome.shaping == 0


def test_tokens_that_are_not_selected_are_told(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("dr-grpo", top_entropy=0.3, prompts=6), size=(6, 4))
    experience.recording = TokenRecording("full")
    kept = [o.numbers["kept"] for o in played(experience, 1)[0].outcomes]
    tokens = np.concatenate(kept)
    assert tokens.dtype == bool and tokens.sum() == round(0.3 * len(tokens))


def test_replayed_rollouts_are_the_same_after_a_resumption(tokenizer: Tokenizer) -> None:
    def told(step: TrainingStep) -> list[tuple[Any, ...]]:
        again = [o for o in step.outcomes if o.replayed]
        return [(o.rollout.task, o.rollout.group, o.rollout.text, o.advantage, o.why) for o in again]

    experience = source(tokenizer, row("sac", replay=30, minibatches=3))
    played(experience, 1)
    other = source(tokenizer, row("sac", replay=30, minibatches=3))
    other.restore(experience.state())
    whole, resumed = told(played(experience, 2)[0]), told(played(other, 2)[0])
    assert whole and [r[:3] for r in whole] == [r[:3] for r in resumed]
