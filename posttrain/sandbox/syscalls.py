"""System calls by number that Python's library lacks, through ctypes alone."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from functools import cache

MACHINE = os.uname().machine if hasattr(os, "uname") else ""
LINUX = sys.platform == "linux"

NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
NAMESPACES = {"user": NEW_USER, "mount": NEW_MOUNT, "pid": NEW_PID, "net": NEW_NET, "ipc": NEW_IPC, "uts": NEW_UTS}
"""Kind of namespace -> the flag that creates it."""

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXECUTION, REMOUNT, BIND, RECURSIVE, PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
DETACH = 2  # flag of umount2

DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38  # options of prctl
_CAPABILITIES_3 = 0x20080522

# name, number on x86_64, number on aarch64 ("-": none)
_NUMBERS = """
access 21 -; alarm 37 -; arch_prctl 158 -; brk 12 214; capset 126 91; chdir 80 49; chmod 90 -; chown 92 -;
clock_getres 229 114; clock_gettime 228 113; clock_nanosleep 230 115; clone 56 220; clone3 435 435; close 3 57;
close_range 436 436; copy_file_range 326 285; creat 85 -; dup 32 23; dup2 33 -; dup3 292 24; epoll_create 213 -;
epoll_create1 291 20; epoll_ctl 233 21; epoll_pwait 281 22; epoll_wait 232 -; eventfd 284 -; eventfd2 290 19;
execve 59 221; execveat 322 281; exit 60 93; exit_group 231 94; faccessat 269 48; faccessat2 439 439;
fadvise64 221 223; fallocate 285 47; fchdir 81 50; fchmod 91 52; fchmodat 268 53; fchown 93 55; fchownat 260 54;
fcntl 72 25; fdatasync 75 83; fgetxattr 193 10; flistxattr 196 13; flock 73 32; fork 57 -; fremovexattr 199 16;
fsetxattr 190 7; fstat 5 80; fstatfs 138 44; fsync 74 82; ftruncate 77 46; futex 202 98; getcpu 309 168; getcwd 79 17;
getdents 78 -; getdents64 217 61; getegid 108 177; geteuid 107 175; getgid 104 176; getgroups 115 158;
getitimer 36 102; getpeername 52 205; getpgid 121 155; getpgrp 111 -; getpid 39 172; getppid 110 173;
getrandom 318 278; getresgid 120 150; getresuid 118 148; getrlimit 97 163; getrusage 98 165; getsid 124 156;
getsockname 51 204; getsockopt 55 209; gettid 186 178; gettimeofday 96 169; getuid 102 174; getxattr 191 8;
ioctl 16 29; kill 62 129; landlock_add_rule 445 445; landlock_create_ruleset 444 444; landlock_restrict_self 446 446;
lchown 94 -; lgetxattr 192 9; link 86 -; linkat 265 37; listxattr 194 11; llistxattr 195 12; lremovexattr 198 15;
lseek 8 62; lsetxattr 189 6; lstat 6 -; madvise 28 233; membarrier 324 283; memfd_create 319 279; mkdir 83 -;
mkdirat 258 34; mknod 133 -; mknodat 259 33; mmap 9 222; mount 165 40; mprotect 10 226; mremap 25 216; msync 26 227;
munmap 11 215; nanosleep 35 101; newfstatat 262 79; open 2 -; openat 257 56; openat2 437 437; pause 34 -; pipe 22 -;
pipe2 293 59; pivot_root 155 41; poll 7 -; ppoll 271 73; prctl 157 167; pread64 17 67; preadv 295 69;
prlimit64 302 261; pselect6 270 72; pwrite64 18 68; pwritev 296 70; read 0 63; readlink 89 -; readlinkat 267 78;
readv 19 65; recvfrom 45 207; recvmsg 47 212; removexattr 197 14; rename 82 -; renameat 264 38; renameat2 316 276;
restart_syscall 219 128; rmdir 84 -; rseq 334 293; rt_sigaction 13 134; rt_sigpending 127 136; rt_sigprocmask 14 135;
rt_sigreturn 15 139; rt_sigsuspend 130 133; rt_sigtimedwait 128 137; sched_getaffinity 204 123; sched_yield 24 124;
seccomp 317 277; select 23 -; sendfile 40 71; sendmsg 46 211; sendto 44 206; set_robust_list 273 99;
set_tid_address 218 96; setitimer 38 103; setns 308 268; setpgid 109 154; setsid 112 157; setxattr 188 5;
shutdown 48 210; sigaltstack 131 132; socketpair 53 199; stat 4 -; statfs 137 43; statx 332 291; symlink 88 -;
symlinkat 266 36; sysinfo 99 179; tgkill 234 131; time 201 -; timer_create 222 107; timer_delete 226 111;
timer_settime 223 110; times 100 153; tkill 200 130; truncate 76 45; umask 95 166; umount2 166 39; uname 63 160;
unlink 87 -; unlinkat 263 35; unshare 272 97; utimensat 280 88; vfork 58 -; wait4 61 260; waitid 247 95; write 1 64;
writev 20 66
"""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> its number in seccomp."""


@cache
def release() -> tuple[int, int]:
    """Return the release of Linux, as (6, 1)."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@cache
def numbers(machine: str = MACHINE) -> dict[str, int]:
    """Return name of a system call -> its number, for a machine of `ARCHITECTURES`; {} for any other machine."""
    if machine not in ARCHITECTURES:
        return {}
    column = 1 + list(ARCHITECTURES).index(machine)
    rows = (entry.split() for entry in _NUMBERS.split(";"))
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def call(name: str, *args: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call by name. Raises OSError, also if the numbers of this machine are unknown."""
    number = numbers().get(name)
    if number is None:
        raise OSError(38, f"{name} is not known on {MACHINE}")
    words = [
        ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) if isinstance(a, bytes) else a for a in args
    ]
    found: int = _library().syscall(ctypes.c_long(number), *words)
    if found == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return found


def unshare(flags: int) -> None:
    call("unshare", flags)


def enter(namespace: int, flag: int) -> None:
    """Enter the namespace that a descriptor refers to."""
    call("setns", namespace, flag)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call(
        "mount",
        source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        flags,
        options.encode() or None,
    )


def unmount(target: str) -> None:
    """Detach a mount and all mounts below it; they end when no process uses them any more."""
    call("umount2", target.encode(), DETACH)


def pivot_root(new: str, old: str) -> None:
    call("pivot_root", new.encode(), old.encode())


def prctl(option: int, value: int) -> None:
    call("prctl", option, value, 0, 0, 0)


def drop_capabilities() -> None:
    """Drop all capabilities, permanently where no new privileges can be gained."""
    call("capset", struct.pack("=II", _CAPABILITIES_3, 0), bytes(24))
