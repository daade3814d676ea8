"""Sandboxes as they are on other systems: where namespaces are denied, and of another user. Linux, for tests.

A thread gives up what it may, by its own system calls, and starts a sandbox. The rest of the process stays as it is.
"""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from unittest import mock

from posttrain.sandbox import host, seccomp, syscalls
from posttrain.sandbox.host import Sandbox
from posttrain.sandbox.seccomp import ALLOW, ERROR, Instruction

OTHER = 65534
MODES = ("all", "denied")
"""Namespaces: as this system has them, or denied as by Docker's default profile."""


def deny(names: Iterable[str], error: int = errno.EPERM, flags: int = 0) -> None:
    """System calls to this thread, and what it starts; `flags`: of clone and unshare, those alone."""
    numbers = syscalls.numbers()
    refused, allowed = Instruction(0x06, 0, 0, ERROR | error), Instruction(0x06, 0, 0, ALLOW)
    code = [Instruction(0x20, 0, 0, 0)]
    for name in names:
        code += [Instruction(0x15, 0, 1, numbers[name]), refused]
    code += [Instruction(0x15, 0, 1, numbers["clone3"]), Instruction(0x06, 0, 0, ERROR | errno.ENOSYS)]
    for name in ("clone", "unshare") if flags else ():
        code += [Instruction(0x15, 0, 4, numbers[name]), Instruction(0x20, 0, 0, 16)]
        code += [Instruction(0x45, 0, 1, flags), refused, allowed]
    syscalls.prctl(syscalls.NO_NEW_PRIVILEGES, 1)
    filter = b"".join(struct.pack("<HBBI", *instruction) for instruction in [*code, allowed])
    seccomp.install(seccomp.installable(filter))


def deny_namespaces() -> None:
    """What Docker's default profile denies to whom has no CAP_SYS_ADMIN."""
    deny(("setns", "mount", "umount2", "pivot_root"), flags=seccomp.NEW_NAMESPACES)


def become_other() -> None:
    """This thread alone, and what it starts."""
    assert os.geteuid() == 0
    for name in ("setresgid", "setresuid"):
        number = {"x86_64": {"setresgid": 119, "setresuid": 117}, "aarch64": {"setresgid": 149, "setresuid": 147}}
        syscalls._library().syscall(number[syscalls.MACHINE][name], OTHER, OTHER, OTHER)


@cache
def interpreter() -> str | None:
    """One that another user can run, with a Python that this package supports."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        code = "import sys; assert sys.version_info >= (3, 11)"
        try:
            subprocess.run(
                [path, "-c", code], check=True, user=OTHER, group=OTHER, extra_groups=[], capture_output=True
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    return None


def apart(action: Callable[[], Any]) -> Any:
    """The result of an action in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(action())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def opened(user: str, mode: str) -> Sandbox:
    """A sandbox of this user ("own" or "other") in a mode of `MODES`."""

    def start() -> Sandbox:
        if mode == "denied":
            deny_namespaces()
        if user == "other":
            become_other()
            with mock.patch.object(host.sys, "executable", interpreter()):
                return Sandbox()
        return Sandbox()

    return apart(start)
