"""Programs in the sandbox: what they see, how they end, and that nothing is left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sandboxes
from processes import descendants, gone

from posttrain.core.types import UserError
from posttrain.sandbox import bubblewrap, capabilities, filesystem, shared_sandbox
from posttrain.sandbox.host import Sandbox
from posttrain.sandbox.limits import ProgramLimits
from posttrain.sandbox.program import Ended, SandboxError
from posttrain.sandbox.session import InterpreterSession, cut

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@pytest.fixture(scope="module", params=sandboxes.MODES)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with sandboxes.opened("own", request.param) as sandbox:
        if sandbox.protections.missing:
            pytest.skip(f"this system has no {sandbox.protections.missing}")
        yield sandbox


def value(sandbox: Sandbox, source: str, code: str = "", **limits: Any) -> Any:
    with sandbox.start(ProgramLimits(**{"life": 30.0, **limits})) as program:
        assert program.run(code) is None
        return program.ask({"do": "value", "source": source})


# -- programs ----------------------------------------------------------------------------------------------------------


def test_a_program_sees_its_folder_and_the_standard_library_and_little_else(sandbox: Sandbox) -> None:
    code = "import os, tempfile, zoneinfo, statistics\nopen('a', 'w').write('x')\nos.mkdir('b'); os.rename('a', 'b/a')"
    named = "sandbox" if "uts" in sandbox.protections.namespaces else os.uname().nodename
    seen = "os.uname().nodename, open('b/a').read(), tempfile.mkdtemp().startswith(os.getcwd()), sorted(os.environ)"
    assert value(sandbox, seen, code) == {
        "value": {"tuple": [named, "x", True, ["HOME", "LANG", "PATH", "TMPDIR"]]},
    }


def test_a_program_is_the_same_each_time_and_knows_nothing_of_the_one_before(sandbox: Sandbox) -> None:
    code = (
        "import builtins, os, random\nbefore = hasattr(builtins, 'a'), os.listdir('.')\nbuiltins.a = 1\nopen('a', 'w')"
    )
    seen = [value(sandbox, "before, random.random(), hash('a'), list({'a', 'b', 'c'})", code) for _ in range(3)]
    assert seen[0] == seen[1] == seen[2] and seen[0]["value"]["tuple"][0] == {"tuple": [False, []]}


def test_threads_and_processes_run_where_they_are_contained(sandbox: Sandbox) -> None:
    code = """
import asyncio, concurrent.futures, os, threading
def threads():
    try:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            wait = threading.Barrier(6).wait
            return sorted(pool.map(lambda n: wait() * 0 + n, range(6)))
    except RuntimeError:
        return None
def processes():
    try:
        child = os.fork()
    except PermissionError:
        return None
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
async def wait():
    await asyncio.sleep(0)
    return 5
"""
    expected = [list(range(6)), 7, 5] if sandbox.protections.processes else [None, None, 5]
    assert value(sandbox, "threads(), processes(), asyncio.run(wait())", code) == {"value": {"tuple": expected}}


ENDS = {
    "import os; os._exit(3)": (60.0, "ended with exit code 3"),
    "while True: pass": (60.0, "took more than 1 s of processor time"),
    "import time; time.sleep(60)": (0.5, "took too long"),
    "import ctypes; ctypes.string_at(0)": (60.0, "ended by signal 11"),
}


def test_a_program_leaves_no_core_and_cannot_be_traced(sandbox: Sandbox) -> None:
    with sandbox.start(ProgramLimits(life=30.0)) as program:
        assert program.run("import resource, time") is None
        found = program.ask({"do": "value", "source": "resource.getrlimit(resource.RLIMIT_CORE)"})
        assert found == {"value": {"tuple": [0, 0]}}
        running = max(descendants(sandbox._process.pid))
        assert os.stat(f"/proc/{running}/environ").st_uid == 0, "what is not dumpable is root's in /proc"


def test_what_ends_a_program_is_told_each_time_again(sandbox: Sandbox) -> None:
    def end(code: str) -> str:
        with sandbox.start(ProgramLimits(cpu=1, life=ENDS[code][0])) as program, pytest.raises(Ended) as error:
            program.run(code)
        with pytest.raises(Ended, match=re.escape(str(error.value))):
            program.ask({"do": "value", "source": "1"})
        return str(error.value)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(end, ENDS)) == [reason for _, reason in ENDS.values()]


def test_many_programs_at_once_have_their_own_answers(sandbox: Sandbox) -> None:
    def own(number: int) -> Any:
        return value(sandbox, "f()", f"def f(): return {number}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(own, range(40))) == [{"value": number} for number in range(40)]


# -- what is left behind -----------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sandboxes make their folders, where they need any."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("mode", sandboxes.MODES)
def test_nothing_is_left_of_programs_nor_of_a_sandbox_that_is_closed(mode: str, place: Path) -> None:
    before = set(descendants(os.getpid()))
    with sandboxes.opened("own", mode) as sandbox:
        with sandbox.start() as program:
            program.finish()
        time.sleep(0.2)  # it closes the last descriptors of a program after it has told us of its end
        running, open_files = set(descendants(os.getpid())), len(os.listdir("/proc/self/fd"))
        server = max(running - before)
        theirs = len(os.listdir(f"/proc/{server}/fd"))
        for number in range(20):
            with sandbox.start(output=bool(number % 2)) as program:
                if number % 3:
                    program.run("import os\nopen('a', 'w').write('x')\nos.mkdir('b')")
                program.finish()
        with sandbox.start(ProgramLimits(files=100)) as program:  # more than is deleted at once
            with suppress(Ended):
                program.run("import os\nfor i in range(20000): os.close(os.open(str(i), os.O_CREAT | os.O_WRONLY))")
            program.finish()
        assert set(descendants(os.getpid())) == running and len(os.listdir("/proc/self/fd")) == open_files
        end = time.monotonic() + 10
        while len(os.listdir(f"/proc/{server}/fd")) != theirs:
            assert time.monotonic() < end
        if not sandbox.protections.namespaces:
            [own] = place.iterdir()
            assert not list(own.iterdir())
        idle = sandbox.start(ProgramLimits(life=100.0))
        idle.run("x = 1")
    assert set(descendants(os.getpid())) <= before and not list(place.iterdir())
    idle.close()


@pytest.mark.parametrize("mode", sandboxes.MODES)
def test_a_killed_warm_interpreter_takes_its_programs_along_and_is_started_again(mode: str, place: Path) -> None:
    before = set(descendants(os.getpid()))
    with sandboxes.opened("own", mode) as sandbox:
        program = sandbox.start(ProgramLimits(life=100.0))
        assert program.run("x = 1") is None
        found = set(descendants(os.getpid())) - before
        os.kill(sandbox._process.pid, signal.SIGKILL)
        gone(*found)
        with pytest.raises(SandboxError):
            program.ask({"do": "value", "source": "x"})
        program.close()
        assert value(sandbox, "2") == {"value": 2}
    assert not list(place.iterdir()), "the next one deletes what the killed one left"


def test_nothing_outlives_a_host_that_is_killed() -> None:
    script = (
        "import time\nfrom posttrain.sandbox.host import Sandbox\n"
        "from posttrain.sandbox.limits import ProgramLimits as Limits\n"
        "sandbox = Sandbox()\nprogram = sandbox.start(Limits(life=100.0))\nprogram.run('x = 1')\n"
        "print('ready', flush=True)\ntime.sleep(1000)\n"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=paths)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "ready\n"
        found = descendants(parent.pid)
        assert len(found) >= 2
        parent.kill()
        parent.wait()
    gone(*found)


def test_a_forked_process_has_a_sandbox_of_its_own() -> None:
    try:
        ours = shared_sandbox.shared()
        child = os.fork()
        if child == 0:
            own = shared_sandbox.shared()
            good = own is not ours and value(own, "3") == {"value": 3}
            own.close()
            os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert value(ours, "4") == {"value": 4}
    finally:
        shared_sandbox.close()


def test_a_folder_of_any_depth_and_mode_is_deleted(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.getcwd()
    os.chdir(top)
    for _ in range(filesystem.DEEPEST + 10):
        os.mkdir("d" * 50)
        os.chdir("d" * 50)
    Path("file").write_text("x")
    os.chdir(here)
    (top / "closed").mkdir()
    (top / "closed" / "file").write_text("x")
    (top / "closed").chmod(0)
    (top / "open").mkdir()
    (top / "open" / "closed").mkdir(mode=0)
    (top / "link").symlink_to("/etc")
    assert not filesystem.usage(str(top), 1 << 30, 1000), "what is too deep to be looked at is too much"
    filesystem.remove(str(top))
    assert not top.exists() and Path("/etc").is_dir()


def test_usage_counts_bytes_and_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(100_000))
    assert filesystem.usage(str(tmp_path), 200_000, 2)
    assert not filesystem.usage(str(tmp_path), 50_000, 2) and not filesystem.usage(str(tmp_path), 200_000, 1)


def test_folders_of_killed_sandboxes_are_deleted_and_those_of_living_ones_kept(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(capabilities.tempfile, "gettempdir", lambda: str(tmp_path))
    left = tmp_path / f"{capabilities.PREFIX}{os.geteuid()}-left"
    (left / "1").mkdir(parents=True)
    living = capabilities.held_folder(0o700)[0]
    capabilities.sweep()
    assert not left.exists() and Path(living).exists() and capabilities.held_folder(0o700)[0] != living


# -- an interpreter as a tool ------------------------------------------------------------------------------------------


@pytest.fixture
def session(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[InterpreterSession]:
    monkeypatch.setattr("posttrain.sandbox.session.shared", lambda: sandbox)
    session = InterpreterSession(seconds=1.0)
    yield session
    session.close()


def test_a_session_shows_what_a_prompt_would_and_remembers(session: InterpreterSession) -> None:
    assert session.run("import math\nx = 6\nprint('so')\nx * 7") == "so\n42\n"
    assert session.run("x += 1") == ""
    assert session.run("x, math.floor(2.5)") == "(7, 2)\n"
    raised = session.run("def f():\n    return 1 / 0\nf()")
    assert [line.strip(" ~^") for line in raised.splitlines() if line.strip(" ~^")] == [
        "Traceback (most recent call last):", 'File "<program>", line 3, in <module>', "f()",
        'File "<program>", line 2, in f', "return 1 / 0", "ZeroDivisionError: division by zero",
    ]  # fmt: skip
    assert "SyntaxError" in session.run("1 +") and session.run("x") == "7\n"
    assert session.run("raise ValueError('\\ud800')").endswith("ValueError: ?\n")  # what no tokenizer reads
    assert session.run("input()").endswith("EOFError: EOF when reading a line\n")


def test_a_session_that_is_ended_says_so_and_begins_anew(session: InterpreterSession) -> None:
    assert session.run("x = 1\nprint('before', flush=True)\nwhile True: pass") == (
        "before\nThe interpreter took too long. What it knew is lost.\n"
    )
    assert "NameError" in session.run("x")
    assert session.run("import os; os._exit(2)") == "The interpreter ended with exit code 2. What it knew is lost.\n"
    assert "printed too much" in session.run("while True: print('x' * 1000)")
    assert session.run("2") == "2\n"


def test_long_output_is_cut_in_its_middle(session: InterpreterSession) -> None:
    shown = session.run("print('a' * 5000 + 'b' * 5000)")
    assert len(shown) < 2100 and shown.startswith("aaa") and shown.endswith("bbb\n") and "8,001 characters" in shown
    assert cut("abc", 3) == "abc"


# -- other programs ----------------------------------------------------------------------------------------------------


def test_without_bubblewrap_other_programs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.check.cache_clear()
    with pytest.raises(UserError, match="apt install bubblewrap"):
        bubblewrap.run_command(["true"])
    for name in ("/etc/x", "../x", "", "a/b"):
        with pytest.raises(UserError, match="plain name"):
            bubblewrap.run_command(["true"], {name: ""})


def test_a_command_runs_in_bubblewrap() -> None:
    bubblewrap.check.cache_clear()
    try:
        found = bubblewrap.run_command(["cat", "a", "-"], {"a": "hello "}, "world")
    except UserError as error:
        pytest.skip(str(error))
    assert found == bubblewrap.Finished(0, b"hello world")
    shell = ["sh", "-c", "ls /proc /home; cat /etc/passwd; touch /x /tmp/y && ls /tmp; env; kill -9 $$"]
    found = bubblewrap.run_command(shell)
    assert found.exit == 137 and b"root:" not in found.output and b"\ny\n" not in found.output.split(b"env")[0][:0]
    assert b"No such file" in found.output and b"Read-only" in found.output
    endless = bubblewrap.run_command(["yes"], limits=ProgramLimits(life=5.0, output=1000))
    assert endless.over == "output" and len(endless.output) == 1000
    began = time.monotonic()
    assert bubblewrap.run_command(["sleep", "60"], limits=ProgramLimits(life=0.3)).over == "life"
    assert time.monotonic() - began < 50


def test_usage_never_follows_a_link_that_has_taken_the_place_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, own = tmp_path / "outside", tmp_path / "own"
    outside.mkdir()
    (outside / "large").write_bytes(b"x" * 300_000)
    (own / "inner").mkdir(parents=True)
    opened = os.open

    def late(path: Any, *how: Any, **named: Any) -> int:
        if path == "inner":
            (own / "inner").rename(own / "gone")
            (own / "inner").symlink_to(outside)
        return opened(path, *how, **named)

    monkeypatch.setattr(filesystem.os, "open", late)
    assert filesystem.usage(str(own), 100_000, 10)
    assert (own / "inner").is_symlink()
