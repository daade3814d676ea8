"""Limits of a program in the sandbox, and the active protections."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from posttrain.sandbox import syscalls

COUNTED_BY_NAMESPACE = (5, 14)  # from this Linux release on, a user namespace counts its own processes


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program."""

    cpu: int = 5  # seconds of processor time of each of its processes
    life: float = 7.5  # seconds of wall time
    memory: int = 256 << 20  # bytes of address space of each of its processes
    processes: int = 8  # processes and threads
    descriptors: int = 64  # open at once
    file: int = 16 << 20  # bytes of one file
    folder: int = 32 << 20  # bytes of all files in its folder
    files: int = 1000  # number of files in its folder
    output: int = 1 << 20  # bytes that it may print

    def of_the_system(self) -> dict[int, int]:
        """Return kind of limit -> value, of those for `resource.setrlimit`, without that of processes."""
        return {
            resource.RLIMIT_CPU: self.cpu,
            resource.RLIMIT_AS: self.memory,
            resource.RLIMIT_FSIZE: self.file,
            resource.RLIMIT_NOFILE: self.descriptors,
            resource.RLIMIT_CORE: 0,
        }


@dataclass(frozen=True)
class Protections:
    """The active protections. `missing`: those that a sandbox requires and this one lacks."""

    namespaces: tuple[str, ...] = ()  # kinds, as in `syscalls.NAMESPACES`
    landlock: int = 0  # ABI; 0: none
    seccomp: bool = False
    other_user: bool = False  # whether programs run as another user than the sandbox
    root: bool = False  # whether programs run as root, without its rights, as no other user was available

    @property
    def processes(self) -> bool:
        """Whether a program may start processes and threads: only if these are counted, unlike those of root, and end
        with it.
        """
        held = {"user", "pid"} <= set(self.namespaces) and not self.root
        return held and syscalls.release() >= COUNTED_BY_NAMESPACE

    @property
    def flags(self) -> int:
        """The flags for unshare."""
        return sum(syscalls.NAMESPACES[kind] for kind in self.namespaces)

    @property
    def missing(self) -> list[str]:
        found = [] if self.seccomp else ["seccomp, which denies system calls"]
        if not self.landlock and "mount" not in self.namespaces:
            found.append("Landlock or a namespace of mounts, one of which has to hide files")
        return found

    def __str__(self) -> str:
        parts = []
        if self.namespaces:
            parts.append(f"namespaces ({', '.join(self.namespaces)})")
        if self.landlock:
            parts.append(f"Landlock {self.landlock}")
        if self.seccomp:
            parts.append("seccomp" if self.processes else "seccomp (no new processes)")
        parts.append("limits")
        if self.other_user or self.root:
            parts.append("another user" if self.other_user else "root without its rights")
        return ", ".join(parts)
