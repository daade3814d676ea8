"""The sandbox on this system, and as it would be on others: filters, Landlock, choices, limits, what it leaves behind."""

from __future__ import annotations

import errno
import os
import re
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import sandboxes

from posttrain.core.types import UserError
from posttrain.sandbox import capabilities, landlock, seccomp, syscalls
from posttrain.sandbox.host import Sandbox
from posttrain.sandbox.limits import ProgramLimits, Protections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
EPERM, ENOSYS = seccomp.ERROR | errno.EPERM, seccomp.ERROR | errno.ENOSYS
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def value(sandbox: Sandbox, source: str, code: str = "", **limits: Any) -> Any:
    with sandbox.start(ProgramLimits(**{"life": 30.0, **limits})) as program:
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


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_filter_decides_by_name_argument_and_machine_on_both_architectures(machine: str) -> None:
    numbers, own = syscalls.numbers(machine), syscalls.ARCHITECTURES[machine]
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
        for flag in syscalls.NAMESPACES.values():
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
        for other in (*syscalls.ARCHITECTURES.values(), 0x40000003):
            if other != own:
                assert decide(code, other, numbers["read"]) == seccomp.KILL
        assert decide(code, own, numbers["read"] | 0x40000000) == seccomp.KILL


def test_filter_for_other_programs_allows_what_these_need_and_no_namespaces() -> None:
    code = seccomp.instructions(True, commands=True, machine="x86_64")
    numbers, own = syscalls.numbers("x86_64"), syscalls.ARCHITECTURES["x86_64"]
    assert decide(code, own, numbers["execve"]) == decide(code, own, numbers["chmod"]) == seccomp.ALLOW
    assert decide(code, own, numbers["unshare"]) == decide(code, own, numbers["mount"]) == EPERM
    assert decide(code, own, 41) == EPERM  # socket


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_numbers_of_system_calls_are_those_of_the_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"needs {HEADERS[machine]}")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text()))
    found.setdefault("newfstatat", found.get("fstatat"))
    numbers = syscalls.numbers(machine)
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

    monkeypatch.setattr(syscalls, "call", call)
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
    monkeypatch.setattr(syscalls, "numbers", lambda: {"read": 0})
    monkeypatch.setattr(capabilities, "_single", lambda kinds, root: ("user", "mount", "pid"))
    kinds = list(syscalls.NAMESPACES)
    for root in (False, True):
        monkeypatch.setattr(os, "geteuid", lambda root=root: 0 if root else 1000)
        found = list(capabilities.choices(kinds))
        assert found[0] == Protections(tuple(kinds), 4, True, other_user=root)
        assert found[1] == Protections(("user", "mount", "pid"), 4, True, other_user=root)
        assert (Protections(tuple(kinds[1:]), 4, True, other_user=True) in found) == root
        usable = [p for p in found if not p.missing]
        assert usable[-1].landlock or usable[-1].namespaces
        assert found[-1] == Protections(root=root) and found[-1].missing


def test_more_than_one_way_is_missing_only_where_files_or_system_calls_are_open() -> None:
    every = tuple(syscalls.NAMESPACES)
    assert not Protections(every, 0, True).missing and not Protections((), 1, True).missing
    assert Protections(every, 7, False).missing and Protections((), 0, True).missing
    assert not Protections((), 7, True).processes, "nothing would end them"
    assert "no new processes" in str(Protections((), 7, True))


def test_a_kind_of_namespace_that_is_denied_is_done_without() -> None:
    def start() -> Sandbox:
        sandboxes.deny((), flags=syscalls.NEW_NET)
        return Sandbox()

    with sandboxes.apart(start) as sandbox:
        if not sandbox.protections.namespaces:
            pytest.skip("this system allows no namespaces")
        assert "net" not in sandbox.protections.namespaces and "pid" in sandbox.protections.namespaces
        assert value(sandbox, "1 + 1") == {"value": 2}


def test_without_protections_it_refuses_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> Sandbox:
        sandboxes.deny_namespaces()
        sandboxes.deny(("seccomp", *(name for name in syscalls.numbers() if name.startswith("landlock"))), errno.ENOSYS)
        return Sandbox()

    with pytest.raises(UserError, match=r"no seccomp.* and no Landlock.*POSTTRAIN_SANDBOX=unprotected"):
        sandboxes.apart(start)
    monkeypatch.setenv("POSTTRAIN_SANDBOX", "unprotected")
    with sandboxes.apart(start) as sandbox:
        assert str(sandbox.protections).startswith("limits")
        assert value(sandbox, "1 + 1") == {"value": 2}


def test_landlock_alone_missing_leaves_the_namespaces_and_the_other_way_round() -> None:
    def start() -> Sandbox:
        sandboxes.deny([name for name in syscalls.numbers() if name.startswith("landlock")], errno.ENOSYS)
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
    monkeypatch.setattr(syscalls, "LINUX", False)
    with pytest.raises(UserError, match="needs Linux"):
        Sandbox()
