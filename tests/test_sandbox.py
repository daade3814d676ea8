"""The sandbox on this system, and as it would be on others: filters, Landlock, choices, limits, what it leaves behind."""

from __future__ import annotations

import errno
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sandboxes
from processes import descendants, gone

from posttrain.sandbox import bubblewrap, files, ground, kernel, landlock, seccomp, shared
from posttrain.sandbox.host import Sandbox
from posttrain.sandbox.limits import Limits, Protections
from posttrain.sandbox.program import Broken, Ended
from posttrain.sandbox.session import Session, cut
from posttrain.types import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
EPERM, ENOSYS = seccomp.ERROR | errno.EPERM, seccomp.ERROR | errno.ENOSYS
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.fixture(scope="module", params=sandboxes.MODES)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with sandboxes.opened("own", request.param) as sandbox:
        if sandbox.protections.missing:
            pytest.skip(f"this system has no {sandbox.protections.missing}")
        yield sandbox


def value(sandbox: Sandbox, source: str, code: str = "", **limits: Any) -> Any:
    with sandbox.start(Limits(**{"life": 30.0, **limits})) as program:
        assert program.run(code) is None
        return program.ask({"do": "value", "source": source})


# -- the filter of system calls ----------------------------------------------------------------------------------------


def decide(code: list[seccomp.Instruction], machine: int, number: int, *args: int) -> int:
    """What the kernel would: an interpreter of the instructions that are used, after linux/filter.h."""
    data = struct.pack("<IIQ6Q", number, machine, 0, *args, *[0] * (6 - len(args)))
    at = register = 0
    while True:
        operation, yes, no, operand = code[at]
        at += 1
        if operation == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            register = struct.unpack_from("<I", data, operand)[0]
        elif operation == 0x54:  # BPF_ALU | BPF_AND | BPF_K
            register &= operand
        elif operation == 0x06:  # BPF_RET | BPF_K
            return operand
        else:
            holds = {0x15: register == operand, 0x45: bool(register & operand), 0x35: register >= operand}[operation]
            at += yes if holds else no


@pytest.mark.parametrize("machine", kernel.ARCHITECTURES)
def test_filter_decides_by_name_argument_and_machine_on_both_architectures(machine: str) -> None:
    numbers, own = kernel.numbers(machine), kernel.ARCHITECTURES[machine]
    for processes in (False, True):
        code = seccomp.instructions(processes, machine=machine)

        def ask(name: str, *args: int, code: list[seccomp.Instruction] = code) -> int:
            return decide(code, own, numbers[name], *args)

        assert all(ask(name) == seccomp.ALLOW for name in seccomp.ALLOWED if name in numbers)
        listed = {*seccomp.ALLOWED, *seccomp.OF_PROCESSES, *seccomp.UNKNOWN}
        ruled = {"ioctl", "fcntl", "prctl", "prlimit64", "socketpair", "getsockopt", "clone"}
        for name in numbers.keys() - listed - ruled:
            assert ask(name) == EPERM, name
        assert {decide(code, own, number) for number in range(450, 600)} == {EPERM}
        allowed = seccomp.ALLOW if processes else EPERM
        assert {ask(name) for name in seccomp.OF_PROCESSES if name in numbers} == {allowed}
        assert ask("clone", signal.SIGCHLD) == ask("clone", 0x3D0F00) == allowed  # fork; a thread of glibc's
        for flag in kernel.NAMESPACES.values():
            assert ask("clone", flag | signal.SIGCHLD) == EPERM
        assert ask("clone3") == ask("openat2") == ENOSYS
        assert ask("fcntl", 3, 1) == seccomp.ALLOW and ask("fcntl", 3, 8) == ask("fcntl", 3, 10) == EPERM
        assert ask("fcntl", 3, 8 | 1 << 32) == EPERM, "the kernel reads the lower half alone"
        assert ask("ioctl", 0, 0x5401) == seccomp.ALLOW and ask("ioctl", 0, 0x5412) == EPERM
        assert ask("prctl", 15) == seccomp.ALLOW and ask("prctl", 1) == ask("prctl", 38) == EPERM
        assert ask("prlimit64", 0) == seccomp.ALLOW and ask("prlimit64", 5) == EPERM
        assert ask("getsockopt", 3, 1, 3) == seccomp.ALLOW and ask("getsockopt", 3, 1, 77) == EPERM
        assert ask("socketpair", 1, 1 | 0o2004000) == seccomp.ALLOW
        assert ask("socketpair", 1, 2) == ask("socketpair", 2, 1) == ask("socketpair", 1, 5) == EPERM
        for other in (*kernel.ARCHITECTURES.values(), 0x40000003):
            if other != own:
                assert decide(code, other, numbers["read"]) == seccomp.KILL
        assert decide(code, own, numbers["read"] | 0x40000000) == seccomp.KILL


def test_filter_for_other_programs_allows_what_these_need_and_no_namespaces() -> None:
    code = seccomp.instructions(True, commands=True, machine="x86_64")
    numbers, own = kernel.numbers("x86_64"), kernel.ARCHITECTURES["x86_64"]
    assert decide(code, own, numbers["execve"]) == decide(code, own, numbers["chmod"]) == seccomp.ALLOW
    assert decide(code, own, numbers["unshare"]) == decide(code, own, numbers["mount"]) == EPERM
    assert decide(code, own, 41) == EPERM  # socket


@pytest.mark.parametrize("machine", kernel.ARCHITECTURES)
def test_numbers_of_system_calls_are_those_of_the_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"needs {HEADERS[machine]}")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text()))
    found.setdefault("newfstatat", found.get("fstatat"))
    numbers = kernel.numbers(machine)
    assert {name: str(number) for name, number in numbers.items()} == {name: found[name] for name in numbers}
    wanted = {*seccomp.ALLOWED, *seccomp.OF_PROCESSES, *seccomp.OF_COMMANDS, *seccomp.UNKNOWN}
    assert {name for name in wanted if name in found} <= numbers.keys()


# -- Landlock ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(1, 9))
def test_landlock_is_asked_for_what_its_version_knows(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def call(name: str, *args: Any) -> int:
        asked.append((name, *(bytes(a) if not isinstance(a, int | None) else a for a in args)))
        return os.open(os.devnull, os.O_RDONLY) if name == "landlock_create_ruleset" else 0

    monkeypatch.setattr(kernel, "call", call)
    landlock.restrict(version, [(7, landlock.OWNING), (8, landlock.READING)])
    (_, head, size, flags), *rules, (last, _, quiet) = asked
    known = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)  # Documentation/userspace-api/landlock.rst
    assert flags == 0 and size == len(head) == (8 if version < 4 else 16 if version < 6 else 24)
    fields = struct.unpack(f"{size // 8}Q", head)
    assert fields == ((1 << known) - 1, 3, 3)[: size // 8]
    for (name, _, kind, content, zero), place in zip(rules, (7, 8), strict=True):
        rights, descriptor = struct.unpack("=Qi", content)
        assert (name, kind, zero, descriptor) == ("landlock_add_rule", 1, 0, place)
        assert rights and rights & ~fields[0] == 0, "a right that this kernel does not know is refused by it"
    assert last == "landlock_restrict_self" and quiet == (version >= 7)


def test_rights_of_a_file_are_those_that_a_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, rights in ((tmp_path, landlock.OWNING), (tmp_path / "file", landlock.OWNING & landlock._OF_A_FILE)):
        rule = landlock.rule(str(path), landlock.OWNING)
        assert rule is not None and rule[1] == rights
        os.close(rule[0])
    assert landlock.rule(str(tmp_path / "none"), landlock.READING) is None


# -- what a system allows ----------------------------------------------------------------------------------------------


def test_choices_go_from_all_protections_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: 4)
    monkeypatch.setattr(kernel, "numbers", lambda: {"read": 0})
    monkeypatch.setattr(ground, "_single", lambda kinds, root: ("user", "mount", "pid"))
    kinds = list(kernel.NAMESPACES)
    for root in (False, True):
        monkeypatch.setattr(os, "geteuid", lambda root=root: 0 if root else 1000)
        found = list(ground.choices(kinds))
        assert found[0] == Protections(tuple(kinds), 4, True, other_user=root)
        assert found[1] == Protections(("user", "mount", "pid"), 4, True, other_user=root)
        assert (Protections(tuple(kinds[1:]), 4, True, other_user=True) in found) == root
        usable = [p for p in found if not p.missing]
        assert usable[-1].landlock or usable[-1].namespaces
        assert found[-1] == Protections(root=root) and found[-1].missing


def test_more_than_one_way_is_missing_only_where_files_or_system_calls_are_open() -> None:
    every = tuple(kernel.NAMESPACES)
    assert not Protections(every, 0, True).missing and not Protections((), 1, True).missing
    assert Protections(every, 7, False).missing and Protections((), 0, True).missing
    assert not Protections((), 7, True).processes, "nothing would end them"
    assert "no new processes" in str(Protections((), 7, True))


def test_a_kind_of_namespace_that_is_denied_is_done_without() -> None:
    def start() -> Sandbox:
        sandboxes.deny((), flags=kernel.NEW_NET)
        return Sandbox()

    with sandboxes.apart(start) as sandbox:
        if not sandbox.protections.namespaces:
            pytest.skip("this system allows no namespaces")
        assert "net" not in sandbox.protections.namespaces and "pid" in sandbox.protections.namespaces
        assert value(sandbox, "1 + 1") == {"value": 2}


def test_without_protections_it_refuses_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> Sandbox:
        sandboxes.deny_namespaces()
        sandboxes.deny(("seccomp", *(name for name in kernel.numbers() if name.startswith("landlock"))), errno.ENOSYS)
        return Sandbox()

    with pytest.raises(UserError, match=r"no seccomp.* and no Landlock.*POSTTRAIN_SANDBOX=unprotected"):
        sandboxes.apart(start)
    monkeypatch.setenv("POSTTRAIN_SANDBOX", "unprotected")
    with sandboxes.apart(start) as sandbox:
        assert str(sandbox.protections).startswith("limits")
        assert value(sandbox, "1 + 1") == {"value": 2}


def test_landlock_alone_missing_leaves_the_namespaces_and_the_other_way_round() -> None:
    def start() -> Sandbox:
        sandboxes.deny([name for name in kernel.numbers() if name.startswith("landlock")], errno.ENOSYS)
        return Sandbox()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_SANDBOX", "unprotected")
        with sandboxes.apart(start) as sandbox:
            assert not sandbox.protections.landlock and sandbox.protections.seccomp
            assert value(sandbox, "1 + 1") == {"value": 2}


def test_a_variable_turns_namespaces_off_and_says_what_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_SANDBOX", "without-namespaces")
    with Sandbox() as sandbox:
        assert not sandbox.protections.namespaces and value(sandbox, "3") == {"value": 3}
    monkeypatch.setenv("POSTTRAIN_SANDBOX", "off")
    with pytest.raises(UserError, match="may be unprotected or without-namespaces, not 'off'"):
        Sandbox()


def test_another_system_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LINUX", False)
    with pytest.raises(UserError, match="needs Linux"):
        Sandbox()


# -- programs ----------------------------------------------------------------------------------------------------------


def test_a_program_sees_its_folder_and_the_standard_library_and_little_else(sandbox: Sandbox) -> None:
    code = "import os, tempfile, zoneinfo, statistics\nopen('a', 'w').write('x')\nos.mkdir('b'); os.rename('a', 'b/a')"
    seen = "open('b/a').read(), tempfile.mkdtemp().startswith(os.getcwd()), sorted(os.environ), statistics.mean([1, 3])"
    assert value(sandbox, seen, code) == {
        "value": {"tuple": ["x", True, ["HOME", "LANG", "PATH", "TMPDIR"], 2]},
    }


def test_a_program_is_the_same_each_time_and_knows_nothing_of_the_one_before(sandbox: Sandbox) -> None:
    code = (
        "import builtins, os, random\nbefore = hasattr(builtins, 'a'), os.listdir('.')\nbuiltins.a = 1\nopen('a', 'w')"
    )
    seen = [value(sandbox, "before, random.random(), hash('a'), list({'a', 'b', 'c'})", code) for _ in range(3)]
    assert seen[0] == seen[1] == seen[2] and seen[0]["value"]["tuple"][0] == {"tuple": [False, []]}


def test_threads_and_processes_run_where_they_are_contained(sandbox: Sandbox) -> None:
    code = """
import asyncio, concurrent.futures, os
def threads():
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(abs, [-1, -2]))
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
    expected = [[1, 2], 7, 5] if sandbox.protections.processes else [None, None, 5]
    assert value(sandbox, "threads(), processes(), asyncio.run(wait())", code) == {"value": {"tuple": expected}}


def test_what_ends_a_program_is_told(sandbox: Sandbox) -> None:
    ends = {
        "import os; os._exit(3)": "exit code 3",
        "while True: pass": "1 s of processor time",
        "import time; time.sleep(60)": "too long",
        "import ctypes; ctypes.string_at(0)": "signal 11",
    }

    def end(code: str) -> str:
        with sandbox.start(Limits(cpu=1, life=3.0)) as program, pytest.raises(Ended) as error:
            program.run(code)
        with pytest.raises(Ended, match=re.escape(str(error.value))):
            program.ask({"do": "value", "source": "1"})
        return str(error.value)

    with ThreadPoolExecutor(4) as pool:
        for (code, reason), found in zip(ends.items(), pool.map(end, ends), strict=True):
            assert reason in found, code


def test_many_programs_at_once_have_their_own_answers(sandbox: Sandbox) -> None:
    def own(number: int) -> Any:
        return value(sandbox, "f()", f"def f(): return {number}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(own, range(40))) == [{"value": number} for number in range(40)]


# -- what is left behind -----------------------------------------------------------------------------------------------


def folders() -> set[str]:
    return {path.name for path in Path("/tmp").glob("posttrain-sandbox-*")}


@pytest.mark.parametrize("mode", sandboxes.MODES)
def test_nothing_is_left_of_programs_nor_of_a_sandbox_that_is_closed(mode: str) -> None:
    before, folders_before = set(descendants(os.getpid())), folders()
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
        assert set(descendants(os.getpid())) == running and len(os.listdir("/proc/self/fd")) == open_files
        end = time.monotonic() + 10
        while len(os.listdir(f"/proc/{server}/fd")) != theirs:
            assert time.monotonic() < end
        if not sandbox.protections.namespaces:
            [own] = folders() - folders_before
            assert not list(Path("/tmp", own).iterdir())
        idle = sandbox.start(Limits(life=100.0))
        idle.run("x = 1")
    assert set(descendants(os.getpid())) <= before and folders() <= folders_before
    idle.close()


@pytest.mark.parametrize("mode", sandboxes.MODES)
def test_a_killed_warm_interpreter_takes_its_programs_along_and_is_started_again(mode: str) -> None:
    before, folders_before = set(descendants(os.getpid())), folders()
    with sandboxes.opened("own", mode) as sandbox:
        program = sandbox.start(Limits(life=100.0))
        assert program.run("x = 1") is None
        found = set(descendants(os.getpid())) - before
        os.kill(sandbox._process.pid, signal.SIGKILL)
        gone(*found)
        with pytest.raises(Broken):
            program.ask({"do": "value", "source": "x"})
        program.close()
        assert value(sandbox, "2") == {"value": 2}
    assert folders() <= folders_before, "the next one deletes what the killed one left"


def test_nothing_outlives_a_host_that_is_killed() -> None:
    script = (
        "import time\nfrom posttrain.sandbox.host import Sandbox\nfrom posttrain.sandbox.limits import Limits\n"
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
        ours = shared.shared()
        child = os.fork()
        if child == 0:
            own = shared.shared()
            good = own is not ours and value(own, "3") == {"value": 3}
            own.close()
            os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert value(ours, "4") == {"value": 4}
    finally:
        shared.close()


def test_a_folder_of_any_depth_and_mode_is_deleted(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.getcwd()
    os.chdir(top)
    for _ in range(60):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    Path("file").write_text("x")
    os.chdir(here)
    (top / "closed").mkdir()
    (top / "closed" / "file").write_text("x")
    (top / "closed").chmod(0)
    (top / "open").mkdir()
    (top / "open" / "closed").mkdir(mode=0)
    (top / "link").symlink_to("/etc")
    assert not files.usage(str(top), 1 << 30, 1000), "what is too deep to be looked at is too much"
    files.remove(str(top))
    assert not top.exists() and Path("/etc").is_dir()


def test_usage_counts_bytes_and_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(100_000))
    assert files.usage(str(tmp_path), 200_000, 2)
    assert not files.usage(str(tmp_path), 50_000, 2) and not files.usage(str(tmp_path), 200_000, 1)


def test_folders_of_killed_sandboxes_are_deleted_and_those_of_living_ones_kept(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(ground.tempfile, "gettempdir", lambda: str(tmp_path))
    left = tmp_path / f"{ground.PREFIX}{os.geteuid()}-left"
    (left / "1").mkdir(parents=True)
    living = ground._base(Protections())
    ground._sweep()
    assert not left.exists() and Path(living).exists() and ground._base(Protections()) != living


# -- an interpreter as a tool ------------------------------------------------------------------------------------------


@pytest.fixture
def session(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr("posttrain.sandbox.session.shared", lambda: sandbox)
    session = Session(seconds=1.0)
    yield session
    session.close()


def test_a_session_shows_what_a_prompt_would_and_remembers(session: Session) -> None:
    assert session.run("import math\nx = 6\nprint('so')\nx * 7") == "so\n42\n"
    assert session.run("x += 1") == ""
    assert session.run("x, math.floor(2.5)") == "(7, 2)\n"
    raised = session.run("def f():\n    return 1 / 0\nf()")
    assert [line.strip(" ~^") for line in raised.splitlines() if line.strip(" ~^")] == [
        "Traceback (most recent call last):", 'File "<program>", line 3, in <module>', "f()",
        'File "<program>", line 2, in f', "return 1 / 0", "ZeroDivisionError: division by zero",
    ]  # fmt: skip
    assert "SyntaxError" in session.run("1 +") and session.run("x") == "7\n"
    assert session.run("input()").endswith("EOFError: EOF when reading a line\n")


def test_a_session_that_is_ended_says_so_and_begins_anew(session: Session) -> None:
    assert session.run("x = 1\nprint('before', flush=True)\nwhile True: pass") == (
        "before\nThe interpreter took too long. What it knew is lost.\n"
    )
    assert "NameError" in session.run("x")
    assert session.run("import os; os._exit(2)") == "The interpreter ended with exit code 2. What it knew is lost.\n"
    assert "printed too much" in session.run("while True: print('x' * 1000)")
    assert session.run("2") == "2\n"


def test_long_output_is_cut_in_its_middle(session: Session) -> None:
    shown = session.run("print('a' * 5000 + 'b' * 5000)")
    assert len(shown) < 2100 and shown.startswith("aaa") and shown.endswith("bbb\n") and "8,001 characters" in shown
    assert cut("abc", 3) == "abc"


# -- other programs ----------------------------------------------------------------------------------------------------


def test_without_bubblewrap_other_programs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap._check.cache_clear()
    with pytest.raises(UserError, match="apt install bubblewrap"):
        bubblewrap.run_command(["true"])
    for name in ("/etc/x", "../x", "", "a/b"):
        with pytest.raises(UserError, match="plain name"):
            bubblewrap.run_command(["true"], {name: ""})


def test_a_command_runs_in_bubblewrap() -> None:
    bubblewrap._check.cache_clear()
    try:
        found = bubblewrap.run_command(["cat", "a", "-"], {"a": "hello "}, "world")
    except UserError as error:
        pytest.skip(str(error))
    assert found == bubblewrap.Finished(0, b"hello world")
    shell = ["sh", "-c", "ls /proc /home; cat /etc/passwd; touch /x /tmp/y && ls /tmp; env; kill -9 $$"]
    found = bubblewrap.run_command(shell)
    assert found.exit == 137 and b"root:" not in found.output and b"\ny\n" not in found.output.split(b"env")[0][:0]
    assert b"No such file" in found.output and b"Read-only" in found.output
    endless = bubblewrap.run_command(["yes"], limits=Limits(life=5.0, output=1000))
    assert endless.over == "output" and len(endless.output) == 1000
    began = time.monotonic()
    assert bubblewrap.run_command(["sleep", "60"], limits=Limits(life=0.3)).over == "life"
    assert time.monotonic() - began < 10
