"""A worker is not trusted: whatever user code does to it costs the episode it was in, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
from processes import descendants, gone, is_running

from posttrain.core.types import Invalid, InvalidKind, Reply, Turn
from posttrain.envs.play.env_outputs import Done, Event
from posttrain.envs.play.env_pool import EnvPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
TASK = {"id": "t", "prompt": "p"}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with EnvPool("hostile:reward", 1, seconds=2.0, memory=1.0) as pool:
        pool.ready()
        yield pool


def event_of(pool: EnvPool, env_task: Any = TASK, reply: str | None = None) -> Event:
    """What an environment answers at first, or to this reply."""
    pool.start(0, env_task)
    [(_, event)] = pool.poll(30)
    if reply is not None:
        assert isinstance(event, Turn)
        pool.send(0, Reply(reply))
        [(_, event)] = pool.poll(30)
    return event


def children(root: int, count: int, before: Collection[int] = ()) -> list[int]:
    """All descendants, when there are so many besides those before: one that changes its parent is missed by a look."""
    end = time.monotonic() + 10
    while len(found := [pid for pid in descendants(root) if pid not in before]) != count:
        assert time.monotonic() < end, found
    return found


def reason(event: Event) -> Invalid:
    assert isinstance(event, Done) and isinstance(event.reward, Invalid), event
    assert event.reward.reason.isprintable() or "\n" not in event.reward.reason
    event.reward.reason.encode()
    return event.reward


@pytest.mark.parametrize("what", hostile.MESSAGES)
def test_a_message_that_cannot_be_read_or_is_out_of_turn_costs_one_episode(
    pool: EnvPool, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    invalid = reason(event_of(pool, reply=what))
    assert invalid.kind is InvalidKind.UNREADABLE and "sent a message that cannot be read" in invalid.reason
    assert event_of(pool, reply="ab") == Done(2.0) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", hostile.RESULTS)
def test_a_result_of_any_type_is_invalid_and_the_worker_goes_on(pool: EnvPool, what: str) -> None:
    invalid = reason(event_of(pool, reply=what))
    own = (InvalidKind.REPORTED,) if what == "a reason that is no text" else ()  # it said Invalid, after all
    assert invalid.kind in (InvalidKind.UNREADABLE, InvalidKind.RAISED, *own)
    assert event_of(pool, reply="ab") == Done(2.0)


def test_more_memory_than_allowed_is_invalid_and_names_the_option(pool: EnvPool) -> None:
    invalid = reason(event_of(pool, reply="memory"))
    assert "MemoryError" in invalid.reason and "1 GiB: see --env-memory" in invalid.reason


def test_a_worker_that_closes_its_socket_is_replaced(pool: EnvPool) -> None:
    assert reason(event_of(pool, reply="close")).kind in (InvalidKind.DIED, InvalidKind.UNREADABLE)
    assert event_of(pool, reply="ab") == Done(2.0)


def test_a_fork_within_a_reward_answers_nobody(pool: EnvPool) -> None:
    for _ in range(3):
        assert event_of(pool, reply="fork and return") == Done(15.0)
        assert event_of(pool, reply="ab") == Done(2.0)
    assert event_of(pool, reply="fork and stay") == Done(13.0)


@pytest.mark.parametrize("end", ["closed", "too late", "keeper killed", "worker killed"])
@pytest.mark.parametrize("what", hostile.DAEMONS)
def test_nothing_that_a_worker_started_outlives_it(what: str, end: str) -> None:
    if (what, end) == ("one without our environment", "keeper killed"):
        pytest.skip("nobody can know it any more")
    before = set(descendants(os.getpid()))
    with EnvPool("hostile:reward", 1, seconds=1.0) as pool:
        pool.ready()
        event = event_of(pool, {**TASK, "stuck": end == "too late"}, what)
        if end == "too late":
            assert reason(event).kind is InvalidKind.TIMEOUT
            assert event_of(pool, reply="ab") == Done(2.0)
            assert len(set(descendants(os.getpid())) - before) == 2  # a fresh worker and its keeper
            return
        keeper, worker, *others = children(os.getpid(), 3, before)
        if end != "closed":
            os.kill(keeper if end == "keeper killed" else worker, signal.SIGKILL)
            gone(worker)
            assert event_of(pool, reply="ab") == Done(2.0)
            gone(keeper, worker, *others)
    gone(keeper, worker, *others)


@pytest.mark.parametrize("what", ["one without our environment", "an orphan in a session of its own"])
def test_nothing_that_a_worker_started_outlives_a_killed_parent(what: str) -> None:
    script = (
        "import time\nfrom posttrain.envs.play.env_pool import EnvPool\nfrom posttrain.core.types import Reply\n"
        "pool = EnvPool('hostile:reward', 1)\n"
        f"pool.start(0, {TASK!r}); pool.poll(20); pool.send(0, Reply({what!r})); pool.poll(20)\n"
        "print('ready', flush=True)\ntime.sleep(1000)\n"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=paths)
    assert parent.stdout is not None
    with parent.stdout:
        parent.stdout.readline()
        processes = children(parent.pid, 3)
        parent.kill()
        parent.wait()
    gone(*processes)


def test_a_generator_that_never_yields_is_invalid_by_time() -> None:
    with EnvPool("hostile:never", 1, seconds=0.5) as pool:
        invalid = reason(event_of(pool))
    assert invalid.kind is InvalidKind.TIMEOUT and "did not return within 0.5 s" in invalid.reason


def test_text_that_cannot_be_tokenised_never_reaches_the_tokenizer() -> None:
    with EnvPool("hostile:floods", 1, seconds=5.0) as pool:
        pool.ready()
        invalid = reason(event_of(pool))
        assert "yielded 100,000,000 characters; a turn may have at most 1,048,576" in invalid.reason
    with EnvPool("hostile:halves", 1) as pool:
        assert "surrogate" in reason(event_of(pool, reply="x")).reason


def test_an_environment_that_raises_when_it_is_dropped_costs_nothing() -> None:
    with EnvPool("hostile:raises_when_closed", 1) as pool:
        for _ in range(3):
            assert event_of(pool) == Turn("a")
            pool.drop(0)


def test_workers_are_as_many_as_there_are_processors_unless_told(workers_by_default: None) -> None:
    with EnvPool("hostile:reward") as pool:
        assert pool.size == len(os.sched_getaffinity(0))
        pool.ready()
        assert all(map(is_running, descendants(os.getpid())))
