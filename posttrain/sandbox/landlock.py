"""Restricts a program in the sandbox to some files and no network: Landlock, Linux 5.13 and later.

The kernel reports which version of Landlock it supports (its ABI), and only its features are used. The filter of system
calls covers features that older versions lack: it denies truncation by path, sockets, device controls and signals.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence

from posttrain.sandbox import syscalls

EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER, REMOVE_FOLDER, REMOVE_FILE = (1 << n for n in range(6))
MAKE_DEVICE, MAKE_FOLDER, MAKE_FILE, MAKE_SOCKET, MAKE_PIPE, MAKE_BLOCK_DEVICE, MAKE_LINK = (
    1 << n for n in range(6, 13)
)
REFER, TRUNCATE, CONTROL_DEVICE = (1 << n for n in range(13, 16))

_FILES = {1: 13, 2: 14, 3: 15, 4: 15}  # ABI -> number of file rights that it supports; 16 from ABI 5 on
_NETWORK = 0b11  # bind and connect of TCP, from ABI 4 on
_SCOPES = 0b11  # abstract sockets and signals are confined to the sandbox, from ABI 6 on
_VERSION = 1  # flag: return the ABI
_BENEATH = 1  # kind of rule: rights beneath a path
_QUIET = 1  # flag: a program cannot fill the system's audit log with denied requests

READING = READ_FILE | READ_FOLDER
USING = READ_FILE | WRITE_FILE  # rights for a device such as /dev/null
OWNING = (
    READING | WRITE_FILE | REMOVE_FOLDER | REMOVE_FILE | MAKE_FOLDER | MAKE_FILE | MAKE_LINK | REFER | TRUNCATE
)  # fmt: skip
_OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | CONTROL_DEVICE


def abi() -> int:
    """Return the ABI of Landlock that this kernel supports; 0 if it has none, or is booted without it."""
    try:
        return syscalls.call("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def handled(version: int) -> tuple[int, int, int]:
    """Return all file rights, network rights and scopes that a kernel of this ABI can deny."""
    return (1 << _FILES.get(version, 16)) - 1, _NETWORK if version >= 4 else 0, _SCOPES if version >= 6 else 0


def rule(path: str, rights: int) -> tuple[int, int] | None:
    """Return (a descriptor of the path, the rights beneath it that apply to it); None if the path does not exist."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    return place, rights if stat.S_ISDIR(os.fstat(place).st_mode) else rights & _OF_A_FILE


def restrict(version: int, rules: Sequence[tuple[int, int]]) -> None:
    """Restrict this thread and its children to these rules. Requires `NO_NEW_PRIVILEGES`. Raises OSError."""
    files, network, scopes = handled(version)
    size = 8 if version < 4 else 16 if version < 6 else 24
    head = struct.pack("QQQ", files, network, scopes)[:size]
    ruleset = syscalls.call("landlock_create_ruleset", head, size, 0)
    for place, rights in rules:
        syscalls.call("landlock_add_rule", ruleset, _BENEATH, struct.pack("=Qi", rights & files, place), 0)
    syscalls.call("landlock_restrict_self", ruleset, _QUIET if version >= 7 else 0)
    os.close(ruleset)
