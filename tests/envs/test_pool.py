"""Nothing that user code does hangs or crashes the parent, costs another episode, or becomes a silent 0.

Real worker processes throughout.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import environments
import pytest
from places import ROOT
from processes import descendants, gone, is_running

from posttrain.core.types import Invalid, Reply, StopReason, Turn, UserError
from posttrain.envs.play.env_outputs import Done, Event
from posttrain.envs.play.env_pool import EnvPool

TASK = {"id": "t", "prompt": "p"}

MY = r"""
import os, re, signal, time

def reward(task, reply):
    if reply == "raise":
        raise ValueError("bad thing")
    if reply == "loop":
        while True:
            pass
    if reply == "regex":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if reply == "exit":
        os._exit(3)
    if reply == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if reply == "quit":
        exit()
    return {"none": None, "nan": float("nan"), "text": "1.0"}.get(str(reply), float(len(reply)))

def echo(task):
    reply = yield task["prompt"]
    said = []
    while True:
        said.append(str(reply))
        if reply == "hang":
            time.sleep(1000)
        if reply == "exit":
            os._exit(3)
        if reply == "raise":
            raise ValueError("bad thing")
        if reply == "odd":
            yield 7
        if reply == "end":
            return {"turns": len(said)}
        reply = yield "+".join(said)

def prints(task, reply):
    print("a tab:\t\x1b[2J")
    print("for the eyes")
    os.system("echo from a child")
    return 1.0
"""


@pytest.fixture
def my(tmp_path: Path) -> str:
    (tmp_path / "my.py").write_text(MY)
    return str(tmp_path / "my.py")


@pytest.fixture
def open_pool() -> Iterator[Callable[..., EnvPool]]:
    pools: list[EnvPool] = []

    def open_pool(env: Any, workers: int = 1, seconds: float = 0.5) -> EnvPool:
        pools.append(EnvPool(env, workers, seconds))
        return pools[-1]

    yield open_pool
    for pool in pools:
        pool.close()


def workers_of(pool: EnvPool) -> list[int]:
    """The processes in which the environment runs; each is the child of a keeper."""
    return [child for worker in pool._workers for child in descendants(worker.child.process.pid)]


def answers(pool: EnvPool) -> dict[int, Event]:
    """All that is pending; one event for each episode."""
    found: dict[int, Event] = {}
    while pool.pending:
        events = pool.poll(20)
        assert events, "no answer within 20 s"
        for id, event in events:
            assert id not in found
            found[id] = event
    return found


def score(pool: EnvPool, replies: list[str]) -> list[float | str]:
    """The reward of each reply, or the reason why there is none."""
    for id in range(len(replies)):
        pool.start(id, TASK)
    assert all(event == Turn(text="p") for event in answers(pool).values())
    for id, reply in enumerate(replies):
        pool.send(id, Reply(reply))
    done = answers(pool)
    assert sorted(done) == list(range(len(replies)))
    rewards = [event.reward for _, event in sorted(done.items()) if isinstance(event, Done)]
    return [reward.reason if isinstance(reward, Invalid) else reward for reward in rewards]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_episode_gets_its_own_answer(my: str, open_pool: Callable[..., EnvPool], workers: int) -> None:
    assert score(open_pool(f"{my}:reward", workers), ["", "a", "ab", "abc", "abcd"]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("raise", "ValueError: bad thing (my.py:6)"),
        ("quit", "SystemExit"),
        ("none", "returned None (is a return missing?)"),
        ("nan", "returned nan"),
        ("text", "returned '1.0' (str)"),
    ],
)
def test_a_misbehaving_reward_is_invalid_with_its_reason(
    my: str, open_pool: Callable[..., EnvPool], reply: str, reason: str, workers: int
) -> None:
    before, invalid, after = score(open_pool(f"{my}:reward", workers), ["a", reply, "ab"])
    assert (before, after) == (1.0, 2.0)
    assert isinstance(invalid, str) and invalid.startswith(reason)


@pytest.mark.parametrize("reply", ["loop", "regex"])
def test_a_reward_that_does_not_return_costs_its_own_episode_and_its_time_limit(
    my: str, open_pool: Callable[..., EnvPool], reply: str
) -> None:
    pool = open_pool(f"{my}:reward", seconds=0.5)
    pool.ready()
    began = time.monotonic()
    before, invalid, after = score(pool, ["a", reply, "ab"])
    assert 0.5 <= time.monotonic() - began < 30
    assert (before, after) == (1.0, 2.0)
    assert isinstance(invalid, str) and invalid.endswith("my.py:reward: did not return within 0.5 s")


@pytest.mark.parametrize(("reply", "code"), [("exit", "exit code 3"), ("segfault", "exit code -11, SIGSEGV")])
def test_a_dying_worker_costs_the_episode_it_was_in(
    my: str, open_pool: Callable[..., EnvPool], reply: str, code: str
) -> None:
    before, invalid, after = score(open_pool(f"{my}:reward"), ["a", reply, "ab"])
    assert (before, after) == (1.0, 2.0)
    assert isinstance(invalid, str) and invalid.endswith(f"its worker process died ({code})")


def test_every_step_has_the_whole_limit_to_itself(open_pool: Callable[..., EnvPool]) -> None:
    def slow(task: Any, reply: str) -> float:
        time.sleep(0.2)
        return 1.0

    assert score(open_pool(slow, seconds=0.5), ["a"] * 5) == [1.0] * 5


def test_time_away_from_poll_is_not_held_against_the_worker(open_pool: Callable[..., EnvPool]) -> None:
    pool = open_pool(lambda task, reply: 1.0, seconds=0.3)
    pool.ready()
    for id in range(2):
        pool.start(id, TASK)
    assert len(pool.poll()) == 2
    for id in range(2):
        pool.send(id, Reply("a"))
    found = dict(pool.poll(0))
    time.sleep(0.6)
    assert found | answers(pool) == {0: Done(1.0), 1: Done(1.0)}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_of_many_turns_hears_every_reply(my: str, open_pool: Callable[..., EnvPool], workers: int) -> None:
    pool = open_pool(f"{my}:echo", workers)
    pool.start(5, TASK)
    shown: list[Event] = []
    for reply in ["a", "b", "end"]:
        [(id, event)] = pool.poll(20)
        assert id == 5
        shown.append(event)
        pool.send(5, Reply(reply))
    assert shown == [Turn("p"), Turn("a"), Turn("a+b")]
    assert pool.poll(20) == [(5, Done(3.0, {"turns": 3.0}))]
    assert not pool.single_turn and pool.pending == 0 and pool.poll(None) == []


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("last", ["hang", "exit"])
def test_the_other_episodes_of_a_lost_worker_are_replayed(
    my: str, open_pool: Callable[..., EnvPool], last: str, kind: str
) -> None:
    pool = open_pool(environments.echo if kind == "async" else f"{my}:echo", seconds=0.5)
    for id in range(4):
        pool.start(id, {"id": id, "prompt": f"p{id}"})
    answers(pool)
    for id in range(4):
        pool.send(id, Reply(f"a{id}"))
    answers(pool)
    for id, reply in enumerate(["b0", last, "b2"]):  # episode 3 waits meanwhile: it is replayed when it goes on
        pool.send(id, Reply(reply))
    found = answers(pool)
    assert isinstance(lost := found.pop(1), Done) and isinstance(lost.reward, Invalid)
    assert found == {0: Turn("a0+b0"), 2: Turn("a2+b2")}
    pool.send(3, Reply("b3"))
    assert answers(pool) == {3: Turn("a3+b3")}
    for id in (0, 2, 3):
        pool.send(id, Reply("end"))
    assert answers(pool) == {id: Done(3.0, {"turns": 3.0}) for id in (0, 2, 3)}


def kill_idle_worker(pool: EnvPool) -> None:
    [worker] = workers_of(pool)
    os.kill(worker, signal.SIGKILL)
    gone(worker)


def test_an_idle_worker_that_is_killed_costs_nothing(my: str, open_pool: Callable[..., EnvPool]) -> None:
    pool = open_pool(f"{my}:echo")
    pool.start(0, TASK)
    assert pool.poll(20) == [(0, Turn("p"))]
    kill_idle_worker(pool)
    pool.send(0, Reply("a"))
    assert pool.poll(20) == [(0, Turn("a"))]


def test_an_interrupt_from_the_keyboard_does_not_reach_workers(my: str, open_pool: Callable[..., EnvPool]) -> None:
    pool = open_pool(f"{my}:echo")
    pool.start(0, TASK)
    assert pool.poll(20) == [(0, Turn("p"))]
    [worker] = workers_of(pool)
    assert os.getsid(worker) != os.getsid(0)
    os.kill(worker, signal.SIGINT)
    pool.send(0, Reply("a"))
    assert pool.poll(20) == [(0, Turn("a"))] and workers_of(pool) == [worker]


def test_an_episode_whose_worker_is_killed_from_outside_is_played_again(open_pool: Callable[..., EnvPool]) -> None:
    def wait_for_it(task: Any, reply: str) -> float:
        time.sleep(0.5 if reply == "slow" else 0)
        return 1.0

    pool = open_pool(wait_for_it, seconds=5)
    for id in range(2):
        pool.start(id, TASK)
    pool.ready()
    assert len(pool.poll(20)) == 2
    pool.send(0, Reply("slow"))
    pool.send(1, Reply("fast"))
    pool.poll(0)
    os.kill(workers_of(pool)[0], signal.SIGKILL)
    found = answers(pool)
    assert found[0] == found[1] == Done(1.0)


def test_an_episode_that_kills_its_own_process_ends_invalid_after_three_times(
    tmp_path: Path, open_pool: Callable[..., EnvPool]
) -> None:
    def dies(task: Any, reply: str) -> float:
        if reply == "die":
            with open(f"{task['folder']}/times", "a") as file:
                file.write(".")
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    pool = open_pool(dies, seconds=20)
    for id, reply in enumerate(("well", "die", "well")):
        pool.start(id, {**TASK, "folder": str(tmp_path)})
        assert len(pool.poll(20)) == 1
        pool.send(id, Reply(reply))
    found = answers(pool)
    assert found[0] == found[2] == Done(1.0)
    assert isinstance(lost := found[1], Done) and isinstance(lost.reward, Invalid)
    assert "its worker process died (exit code -9, SIGKILL)" in lost.reward.reason
    assert (tmp_path / "times").read_text() == "..."


def test_a_replay_that_goes_another_way_is_invalid(tmp_path: Path, open_pool: Callable[..., EnvPool]) -> None:
    (tmp_path / "env.py").write_text(
        "import os, pathlib\n"
        "def env(task):\n"
        "    been_here = pathlib.Path(__file__).with_name('mark')\n"
        "    yield 'a'\n"
        "    if been_here.exists():\n"
        "        return 1.0\n"
        "    been_here.touch()\n"
        "    yield 'b'\n"
        "    return 2.0\n"
    )
    pool = open_pool(f"{tmp_path}/env.py:env")
    pool.start(0, TASK)
    pool.poll(20)
    pool.send(0, Reply("x"))
    assert pool.poll(20) == [(0, Turn("b"))]
    kill_idle_worker(pool)
    pool.send(0, Reply("y"))
    [(_, event)] = pool.poll(20)
    assert isinstance(event, Done) and isinstance(event.reward, Invalid) and "replayed" in event.reward.reason


@pytest.mark.parametrize(
    ("reply", "reason"), [("raise", "ValueError: bad thing (my.py:30)"), ("odd", "yielded 7 (int)")]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_misbehaving_environment_is_invalid_with_its_reason(
    my: str, open_pool: Callable[..., EnvPool], reply: str, reason: str, workers: int
) -> None:
    pool = open_pool(f"{my}:echo", workers)
    pool.start(0, TASK)
    pool.poll(20)
    pool.send(0, Reply(reply))
    [(_, event)] = pool.poll(20)
    assert isinstance(event, Done) and isinstance(event.reward, Invalid) and event.reward.reason.startswith(reason)


def test_a_turn_arrives_as_it_was_yielded_and_the_reply_with_its_stop_reason(open_pool: Callable[..., EnvPool]) -> None:
    turn = Turn(messages=[{"role": "user", "content": "c"}], stop=("</a>",), reward=0.5, max_tokens=7)

    def env(task: Any) -> Generator[Turn, Reply, Any]:
        reply = yield turn
        return {reply.stop.value: 1.0}

    pool = open_pool(env)
    pool.start(0, TASK)
    assert pool.poll(20) == [(0, turn)]
    pool.send(0, Reply("x", StopReason.CONTEXT))
    assert pool.poll(20) == [(0, Done(1.0, {"context": 1.0}))]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_an_episode_does_to_its_task_is_not_seen_by_the_others(
    open_pool: Callable[..., EnvPool], workers: int
) -> None:
    def reward(task: Any, reply: str) -> float:
        task["seen"].append(reply)
        return float(len(task["seen"]))

    pool = open_pool(reward, workers)
    task = {**TASK, "seen": []}
    for id in range(3):
        pool.start(id, task)
    answers(pool)
    for id in range(3):
        pool.send(id, Reply("x"))
    assert answers(pool) == dict.fromkeys(range(3), Done(1.0)) and task["seen"] == []


def test_closures_and_lambdas_run_in_workers(open_pool: Callable[..., EnvPool]) -> None:
    here = os.getpid()
    assert score(open_pool(lambda task, reply: float(os.getpid() != here)), ["a"]) == [1.0]


def test_only_scoring_goes_to_a_worker_for_a_plain_reward(open_pool: Callable[..., EnvPool]) -> None:
    pool = open_pool(lambda task, reply: 1.0)
    assert pool.single_turn
    pool.start(0, {"messages": [{"role": "user", "content": "c"}], "stop": ["\n"]})
    assert pool.poll(0) == [(0, Turn(messages=[{"role": "user", "content": "c"}], stop=("\n",)))]
    with pytest.raises(UserError, match='needs "prompt"'):
        pool.start(1, {"id": "x", "question": "q"})


def test_an_import_that_fails_is_the_users_error_from_poll(tmp_path: Path, open_pool: Callable[..., EnvPool]) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nraise RuntimeError('no index here')\n")
    pool = open_pool(f"{tmp_path}/broken.py:reward", workers=2)
    pool.start(0, TASK)
    with pytest.raises(UserError, match=r"RuntimeError: no index here \(broken.py:2\)"):
        pool.poll(20)


def test_an_import_that_kills_its_worker_is_the_users_error(tmp_path: Path, open_pool: Callable[..., EnvPool]) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(9)\n")
    pool = open_pool(f"{tmp_path}/deadly.py:reward")
    with pytest.raises(UserError, match=r"a worker process died \(exit code 9\) while it was imported"):
        assert pool.single_turn


def test_large_batches_of_long_replies_do_not_block(open_pool: Callable[..., EnvPool]) -> None:
    def env(task: Any) -> Generator[str, Reply, float]:
        reply = yield "x" * 5000
        reply = yield str(reply)  # answers as long as the questions: both directions fill up
        return float(len(reply))

    pool = open_pool(env, workers=2, seconds=10)
    ids = range(2000)
    for id in ids:
        pool.start(id, TASK)
    assert len(answers(pool)) == 2000
    for id in ids:
        pool.send(id, Reply(f"{id:05}" * 4000))
    shown = answers(pool)
    assert all(shown[id] == Turn(f"{id:05}" * 4000) for id in ids)
    for id in ids:
        pool.send(id, Reply("y" * 20_000))
    assert answers(pool) == dict.fromkeys(ids, Done(20_000.0))


def test_a_dropped_episode_is_over_and_its_number_free(my: str, open_pool: Callable[..., EnvPool]) -> None:
    pool = open_pool(f"{my}:echo")
    pool.start(0, TASK)
    assert pool.poll(20) == [(0, Turn("p"))]
    pool.drop(0)
    pool.start(0, {"prompt": "q"})
    assert pool.poll(20) == [(0, Turn("q"))]


def test_what_the_environment_prints_goes_to_standard_error(my: str) -> None:
    script = (
        "from posttrain.envs.play.env_pool import EnvPool\nfrom posttrain.core.types import Reply\n"
        f"with EnvPool({my + ':prints'!r}) as pool:\n"
        "    pool.start(0, {'prompt': 'p'}); pool.poll(20); pool.send(0, Reply('x'))\n"
        "    print(pool.poll(20)[0][1].reward)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert run.stdout == "1.0\n"
    assert "for the eyes\n" in run.stderr and "from a child\n" in run.stderr


def test_what_the_environment_prints_on_a_terminal_stands_above_what_is_drawn_there(my: str) -> None:
    script = (
        "import sys\nfrom posttrain.envs.play.env_pool import EnvPool\nfrom posttrain.runs.terminal.display import Display\n"
        "from posttrain.core.types import Reply\n"
        "display = Display()\n"
        f"with EnvPool({my + ':prints'!r}, 2) as pool:\n"
        "    pool.ready(); display.start('run', 3, [])\n"
        "    for n in range(3):\n"
        "        pool.start(n, {'prompt': 'p'}); pool.poll(20); pool.send(n, Reply('x')); pool.poll(20)\n"
        "        display.step(n + 1, {'reward': 1.0}, {})\n"
        "display.close()\n"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as run:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # how the end of a terminal shows
            while more := os.read(ours, 1 << 16):
                seen += more
        os.close(ours)
    assert run.returncode == 0, seen
    text = seen.decode().replace("\r\n", "\n")
    assert "a tab:  \\x1b[2J" in text and "\x1b[2J" not in text  # tabs as spaces, and control codes visible
    for line in ("for the eyes", "from a child"):
        places = [text[: found.start()] for found in re.finditer(line, text)]
        assert len(places) == 3
        assert all(re.search(r"\x1b\[J(a tab:.*\n|for the eyes\n|from a child\n)*$", before) for before in places), text


def test_a_script_without_a_main_guard_runs_its_body_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "print('body')\n"
        "from posttrain.envs.play.env_pool import EnvPool\nfrom posttrain.core.types import Reply\n"
        "def reward(task, reply):\n    return len(reply)\n"
        "pool = EnvPool(reward)\n"
        "pool.start(0, {'prompt': 'p'}); pool.poll(20); pool.send(0, Reply('x'))\n"
        "print(pool.poll(20)[0][1].reward)\n"  # and it may end without closing the host
    )
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert run.stdout == "body\n1.0\n", run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends workers stuck in C code on Linux only")
@pytest.mark.parametrize("reply", ["fine", "regex"])
def test_workers_do_not_outlive_a_parent_that_is_killed(my: str, reply: str) -> None:
    script = (
        "import sys, time\nfrom posttrain.envs.play.env_pool import EnvPool\nfrom posttrain.core.types import Reply\n"
        f"pool = EnvPool({my + ':reward'!r}, 1, seconds=1000)\n"
        "pool.start(0, {'prompt': 'p'}); pool.poll(20)\n"
        f"pool.send(0, Reply({reply!r})); pool.poll(0.3)\n"
        "print('ready', flush=True)\ntime.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()
    processes = descendants(parent.pid)
    assert len(processes) == 2  # a worker and its keeper
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone(*processes)


def test_closing_ends_every_worker_even_a_stuck_one(my: str) -> None:
    before = descendants(os.getpid())
    pool = EnvPool(f"{my}:reward", workers=2, seconds=100)
    pool.ready()
    for id in range(2):
        pool.start(id, TASK)
    answers(pool)
    pool.send(0, Reply("regex"))
    pool.poll(0.2)
    processes = [p for p in descendants(os.getpid()) if p not in before]
    assert len(processes) == 4
    pool.close()
    pool.close()
    assert not any(map(is_running, processes))
