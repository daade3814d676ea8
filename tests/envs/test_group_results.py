"""Episodes of several turns are scored together once all of their group have ended, and nothing depends on timing."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import branching
import pytest
import trl_agent
from conftest import tiny
from episodes import episodes, played, said

import posttrain
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Invalid, InvalidKind, Reply, Sampling, Task, Turn, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.check import check
from posttrain.envs.play.branch_plan import BranchPlan
from posttrain.envs.play.env_outputs import AwaitsGroup, Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.group_rewards import group_reward_of, scores_groups
from posttrain.envs.play.load_env import load_env
from posttrain.envs.play.player import Player
from posttrain.envs.play.worker_handle import PoolEpisode, QueuedCommand
from posttrain.envs.play.worker_protocol import Garbled, WorkerReply, read_answer, write_answer
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.tokenizer.tool_parser import HERMES

MY = '''
import os, signal, time
from pathlib import Path
from posttrain import Invalid, group_reward, note, recorded

def rank(tasks, results):
    """The number of smaller results."""
    note(size=len(results))
    mark = Path(tasks[0].get("dies", "/"))
    if not mark.exists():
        mark.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    if tasks[0].get("sleeps"):
        time.sleep(1000)
    return [float(sum(other < own for other in results)) for own in results]

@group_reward(rank)
def count(task):
    """Counts the characters of the replies before "end"."""
    mark, total, times = Path(task.get("mark", "/")), 0, 0
    strays = task.get("strays") and mark.exists()
    reply = yield "go "
    while reply != "end" or strays:
        if reply == "invalid":
            return Invalid("bad")
        if reply == "raise":
            raise ValueError("bad thing")
        if reply == "die" and not mark.exists():
            mark.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        times += recorded(len, reply)
        note(times=times)
        total += len(reply)
        reply = yield "on "
    return total

async def later(tasks, results):
    return rank(tasks, [total for [total] in results])

@group_reward(later)
async def counts(task):
    total, times = 0, 0
    reply = yield "go "
    while reply != "end":
        if reply == "invalid":
            yield Invalid("bad")
            return
        if reply == "raise":
            raise ValueError("bad thing")
        note(times=total + len(reply))
        total += len(reply)
        reply = yield "on "
    yield [total]
'''

GROUPS = [[["ab", "c", "end"], ["end"], ["abcd", "end"]], [["a", "b", "c", "d", "end"]], [["x", "end"], ["y", "end"]]]


def rank(tasks: Sequence[Task], results: Sequence[Any]) -> list[float]:
    return [float(sum(other < own for other in results)) for own in results]


@posttrain.group_reward(rank)
def lengths(task: Task) -> Generator[Any, Any, Any]:
    """Asks up to three times, as the first reply decides, and returns the length of all."""
    reply = yield f"say {task['id']}="
    total = len(reply)
    for _ in range(sum(map(ord, reply)) % 3):
        total += len((yield " more "))
    return total


@pytest.fixture
def my(tmp_path: Path) -> str:
    (tmp_path / "my.py").write_text(MY)
    return str(tmp_path / "my.py")


def ended(
    env: Any,
    groups: Sequence[Sequence[Sequence[str]]],
    workers: int = 1,
    following: Callable[[Iterable[int]], int] = min,
    seconds: float = 20.0,
    **task: Any,
) -> list[list[Done]]:
    """The ends of groups of episodes with these replies. `following`: which of those that are asked gets the next one."""
    scripts = [(group, [*replies]) for group, own in enumerate(groups) for replies in own]
    asked: set[int] = set()
    ends: dict[int, Done] = {}
    with EnvPool(env, workers, seconds) as pool:
        for id, (group, _) in enumerate(scripts):
            pool.start(id, {"id": str(group), **task}, group)
        while len(ends) < len(scripts):
            for id, event in pool.poll(20):
                asked |= {id} if isinstance(event, Turn) else set()
                ends |= {id: event} if isinstance(event, Done) else {}
            if asked and not pool.pending:
                asked.remove(id := following(asked))
                pool.send(id, Reply(scripts[id][1].pop(0)))
        assert not pool.pending
    found = iter(ends[id] for id in range(len(scripts)))
    return [[next(found) for _ in own] for own in groups]


def by_hand(groups: Sequence[Sequence[Sequence[str]]]) -> list[list[float]]:
    return [rank([], [sum(map(len, replies[:-1])) for replies in own]) for own in groups]


@pytest.mark.parametrize(("name", "workers"), [("count", 0), ("count", 2), ("counts", 0), ("counts", 2)])
def test_each_group_is_scored_whole_whichever_of_its_episodes_ends_first(my: str, name: str, workers: int) -> None:
    for following in (min, max):
        found = ended(f"{my}:{name}", GROUPS, workers, following)
        assert [[done.reward for done in own] for own in found] == by_hand(GROUPS)
        for own, replies in zip(found, GROUPS, strict=True):
            assert [done.notes["size"] for done in own] == [len(own)] * len(own)
            assert [done.notes.get("times", 0) for done in own] == [sum(map(len, r[:-1])) for r in replies]


@pytest.mark.parametrize(("name", "workers"), [("count", 0), ("count", 1), ("counts", 1)])
@pytest.mark.parametrize(("reply", "reason"), [("invalid", "bad"), ("raise", "ValueError: bad thing")])
def test_group_is_scored_without_its_invalid_episodes(
    my: str, name: str, workers: int, reply: str, reason: str
) -> None:
    for following in (min, max):
        [[first, bad, last]] = ended(
            f"{my}:{name}", [[["a", "end"], ["abc", reply], ["ab", "end"]]], workers, following
        )
        assert (first.reward, last.reward, first.notes["size"]) == (0.0, 1.0, 2)
        assert isinstance(bad.reward, Invalid) and reason in bad.reward.reason


def test_episodes_of_a_lost_worker_are_replayed_when_their_group_is_scored(my: str, tmp_path: Path) -> None:
    groups = [[["a", "end"], ["die", "end"], ["ab", "end"]]]
    for following in (min, max):  # the first has ended, or has not begun to, when its worker dies
        mark = tmp_path / f"mark-{following.__name__}"
        [found] = ended(f"{my}:count", groups, 1, following, mark=str(mark))
        assert [done.reward for done in found] == by_hand(groups)[0] and mark.exists()
    [found] = ended(f"{my}:count", groups, dies=str(tmp_path / "dies"), mark="/")
    assert [done.reward for done in found] == by_hand(groups)[0]


def test_group_of_an_episode_that_strays_when_it_is_replayed_is_invalid(my: str, tmp_path: Path) -> None:
    groups = [[["a", "end"], ["die", "invalid"]]]
    [[first, died]] = ended(f"{my}:count", groups, mark=str(tmp_path / "mark"), strays=True)
    assert isinstance(first.reward, Invalid) and first.reward.kind is InvalidKind.DIVERGED
    assert died.reward == Invalid("bad")


def test_time_limit_is_that_of_the_whole_call(my: str) -> None:
    [found] = ended(f"{my}:count", [[["a", "end"], ["end"]]], seconds=1.0, sleeps=True)
    assert [done.reward.kind for done in found if isinstance(done.reward, Invalid)] == [InvalidKind.TIMEOUT] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_group_waits_for_an_episode_that_begins_when_the_last_one_has_ended(my: str, workers: int) -> None:
    with EnvPool(f"{my}:count", workers) as pool:
        ends: dict[int, Done] = {}
        for id in range(2):
            pool.start(id, {"id": "t"}, "g")
            assert pool.poll(20) == [(id, Turn(text="go "))]
            pool.send(id, Reply("a" * (2 - id)))
            assert pool.poll(20) == [(id, Turn(text="on "))]
            pool.send(id, Reply("end"))
            assert pool.poll(20) == [(id, AwaitsGroup())] and pool.pending == 1
        while pool.pending:
            ends |= {id: event for id, event in pool.poll(20) if isinstance(event, Done)}
        assert {id: done.reward for id, done in ends.items()} == {0: 1.0, 1: 0.0}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_that_awaits_its_group_can_be_given_up(my: str, workers: int) -> None:
    with EnvPool(f"{my}:count", workers) as pool:
        for id in range(3):
            pool.start(id, {"id": "t"}, "g")
        while pool.pending:
            pool.poll(20)
        pool.send(0, Reply("end"))
        assert pool.poll(20) == [(0, AwaitsGroup())] and not pool.pending
        pool.drop(0), pool.drop(1)
        pool.send(2, Reply("end"))
        assert pool.poll(20) == [(2, AwaitsGroup())]
        [(id, done)] = pool.poll(20)
        assert id == 2 and isinstance(done, Done) and done.reward == 0.0
        for _ in range(2):
            pool.start(0, {"id": "t"}, "g")
            pool.poll(20)
            pool.send(0, Reply("end"))
            pool.clear()
            assert not pool.pending


def test_no_bit_depends_on_when_groups_are_scored_and_none_holds_the_engine(tokenizer: Tokenizer) -> None:
    expected = played(lengths, tokenizer)
    for start in range(0, 12, 3):
        own = expected[start : start + 3]
        assert [r.reward for r in own] == rank(
            [], [sum(len(t.text) for t in r.turns if t.kind is SpanKind.SAMPLED) for r in own]
        )
    assert len({r.reward for r in expected}) > 1 and len({len(r.turns) for r in expected}) > 1
    assert said(played(lengths, tokenizer, workers=2, slots=2)) == said(expected)

    held: list[int] = []
    engine = LocalEngine(tiny(tokenizer, context=256), tokenizer, slots=5)

    @posttrain.group_reward(lambda tasks, results: [held.append(engine.kept.tokens) or 0.0 for _ in results])
    def watched(task: Task) -> Generator[Any, Any, Any]:
        return (yield from lengths(task))

    with EnvPool(watched, 0) as pool:
        Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256).play(episodes(3))
    assert held == [0, 0, 0]


def test_branches_are_scored_with_the_group_that_they_complete(tokenizer: Tokenizer) -> None:
    plan = BranchPlan(first=0.25, tokens=3, alpha=9.0, beta=0.0, threshold=0.5, branches=1, largest=1.0)

    @posttrain.group_reward(lambda tasks, results: [float(len(results))] * len(results))
    def env(task: Task) -> Generator[Any, Any, Any]:
        reply = yield Turn(f"say {task['id']}=", stop=branching.STOP)
        for _ in range(3):
            reply = yield replace(branching.answer(reply), reward=0.0)

    def rollouts(workers: int) -> list[Rollout]:
        engine = LocalEngine(tiny(tokenizer, context=256), tokenizer, slots=5)
        with EnvPool(env, workers) as pool:
            return Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256).play(episodes(12), plan)

    expected = rollouts(0)
    assert {r.branch is None for r in expected} == {True, False} and {r.reward for r in expected} == {3.0}
    assert said(rollouts(2)) == said(expected)


def test_resumed_run_scores_groups_of_episodes_as_the_whole_run_did(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model(tiny(tokenizer, context=64), tmp_path / "start", tokenizer)
    rows = [{"id": str(i)} for i in range(4)]

    def files(out: str, *steps: int, resume: bool = False, **more: Any) -> dict[str, bytes]:
        for part, count in enumerate(steps):
            run = posttrain.rl(
                rows, lengths, str(tmp_path / "start"), out=str(tmp_path / out), env_workers=0, steps=count, prompts=2,
                group=3, max_tokens=6, lr=1e-2, threads=1, quiet=True, save_every=1, compiled=False,
                resume=resume or part > 0, **more,
            )  # fmt: skip
        return {p.name: p.read_bytes() for p in [run.path / "metrics.jsonl", *sorted(run.path.glob("rollouts/*"))]}

    assert files("parts", 1, 2) == files("whole", 2)
    ahead = files("ahead", 3, async_steps=1)
    shutil.rmtree(
        tmp_path / "ahead" / "checkpoints" / "step-000003"
    )  # as if it had been killed before that was written
    assert files("ahead", 3, async_steps=1, resume=True) == ahead


def test_functions_of_trl_get_all_completions_of_a_group_and_their_environments() -> None:
    calls: list[tuple[int, int]] = []

    def diverse(completions: Any, environments: Any, target: Any, log_extra: Any, **_: Any) -> list[float | None]:
        counts = [environment.counter for environment in environments]
        calls.append((len(completions), len({id(environment) for environment in environments})))
        log_extra("count", counts)
        assert target == [5] * len(completions)
        return [None if count == 9 else float(counts.count(count) == 1) for count in counts]

    env = posttrain.trl_reward(diverse, environment_factory=trl_agent.Counter)
    made = trl_agent.Counter.made
    steps = {step: trl_agent.call("increment", step=step) for step in (1, 5, 9)}
    row = {"messages": trl_agent.PROMPT, "target": 5}
    for _ in range(2):
        with EnvPool(env, 0) as pool:
            found = _with_calls(
                pool, row, [[steps[1], "."], [steps[5], "."], ["."], [steps[1], steps[1], "."], [steps[5], "."]]
            )
        assert [done.rewards["diverse"] for done in found] == [1.0, 0.0, 1.0, 1.0, 0.0]
        assert [done.rewards["Counter"] for done in found] == [0.0, 1.0, 0.0, 0.0, 1.0]
        assert [done.notes["count"] for done in found] == [1, 5, 0, 2, 5]
    assert calls == [(5, 5)] * 2 and trl_agent.Counter.made == made + 5, "scored environments serve later episodes"


def _with_calls(pool: EnvPool, row: Task, scripts: list[list[str]]) -> list[Done]:
    ends: dict[int, Done] = {}
    for id in range(len(scripts)):
        pool.start(id, row, "g")
    while len(ends) < len(scripts):
        for id, event in pool.poll(20):
            if isinstance(event, Turn):
                text = scripts[id].pop(0)
                pool.send(id, Reply(text, tool_calls=HERMES.read(text, [])))
            elif isinstance(event, Done):
                ends[id] = event
    return [ends[id] for id in range(len(scripts))]


def test_check_plays_the_sample_replies_of_a_task_as_a_group(my: str) -> None:
    found = check(f"{my}:count", [{"id": "a", "replies": ["abcdef", "end"]}], replies=None)
    rewards = {case.kind: case.result for case in found.cases}
    done = rewards["replies"]
    assert done is not None and done.notes["size"] == 1, "the others never end"
    [first, second] = check(f"{my}:count", [{"id": "a"}], replies=["end", "raise"]).cases
    assert first.result is not None and first.result.reward == 0.0 and first.repeats
    assert second.result is not None and isinstance(second.result.reward, Invalid)


def test_decorator_refuses_what_cannot_be_scored_so(my: str) -> None:
    assert (
        group_reward_of(lengths) is rank
        and scores_groups(load_env(f"{my}:counts"))
        and not scores_groups(branching.tools)
    )
    assert group_reward_of(functools.partial(lengths)) is rank, "with options bound to it"

    async def waits(tasks: Any, results: Any) -> list[float]:
        return []

    with pytest.raises(UserError, match="yields no turns: write its group reward as def reward"):
        posttrain.group_reward(rank)(lambda task, reply: 1.0)
    with pytest.raises(UserError, match="the group_reward of tools is async def, and the environment is not"):
        posttrain.group_reward(waits)(branching.tools)
    with pytest.raises(UserError, match="is no function; it is called with"):
        posttrain.group_reward(3)(branching.tools)  # type: ignore[arg-type]
    assert not hasattr(branching.tools, "group_reward")


def test_wait_for_a_group_is_believed_of_environments_that_are_scored_so_alone(my: str) -> None:
    waits = WorkerReply(3, AwaitsGroup())
    assert read_answer(write_answer(3, AwaitsGroup())[8:]) == waits
    for env, believed in ((f"{my}:count", True), (branching.tools, False), (f"{my}:rank", False)):
        with EnvPool(env, 1) as pool:
            pool.ready()
            [worker] = pool._workers
            worker.sent[3] = QueuedCommand(PoolEpisode(3, 3, {}, group="g"))
            pool._waiting += 1
            if believed:
                pool._take(worker, waits)
                continue
            with pytest.raises(Garbled):
                pool._take(worker, waits)
