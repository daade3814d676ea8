"""The source of reinforcement learning: what is kept, what is dropped, and what a step is made of."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import make_rollouts, tiny
from rl_sources import TASKS, accounted, digits, learned_from, one_of_a_kind, row, run, source, weights

from posttrain.algorithms.aggregate import ConstantLength
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.credit import PassAtK
from posttrain.algorithms.policy import Algorithm, Imitation, PolicyObjective, Pretraining
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.shaping import SoftOverlong
from posttrain.config.resolve import filled
from posttrain.config.training import RL
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Invalid, InvalidKind, Reply, Sampling, StopReason, Task, Turn, UserError
from posttrain.data.tasks import draw, order, to_tasks
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.player import Player
from posttrain.learners.local_learner import Optimization
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.adjust import adjust
from posttrain.training.loop import train
from posttrain.training.sources.collector import Collector, Size
from posttrain.training.sources.credit_assignment import Credited, credit
from posttrain.training.sources.diversity import GROUPS, MEMBERS, diversity
from posttrain.training.sources.ledger import Ledger
from posttrain.training.sources.length_filter import Prompts, TooLong
from posttrain.training.sources.minibatches import Minibatches
from posttrain.training.sources.model_outputs import evaluate_rollouts
from posttrain.training.sources.scoreboard import describe, refuse_broken, scoreboard, usable
from posttrain.training.sources.task_order import Solved, Uniform
from posttrain.training.sources.token_recording import SAMPLE


def half_digits(task: Task, reply: str) -> float:
    return float(digits(task, reply) >= 0.5)


def ledger_of(credited: Credited, algorithm: Algorithm = TABLE["grpo"]) -> Ledger:
    """As a source has it when the updates of a step are made."""
    ledger = Ledger(algorithm, 1, credited.rollouts, [], SAMPLE)
    ledger.credit(credited)
    return ledger


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_a_kind(TABLE))
def test_step_does_not_depend_on_the_microbatch_budget(tokenizer: Tokenizer, name: str) -> None:
    one, _ = run(source(tokenizer, row(name), budget=10_000))
    many, _ = run(source(tokenizer, row(name), budget=20))
    assert (one - many).abs().max() < 1e-5


def test_first_update_of_a_step_is_on_policy_and_later_ones_have_their_own_ratio(tokenizer: Tokenizer) -> None:
    _, seen = run(source(tokenizer, row("dr-grpo", epochs=2, minibatches=2), lr=1e-2), steps=1)
    assert seen[0]["ratio/first"] == 1.0 and seen[0]["ratio"] != 1.0
    assert seen[0]["ratio/clipped_low"] + seen[0]["ratio/clipped_high"] > 0


def test_every_rollout_serves_once_per_epoch(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("grpo", epochs=2, minibatches=3))
    step = experience.produce(1)
    assert len(step.updates) == 6
    for epoch in (step.updates[:3], step.updates[3:]):
        served = [r for build in epoch for r in learned_from(build)]
        assert {id(r) for r in served} == {id(r) for r in step.played} and len(served) == 12


def test_groups_stay_whole_within_an_update(tokenizer: Tokenizer) -> None:
    step = source(tokenizer, row("grpo", minibatches=3)).produce(1)
    for build in step.updates:
        rollouts = learned_from(build)
        assert len(rollouts) == 4 and len({r.group for r in rollouts}) == 1


def test_minibatches_have_an_order_of_their_own_for_every_step_epoch_and_seed(tokenizer: Tokenizer) -> None:
    def orders(seed: int) -> list[tuple[str, ...]]:
        experience = source(tokenizer, row("grpo", epochs=2, minibatches=6, prompts=6), seed=seed, size=(6, 4))
        _, _, _, coefficients, *_ = experience.produce(1).updates[0].args
        credited = experience._watched
        assert credited is not None
        found = []
        for number in (1, 2, 3):
            groups = [
                learned_from(b)[0].task["id"]
                for b in experience.minibatches.updates(number, credited, coefficients, ledger_of(credited))
            ]
            assert sorted(groups[:6]) == sorted(groups[6:]) == [t["id"] for t in TASKS]
            found += [tuple(groups[:6]), tuple(groups[6:])]
        return found

    every = [*orders(0), *orders(1)]
    assert len(set(every)) == 12 and orders(0) == every[:6]


def test_replay_draws_others_for_every_step_update_and_seed(tokenizer: Tokenizer) -> None:
    def draws(seed: int) -> list[tuple[int, ...]]:
        experience = source(tokenizer, row("sac", replay=30, minibatches=3), seed=seed)
        played = [rollout for number in (1, 2, 3) for rollout in experience.produce(number).played]
        assert experience.buffer is not None and len(experience.buffer.advantages) == 30
        assert list(map(id, experience.buffer.rollouts)) == list(map(id, played[-30:]))
        nothing, found = credit(experience.algorithm, [], experience.learner, 64, {}, 1.0, Stats()), []
        places = {id(r): place for place, r in enumerate(experience.buffer.rollouts)}  # type: ignore[union-attr]
        for number in (4, 5, 6):
            for build in experience.minibatches.updates(number, nothing, {}, ledger_of(nothing)):
                drawn = [places[id(r)] for r in learned_from(build)]
                assert len(set(drawn)) == 4 and drawn == sorted(drawn)  # a third of the step's 12, neighbours by group
                found.append(tuple(drawn))
        return found

    every = [*draws(0), *draws(1)]
    assert len(every) == 36 == len(set(every)) and draws(0) == every[:18]


def test_what_a_token_is_told_is_its_own_rollout_s_though_others_were_dropped(tokenizer: Tokenizer) -> None:
    """Invalid rollouts leave their group, and places among the rest are neither places among all nor groups of four."""

    def broken(task: Task, reply: str) -> Any:
        return Invalid("no letters") if reply[:1] in "abcdefgh" else digits(task, reply)

    experience = source(tokenizer, row("dr-grpo", epochs=2, minibatches=2), broken, budget=40, size=(6, 4))
    step = experience.produce(1)
    valid = {}
    for rollout in step.played:
        if not isinstance(rollout.reward, Invalid):
            valid.setdefault(rollout.group, []).append(rollout.reward)
    sizes = [len(own) for own in valid.values()]
    assert 2 <= min(sizes[:3]) < 4 and min(sizes) >= 2, "a group before others has to lose a member"
    for rollout, told in ((o.rollout, o.advantage) for o in accounted(experience)):
        own = valid[rollout.group]
        lost = isinstance(rollout.reward, Invalid)
        expected = None if lost else pytest.approx(rollout.reward - sum(own) / len(own), abs=1e-6)  # type: ignore[operator]
        assert told == expected
    advantage = {id(o.rollout): o.advantage for o in accounted(experience)}
    fed = 0
    for place, build in enumerate(step.updates):
        rollouts = learned_from(build)
        for batch in build():
            assert (
                batch.advantage is not None
                and batch.sampler_logp is not None
                and (batch.old_logp is None) == (place == 0)
            )
            for index in batch.rollout.unique().tolist():
                mine, transcript = batch.rollout == index, rollouts[index].transcripts[0]
                assert batch.target[mine].tolist() == [transcript.tokens[t] for t in transcript.scored.tolist()]
                assert batch.advantage[mine].tolist() == pytest.approx(
                    [advantage[id(rollouts[index])]] * int(mine.sum())
                )
                sampled = torch.from_numpy(transcript.sampler_logp)
                assert torch.equal(batch.sampler_logp[mine], sampled)
                if batch.old_logp is not None:  # nothing has moved yet
                    assert torch.allclose(batch.old_logp[mine], sampled, atol=1e-4)
                fed += 1
    assert fed > 20


def test_weights_sum_to_one_sequence_each_whatever_the_minibatch(tokenizer: Tokenizer) -> None:
    for build in source(tokenizer, row("grpo", minibatches=3)).produce(1).updates:
        assert sum(b.weight.sum().item() for b in build()) == pytest.approx(1.0)


def test_dropping_rollouts_without_advantage_changes_nothing(tokenizer: Tokenizer) -> None:
    def coarse(task: Task, reply: str) -> float:  # whole groups of equal rewards
        return float(len(reply) > 3) if task["id"] in "024" else 1.0

    dropped, _ = run(source(tokenizer, row("dr-grpo"), coarse), steps=3)
    experience = source(tokenizer, row("dr-grpo"), coarse)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(Algorithm, "moves_every_token", property(lambda self: True))
    whole, _ = run(experience, steps=3)
    monkey.undo()
    assert (dropped - whole).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["dr-grpo", "lite-ppo", "gspo"])
def test_rollouts_without_advantage_count_in_every_denominator(tokenizer: Tokenizer, name: str) -> None:
    """By the weights themselves: the optimizer takes no notice of a gradient that is a multiple of another."""

    def coarse(task: Task, reply: str) -> float:  # whole groups of equal rewards
        return sum(map(ord, reply)) % 5 / 4 if task["id"] in "024" else 1.0

    step = source(tokenizer, row(name, minibatches=1, epochs=1), coarse).produce(1)
    [build] = step.updates
    batches = build()
    fed = {rollout for b in batches for rollout in b.rollout.tolist()}
    assert 0 < len(fed) <= 8 and len(step.played) == 12
    every = sum(r.n_scored for r in step.played)
    for b in batches:
        own = torch.bincount(b.rollout)[b.rollout]
        expected = {"dr-grpo": 0 * own + 1 / (12 * 8), "lite-ppo": 0 * own + 1 / every, "gspo": 1 / (12 * own)}[name]
        assert torch.allclose(b.weight, expected.float(), rtol=1e-6)


def test_step_without_any_signal_is_still_an_update_with_gradient_zero(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("dr-grpo"), lambda task, reply: 0.7)
    before = weights(experience.learner)
    after, seen = run(experience, steps=1)
    assert torch.equal(before, after) and seen[0]["groups/no_signal"] == 1.0 and experience.learner.version == 3


def test_tasks_of_an_epoch_are_all_played_once(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("grpo"))
    played = [e.task["id"] for number in (1, 2) for e in experience.queue.collector.episodes(number, 3)]
    assert sorted(set(played)) == [t["id"] for t in TASKS] and all(played.count(t["id"]) == 4 for t in TASKS)
    again = [e.task["id"] for number in (3, 4) for e in experience.queue.collector.episodes(number, 3)]
    assert sorted(again) == sorted(played) and again != played


def test_a_task_that_comes_twice_in_a_step_makes_two_groups(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("grpo"), size=(4, 2))  # 6 tasks: step 2 spans two epochs
    collector = experience.queue.collector
    collector.episodes(1, 4)
    episodes = collector.episodes(2, 4)
    assert collector.position.state() == {"cursor": 8}
    assert len({e.group for e in episodes}) == 4 and len({e.seed for e in episodes}) == 8


def test_reward_penalty_of_rloo_reaches_the_advantage(tokenizer: Tokenizer) -> None:
    told = []
    for kl in (0.0, 0.5):
        experience = source(tokenizer, row("rloo", kl=kl))
        experience.produce(1)
        told.append([(o.rollout.transcripts[0].tokens, o.advantage) for o in accounted(experience)])
    tokens, advantages = ([[own[i] for own in one] for one in told] for i in (0, 1))
    assert tokens[0] == tokens[1] and advantages[0] != advantages[1]


def test_an_entropy_bonus_in_the_reward_is_the_surprise_of_each_token(tokenizer: Tokenizer) -> None:
    """REINFORCE credits a token with what follows: the reward, and 0.1 of -log pi of itself and all later tokens."""
    plain, soft = (
        source(tokenizer, row("reinforce", **how)) for how in ({}, {"entropy": 0.1, "entropy_where": "reward"})
    )
    for experience in (plain, soft):
        experience.produce(1)
    for without, widened in zip(accounted(plain), accounted(soft), strict=True):
        logp = widened.rollout.transcripts[0].sampler_logp
        assert logp is not None
        assert widened.rollout.transcripts[0].tokens == without.rollout.transcripts[0].tokens
        assert widened.penalty == pytest.approx(0.1 * float(logp.sum()), abs=1e-5) and without.penalty == 0
        surprise = -0.1 * logp[::-1].cumsum()[::-1]
        assert widened.advantage - without.advantage == pytest.approx(float(surprise.mean()), abs=1e-5)


def test_a_kl_and_an_entropy_in_the_reward_are_both_deducted(tokenizer: Tokenizer) -> None:
    both = {"kl": 0.5, "kl_where": "reward", "kl_estimator": "k1", "entropy": 0.1, "entropy_where": "reward"}
    experience = source(tokenizer, row("reinforce", **both))
    played = experience.produce(1).played
    reference = evaluate_rollouts(experience.learner, played, 64, of="reference")["logp"]
    for outcome, other in zip(accounted(experience), reference, strict=True):
        logp = outcome.rollout.transcripts[0].sampler_logp
        assert logp is not None
        assert outcome.penalty == pytest.approx(float(0.6 * logp.sum() - 0.5 * other.sum()), abs=1e-4)


def test_invalid_rewards_are_no_results_of_a_task(tokenizer: Tokenizer) -> None:
    """They say nothing of whether the policy solves it: an order of tasks sees the others alone."""
    told: list[Solved] = []

    class Noting(Uniform):
        def observe(self, results: Sequence[Solved]) -> None:
            told.extend(results)

    def sometimes(task: Task, reply: str) -> float | Invalid:
        return Invalid("broken") if len(reply) % 3 == 0 else float(len(reply) % 2)

    experience = source(tokenizer, row("grpo"), sometimes)
    experience.queue.collector.order = Noting(len(TASKS), 0)
    played = experience.produce(1).played
    found = {}
    for task in {r.task["id"] for r in played}:
        rewards = [r.reward for r in played if r.task["id"] == task and not isinstance(r.reward, Invalid)]
        found[task] = rewards.count(1.0), rewards.count(0.0)
    assert {one.id: (one.right, one.wrong) for one in told} == {task: own for task, own in found.items() if sum(own)}
    assert 0 < sum(map(sum, found.values())) < len(played)


def invalidate(rollouts: list[Rollout], *places: int) -> list[Rollout]:
    for place in places:
        rollouts[place].reward = Invalid("broken")
    return rollouts


def test_invalid_rewards_are_counted_and_left_out_and_never_zero() -> None:
    rollouts = invalidate(make_rollouts(torch.Generator().manual_seed(0), 3, 4, 40), 0, 4, 5, 6)
    stats = describe(rollouts, 1.0)
    kept, _ = usable(rollouts, stats)
    assert [r.group for r in kept] == ["g0"] * 3 + ["g2"] * 4  # one valid of four is no group
    assert stats["invalid"] == (4.0, 12.0) and stats["reward"][1] == 8.0 and stats["dropped"] == (5.0, 12.0)
    pairs = invalidate(make_rollouts(torch.Generator().manual_seed(0), 2, 2, 40), 3)
    assert [r.group for r in usable(pairs, Stats())[0]] == ["g0"] * 2  # one valid of two is none either
    sixes = invalidate(make_rollouts(torch.Generator().manual_seed(0), 2, 6, 40), 0, 1, 2, 3, 6, 7, 8)
    assert [r.group for r in usable(sixes, Stats())[0]] == ["g1"] * 3  # less than half of six is none, half is one
    single = make_rollouts(torch.Generator().manual_seed(0), 2, 1, 40)
    assert usable(single, Stats())[0] == single  # groups of one are compared with nothing


def test_kinds_of_invalid_rewards_are_shares_of_the_step_and_timeouts_are_always_told() -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(1), 2, 4, 30)
    assert describe(rollouts, None).means()["invalid/timeout"] == 0.0
    rollouts[0] = replace(rollouts[0], reward=Invalid("late", InvalidKind.TIMEOUT))
    rollouts[3] = replace(rollouts[3], reward=Invalid("dead", InvalidKind.DIED))
    figures = describe(rollouts, None).means()
    assert (figures["invalid"], figures["invalid/timeout"], figures["invalid/died"]) == (0.25, 0.125, 0.125)


def test_figures_of_a_step_are_of_all_of_its_rollouts() -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), GROUPS + 2, MEMBERS + 1, 40)
    rollouts[1].stop = StopReason.LENGTH
    stats = describe(rollouts, 0.5)
    tokens = sum(r.n_sampled for r in rollouts)
    logp = sum(x for r in rollouts for t in r.transcripts for x in t.logp)
    rewards = [float(r.reward) for r in rollouts]  # type: ignore[arg-type]
    assert stats["entropy"] == (pytest.approx(-logp), tokens) and stats["length"] == (tokens, len(rollouts))
    assert stats["reward"] == (pytest.approx(sum(rewards)), len(rollouts)) and stats["truncated"] == (1, len(rollouts))
    assert stats["accuracy"] == (sum(x >= 0.5 for x in rewards), len(rollouts))
    groups = [rollouts[i : i + MEMBERS] for i in range(0, GROUPS * (MEMBERS + 1), MEMBERS + 1)]
    looked = [[[t.tokens[i] for t in r.transcripts for i in t.scored] for r in own] for own in groups]
    expected = diversity(looked)
    assert {name: stats[name] for name in expected} == expected
    pair = describe(rollouts[:2], None)
    assert {name: pair[name] for name in expected} == diversity([looked[0][:2]])
    alone = describe(rollouts[: MEMBERS + 2], None)  # the second group has one member: nothing to compare
    assert {name: alone[name] for name in expected} == diversity(looked[:1]) and "accuracy" not in alone


def test_a_success_is_decided_by_the_outcome_where_a_reward_has_one_and_by_the_whole_reward_elsewhere() -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 1, 3, 40)
    for rollout, outcome, reward in zip(rollouts, (1.0, 0.0, None), (0.2, 1.2, 0.9), strict=True):
        rollout.reward, rollout.rewards = reward, {} if outcome is None else {"outcome": outcome}
    scores = scoreboard(rollouts, success=0.5)
    assert scores.success is not None and scores.success.tolist() == [True, False, True]
    assert describe(rollouts, 0.5)["accuracy"] == (2, 3) and scores.reward.tolist() == [0.2, 1.2, 0.9]


def test_step_with_mostly_invalid_rewards_stops_with_the_reason() -> None:
    refuse_broken(invalidate(make_rollouts(torch.Generator().manual_seed(0), 2, 4, 40), 0, 1, 2, 3))
    rollouts = invalidate(make_rollouts(torch.Generator().manual_seed(0), 2, 4, 40), 0, 1, 2, 3, 4)
    with pytest.raises(UserError, match="5 of 8 rewards.*broken"):
        refuse_broken(rollouts)


def test_all_that_counts_the_tokens_of_an_episode_counts_the_same() -> None:
    given = {"max_tokens": 8, "group": 4, "prompts": 3, "overlong_cache": 4, "aggregate": "constant"}

    def limits(single_turn: bool, **more: Any) -> tuple[Any, Any]:
        found = adjust(find("grpo"), filled(RL, {**given, **more}), single_turn)
        assert isinstance(found.aggregate, ConstantLength) and isinstance(found.shaping[0], SoftOverlong)
        assert f"B {found.aggregate.length})" in found.aggregate.formula
        assert f"up to {found.shaping[0].limit}" in found.shaping[0].formula
        return found.aggregate.length, found.shaping[0].limit

    assert limits(True) == limits(False, max_turns=1) == (8, 8)
    assert limits(False, max_episode_tokens=20) == (20, 20) and limits(True, max_episode_tokens=20) == (8, 8)
    with pytest.raises(UserError, match="aggregate and shaping count the tokens of an episode.*--max-episode-tokens"):
        limits(False)


def test_more_prompts_than_tasks_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="--prompts 7.*6"):
        player = Player(EnvPool(digits, 0), LocalEngine(tiny(tokenizer), tokenizer), tokenizer, Sampling(), 64)
        Collector(TASKS, player, Size(7, 4, 64), 0, None, order=Uniform(6, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["skip", "truncate"])
def test_step_has_the_next_task_for_one_whose_prompt_does_not_fit(tokenizer: Tokenizer, policy: Any) -> None:
    rows = [{**task, "prompt": task["prompt"] * (30 if task["id"] in "14" else 1)} for task in TASKS]
    said: list[str] = []

    def collector() -> Collector:
        too_long = TooLong(policy, 64, said.append)
        engine = LocalEngine(tiny(tokenizer), tokenizer)
        player = Player(EnvPool(digits, 0), engine, tokenizer, Sampling(max_tokens=4), 64, policy)
        return Collector(to_tasks(rows), player, Size(3, 2, 64), 0, None, too_long, order=Uniform(len(rows), 0))

    def play(collector: Collector, number: int) -> tuple[list[str], float, int]:
        stats = Stats()
        played = collector.collect(number, None, stats).played
        assert all(len(rollout.transcripts[0]) <= 64 and rollout.n_sampled for rollout in played)
        return [rollout.group for rollout in played[::2]], stats["too_long"][0], collector.position.state()["cursor"]

    first = collector()
    steps = [play(first, number) for number in (1, 2, 3, 4)]
    expected = [f"{p}#{e}" for e, p in draw(6, 0, 12, 0, lambda p: policy == "truncate" or p not in (1, 4))[0]]
    assert [group for groups, _, _ in steps for group in groups] == expected
    met = [
        sum(place in (1, 4) for _, place in draw(6, a, b - a, 0)[0])
        for a, b in pairwise([0, *(c for _, _, c in steps)])
    ]
    assert [count for _, count, _ in steps] == met
    assert len(said) == 2 and "row 2: the prompt has 120 tokens; the model's context holds 64" in "".join(said)
    resumed = collector()
    resumed.too_long.count = 3  # type: ignore[union-attr]  # an evaluation met some
    resumed.restore({"cursor": steps[1][2]})
    assert [play(resumed, number) for number in (3, 4)] == steps[2:]


@pytest.mark.parametrize("policy", ["skip", "truncate", "refuse"])
def test_prompts_that_do_not_fit_are_told_before_they_are_played(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    def prompts(tokens: int) -> tuple[Prompts, list[str]]:
        said: list[str] = []
        rows = to_tasks([{"id": str(i), "prompt": "1" * n} for i, n in enumerate((3, tokens, 5))])
        return Prompts(rows, tokenizer, TooLong(policy, 8, said.append)), said

    fits, said = prompts(7)
    fits.check()
    assert [task["id"] for task in fits.fitting()] == ["0", "1", "2"] and not said
    long, said = prompts(8)
    if policy == "refuse":
        for tried in (long.check, long.fitting):
            with pytest.raises(UserError, match="row 2: the prompt has 8 tokens; the model's context holds 8"):
                tried()
        monkeypatch.setattr("posttrain.training.sources.length_filter.ENDLESS", 3)
        long.check()  # of so many rows that nobody could wait for it
    else:
        long.check()
        assert not said
        assert [task["id"] for task in long.fitting()] == (["0", "2"] if policy == "skip" else ["0", "1", "2"])
        assert len(said) == 1 and ("left out" if policy == "skip" else "cut") in said[0]


def test_the_engines_work_is_counted_for_the_step_that_it_was_done_in(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("grpo"))
    engine: Any = experience.queue.collector.player.engine
    assert isinstance(engine, LocalEngine)
    before = dict(engine.pace())
    for number in (1, 2, 3):
        step, after = experience.produce(number), dict(engine.pace())
        assert step.work == {name: now - before.get(name, 0.0) for name, now in after.items()} and any(
            step.work.values()
        )
        before = after


def test_first_rows_that_do_not_fit_are_named_and_the_others_counted() -> None:
    said: list[str] = []
    too_long = TooLong("skip", 8, said.append)
    for place in (1, 2, 2, 3, 4, 5):
        too_long.meet(f"row {place}", "too much", cut=place == 1)
    assert [line.partition(":")[0] for line in said] == ["row 1", "row 2", "row 3"]
    assert [line.endswith("further rows are not listed") for line in said] == [False, False, True]
    assert "it is cut" in said[0] and "it is left out" in said[1] and too_long.take() == 6 and too_long.take() == 0


def test_every_pretraining_text_is_read_once_before_any_is_read_again(tokenizer: Tokenizer) -> None:
    plain = row("ppo-ptx", epochs=2, minibatches=1)
    experience = source(tokenizer, replace(plain, pretraining=Pretraining(0.5, rows=2)))
    texts = {tuple(t.tokens[1:]): place for place, [t] in enumerate(experience.minibatches.texts)}  # type: ignore[misc]
    assert len(texts) == 6
    read: list[int] = []
    for number in (1, 2, 3):
        for build in experience.produce(number).updates:
            batches = [b for b in build() if b.advantage is None]
            share = [w for b in batches for w in b.imitate.tolist()]  # type: ignore[union-attr]
            assert sum(share) == pytest.approx(0.5) and not any(b.weight.any() for b in batches)
            targets = [b.target[b.rollout == i].tolist() for b in batches for i in b.rollout.unique()]
            read += [next(p for tokens, p in texts.items() if list(tokens[-len(own) :]) == own) for own in targets]
    assert sorted(read[:6]) == sorted(read[6:]) == list(range(6)) and read[:6] != read[6:]
    assert read == [*order(6, 0, 0), *order(6, 1, 0)]


def test_rollouts_without_advantage_are_fed_only_where_something_else_moves_their_tokens(tokenizer: Tokenizer) -> None:
    def coarse(task: Task, reply: str) -> float:
        return digits(task, reply) if task["id"] in "024" else 1.0

    for name, every in (("dr-grpo", False), ("grpo", True)):
        experience = source(tokenizer, row(name), coarse, size=(6, 4))
        step = experience.produce(1)
        told = {id(o.rollout): o.advantage for o in accounted(experience)}
        for build in step.updates:
            rollouts = learned_from(build)
            fed = {i for b in build() for i in b.rollout.tolist()}
            assert fed == {i for i, r in enumerate(rollouts) if every or told[id(r)] != 0}
        assert 0.0 in told.values()


def test_a_single_token_that_succeeded_is_imitated_with_the_whole_coefficient() -> None:
    row_of = replace(row("dr-grpo"), imitation=Imitation(0.3))
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 1, 2, 40)
    short = Transcript()
    short.observe([5, 6])
    short.sample(Completion(0, [7], [-1.0], "", StopReason.EOS, 0))
    rollouts[0] = replace(rollouts[0], transcripts=[short], reward=1.0, steps=[])
    rollouts[1].reward = 0.0
    for reward, share in ((1.0, 0.3), (0.0, 0.0)):
        rollouts[0].reward = reward
        scores = scoreboard(rollouts, success=0.5)
        fields = {"advantage": [torch.ones(r.n_scored) for r in rollouts]}
        minibatches = Minibatches(row_of, Learnt(), Size(1, 2, 1000), 0, 0.5, (), None)  # type: ignore[arg-type]
        credited = Credited(rollouts, scores, fields, {})
        (batch,) = minibatches._weighted(credited, {}, ledger_of(credited, row_of), fresh=True)
        assert batch.imitate is not None and batch.imitate.sum().item() == pytest.approx(share)


class Learnt:
    device = torch.device("cpu")
    moves_every_token = False


def test_gradient_that_is_not_finite_is_counted_and_moves_nothing(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("dr-grpo"))
    learner, objective = experience.learner, PolicyObjective(experience.algorithm)
    batches = experience.produce(1).updates[0]()
    before = weights(learner)

    class Broken(PolicyObjective):
        def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> torch.Tensor:
            return super().__call__(outputs, batch, stats) * float("nan")

    stats = learner.update(batches, Broken(experience.algorithm))
    assert stats["skipped"] == (1.0, 1.0) and torch.equal(before, weights(learner)) and learner.version == 0
    assert not learner.optimizer.state
    assert learner.update(batches, objective)["skipped"] == (0.0, 1.0) and learner.version == 1


@pytest.mark.parametrize("name", ["dr-grpo", "dapo", "ppo-kl", "iterative-grpo", "trpo", "sac"])
def test_state_of_learner_and_source_survives_saving_bit_for_bit(
    tokenizer: Tokenizer, tmp_path: Any, name: str
) -> None:
    how = {"reference_every": 1} if name == "iterative-grpo" else {"replay": 20} if name == "sac" else {}
    experience = source(tokenizer, row(name, **how))
    run(experience, steps=2)
    experience.learner.save(tmp_path)
    other = source(tokenizer, row(name, **how))
    other.learner.weights().load_state_dict(experience.learner.weights().state_dict())
    other.learner.load(tmp_path)
    other.restore(json.loads(json.dumps(experience.state())))
    for each in (experience, other):
        train(each.learner, each, PolicyObjective(each.algorithm), [], first=3, steps=4)
    assert torch.equal(weights(experience.learner), weights(other.learner))
    assert experience.state() == other.state()


@pytest.mark.parametrize("counted", ["-1", "true", '"3"', "1.0", str(2**31)])
def test_count_of_updates_that_is_none_is_refused_in_one_line(
    tokenizer: Tokenizer, tmp_path: Any, counted: str
) -> None:
    learner = source(tokenizer, row("dr-grpo")).learner
    learner.save(tmp_path)
    (tmp_path / "training" / "learner.json").write_text(f'{{"version": {counted}}}')
    with pytest.raises(UserError, match="learner.json is damaged: it counts"):
        learner.load(tmp_path)


def test_only_matrices_are_decayed(tokenizer: Tokenizer) -> None:
    learner = source(tokenizer, row("dr-grpo"), weight_decay=0.1).learner
    names = {p: name for name, p in learner.model.named_parameters()}
    decayed, kept = ([names[p] for p in group["params"]] for group in learner.optimizer.param_groups)
    assert len(decayed) + len(kept) == len(names) and all("norm" in name for name in kept)
    assert not any("norm" in name or name.endswith("bias") for name in decayed)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_rises_then_falls_to_its_end(schedule: Any, rates: list[float]) -> None:
    plan = Optimization(lr=1.0, schedule=schedule, warmup=2, updates=6)
    assert [plan.rate(i) for i in range(1, 7)] == pytest.approx(rates, abs=1e-6)
    other = Optimization(lr=0.2, schedule=schedule, warmup=2, updates=6, final=0.1)
    least = 1.0 if schedule == "constant" else 0.1  # what falls to 0 falls to a tenth instead
    expected = [0.1, *(0.2 * (least + (1 - least) * rate) for rate in rates[1:])]
    assert [other.rate(i) for i in range(1, 7)] == pytest.approx(expected, abs=1e-6)
    if schedule != "constant":
        assert other.rate(7) == other.rate(100) == pytest.approx(0.02)


def test_gradients_of_policy_and_critic_are_clipped_apart_by_the_norm_that_is_logged(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("ppo", minibatches=1, kl=0.0), max_grad_norm=1e-3)
    learner, batches = experience.learner, experience.produce(1).updates[0]()
    objective, seen = PolicyObjective(experience.algorithm), []
    for batch in batches:
        objective(learner._outputs(learner.model, batch, objective.wants), batch, Stats()).backward()
    for part in learner.parts:
        own = [p.grad.double().square().sum() for p in part.parameters.values() if p.grad is not None]
        seen.append(torch.stack(own).sum().sqrt().item())
    stepped = learner.optimizer.step
    clipped = []

    def step() -> None:
        for part in learner.parts:
            own = [p.grad.double().square().sum() for p in part.parameters.values() if p.grad is not None]
            clipped.append(torch.stack(own).sum().sqrt().item())
        stepped()

    learner.optimizer.step = step  # type: ignore[method-assign]
    versions = [p._version for part in learner.parts for p in part.parameters.values()]
    stats = learner.update(batches, objective)
    assert stats["grad_norm"] == (pytest.approx(seen[0], rel=1e-4), 1.0)
    assert stats["grad_norm/critic"] == (pytest.approx(seen[1], rel=1e-4), 1.0)
    assert min(seen) > 2e-3 and clipped == pytest.approx([1e-3, 1e-3], rel=1e-2)
    now = [p._version for part in learner.parts for p in part.parameters.values()]
    assert all(a > b for a, b in zip(now, versions, strict=True))  # whoever keeps copies of weights looks at this


def test_mismatch_to_the_sampler_is_measured_over_the_whole_step(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, row("dr-grpo"), budget=20)
    generator, exact = torch.Generator().manual_seed(0), experience.queue.collector.player.engine.poll
    noise: list[float] = []

    def distorted() -> list[Completion]:
        done = exact()
        for completion in done:
            off = torch.randn(len(completion.tokens), generator=generator) / 2
            noise.extend(off.tolist())
            completion.logp[:] = (torch.tensor(completion.logp) - off).tolist()  # type: ignore[index]
        return done

    experience.queue.collector.player.engine.poll = distorted  # type: ignore[method-assign]
    _, (seen,) = run(experience, steps=1)
    gap = torch.tensor(noise, dtype=torch.float64)  # learner minus sampler
    assert seen["groups/no_signal"] == 0, "every token is to be fed"
    assert seen["sampler/kl"] == pytest.approx((gap.exp() - 1 - gap).mean().item(), abs=1e-5)
    assert seen["sampler/gap/max"] == pytest.approx(gap.abs().max().item(), abs=1e-5)
    share = gap.exp().sum() ** 2 / (len(gap) * gap.exp().square().sum())
    assert share < 0.9 and seen["sampler/ess"] == pytest.approx(share.item(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_a_kind(name for name, row in TABLE.items() if row.teacher is None))
def test_every_row_learns_what_the_reward_asks_for(tokenizer: Tokenizer, name: str) -> None:
    """The shares of digits in the reply, from some 0.3 of all characters to nearly all; the reference holds little."""
    how: dict[str, Any] = {} if find(name).kl is None else {"kl": 0.01}
    if not find(name).replay:  # as many updates as some rows make need a smaller learning rate than this one
        how |= {"minibatches": 1}
    if find(name).filters:  # long replies are the good ones here
        how |= {"overlong_filter": False, "overlong_cache": 0}
    if find(name).trust_region:
        how |= {"trust_region": 0.2, "settings": {"trust_region.iterations": 4}}
    lr = 1e-2
    if find(name).replay:  # the policy must not outrun its action values
        how, lr = {"critic_warmup": 10, "critic_tau": 0.2}, 1e-3
    # A trust region goes to its border in each step, so it needs a direction with less noise.
    much: dict[str, Any] = {"size": (4, 12), "budget": 1000} if find(name).trust_region else {}
    if isinstance(find(name).advantage, PassAtK):  # it knows right and wrong alone, and leaves k - 1 of a group wrong
        much = {"size": (3, 16), "env": half_digits}
    experience = source(tokenizer, row(name, **how), lr=lr, **much)
    seen: list[dict[str, float]] = []
    last = 0.0
    while last <= 0.85 and len(seen) < 40:
        seen += run(experience, first=len(seen) + 1, steps=len(seen) + 5)[1]
        last = sum(m["reward"] for m in seen[-5:]) / 5
    assert seen[0]["reward"] < 0.5 and last > 0.85, [m["reward"] for m in seen]


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize("learned_first", [True, False])
def test_rollouts_train_with_the_contexts_that_are_learned_from(
    tokenizer: Tokenizer, name: str, learned_first: bool
) -> None:
    def judged(task: Task) -> Generator[Turn | str, Reply, float]:
        reply = yield Turn(text=task["prompt"], learn=learned_first)
        yield Turn(text="Right? ", fresh=True, learn=not learned_first, max_tokens=4)
        return len(set(reply)) / 10

    experience = source(tokenizer, row(name), judged)
    before = weights(experience.learner)
    after, seen = run(experience, steps=1)
    assert seen[0]["dropped"] == 0.0 and not torch.equal(before, after)


def test_rollouts_without_any_learned_token_are_dropped(tokenizer: Tokenizer) -> None:
    def watched(task: Task) -> Generator[Turn | str, Reply, float]:
        reply = yield Turn(text=task["prompt"], learn=False)
        return len(set(reply)) / 10

    _, seen = run(source(tokenizer, row("grpo"), watched), steps=1)
    assert seen[0]["dropped"] == 1.0
