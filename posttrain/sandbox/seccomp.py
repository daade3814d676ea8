"""System calls that a program in the sandbox may make: an allow-list, as a filter that the kernel runs (seccomp).

The rules:

* A call that is not listed fails with EPERM, so that a program gets a PermissionError and may go on. A few fail with ENOSYS,
  because the C library then falls back to an older call whose arguments a filter can read (clone3 to clone).
* No sockets except pairs of connected streams, which asyncio needs. No execve, ptrace, mount, keys, BPF, io_uring, System V
  memory, memfd. No change of owner, mode, times or extended attributes: Landlock does not see these, and files that may
  be read may be the user's own. fcntl and ioctl without the commands that send signals to others (F_SETOWN, F_SETSIG).
* New processes and signals to others only in a namespace of process ids.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Sequence
from typing import NamedTuple

from posttrain.sandbox import syscalls

ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev close close_range lseek fstat newfstatat stat lstat statx access
faccessat faccessat2 open openat readlink readlinkat getcwd chdir fchdir getdents getdents64 dup dup2 dup3 ftruncate fsync
fdatasync sendfile copy_file_range mkdir mkdirat unlink unlinkat rmdir rename renameat renameat2 symlink symlinkat
umask statfs fstatfs fadvise64
mmap munmap mremap mprotect madvise brk msync
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause restart_syscall
futex set_robust_list rseq set_tid_address gettid getpid getppid getuid geteuid getgid getegid getgroups getresuid getresgid
getpgrp getpgid getsid sched_yield sched_getaffinity getcpu getrusage times getrlimit sysinfo uname arch_prctl
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time getitimer setitimer alarm
select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2 pipe pipe2
sendto recvfrom shutdown getsockname getpeername getrandom exit exit_group wait4 waitid
""".split()  # fmt: skip
OF_PROCESSES = "fork vfork kill tkill tgkill".split()  # where all of them are in a namespace of their own
OF_COMMANDS = """
execve execveat chmod fchmod fchmodat utimensat setpgid setsid link linkat memfd_create sendmsg recvmsg
chown fchown lchown fchownat mknod mknodat truncate fallocate flock creat timer_create timer_settime timer_delete
getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr setxattr lsetxattr fsetxattr
removexattr lremovexattr fremovexattr
""".split()  # fmt: skip
"""System calls of programs other than Python, which run in bubblewrap: there only their own files can be changed, and
without a capability mknod makes pipes alone.
"""
UNKNOWN = ("clone3", "openat2")  # fail as on a kernel without them

IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # copies, flags and locks of descriptors; size of a pipe
PRCTLS = (15, 16, 0x53564D41)  # set the name of a thread, or of a memory area
SOCKET_OPTIONS = (3, 4, 7, 8, 38, 39)
"""Type, error, sizes, protocol, domain; not the identity of the peer (SO_PEERPIDFD)."""
LOCAL, STREAM, STREAM_FLAGS = 1, 1, 0o2004000  # AF_UNIX, SOCK_STREAM, SOCK_CLOEXEC | SOCK_NONBLOCK
NEW_NAMESPACES = sum(syscalls.NAMESPACES.values()) | 0x02000000  # and the flag for a cgroup namespace
NO_CLONE = NEW_NAMESPACES | 0x8000 | 0x2000 | 0x1000  # CLONE_PARENT, CLONE_PTRACE, CLONE_PIDFD

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _EQUAL, _SET, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_X32 = 0x40000000  # numbers of the x32 ABI of x86_64
_SET_FILTER = 1
_HEAD = 16  # bytes


class Instruction(NamedTuple):
    """The C structure sock_filter."""

    code: int
    yes: int  # number of instructions to skip
    no: int
    value: int


def program(processes: bool, commands: bool = False, machine: str = syscalls.MACHINE) -> bytes:
    """Return the filter in the kernel's format. `processes`: new processes are allowed; `commands`: for any program,
    not only Python.
    """
    return b"".join(struct.pack("<HBBI", *i) for i in instructions(processes, commands, machine))


def instructions(processes: bool, commands: bool = False, machine: str = syscalls.MACHINE) -> list[Instruction]:
    known = syscalls.numbers(machine)
    allowed = [*ALLOWED, *(OF_PROCESSES if processes else ()), *(OF_COMMANDS if commands else ())]
    found = [
        Instruction(_LOAD, 0, 0, _ARCHITECTURE),
        Instruction(_EQUAL, 1, 0, syscalls.ARCHITECTURES[machine]),
        Instruction(_RETURN, 0, 0, KILL),
        Instruction(_LOAD, 0, 0, _NUMBER),
        Instruction(_AT_LEAST, 0, 1, _X32),
        Instruction(_RETURN, 0, 0, KILL),
    ]
    for name in allowed:
        if name in known:
            found += _for(known[name], [_verdict(ALLOW)])
    for name in UNKNOWN:
        found += _for(known[name], [_verdict(ERROR | errno.ENOSYS)])
    found += _for(known["ioctl"], _one_of(1, IOCTLS))
    found += _for(known["fcntl"], _one_of(1, FCNTLS))
    found += _for(known["prctl"], _one_of(0, PRCTLS))
    found += _for(known["prlimit64"], _one_of(0, (0,)))  # only for the calling process
    found += _for(known["getsockopt"], _one_of(2, SOCKET_OPTIONS))
    found += _for(known["socketpair"], _pairs())
    if processes:
        found += _for(known["clone"], _without(0, NO_CLONE))
    return [*found, _verdict(ERROR | errno.EPERM)]


def installable(filter: bytes) -> ctypes.Array[ctypes.c_char]:
    """Return a filter in memory as the kernel's struct sock_fprog, which can be installed repeatedly."""
    whole = ctypes.create_string_buffer(_HEAD + len(filter))
    where = ctypes.addressof(whole) + _HEAD
    whole.raw = struct.pack("HxxxxxxP", len(filter) // 8, where) + filter
    return whole


def install(filter: ctypes.Array[ctypes.c_char]) -> None:
    """Install the filter for this thread and its children. Requires `NO_NEW_PRIVILEGES`."""
    syscalls.call("seccomp", _SET_FILTER, 0, filter)


def _verdict(value: int) -> Instruction:
    return Instruction(_RETURN, 0, 0, value)


def _for(number: int, then: Sequence[Instruction]) -> list[Instruction]:
    """Return instructions that apply `then` to one system call, whose number is loaded."""
    return [Instruction(_EQUAL, 0, len(then), number), *then]


def _argument(place: int) -> Instruction:
    """Load the lower half of an argument: for the arguments checked here, the kernel reads no more."""
    return Instruction(_LOAD, 0, 0, _ARGUMENTS + 8 * place)


def _one_of(place: int, values: Sequence[int]) -> list[Instruction]:
    tests = [Instruction(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(place), *tests, _verdict(ERROR | errno.EPERM), _verdict(ALLOW)]


def _without(place: int, flags: int) -> list[Instruction]:
    return [_argument(place), Instruction(_SET, 0, 1, flags), _verdict(ERROR | errno.EPERM), _verdict(ALLOW)]


def _pairs() -> list[Instruction]:
    """Return the instructions for socketpair: only local streams are allowed."""
    return [
        _argument(0),
        Instruction(_EQUAL, 0, 4, LOCAL),
        _argument(1),
        Instruction(_AND, 0, 0, 0xFFFFFFFF & ~STREAM_FLAGS),
        Instruction(_EQUAL, 0, 1, STREAM),
        _verdict(ALLOW),
        _verdict(ERROR | errno.EPERM),
    ]
