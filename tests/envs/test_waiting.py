"""Environments that are written with `async def` wait side by side, and are otherwise like all others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from environments import Scorer, asking, asking_too, closing, delegating, echo, meeting, misbehaving, one_task, tidy
from episodes import played, said

from posttrain.core.types import Invalid, InvalidKind, Reply, StopReason, Turn, UserError
from posttrain.envs.play.env_outputs import Done, Event
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.load_env import load_env
from posttrain.models.tokenizer.tokenizer import Tokenizer

TASK = {"prompt": "p"}
MANY = 40


def answers(pool: EnvPool) -> dict[int, Event]:
    """All that is to come."""
    found: dict[int, Event] = {}
    while pool.pending:
        found |= dict(pool.poll(20))
    return found


def ended(pool: EnvPool, replies: dict[int, str]) -> dict[int, Any]:
    """The rewards of these episodes of one turn, each with its reply; an Invalid is its kind."""
    for id in replies:
        pool.start(id, {**TASK, "id": id})
    assert all(isinstance(event, Turn) for event in answers(pool).values())
    for id, reply in replies.items():
        pool.send(id, Reply(reply))
    found = answers(pool)
    assert all(isinstance(event, Done) for event in found.values())
    rewards = {id: event.reward for id, event in found.items() if isinstance(event, Done)}
    return {id: reward.kind if isinstance(reward, Invalid) else reward for id, reward in sorted(rewards.items())}


@pytest.mark.parametrize("which", ["environment", "reward"])
def test_as_many_wait_in_a_worker_as_are_asked(which: str) -> None:
    env = meeting(MANY)[which == "reward"]
    with EnvPool(env, workers=1, seconds=20) as pool:
        assert ended(pool, {id: str(id) for id in range(MANY)}) == {id: float(id) for id in range(MANY)}


def test_rewards_that_wait_are_shared_evenly_among_workers() -> None:
    _, reward = meeting(MANY // 2)
    with EnvPool(reward, workers=2, seconds=20) as pool:
        pool.ready()
        assert ended(pool, {id: str(id) for id in range(MANY)}) == {id: float(id) for id in range(MANY)}


def test_code_that_never_gives_the_thread_back_is_blamed_in_whichever_task_it_runs() -> None:
    replies = {0: "one", 1: "loop", 2: "three"}
    with EnvPool(delegating, workers=1, seconds=1.5) as pool:
        assert ended(pool, replies) == {0: 5.0, 1: InvalidKind.TIMEOUT, 2: 7.0}


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_it_is_played_as_one_that_does_not_wait(tokenizer: Tokenizer, workers: int) -> None:
    assert said(played(asking_too, tokenizer, workers=workers)) == said(played(asking, tokenizer))


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("hang", InvalidKind.TIMEOUT),
        ("deaf", InvalidKind.TIMEOUT),
        ("loop", InvalidKind.TIMEOUT),
        ("exit", InvalidKind.DIED),
        ("raise", InvalidKind.RAISED),
        ("cancel", InvalidKind.RAISED),
        ("odd", InvalidKind.UNREADABLE),
        ("silent", InvalidKind.UNREADABLE),
        ("none", InvalidKind.UNREADABLE),
    ],
)
def test_what_it_does_costs_its_own_episode_alone(reply: str, kind: InvalidKind) -> None:
    with EnvPool(misbehaving, workers=1, seconds=1.0) as pool:
        replies = {0: "a", 1: "bb", 2: reply, 3: "dddd"}
        assert ended(pool, replies) == {0: 1.0, 1: 2.0, 2: kind, 3: 4.0}
        assert ended(pool, {9: "again"}) == {9: 5.0}


def test_reasons_say_what_happened() -> None:
    with EnvPool(misbehaving, workers=1, seconds=0.5) as pool:
        reasons = {}
        for id, reply in enumerate(["hang", "silent", "raise"]):
            pool.start(id, TASK)
            answers(pool)
            pool.send(id, Reply(reply))
            event = answers(pool)[id]
            assert isinstance(event, Done) and isinstance(event.reward, Invalid)
            reasons[reply] = event.reward.reason
    assert reasons["hang"] == "misbehaving: did not return within 0.5 s"
    assert "must yield it last" in reasons["silent"]
    assert "ValueError: bad thing" in reasons["raise"] and "environments.py" in reasons["raise"]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_is_one_task(workers: int) -> None:
    with EnvPool(one_task, workers=workers, seconds=10) as pool:
        assert ended(pool, {0: "x", 1: "y"}) == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize("way", ["scored", "dropped"])
def test_an_episode_is_closed_in_the_task_in_which_it_was_opened(tmp_path: Path, way: str) -> None:
    file = tmp_path / "closed"
    with EnvPool(closing, workers=1, seconds=10) as pool:
        pool.start(0, {**TASK, "file": str(file)})
        answers(pool)
        if way == "dropped":
            pool.drop(0)
        else:
            pool.send(0, Reply("x"))
        end = time.monotonic() + 20
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < end
            pool.poll(0.01)
            time.sleep(0.01)
    assert file.read_text() == "True"


def test_a_dropped_episode_is_over_and_its_number_free() -> None:
    with EnvPool(echo, workers=1, seconds=10) as pool:
        for _ in range(2):
            pool.start(0, TASK)
            assert answers(pool) == {0: Turn("p")}
            pool.drop(0)
        pool.start(0, TASK)
        answers(pool)
        pool.send(0, Reply("end", StopReason.EOS))
        assert answers(pool) == {0: Done(1.0, {"turns": 1.0})}


@pytest.mark.parametrize("way", ["too slow", "dropped"])
def test_an_episode_that_is_given_up_is_cancelled(tmp_path: Path, way: str) -> None:
    file = tmp_path / "ended"
    with EnvPool(tidy, workers=1, seconds=0.3 if way == "too slow" else 10) as pool:
        pool.start(0, {**TASK, "file": str(file)})
        answers(pool)
        if way == "too slow":
            pool.send(0, Reply("x"))
            assert isinstance(answers(pool)[0], Done)
        else:
            pool.drop(0)
        end = time.monotonic() + 20
        while not file.exists():
            assert time.monotonic() < end
            pool.poll(0.01)
            time.sleep(0.01)


def test_an_object_may_score() -> None:
    with EnvPool(Scorer(), workers=1) as pool:
        pool.start(0, TASK)
        answers(pool)
        pool.send(0, Reply("four"))
        assert answers(pool) == {0: Done(5.0, {"length": 4.0, "one": 1.0})}


def test_within_another_loop_it_is_refused_without_workers() -> None:
    async def notebook() -> None:
        with EnvPool(echo, workers=0) as pool, pytest.raises(UserError, match="--env-workers 1"):
            pool.start(0, TASK)

    asyncio.run(notebook())


def test_what_its_parameters_should_be_is_told() -> None:
    async def wrong(task: dict[str, Any]) -> float:
        return 0.0

    with pytest.raises(UserError, match=r"a reward is called with \(task, reply\); an environment.* yields"):
        load_env(wrong)
