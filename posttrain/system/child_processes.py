"""Child processes that end with their parent, together with all processes that they started. Plain interpreters.

A child is two processes: a *keeper*, which only waits, and its child, the worker. The keeper holds a life line, a
socket to the parent. When the parent closes its end or dies for any reason, or when the worker ends, the keeper kills
all descendants of itself and ends as the worker did. On Linux every orphan among them becomes its own child
(PR_SET_CHILD_SUBREAPER), so double forks and own sessions hide no process. If the keeper itself is killed, the kernel
kills the worker (PR_SET_PDEATHSIG), and the parent searches the environments of all processes for a mark. On other
systems only the worker's process group is killed.

`multiprocessing` is not used: its children import the user's script again, which starts a second training if the script
has no `__main__` guard. POSIX only.
"""

from __future__ import annotations

import atexit
import codecs
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from posttrain.core.messages import safe
from posttrain.system import garbage

LAST_WORDS_SECONDS = 1.0  # at our end, for passing on the children's last output
END_SECONDS = 10.0  # for a keeper to kill its descendants
MARK = "POSTTRAIN_CHILD"  # the environment variable that all descendants of a child have, unless they drop it
MEETING = "POSTTRAIN_MEETING_SOCKET"  # the file descriptor of the socket at which the processes of a run meet

_BOOT = "import sys; sys.path[:] = sys.argv[4:]; from posttrain.system.child_processes import main; main()"
_DONE = b"."  # from the keeper: no descendant is left
SUBREAPER, DEATH_SIGNAL = 36, 1  # options of prctl
_LINUX = sys.platform == "linux"


class Child:
    """The parent's end of a child process, which calls a function with file descriptors.

    `target`: "package.module:function". `descriptors`: descriptors of this process that the function gets, under the
    same numbers. The child runs in its own session, so Ctrl-C does not reach it.
    """

    def __init__(
        self,
        target: str,
        descriptors: Sequence[int],
        *,
        folder: str | None = None,
        output: int | IO[Any] | None = None,
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        """Start the child. `output`: where its output goes; None: to our standard error, through `sys.stderr` if that
        is a terminal. `environment`: variables in addition to ours; None: one that it does not have.
        """
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._life, theirs = pair()
        if output is None:
            output = _our_error()
        here = folder or os.getcwd()
        numbers = ",".join(map(str, descriptors))
        variables = {**os.environ, **(environment or {}), MARK: self._mark}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, target, str(theirs.fileno()), numbers, *(p or here for p in sys.path)],
                pass_fds=(theirs.fileno(), *descriptors),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={name: value for name, value in variables.items() if value is not None},
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, seconds: float) -> bool:
        """Wait for the child; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        return self.ended

    @property
    def code(self) -> int:
        """Return the exit code of an ended child; a negative number is a signal."""
        code = self.process.poll()
        assert code is not None, "it is still there"
        return code

    def exit(self) -> str:
        """Return how the child ended, in words."""
        code = self.code
        known = code < 0 and -code in signal.valid_signals()
        return f"exit code {code}" + (f", {signal.Signals(-code).name}" if known else "")

    def kill(self) -> None:
        """Kill the child and all its descendants if it has not ended yet. May be called twice."""
        with suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)  # works even if a process that we forked has a copy of our end
        if not self.wait(END_SECONDS):
            self.process.kill()
            self.process.wait()
        if not self._told_done():
            _kill_marked(self._mark)
        self._life.close()

    def _told_done(self) -> bool:
        with suppress(OSError):
            return self._life.recv(1, socket.MSG_DONTWAIT) == _DONE
        return False


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets whose descriptors are not those of closed standard streams."""
    import fcntl

    ends = []
    for end in socket.socketpair():
        if end.fileno() > 2:
            ends.append(end)
            continue
        ends.append(socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)))
        end.close()
    return ends[0], ends[1]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _our_error() -> int:
    """Return the default descriptor for the output of children."""
    if not _is_open(2):
        return subprocess.DEVNULL
    return _passed_on() if os.isatty(2) else 2


@cache
def _passed_on() -> int:
    """Return a descriptor for the output of children while standard error is a terminal.

    A thread copies the output to `sys.stderr`: otherwise it would overwrite a display on that terminal.
    """
    reading, writing = os.pipe()

    def copy() -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        while more := os.read(reading, 1 << 16):
            with suppress(OSError, ValueError):  # the terminal is gone
                print(
                    safe(decoder.decode(more).replace("\r\n", "\n").expandtabs()), end="", file=sys.stderr, flush=True
                )

    thread = threading.Thread(target=copy, name="what children print", daemon=True)
    thread.start()

    @atexit.register
    def finish() -> None:
        os.close(writing)
        thread.join(LAST_WORDS_SECONDS)

    return writing


# -- the other side ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the child. Arguments: the function, the file descriptor of the life line, the function's descriptors, our
    path.
    """
    from importlib import import_module

    target, life, numbers = sys.argv[1:4]
    sys.argv[1:] = []
    descriptors = [int(number) for number in numbers.split(",")]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    keep(int(life))
    garbage.search_seldom()
    module, _, function = target.partition(":")
    loaded = import_module(module)
    garbage.leave_libraries()
    getattr(loaded, function)(*descriptors)


def keep(life: int) -> None:
    """Fork, and return in the child alone. This process waits for the end of the child or of the parent, and ends in
    the same way.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    prctl(SUBREAPER, 1)
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        try:
            _wait(life, worker)
        finally:
            os._exit(70)  # only reached after an error of our own
    os.close(life)
    os.setsid()  # its own process group, which it may kill without the keeper
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(70)
    for number in (signal.SIGTERM, signal.SIGHUP):  # Ctrl-C is handled by the parent
        signal.signal(number, signal.SIG_DFL)


def _wait(life: int, worker: int) -> NoReturn:
    """Run the keeper."""
    waker, wakes = os.pipe()
    for end in (waker, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _close_all_but((2, life, waker, wakes))
    changed = select.poll()
    changed.register(life, select.POLLIN)
    changed.register(waker, select.POLLIN)
    status = _reap(worker)
    while status is None:
        if any(descriptor == life for descriptor, _ in changed.poll()):
            break
        with suppress(BlockingIOError):
            os.read(waker, 4096)
        status = _reap(worker)
    status = _kill_descendants(worker, status)
    with suppress(OSError):
        os.write(life, _DONE)
    _end_like(status)


def _reap(worker: int) -> int | None:
    """Reap all children that have ended; return the worker's status if it is among them, else None."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == worker:
                found = status
    return found


def _kill_descendants(worker: int, status: int | None) -> int:
    """Kill processes until no descendant is left. Return the worker's status, also if it was known before."""
    end = time.monotonic() + END_SECONDS
    while True:
        pids = _descendants(os.getpid()) if _LINUX else []
        if not _LINUX and status is None:
            pids = [-worker, worker]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none starts another meanwhile
            _signal(pids, number)
        ended = _reap(worker)
        status = status if ended is None else ended
        if (not pids and status is not None) or time.monotonic() > end:
            return signal.SIGKILL if status is None else status
        time.sleep(0.002)


def _descendants(root: int) -> list[int]:
    """Return the living descendants of a process, on Linux."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):
            state, parent = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(entry) if state not in (b"Z", b"X") else -int(entry))
    found: list[int] = []
    line = [root]
    while line:
        for pid in children.get(abs(line.pop()), []):
            line.append(pid)
            if pid > 0:  # neither dead nor a zombie
                found.append(pid)
    return found


def _kill_marked(mark: str) -> None:
    """Kill all processes with this mark in their environment, on Linux."""
    entry = f"{MARK}={mark}".encode()
    for _ in range(100):
        found = []
        for name in os.listdir("/proc") if _LINUX else ():
            if name.isdigit() and int(name) != os.getpid():
                with suppress(OSError):
                    if entry in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                        found.append(int(name))
        if not found:
            return
        _signal(found, signal.SIGKILL)
        time.sleep(0.002)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _close_all_but(kept: Iterable[int]) -> None:
    """Close all other descriptors: the worker's sockets must close when the worker ends."""
    first = 0
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    highest = max(map(int, os.listdir("/proc/self/fd"))) if _LINUX else os.sysconf("SC_OPEN_MAX")
    os.closerange(first, max(first, highest + 1))


def _end_like(status: int) -> NoReturn:
    """End with the worker's exit code, or by its signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def prctl(option: int, value: int) -> None:
    """Set an option of this process, on Linux."""
    if _LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
