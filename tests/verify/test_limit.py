"""Calls with limits of time and memory: what they return, what they leave behind, and what cannot hold them up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import ROOT, TESTS

from posttrain.core.types import Invalid
from posttrain.verify.limited_process import CheckFailed, _servers, limited

PACKAGE = ROOT


def failed(function: str, *args: object, seconds: float = 30.0) -> str:
    answer = limited(function, *args, seconds=seconds)
    assert isinstance(answer, CheckFailed), answer
    return answer.reason


def ended(pid: int, within: float = 30.0) -> bool:
    """Whether a process ends, or is a zombie that only waits to be counted."""
    limit = time.monotonic() + within
    while time.monotonic() < limit:
        try:
            os.kill(pid, 0)
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_a_call_returns_the_result_or_says_how_it_failed() -> None:
    assert limited("builtins:max", 3, 4, seconds=30) == 4
    assert limited("posixpath:split", "a/b", seconds=30) == ["a", "b"]
    assert limited("os:kill", os.getpid(), 0, seconds=30) is None
    assert "ValueError" in failed("builtins:int", "x")
    assert "SystemExit" in failed("sys:exit", 3)
    assert "died (1)" in failed("os:_exit", 1)
    assert f"died ({-signal.SIGABRT})" in failed("os:abort")
    assert limited("builtins:pow", 2, 10, seconds=30) == 1024


def test_what_does_not_import_says_nothing_about_the_call() -> None:
    for name in ("no_such_module:run", "os:no_such_function"):
        answer = limited(name, seconds=30)
        assert isinstance(answer, Invalid) and "could not be loaded" in answer.reason


def test_time_is_limited_while_sleeping_and_within_a_computation_in_c() -> None:
    began = time.monotonic()
    assert "time limit" in failed("time:sleep", 600, seconds=0.2)
    assert "time limit" in failed("builtins:pow", 9, 9**9, seconds=0.3)
    assert time.monotonic() - began < 60  # against a hang: neither would end within hours


def test_memory_is_limited() -> None:
    assert "MemoryError" in failed("builtins:bytearray", 2**40)
    assert "MemoryError" in failed("operator:mul", "x", 2**31)


def test_a_result_that_is_huge_or_no_plain_data_holds_nothing_up() -> None:
    assert "larger than" in failed("operator:mul", "x", 2**21)
    assert "TypeError" in failed("builtins:range", 5)
    assert "RecursionError" in failed("limited_functions:nested", 100_000)
    assert "ValueError" in failed("builtins:pow", 10, 5000)  # more digits than Python writes
    assert limited("builtins:max", 3, 4, seconds=30) == 4


def test_one_call_changes_nothing_for_the_next() -> None:
    here = limited("os:getcwd", seconds=30)
    assert limited("os:chdir", "/", seconds=30) is None
    assert limited("os:getcwd", seconds=30) == here != "/"


@pytest.mark.skipif(sys.platform != "linux", reason="finds descendants through /proc")
@pytest.mark.parametrize("seconds", [0.0, 600.0], ids=["returned", "stopped"])
def test_every_descendant_of_a_call_ends_with_it(tmp_path: Path, seconds: float) -> None:
    file = tmp_path / "pid"
    answer = limited("limited_functions:leave_behind", str(file), seconds, seconds=2.0)
    assert isinstance(answer, CheckFailed) == bool(seconds)
    assert ended(int(file.read_text()), within=0.0001)


@pytest.mark.skipif(sys.platform != "linux", reason="the life line is Linux's")
@pytest.mark.parametrize("victim", ["caller", "server"])
def test_nothing_outlives_a_killed_caller_or_a_killed_server(tmp_path: Path, victim: str) -> None:
    file = tmp_path / "pid"
    script = (
        "import sys; sys.path[:] = sys.argv[2:]; from posttrain.verify.limited_process import limited, _servers; "
        "limited('builtins:max', 1, 2, seconds=9); print(*[s.process.pid for s in _servers.alive], flush=True); "
        "limited('limited_functions:leave_behind', sys.argv[1], 600.0, seconds=300)"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", script, str(file), str(PACKAGE), str(TESTS / "helpers"), *sys.path],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None
    server = int(caller.stdout.readline())
    while not (file.exists() and file.read_text().endswith("\n")):
        assert caller.poll() is None
        time.sleep(0.02)
    orphan = int(file.read_text())
    (child,) = {int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()} - {orphan}
    os.kill(caller.pid if victim == "caller" else server, signal.SIGKILL)
    caller.wait(timeout=60)
    assert ended(server) and ended(child)
    if victim == "caller":  # a killed server takes its child with it, but cannot see to what that has left behind
        assert ended(orphan)
    else:
        os.kill(orphan, signal.SIGKILL)


def test_a_call_cannot_answer_for_its_server() -> None:
    assert "died" in failed("limited_functions:forge", '[true, "forged"]')
    assert limited("builtins:max", 3, 4, seconds=30) == 4


def test_a_server_that_died_while_idle_costs_no_verdict() -> None:
    assert limited("builtins:pow", 2, 10, seconds=30) == 1024
    for server in _servers.alive:
        server.process.kill()
        server.process.wait()
    assert limited("builtins:pow", 2, 10, seconds=30) == 1024
