"""Protections that this system supports: tested, not looked up.

Tries the isolation methods in order of strength: each is tested by running a program inside a complete jail. The first
that works is used.
"""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress

from posttrain.sandbox import filesystem, landlock, seccomp, syscalls
from posttrain.sandbox.jail import Ground, leave_root, map_user
from posttrain.sandbox.limits import Protections

PREFIX = "posttrain-sandbox-"  # of the folder with the folders of programs, where these have no root of their own


def prepared(allowed: list[str], tried: Callable[[Ground], str | None]) -> Ground:
    """Return the ground (prepared state, with its protections) for programs. `tried`: returns why a program cannot run
    on a ground, or None. Raises OSError if none works.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    paths = filesystem.readable()
    sweep()
    reasons = []
    for protections in choices([kind for kind in syscalls.NAMESPACES if kind in allowed]):
        filter = seccomp.installable(seccomp.program(protections.processes) if protections.seccomp else b"")
        base = None if "mount" in protections.namespaces else held_folder(0o711 if protections.other_user else 0o700)[0]
        ground = Ground(protections, filter, paths, proc, base, [])
        if (problem := tried(ground)) is None:
            return ground
        reasons.append(f"{protections}: {problem}")
        if base is not None:
            filesystem.remove(base)
    raise OSError("; ".join(reasons))


def choices(kinds: list[str]) -> Iterator[Protections]:
    """Yield sets of protections, the strongest first: all namespaces, those that are allowed separately, none; each
    with Landlock and seccomp or without.
    """
    root, version, filtered = os.geteuid() == 0, landlock.abi(), bool(syscalls.numbers())
    held = dict.fromkeys([(version, filtered), (0, filtered), (version, False), (0, False)])
    single: tuple[str, ...] | None = None
    for walls in held:
        yield Protections(tuple(kinds), *walls, other_user=root)
        single = _single(kinds, root) if single is None else single
        for some in (single, tuple(kind for kind in kinds if kind != "user") if root else ()):
            if {"mount", "pid"} <= set(some) and some != tuple(kinds):
                yield Protections(some, *walls, other_user=root)
        if root:
            yield Protections(tuple(kinds), *walls, root=True)
            yield Protections((), *walls, other_user=True)
        yield Protections((), *walls, root=root)


def _single(kinds: list[str], root: bool) -> tuple[str, ...]:
    """Return the namespaces that are allowed when each is requested alone, together with a user namespace."""

    def allowed(kind: str) -> bool:
        child = os.fork()
        if child == 0:
            try:
                if root:
                    leave_root()
                syscalls.unshare(syscalls.NEW_USER | syscalls.NAMESPACES[kind])
            except OSError:
                os._exit(1)
            os._exit(0)
        return os.waitpid(child, 0)[1] == 0

    return tuple(kind for kind in kinds if allowed(kind))


def settled(ground: Ground) -> None:
    """Move the warm interpreter into the namespaces in which it forks programs. May return in another process.

    That process is then number 1 in a namespace of process ids; the original one waits for its end, and ends too.
    """
    kinds, leaves = ground.kinds, ground.protections.other_user
    if "mount" in kinds and leaves:
        syscalls.unshare(syscalls.NEW_MOUNT)
        filesystem.build_root(ground.paths)  # while everything can still be read
    if "user" in kinds:
        if leaves:
            leave_root()
        user, group = os.geteuid(), os.getegid()
        syscalls.unshare(syscalls.NEW_USER | (syscalls.NEW_MOUNT if "mount" in kinds else 0))
        map_user(ground.proc, user, group)
        if "mount" in kinds and not leaves:
            filesystem.build_root(ground.paths)
    ground.rules[:] = _rules(ground)
    if "pid" in kinds:
        _become_first()


def _become_first() -> None:
    syscalls.unshare(syscalls.NEW_PID)
    first = os.fork()
    if first:
        os.closerange(3, 1 << 20)
        _, status = os.waitpid(first, 0)
        os._exit(0 if status == 0 else 1)
    syscalls.prctl(syscalls.DEATH_SIGNAL, signal.SIGKILL)


def _rules(ground: Ground) -> list[tuple[int, int]]:
    """Return the Landlock rules, which are the same for all programs."""
    own_root = "mount" in ground.kinds
    reading = [(path, landlock.READING) for path in (["/"] if own_root else ground.paths)]
    using = [(path, landlock.USING) for path in (["/dev"] if own_root else filesystem.DEVICES)]
    return [rule for path, rights in (*reading, *using) if (rule := landlock.rule(path, rights)) is not None]


def held_folder(mode: int) -> tuple[str, int]:
    """Create a folder for the files of programs. Return it with a descriptor, whose lock marks a live owner."""
    while True:
        base = tempfile.mkdtemp(prefix=f"{PREFIX}{os.geteuid()}-", dir=os.path.realpath(tempfile.gettempdir()))
        held = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(base):
                os.chmod(base, mode)
                return base, held
        os.close(held)


def sweep() -> None:
    """Delete the folders left by killed sandboxes of this user."""
    place = os.path.realpath(tempfile.gettempdir())
    for name in os.listdir(place):
        if name.startswith(f"{PREFIX}{os.geteuid()}-"):
            _delete_unless_alive(os.path.join(place, name))


def _delete_unless_alive(base: str) -> None:
    with suppress(OSError):  # its lock is held, so its owner is alive
        held = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(held).st_uid == os.geteuid():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                filesystem.remove(base)
        finally:
            os.close(held)
