"""Rights that a fork of the warm interpreter drops before it runs a program, and the order in which it drops them.

It enters new namespaces, in which it has all rights for a moment, and mounts its folder there. Then follow the change
of user, Landlock, the limits, capabilities, and last the filter of system calls, after which none of the others can be
undone. An error on the way is reported through a pipe, and nothing runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from posttrain.sandbox import filesystem, landlock, seccomp, syscalls
from posttrain.sandbox.limits import ProgramLimits, Protections

NOBODY = 65534  # user and group of programs, where the sandbox may choose them
INSIDE = 1000  # their number in a user namespace
TALK = 3  # descriptor for messages between the program and its caller
HIGH = 64  # lowest descriptor that does not belong to the program


@dataclass(frozen=True)
class Ground:
    """State that the warm interpreter has prepared for all programs."""

    protections: Protections
    filter: ctypes.Array[ctypes.c_char]  # filter of system calls
    paths: list[str]  # paths that may be read
    proc: int  # descriptor of /proc
    base: str | None  # folder for the folders of programs, if these have no root of their own
    rules: list[tuple[int, int]]  # (descriptor of a path, rights beneath it), the same for all programs

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.protections.namespaces


@dataclass(frozen=True)
class Order:
    """The setup of one program."""

    limits: ProgramLimits
    talk: int  # descriptor for messages to the caller
    output: int | None
    folder: str


Guest = Callable[[int, str], NoReturn]
"""Function that runs in the jail. It gets the descriptor to its caller, and its folder."""


def become(ground: Ground, order: Order, confining: int, guest: Guest) -> NoReturn:
    """Drop all rights, then run the guest. Errors before that are reported through `confining`."""
    try:
        confining = fcntl.fcntl(confining, fcntl.F_DUPFD_CLOEXEC, HIGH)
        try:
            _enter(ground, order.limits)
            _confine(ground, order, confining)
        except BaseException as error:
            os.write(confining, f"{type(error).__name__}: {error}".encode()[:4096])
            os._exit(1)
        os.close(confining)
        guest(TALK, order.folder)
    finally:
        os._exit(1)


def _enter(ground: Ground, limits: ProgramLimits) -> None:
    """Enter new namespaces, as far as they are allowed; the one of process ids was created before the fork."""
    kinds = ground.kinds
    with suppress(OSError):
        in_proc(ground.proc, "oom_score_adj", "1000")  # if memory runs out, the system should kill the program first
    flags = ground.protections.flags & ~syscalls.NEW_PID
    if flags:
        user, group = os.geteuid(), os.getegid()
        syscalls.unshare(flags)
        if "user" in kinds:
            map_user(ground.proc, user, group, INSIDE)
    if "uts" in kinds:
        socket.sethostname("sandbox")
    if "mount" in kinds:
        owner = NOBODY if ground.protections.other_user and "user" not in kinds else None
        syscalls.mount("none", "/", None, syscalls.RECURSIVE | syscalls.PRIVATE)
        filesystem.mount_folder(limits.folder, limits.files, owner)


def map_user(proc: int, user: int, group: int, inside: int | None = None) -> None:
    """Map this user and group in this process's new namespace, to the same numbers or to `inside`."""
    in_proc(proc, "setgroups", "deny")
    in_proc(proc, "gid_map", f"{group if inside is None else inside} {group} 1")
    in_proc(proc, "uid_map", f"{user if inside is None else inside} {user} 1")


def in_proc(proc: int, name: str, content: str) -> None:
    """Write into a file of this process in /proc."""
    file = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(file, content.encode())
    finally:
        os.close(file)


def leave_root() -> None:
    """Change to another user, who owns nothing. As with any user, the process may still trace and map itself."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    syscalls.prctl(syscalls.DUMPABLE, 1)


def _confine(ground: Ground, order: Order, confining: int) -> None:
    """Apply the restrictions that cannot be undone."""
    protections = ground.protections
    os.setsid()  # a signal to the program's own group must not reach the warm interpreter or other programs
    os.chdir(order.folder)
    rules = [*ground.rules, (os.open(".", os.O_PATH | os.O_CLOEXEC), landlock.OWNING)]
    if protections.other_user and "user" not in protections.namespaces:
        leave_root()
    syscalls.prctl(syscalls.DEATH_SIGNAL, signal.SIGKILL)
    if _is_cut(confining):
        os._exit(1)  # the warm interpreter has already died
    syscalls.prctl(syscalls.NO_NEW_PRIVILEGES, 1)
    if protections.landlock:
        landlock.restrict(protections.landlock, rules)
    _keep_descriptors(order, confining)
    _limit(order.limits, protections)
    syscalls.drop_capabilities()
    syscalls.prctl(syscalls.DUMPABLE, 0)
    if protections.seccomp:
        seccomp.install(ground.filter)


def _keep_descriptors(order: Order, confining: int) -> None:
    """Keep /dev/null, output twice, the caller's descriptor, and `confining` under its own number. Close all others.

    Standard input and output of the warm interpreter are /dev/null.
    """
    talk = fcntl.fcntl(order.talk, fcntl.F_DUPFD, HIGH)
    output = 1 if order.output is None else fcntl.fcntl(order.output, fcntl.F_DUPFD, HIGH)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(talk, TALK)
    for first, last in ((TALK + 1, confining - 1), (confining + 1, (1 << 32) - 1)):
        syscalls.call("close_range", first, last, 0)


def _is_cut(pipe: int) -> bool:
    """Return whether the other end of a pipe is closed."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _limit(limits: ProgramLimits, protections: Protections) -> None:
    wanted = {
        **limits.of_the_system(),
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if protections.processes:
        wanted[resource.RLIMIT_NPROC] = limits.processes
    for kind, most in wanted.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
