"""Rollouts that branch behind a tool's answer: who branches, what is shared, and that nothing else changes."""

from __future__ import annotations

import math
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import branching
import pytest
import torch
from branching import STOP
from conftest import tiny
from episodes import said
from rl_sources import accounted, row, source

import posttrain
from posttrain.algorithms.aggregate import TokenMean
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.branching import Branching
from posttrain.algorithms.credit import Baselined
from posttrain.algorithms.earned_rewards import per_token
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.core.batch import Stats
from posttrain.core.rollouts import Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Invalid, InvalidKind, Reply, Sampling, StopReason, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.play.branch_plan import BranchPlan, Shares
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import EpisodeLimits, Player
from posttrain.envs.play.service_client import Services
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.kernels import binder, build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.training.sources.packing import collate, pack, split_microbatches
from posttrain.training.sources.scoreboard import describe, refuse_broken, scoreboard

SIZE = 8
RISEN = BranchPlan(first=0.25, tokens=3, alpha=0.5, beta=0.2, threshold=0.5, branches=1, largest=math.log(64))
ALWAYS = replace(RISEN, threshold=-100.0)


def episodes(groups: int = 3, **more: Any) -> list[Episode]:
    """Groups of `SIZE`, whose members do not stand side by side."""
    tasks = [{"id": str(g), "prompt": f"say {g}=", **more} for g in range(groups)]
    return [Episode(t, str(t["id"]), seed_of(t["id"], m)) for m in range(SIZE) for t in tasks]


def played(
    env: Any,
    tokenizer: Tokenizer,
    plan: BranchPlan | None = RISEN,
    workers: int = 0,
    *,
    groups: int = 3,
    slots: int = 5,
    kept: int = 1 << 30,
    context: int = 256,
    task: dict[str, Any] | None = None,
    **limits: Any,
) -> list[Rollout]:
    engine = LocalEngine(tiny(tokenizer, context=context), tokenizer, slots=slots, kept_bytes=kept)
    with EnvPool(env, workers) as pool:
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=9), context, **limits)
        rollouts = player.play(episodes(groups, **task or {}), plan)
    assert engine.kept.bytes == 0 and not engine.running and not engine.waiting
    return rollouts


def grouped(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """By group, in the order of the members."""
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group].append(rollout)
    return list(groups.values())


def all_of(rollouts: list[Rollout]) -> list[Any]:
    return [(*parts, r.branch, r.pieces) for parts, r in zip(said(rollouts), rollouts, strict=True)]


def valid(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [r for r in rollouts if not isinstance(r.reward, Invalid)]


@pytest.fixture(scope="module")
def branched(tokenizer: Tokenizer) -> list[Rollout]:
    return played(branching.tools, tokenizer)


@pytest.fixture(params=["compiled", "torch"])
def code(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled" and binder.decode() is None:
        pytest.skip("needs a C compiler")
    build.use(request.param == "compiled")
    yield request.param
    build.use(True)


# -- who branches ------------------------------------------------------------------------------------------------------


def spoken(rollout: Rollout) -> list[tuple[int, bool, list[float]]]:
    """Of each reply: the turns before it, whether it stands behind a tool's answer, its log-probabilities."""
    logp = {i: iter(t.logp) for i, t in enumerate(rollout.transcripts)}
    found = []
    for place, turn in enumerate(rollout.turns):
        if turn.kind is SpanKind.SAMPLED:
            after = rollout.turns[place - 1].kind is SpanKind.TOOL
            found.append((place, after, [next(logp[turn.transcript]) for _ in range(turn.length)]))
    return found


def by_hand(group: Sequence[Rollout], plan: BranchPlan) -> dict[int, tuple[int, int]]:
    """Of each member that is a branch: of whom, and after how many turns. Written down from what was said alone."""
    begin = math.ceil(plan.first * len(group))
    waiting = {m: list(range(begin, len(group)))[m::begin] for m in range(begin)}
    found: dict[int, tuple[int, int]] = {}
    left = list(range(begin))
    while left:
        member = left.pop(0)
        begun_with = found.get(member, (0, 0))[1]
        first = sum(spoken(group[member])[0][2][: plan.tokens]) / len(spoken(group[member])[0][2][: plan.tokens])
        for turns, after_tool, logp in spoken(group[member]):
            now = sum(logp[: plan.tokens]) / len(logp[: plan.tokens])
            risen = plan.alpha + plan.beta * (first - now) / plan.largest > plan.threshold
            own = waiting.get(member, [])
            if turns <= begun_with or not after_tool or not risen or not own:
                continue
            new, rest = own[: plan.branches], own[plan.branches :]
            holders = [member, *new]
            for place, holder in enumerate(holders):
                waiting[holder] = rest[place :: len(holders)]
            found |= {other: (member, turns) for other in new}
            left += new
        left += waiting.pop(member, [])
    return found


def test_a_rise_of_entropy_is_that_of_the_first_tokens_as_a_share_of_the_largest() -> None:
    """ARPO, arXiv 2507.19849, eq. 3, by hand: (2.5 - 1) / log V; the threshold 0.5 + 0.2 x that is not reached itself."""
    plan = Branching(tokens=2).plan(vocab=64)
    before, now = [-0.5, -1.5, -30.0], [-2.0, -3.0, -0.1]
    assert plan.rise(before, now) == pytest.approx(1.5 / math.log(64))
    assert plan.branches_after(before, now) and not plan.branches_after(now, before)
    edge = replace(plan, threshold=0.5 + 0.2 * plan.rise(before, now))
    assert not edge.branches_after(before, now) and replace(edge, threshold=edge.threshold - 1e-9).branches_after(
        before, now
    )


@pytest.mark.parametrize(("first", "branches"), [(0.125, 1), (0.125, 5), (0.3, 2), (0.75, 1)])
def test_a_rollout_branches_where_what_it_said_behind_a_tool_is_less_sure_than_how_it_began(
    tokenizer: Tokenizer, branches: int, first: float
) -> None:
    for plan in (replace(RISEN, branches=branches, first=first), replace(ALWAYS, branches=branches, first=first)):
        for group in grouped(played(branching.tools, tokenizer, plan, groups=2)):
            told = {m: (r.branch.of, r.branch.turns) for m, r in enumerate(group) if r.branch}
            assert told == by_hand(group, plan)
            assert told or plan is not ALWAYS
    assert len(group) == SIZE


@pytest.mark.parametrize("seed", range(20))
def test_every_member_begins_once_whoever_branches_and_ends_when(seed: int) -> None:
    draw = random.Random(seed)
    size, first = draw.randint(1, 12), draw.random()
    shares = Shares(["a", "b"] * size, replace(RISEN, first=first, branches=draw.randint(1, 3)))
    assert shares.member == [m for m in range(size) for _ in "ab"]
    begun = list(shares.first)
    assert [sum(i % 2 == g for i in begun) for g in (0, 1)] == [max(1, math.ceil(first * size))] * 2
    live = list(begun)
    while live:
        index = draw.choice(live)
        if shares.has(index) and draw.random() < 0.4:
            new = shares.branch(index, draw.randint(1, 3))
            assert new and {i % 2 for i in new} == {index % 2}
        else:
            live.remove(index)
            new = shares.end(index)
            assert not shares.has(index)
        begun += new
        live += new
    assert sorted(begun) == list(range(2 * size))


def test_what_is_left_begins_with_the_prompt_as_if_nobody_branched(
    tokenizer: Tokenizer, branched: list[Rollout]
) -> None:
    plain = played(branching.tools, tokenizer, None)
    roots = [i for i, r in enumerate(branched) if r.branch is None]
    assert SIZE * 3 / 4 < len(roots) < SIZE * 3
    assert [said(branched)[i] for i in roots] == [said(plain)[i] for i in roots]
    never = played(branching.tools, tokenizer, replace(RISEN, threshold=100.0))
    assert said(never) == said(plain) and all(r.branch is None for r in never)


def test_no_rollout_branches_behind_what_is_no_tool(tokenizer: Tokenizer) -> None:
    def told(task: Any) -> Any:
        reply = yield posttrain.Turn(task["prompt"], stop=STOP)
        for _ in range(2):
            reply = yield posttrain.Turn(f"<{reply}>")
        return 0.0

    assert not any(r.branch for r in played(told, tokenizer, ALWAYS))
    assert not any(r.branch for r in played(lambda task, reply: 0.0, tokenizer, ALWAYS))


@pytest.mark.parametrize(
    "limits",
    [
        {"bounds": EpisodeLimits(tokens=17)},
        {"bounds": EpisodeLimits(turns=2)},
        {"bounds": EpisodeLimits(turns=1)},
        {"bounds": EpisodeLimits(tool_calls=1)},
        {"bounds": EpisodeLimits(tool_calls=0)},
        {"context": 24},
        {"context": 24, "too_long": "truncate"},
    ],
    ids=str,
)
def test_budgets_of_an_episode_are_those_of_a_branch_with_what_it_shares(
    tokenizer: Tokenizer, limits: dict[str, Any]
) -> None:
    rollouts = played(branching.tools, tokenizer, ALWAYS, **limits)
    plain = played(branching.tools, tokenizer, None, **limits)
    assert [len(group) for group in grouped(rollouts)] == [SIZE] * 3
    bounds, context = limits.get("bounds", EpisodeLimits()), limits.get("context", 256)
    for rollout in rollouts:
        kinds = [turn.kind for turn in rollout.turns if turn.length]
        assert rollout.n_sampled <= (bounds.tokens or 36) and len(rollout.transcripts[0]) <= context
        assert kinds.count(SpanKind.SAMPLED) <= bounds.turns
        assert kinds.count(SpanKind.TOOL) <= (3 if bounds.tool_calls is None else bounds.tool_calls)
    assert any(r.stop.truncated for r in rollouts) and any(r.stop.truncated for r in plain)


def test_a_group_has_all_its_members_whatever_becomes_of_some(tokenizer: Tokenizer) -> None:
    rollouts = played(branching.dying_tools, tokenizer, ALWAYS, 1)
    assert [(r.group, r.task["id"]) for r in rollouts] == [(e.group, e.task["id"]) for e in episodes()]
    kinds = {r.reward.kind for r in rollouts if isinstance(r.reward, Invalid)}
    assert {InvalidKind.DIED, InvalidKind.RAISED} & kinds and InvalidKind.DIVERGED not in kinds
    assert len(valid(rollouts)) > SIZE and any(r.branch for r in valid(rollouts))
    assert all_of(played(branching.dying_tools, tokenizer, ALWAYS, 2)) == all_of(rollouts)


# -- what is shared ----------------------------------------------------------------------------------------------------


def test_a_branch_begins_with_all_that_was_said_and_seen_up_to_the_tools_answer(branched: list[Rollout]) -> None:
    assert sum(r.branch is not None for r in branched) > 4
    for group in grouped(branched):
        for member, rollout in enumerate(group):
            (transcript,) = rollout.transcripts
            assert sum(p.length for p in rollout.pieces) == rollout.n_scored
            assert (rollout.stop is StopReason.STOP) == rollout.turns[-1].text.endswith(STOP)
            if rollout.branch is None:
                assert {p.member for p in rollout.pieces} == {member} and rollout.n_own == rollout.n_sampled
                continue
            parent, turns, (taken,) = group[rollout.branch.of], rollout.branch.turns, rollout.branch.taken
            fork = transcript.forks[-1]
            assert rollout.turns[:turns] == parent.turns[:turns] and rollout.turns[turns] != parent.turns[turns]
            assert rollout.turns[turns - 1].kind is SpanKind.TOOL and rollout.turns[turns].start == fork
            assert transcript.tokens[:fork] == parent.transcripts[0].tokens[:fork]
            assert transcript.logp[:taken] == parent.transcripts[0].logp[:taken]
            own = sum(p.length for p in rollout.pieces if p.member == member)
            assert rollout.n_own == own == rollout.n_sampled - taken > 0
            shared = [p for p in rollout.pieces if p.member != member]
            assert shared == parent.pieces[: len(shared)]
            earned = [step for step in parent.steps if step[0] <= taken]
            assert len(rollout.steps) == 3 and rollout.steps[: len(earned)] == earned != []


@pytest.mark.parametrize(
    ("env", "workers"), [(branching.slow_tools, 1), (branching.slow_tools, 3), (branching.waiting_tools, 2)]
)
def test_no_bit_depends_on_when_tools_answer(
    tokenizer: Tokenizer, code: str, env: Callable[..., Any], workers: int
) -> None:
    expected = played(branching.tools, tokenizer, groups=2)
    assert any(r.branch for r in expected)
    assert all_of(played(env, tokenizer, workers=workers, groups=2)) == all_of(expected)


@pytest.mark.parametrize(("slots", "kept"), [(1, 4_000), (32, 0)])
def test_no_bit_depends_on_what_the_engine_keeps_or_on_its_slots(
    tokenizer: Tokenizer, branched: list[Rollout], kept: int, slots: int
) -> None:
    if binder.decode() is None:
        pytest.skip("needs a C compiler")
    assert all_of(played(branching.tools, tokenizer, slots=slots, kept=kept)) == all_of(branched)


def test_what_a_branch_shares_is_computed_once(tokenizer: Tokenizer, code: str) -> None:
    engine = LocalEngine(tiny(tokenizer, context=256), tokenizer, slots=64)
    with EnvPool(branching.tools, 0) as pool:
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256)
        rollouts = player.play(episodes(), replace(ALWAYS, first=0.5))
    assert sum(r.branch is not None for r in rollouts) == SIZE * 3 / 2
    needed = sum(group[0].transcripts[0].spans[0].length for group in grouped(rollouts))
    for rollout in rollouts:
        (transcript,) = rollout.transcripts
        # the last token before a fork is fed again: what follows it is another choice
        shared = transcript.forks[-1] - 1 if rollout.branch else transcript.spans[0].length
        needed += len(transcript) - 1 - shared
    assert engine.computed == needed


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("env", [branching.noting_tools, branching.noting_tools_beside])
def test_a_recorded_tool_is_not_called_again_for_a_branch(
    tokenizer: Tokenizer, env: Callable[..., Any], workers: int, tmp_path: Path
) -> None:
    rollouts = played(env, tokenizer, ALWAYS, workers, task={"folder": str(tmp_path)})
    shared = sum(t.kind is SpanKind.TOOL for r in rollouts if r.branch for t in r.turns[: r.branch.turns])
    answers = sum(t.kind is SpanKind.TOOL for r in rollouts for t in r.turns)
    assert shared > 10 and len(list(tmp_path.iterdir())) == answers - shared
    plain = played(branching.tools, tokenizer, ALWAYS)
    assert all_of(rollouts) == all_of(plain)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_branch_of_a_branch_has_what_was_recorded_as_it_was(tokenizer: Tokenizer, workers: int) -> None:
    rollouts = played(branching.remembering_tools, tokenizer, replace(ALWAYS, first=0.1), workers, groups=1)
    branches = {n: r.branch for n, r in enumerate(rollouts) if r.branch}
    assert [r.reward for r in rollouts if isinstance(r.reward, Invalid)] == []
    assert any(branch.of in branches for branch in branches.values()) and len(valid(rollouts)) == SIZE


class Lengths:
    """Counts, and is a service."""

    identity = description = "lengths"

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.ready: list[tuple[int, Any]] = []

    def submit(self, id: int, content: Any) -> None:
        self.asked.append(content)
        self.ready.append((id, {"length": len(content)}))

    def poll(self) -> list[tuple[int, Any]]:
        ready, self.ready = self.ready, []
        return ready

    def example(self, content: Any) -> Any:
        return {"length": 1}

    def counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@pytest.mark.parametrize("workers", [0, 2])
def test_what_services_answered_is_not_asked_again_for_a_branch(tokenizer: Tokenizer, workers: int) -> None:
    service = Lengths()
    rollouts = played(branching.asking_tools, tokenizer, ALWAYS, workers, services=Services({"lengths": service}))
    assert len(valid(rollouts)) == len(rollouts) and sum(r.branch is not None for r in rollouts) > SIZE
    replies = {t.text for r in rollouts for t in r.turns if t.kind is SpanKind.SAMPLED}
    assert set(service.asked) <= replies and len(service.asked) == len(set(service.asked))
    assert all(len(r.answers) == 3 for r in rollouts)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("env", [branching.fickle_tools, branching.ending_tools])
def test_an_environment_that_goes_another_way_is_noticed_and_said(
    tokenizer: Tokenizer, env: Callable[..., Any], workers: int
) -> None:
    rollouts = played(env, tokenizer, replace(ALWAYS, first=0.5), workers)
    assert [len(group) for group in grouped(rollouts)] == [SIZE] * 3
    parted = [r for r in rollouts if isinstance(r.reward, Invalid)]
    assert parted and all(r.branch and r.reward.kind is InvalidKind.DIVERGED for r in parted)  # type: ignore[union-attr]
    assert "did something else when it was replayed" in parted[0].reward.reason  # type: ignore[union-attr]
    assert describe(rollouts, None).means()["invalid/diverged"] == len(parted) / len(rollouts)
    if env is branching.fickle_tools:
        with pytest.raises(UserError, match=r"of 12 branches of this step are invalid; the first: .*`recorded`"):
            refuse_broken(rollouts)


def test_a_branch_of_several_contexts_shares_all_of_them(tokenizer: Tokenizer) -> None:
    rollouts = played(branching.two_contexts, tokenizer, ALWAYS)
    assert sum(r.branch is not None and len(r.transcripts) == 2 for r in rollouts) > SIZE
    counted = 0
    for group in grouped(rollouts):
        for member, rollout in enumerate(group):
            places = [(t.transcript, t.start) for t in rollout.turns if t.kind is SpanKind.SAMPLED]
            learned = [(t, s.start, s.length) for t, x in enumerate(rollout.transcripts) for s in x.spans if s.learned]
            assert [(p.reply, p.length) for p in rollout.pieces] == [
                (places.index((t, start)), length) for t, start, length in learned
            ]
            if rollout.branch is not None:
                parent = group[rollout.branch.of]
                own = {p.reply for p in rollout.pieces if p.member == member}
                before = sum(t.kind is SpanKind.SAMPLED for t in rollout.turns[: rollout.branch.turns])
                assert min(own, default=before) >= before
                shared = [t for t in rollout.turns[: rollout.branch.turns] if t.kind is SpanKind.SAMPLED]
                for place, taken in enumerate(rollout.branch.taken):
                    assert taken == sum(t.length for t in shared if t.transcript == place)
                for ours, theirs, taken in zip(
                    rollout.transcripts, parent.transcripts, rollout.branch.taken, strict=False
                ):
                    assert ours.logp[:taken] == theirs.logp[:taken]
                    counted += taken > 0
    assert counted > SIZE


# -- what shared tokens are worth --------------------------------------------------------------------------------------


def apart(rollouts: Sequence[Rollout]) -> list[list[Transcript]]:
    """The transcripts without what tells that they share anything behind their prompt."""
    return [[Transcript.from_dict({**t.as_dict(), "forks": []}) for t in r.transcripts] for r in rollouts]


def advantages(branching: Branching, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    scores = scoreboard(rollouts)
    return branching.shared(per_token(Baselined("group", "group")(scores), scores), scores)


@pytest.mark.parametrize(
    ("env", "credit", "budget"),
    [(branching.tools, "hard", 10_000), (branching.tools, "soft", 150), (branching.two_contexts, "hard", 150)],
)
def test_gradient_of_a_branched_group_is_that_of_its_transcripts_laid_apart(
    tokenizer: Tokenizer, env: Callable[..., Any], credit: Any, budget: int
) -> None:
    rollouts = played(env, tokenizer, ALWAYS)
    fields = {"advantage": advantages(Branching(credit=credit), rollouts)}
    learner = LocalLearner(tiny(tokenizer, dtype=torch.float64, context=256), Optimization())
    weight = find("grpo").aggregate(scoreboard(rollouts)).double()
    objective = PolicyObjective(replace(find("grpo"), kl=None))

    def gradient(transcripts: Sequence[Sequence[Transcript]], cuts: Sequence[Sequence[int]]) -> torch.Tensor:
        learner.model.zero_grad()
        for index in cuts:
            batch = collate([transcripts[i] for i in index], index, weight=weight, fields=fields)
            objective(learner._outputs(learner.model, batch, objective.wants), batch, Stats()).backward()
        return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])

    shared = [r.transcripts for r in rollouts]
    cuts = split_microbatches(shared, budget)
    assert len(cuts) == 1 if budget > 1000 else len(cuts) > 3
    laid = gradient(shared, cuts)
    alone = gradient(apart(rollouts), [[i] for i in range(len(rollouts))])
    assert alone.abs().max() > 1e-3 and (laid - alone).abs().max() < 1e-12
    if env is branching.tools:
        fewer = len(pack(shared, range(len(shared))).layout.tokens)
        assert fewer < len(pack(apart(rollouts), range(len(shared))).layout.tokens)


def test_hard_advantages_are_means_over_those_that_share_a_token(branched: list[Rollout]) -> None:
    """Compared with a walk through the family tree, token by token."""
    found = iter(advantages(Branching(credit="hard"), [r for group in grouped(branched) for r in group]))
    changed = 0
    for group in grouped(branched):
        rewards = torch.tensor([r.reward for r in group], dtype=torch.float64)
        whole = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()

        def sampler(member: int, place: int, group: list[Rollout] = group) -> int:
            """Who sampled a member's token of this place."""
            branch = group[member].branch
            return sampler(branch.of, place) if branch and place < branch.taken[0] else member

        for member, rollout in enumerate(group):
            expected = []
            for place in range(rollout.n_sampled):
                sharing = [
                    other
                    for other in range(len(group))
                    if place < group[other].n_sampled and sampler(other, place) == sampler(member, place)
                ]
                expected.append(sum(whole[other] for other in sharing) / len(sharing))
                changed += len(sharing) > 1
            assert torch.allclose(next(found).double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6)
    assert changed > 50


def test_a_branch_counts_once_in_the_baseline_of_its_group_and_keeps_its_own_advantage(
    branched: list[Rollout],
) -> None:
    found = iter(advantages(Branching(), [r for group in grouped(branched) for r in group]))
    for group in grouped(branched):
        rewards = [float(r.reward) for r in group]  # type: ignore[arg-type]
        mean = sum(rewards) / SIZE
        spread = math.sqrt(sum((x - mean) ** 2 for x in rewards) / (SIZE - 1))
        for reward, rollout in zip(rewards, group, strict=True):
            own = next(found)
            assert len(own) == rollout.n_scored
            assert torch.allclose(own, torch.tensor((reward - mean) / (spread + 1e-6)), atol=1e-6)


def test_where_tokens_weigh_the_same_soft_and_hard_advantages_have_one_gradient(branched: list[Rollout]) -> None:
    scores = scoreboard(branched)
    sums: list[dict[Any, float]] = []
    for credit in ("soft", "hard"):
        total: dict[Any, float] = defaultdict(float)
        own = advantages(Branching(credit=credit), branched)  # type: ignore[arg-type]
        for rollout, weight, values in zip(branched, TokenMean()(scores).tolist(), own, strict=True):
            tokens = [(rollout.group, p.member, p.reply, i) for p in rollout.pieces for i in range(p.length)]
            for token, value in zip(tokens, values.tolist(), strict=True):
                total[token] += weight * value
        sums.append(total)
    assert sums[0].keys() == sums[1].keys() and len(sums[0]) == sum(r.n_own for r in branched)
    assert all(math.isclose(sums[0][token], sums[1][token], abs_tol=1e-7) for token in sums[0])


def test_a_rollout_that_is_left_out_takes_no_part_in_what_is_shared(branched: list[Rollout]) -> None:
    group = next(g for g in grouped(branched) if any(r.branch for r in g))
    child = next(r for r in group if r.branch)
    parent = group[child.branch.of]  # type: ignore[union-attr]
    others = [r for r in group if r is not parent and (r is child or r.branch is None)]
    alone = Branching(credit="hard").shared([torch.full((r.n_scored,), float(i)) for i, r in enumerate(others)],
                                            scoreboard(others))  # fmt: skip
    assert all(bool((x == i).all()) for i, x in enumerate(alone))


# -- runs --------------------------------------------------------------------------------------------------------------


def arpo(**how: Any) -> Algorithm:
    own = row("arpo", group=SIZE, max_episode_tokens=32, **how)
    return replace(own, branching=Branching(tokens=3, first=0.25))


def test_tokens_of_a_step_are_those_that_were_sampled(tokenizer: Tokenizer) -> None:
    experience = source(tokenizer, arpo(), branching.tools, size=(3, SIZE))
    step = experience.produce(1)
    rollouts = [r for r in step.played]
    replies = {(r.group, p.member, p.reply): p.length for r in rollouts for p in r.pieces}
    assert step.tokens == sum(replies.values()) < sum(r.n_sampled for r in rollouts)
    figures = step.stats.means()
    assert figures["branches"] == sum(r.branch is not None for r in rollouts) / 3 > 0
    shared = sum(r.n_sampled for r in rollouts) - step.tokens
    assert figures["branches/shared"] == pytest.approx(shared / sum(r.n_sampled for r in rollouts))
    logp: dict[Any, float] = {}
    for rollout in rollouts:
        place = 0
        for p in rollout.pieces:
            logp[rollout.group, p.member, p.reply] = sum(rollout.transcripts[0].logp[place : place + p.length])
            place += p.length
    assert figures["entropy"] == pytest.approx(-sum(logp.values()) / step.tokens)
    assert "branches" not in source(tokenizer, row("grpo", group=SIZE), size=(3, SIZE)).produce(1).stats


def test_without_tools_arpo_is_grpo_to_the_last_bit(tokenizer: Tokenizer) -> None:
    found = []
    for name in ("grpo", "arpo"):
        experience = source(tokenizer, row(name))
        experience.produce(1)
        told = [(o.rollout, o.advantage) for o in accounted(experience)]
        found.append([(r.text, r.reward, [t.as_dict() for t in r.transcripts], a) for r, a in told])
    assert found[0] == found[1]


def files(run: Path) -> dict[str, bytes]:
    kept = [run / "metrics.jsonl", *run.glob("rollouts/*"), *run.glob("checkpoints/*/*.safetensors")]
    return {str(p.relative_to(run)): p.read_bytes() for p in kept}


def test_a_run_is_the_same_with_slow_tools_and_when_it_is_resumed_and_evaluates_without_branches(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny(tokenizer, context=256), tmp_path / "start", tokenizer)
    rows = [{"id": str(i), "prompt": f"say {i}="} for i in range(8)]
    plans: list[tuple[int, bool]] = []
    play = Player.play

    def watched(self: Player, episodes: Sequence[Episode], plan: BranchPlan | None = None) -> list[Rollout]:
        plans.append((len(episodes), plan is not None))
        return play(self, episodes, plan)

    monkeypatch.setattr(Player, "play", watched)

    def run(name: str, env: Any, workers: int, **how: Any) -> Path:
        given: dict[str, Any] = {} if how.get("resume") else {"env_workers": workers}
        posttrain.rl(
            rows, env, str(tmp_path / "start"), out=str(tmp_path / name), algorithm="arpo", branch_credit="hard", prompts=2,
            branch_tokens=3, branch_first=0.25, group=SIZE, max_tokens=9, lr=1e-2, threads=1, quiet=True, save_every=1,
            held_out=0.25, eval_every=1, eval_samples=2, success=4.0, **{"steps": 2, **given, **how},
        )  # fmt: skip
        return tmp_path / name

    whole = files(run("whole", branching.tools, 0))
    assert {plan for size, plan in plans if size == 2 * SIZE} == {True}
    assert {plan for size, plan in plans if size != 2 * SIZE} == {False}
    assert {row["branch_of"] for step in (1, 2) for row in read_rollouts(tmp_path / "whole", step)} - {None}
    assert files(run("slow", branching.slow_tools, 2)) == whole
    shutil.rmtree(tmp_path / "slow" / "checkpoints" / "step-000002")  # as if it had been killed before that was written
    assert files(run("slow", branching.slow_tools, 2, resume=True)) == whole


def test_branches_that_are_begun_at_once_share_nothing_that_one_of_them_may_change() -> None:
    """They reach their worker in one message."""
    with EnvPool(branching.remembering_tools, 1) as pool:
        pool.start(0, {"id": "0", "prompt": "say 0="})
        shown = [pool.poll(20)]
        for said in ("one 12", "two 34"):
            pool.send(0, Reply(said))
            shown.append(pool.poll(20))
        for other in (1, 2, 3):
            pool.branch(0, other)
        events: dict[int, Any] = {}
        while len(events) < 3:
            events |= dict(pool.poll(20))
        assert [events[other] for other in (1, 2, 3)] == [dict(shown[-1])[0]] * 3
