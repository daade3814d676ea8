"""Runs programs that are not Python: a command in a jail made by bubblewrap, if that is installed.

bubblewrap (`bwrap`) creates all namespaces, a root in which /usr is read-only, and a folder in memory. The limits and
the filter of system calls are ours. The command has no network, no other processes, and no part of the caller's
environment.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from posttrain.core.types import UserError
from posttrain.sandbox import seccomp, syscalls
from posttrain.sandbox.jail import NOBODY
from posttrain.sandbox.limits import ProgramLimits

FOLDER = "/tmp"  # the command's working folder
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
WITH_LIMIT = 'ulimit -u "$0" 2>/dev/null || ulimit -p "$0" 2>/dev/null; exec "$@"'
"""Sets the limit of processes in bash or dash. It runs within the jail, where only the command's processes are
counted.
"""


@dataclass(frozen=True)
class Finished:
    """The result of a command."""

    exit: int  # exit code; 128 plus the number of the signal that ended the command
    output: bytes  # standard output and standard error
    over: str | None = None  # the limit that it exceeded: "life" or "output"; None: none


def run_command(
    command: Sequence[str], files: Mapping[str, str] | None = None, stdin: str = "", limits: ProgramLimits | None = None
) -> Finished:
    """Run a command in a jail, with these files (name -> content) in its folder.

    Raises UserError if bubblewrap is missing or cannot make a jail, and for a file name that is a path.
    """
    for name in files or ():
        if "/" in name or name in ("", ".", ".."):
            raise UserError(f"a file of a command needs a plain name, not {name!r}")
    check()
    return _run(command, files or {}, stdin, limits or ProgramLimits())


@cache
def check() -> None:
    """Raise UserError if a test command does not run."""
    if shutil.which("bwrap") is None:
        raise UserError(
            "programs that are not Python run in bubblewrap, which is not installed: install it (on Debian and Ubuntu: "
            "apt install bubblewrap), so that bwrap is found"
        )
    if not syscalls.numbers():
        raise UserError(f"there is no filter of system calls for this machine ({syscalls.MACHINE})")
    tried = _run(["true"], {}, "", ProgramLimits())
    if tried.exit or tried.over:
        said = tried.output.decode(errors="replace").strip()
        raise UserError(f"bubblewrap cannot make a jail here: {said[:300] or f'exit code {tried.exit}'}")


def _run(command: Sequence[str], files: Mapping[str, str], stdin: str, limits: ProgramLimits) -> Finished:
    wrapper = shutil.which("bwrap")
    assert wrapper is not None
    with ExitStack() as opened:

        def content(data: bytes) -> int:
            """Return a descriptor from which the data can be read."""
            file = os.memfd_create("posttrain")
            opened.callback(os.close, file)
            os.write(file, data)
            os.lseek(file, 0, os.SEEK_SET)
            return file

        filter = content(seccomp.program(processes=True, commands=True))
        given = {name: content(text.encode()) for name, text in files.items()}
        inner = ["/bin/sh", "-c", WITH_LIMIT, str(limits.processes), *command]
        arguments = [wrapper, *_arguments(given, filter, limits), "--", *inner]
        return _watched(arguments, content(stdin.encode()), [filter, *given.values()], limits)


def _arguments(files: Mapping[str, int], filter: int, limits: ProgramLimits) -> list[str]:
    """Return the arguments of bwrap."""
    found = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    for path in SYSTEM:
        if os.path.islink(path):
            found += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            found += ["--ro-bind", path, path]
    found += ["--dev", "/dev", "--size", str(limits.folder), "--tmpfs", FOLDER, "--remount-ro", "/"]
    for name, descriptor in files.items():
        found += ["--file", str(descriptor), f"{FOLDER}/{name}"]
    for name, value in {"PATH": "/usr/bin:/bin", "HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8"}.items():
        found += ["--setenv", name, value]
    return [*found, "--seccomp", str(filter), "--chdir", FOLDER]


def _watched(arguments: Sequence[str], stdin: int, passed: Sequence[int], limits: ProgramLimits) -> Finished:
    def limit() -> None:
        for kind, most in limits.of_the_system().items():
            resource.setrlimit(kind, (most, most))

    other: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    process = subprocess.Popen(
        arguments, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=passed,
        preexec_fn=limit, start_new_session=True, env={}, bufsize=0, **other,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        output, over = _read(process.stdout.fileno(), time.monotonic() + limits.life, limits.output)
    if over:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return Finished(code if code >= 0 else 128 - code, output, over)


def _read(descriptor: int, end: float, most: int) -> tuple[bytes, str | None]:
    """Read the output until the stream closes. Return it, and the exceeded limit if one ended the reading."""
    found = bytearray()
    while True:
        ready = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]
        if not ready:
            return bytes(found), "life"
        more = os.read(descriptor, 1 << 16)
        if not more:
            return bytes(found), None
        found += more[: most - len(found)]
        if len(found) >= most:
            return bytes(found), "output"
