"""What a program can do in the sandbox: nothing that outlives it or leaves it, and no test passes that it does not know.

Each program runs in both modes, and as both users where the tests are root's: with all that this system allows, and where
namespaces are denied.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile_programs
import pytest
import sandboxes
from processes import descendants

from posttrain.sandbox.host import Sandbox
from posttrain.sandbox.limits import ProgramLimits
from posttrain.sandbox.program import Ended
from posttrain.verify import unit_tests as code_module
from posttrain.verify.unit_tests import Grade, graded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
USERS = ("own", "other") if hasattr(os, "geteuid") and os.geteuid() == 0 else ("own",)
GROUNDS = [(user, mode) for mode in sandboxes.MODES for user in USERS]
EITHER = {
    "large files without number",
    "files without number",
    "folders without bottom",
    "folders that may not be looked at",
}
"""Programs that a limit may end."""


@pytest.fixture(scope="module", params=GROUNDS, ids="-".join)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    user, mode = request.param
    if user == "other" and sandboxes.interpreter() is None:
        pytest.skip("another user can run no Python here")
    with sandboxes.opened(user, mode) as sandbox:
        assert mode == "all" or not sandbox.protections.namespaces
        if sandbox.protections.missing:
            pytest.skip(f"this system has no {sandbox.protections.missing}")
        yield sandbox


@dataclass
class Watch:
    """What a program should not reach."""

    folder: Path
    canary: subprocess.Popen[bytes]
    sockets: list[socket.socket]
    memory: Any
    abstract: str

    def filled(self, code: str) -> str:
        return hostile_programs.filled(
            code, file=self.folder / "file", folder=self.folder, port=self.sockets[0].getsockname()[1],
            abstract=self.abstract, host=os.getpid(), canary=self.canary.pid, address=ctypes.addressof(self.memory),
            secret="canary in memory",
        )  # fmt: skip

    def state(self) -> Any:
        entries = sorted((e.name, os.stat(e), e.read_bytes() if e.is_file() else b"") for e in self.folder.iterdir())
        kept = [(name, info.st_mode, info.st_uid, info.st_mtime_ns, content) for name, info, content in entries]
        return kept, os.stat(self.folder).st_mode, os.stat(os.__file__).st_mode

    def unreached(self) -> bool:
        for listening in self.sockets:
            try:
                listening.recv(1) if listening.type == socket.SOCK_DGRAM else listening.accept()
            except BlockingIOError:
                continue
            return False
        return self.canary.poll() is None and self.memory.raw == b"canary in memory\0"


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "file").write_text("canary in a file")
    (folder / "file").chmod(0o666)
    sockets = [socket.create_server(("127.0.0.1", 0))]
    for kind, address in (
        (socket.SOCK_STREAM, str(folder / "socket")),
        (socket.SOCK_DGRAM, str(folder / "datagrams")),
        (socket.SOCK_STREAM, "\0" + (abstract := f"canary {os.getpid()}")),
    ):
        listening = socket.socket(socket.AF_UNIX, kind)
        listening.bind(address)
        if kind == socket.SOCK_STREAM:
            listening.listen()
        sockets.append(listening)
    for listening in sockets:
        listening.setblocking(False)
    above = tmp_path_factory.getbasetemp()
    for path, mode in (
        (folder, 0o777),
        (above, 0o755),
        (above.parent, 0o755),
    ):  # only the sandbox is in the way of a program
        path.chmod(mode)
    for path in ("socket", "datagrams"):
        (folder / path).chmod(0o777)
    user: dict[str, Any] = (
        {"user": sandboxes.OTHER, "group": sandboxes.OTHER, "extra_groups": []} if len(USERS) > 1 else {}
    )
    canary = subprocess.Popen(["sleep", "1000"], **user)
    yield Watch(folder, canary, sockets, ctypes.create_string_buffer(b"canary in memory"), abstract)
    canary.kill()
    canary.wait()
    for listening in sockets:
        listening.close()


def together(play: Callable[[str], str], names: Iterable[str]) -> list[str]:
    """What went wrong with any of them; several run at once, as they do in training."""
    with ThreadPoolExecutor(8) as pool:
        return list(filter(None, pool.map(play, names)))


def test_no_program_reaches_what_is_outside(sandbox: Sandbox, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "canary in the environment")
    before = watch.state()

    def played(name: str) -> str:
        with sandbox.start(ProgramLimits(life=60.0)) as program:
            try:
                raised = program.run(watch.filled(hostile_programs.ESCAPES[name]))
                loot = program.ask({"do": "value", "source": "loot"})
            except Ended as error:
                allowed = name in EITHER and not sandbox.protections.namespaces
                return "" if allowed else f"{name}: {error}"
            finally:
                program.finish()
        return "" if raised is None and loot == {"value": []} else f"{name}: {raised} {loot}"

    assert not together(played, hostile_programs.ESCAPES)
    assert watch.state() == before
    assert watch.unreached()


def test_programs_without_end_are_ended_and_leave_nothing(sandbox: Sandbox, watch: Watch) -> None:
    running = set(descendants(os.getpid()))

    def played(name: str) -> str:
        with sandbox.start(ProgramLimits(life=0.5, cpu=1), output=True) as program:
            try:
                program.run(watch.filled(hostile_programs.ENDLESS[name]))
                loot = program.ask({"do": "value", "source": "loot"})
                return f"{name}: {loot}" if loot != {"value": []} else ""
            except Ended:
                return ""
            finally:
                program.finish()
                assert len(program.printed) <= program.limits.output

    assert not together(played, hostile_programs.ENDLESS)
    assert watch.unreached()
    assert set(descendants(os.getpid())) <= running, "a process is left"


def cases_of(expected: int) -> tuple[list[str], list[str]]:
    """Tests that no program can pass which does not know this number: such as are taken apart, and such as are played."""
    compared = [f"assert answer({n}) == {expected + n}" for n in (1, 2)] + [f"assert answer(3) == [{expected}, 'a']"]
    played = [
        f"assert answer(1) + 0 == {expected}",
        f"assert abs(answer(1) - {expected}) < 0.5",
        f"import math\nassert math.isclose(answer(1), {expected})",
        f"assert math.isclose(answer(1), {expected})",
        f"assert set(answer(1)) == {{{expected}}}",
        f"assert len(answer(1)) == {expected}",
        f"assert isinstance(answer(1), int) and answer(1) == {expected}",
        f"assert {expected} in answer(1)",
        f"assert sorted(answer(1)) == [{expected}]",
        f"expected = {expected}\nassert answer(lambda n: n + expected) == expected * 2",
        f"given = [{expected}]\nanswer(given)\nassert given == [{expected}, 1]",
        f"value = answer(1)\nassert value\nassert value == {expected}",
        *(shape.replace("{n}", str(expected)) for shape in hostile_programs.SHAPES),
    ]
    return compared, played


@pytest.mark.parametrize("kind", ["compared", "played"])
def test_no_program_passes_a_test_whose_answer_it_does_not_know(
    sandbox: Sandbox, kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["sandbox"][0] == "other":
        pytest.skip("who runs a program has no part in its verdict")
    monkeypatch.setattr(code_module, "shared", lambda: sandbox)
    contained = bool(sandbox.protections.namespaces)

    def played(name: str) -> str:
        busy = name in hostile_programs.BUSY
        if (busy or name in hostile_programs.SLOW) and (kind == "played") == contained:
            return ""  # it takes all of its time, which is long: once for each mode
        expected = 10**6 + secrets.randbelow(10**9)
        tests = cases_of(expected)[kind == "played"]
        limits = ProgramLimits(life=0.4, cpu=1) if busy else ProgramLimits(life=60.0)
        grade = graded(hostile_programs.CHEATS[name], tests, limits=limits)
        if not isinstance(grade, Grade):
            return f"{name}: {grade}"
        return "\n".join(f"{name}: {test}" for test, passed in zip(tests, grade.passed, strict=True) if passed)

    assert not together(played, hostile_programs.CHEATS)
