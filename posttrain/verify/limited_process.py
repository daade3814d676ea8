"""Runs checks with limits of time and memory: each in a process of its own, which is killed at the end.

Alarm signals work only in the main thread and do not interrupt a long computation in C, so the limit is a kill. A
server process, a plain interpreter that has imported the function's module, forks a child for every call. The child
needs no imports, and no side effect of a call reaches the next one. The server measures the time, reads the child's
result up to a size limit, and always kills the child with all its descendants. Arguments and results are plain data
(JSON): data from a child is never unpickled.

`multiprocessing` is not used: its children import the user's script again (which starts a second training if it has no
`__main__` guard) and cannot be started from a daemonic process. POSIX only.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from posttrain.core.types import Invalid
from posttrain.system.child_processes import DEATH_SIGNAL, SUBREAPER, prctl

SERVERS = 2  # servers of each calling process; further callers wait for a free one
MEMORY = 2**30  # bytes of address space, for a server and for a child
LARGEST = 2**20  # most bytes of a result
CLOCK = 2.0  # seconds of wall time per second of processor time: other processes may delay a call
START_SECONDS = 120.0  # for an interpreter and its imports, on a busy machine with a slow file system

_BOOT = (
    "import sys; descriptor, sys.path[:] = int(sys.argv[1]), sys.argv[2:]; "
    "from posttrain.verify.limited_process import serve; serve(descriptor)"
)


@dataclass(frozen=True)
class CheckFailed:
    """A call that failed: it took too long or too much memory, raised, or its process died."""

    reason: str


def limited(function: str, *args: Any, seconds: float) -> Any | CheckFailed | Invalid:
    """Return the result of the function "module:name", called with `args` in another process.

    `CheckFailed` if the call takes more than `seconds` of processor time (or `CLOCK` times as much wall time) or more
    than `MEMORY`, raises, or its process dies; `Invalid` if no process can be started or the module cannot be imported,
    which is not a fault of the call. Imports, the start of a server and waiting for a free one do not count. Arguments
    and result are JSON data (a tuple is returned as a list). If the module has a function `prepare`, it is called once
    per server. May be called from any thread and process.
    """
    servers = _servers
    with servers.free:
        try:
            server = servers.take()
        except OSError as error:
            return Invalid(f"{function}: no process to run it in: {error}")
        answered = False
        try:
            answer = server.call(function, args, seconds)
            answered = True
        except (EOFError, OSError) as error:  # TimeoutError is an OSError
            return Invalid(f"{function}: lost its process: {error or 'it died'}")
        finally:
            (servers.give_back if answered else servers.drop)(server)
    if "result" in answer:
        return answer["result"]
    return CheckFailed(f"{function}: {answer['failed']}") if "failed" in answer else Invalid(answer["invalid"])


def limited_verdict(function: str, *args: Any, seconds: float) -> float | Invalid:
    """1.0 if the function, called as by `limited`, returns true; 0.0 if it returns false or fails."""
    found = limited(function, *args, seconds=seconds)
    return found if isinstance(found, Invalid) else float(not isinstance(found, CheckFailed) and bool(found))


class CheckServer:
    """The caller's end of one server process."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy iterates over sets
                stdout=subprocess.DEVNULL,
            )

    def call(self, function: str, args: Sequence[Any], seconds: float) -> dict[str, Any]:
        """Return one of {"result": ...}, {"failed": reason} and {"invalid": reason}. Raises EOFError or OSError if the
        server is gone.
        """
        self.connection.send_bytes(json.dumps([function, args, seconds]).encode())
        if not self.connection.poll(START_SECONDS + CLOCK * seconds):
            raise TimeoutError(f"no answer within {START_SECONDS:g} s")
        answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
        return answer

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class Servers:
    """The servers of this process: at most `SERVERS`, each started when first needed and used by one caller at a
    time.
    """

    def __init__(self) -> None:
        self.free = threading.BoundedSemaphore(SERVERS)
        self.lock = threading.Lock()
        self.idle: list[CheckServer] = []
        self.alive: set[CheckServer] = set()

    def take(self) -> CheckServer:
        with self.lock:
            server = self.idle.pop() if self.idle else None
        if server is not None:
            if server.process.poll() is None:
                return server
            self.drop(server)  # the system has killed it in the meantime
        server = CheckServer()
        with self.lock:
            self.alive.add(server)
        return server

    def drop(self, server: CheckServer) -> None:
        with self.lock:
            self.alive.discard(server)
        server.close()

    def give_back(self, server: CheckServer) -> None:
        with self.lock:
            self.idle.append(server)

    def close(self) -> None:
        with self.lock:
            alive, self.alive, self.idle = self.alive, set(), []
        for server in alive:
            server.close()


_servers = Servers()


def _forget() -> None:
    """Drop the servers in a forked child: they belong to the parent, and threads that do not exist here may hold their
    locks.
    """
    global _servers
    for server in list(_servers.alive):
        server.connection.close()
    _servers = Servers()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _servers.close())


def serve(descriptor: int) -> None:
    """Run the server: answer requests until the caller closes the connection."""
    _confine()
    connection = Connection(descriptor)
    while True:
        try:
            name, args, seconds = json.loads(connection.recv_bytes())
            connection.send_bytes(json.dumps(_answer(name, args, seconds, descriptor)).encode())
        except (EOFError, OSError):  # the caller has ended
            return


def _confine() -> None:
    """Set the limits of the server, which its children inherit."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":  # macOS refuses
        most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the caller
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # from here on, as some parsers print messages


def _answer(name: str, args: Sequence[Any], seconds: float, caller: int) -> dict[str, Any]:
    try:
        function = _load(*name.split(":"))
    except Exception as error:
        return {"invalid": f"{name} could not be loaded: {type(error).__name__}: {error}"}
    ours, theirs = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(ours)
        os.close(theirs)
        return {"invalid": f"{name}: no process to run it in: {error}"}
    if child == 0:
        os.close(caller)
        os.close(ours)
        _run(function, args, seconds, theirs)
    os.close(theirs)
    try:
        written, trouble = _read(ours, caller, time.monotonic() + CLOCK * seconds)
    finally:
        os.close(ours)
        status = _end(child)
    if trouble is None:
        with suppress(ValueError, RecursionError):
            returned, value = json.loads(written)
            return {"result": value} if returned else {"failed": str(value)}
        trouble = f"time limit of {seconds:g} s" if status == -signal.SIGPROF else f"its process died ({status})"
    return {"failed": trouble}


@cache
def _load(module: str, name: str) -> Callable[..., Any]:
    loaded = import_module(module)
    getattr(loaded, "prepare", lambda: None)()
    gc.collect()
    gc.freeze()  # a garbage collection in a child would touch, and so copy, all of the server's memory
    function: Callable[..., Any] = getattr(loaded, name)
    return function


def _read(descriptor: int, caller: int, deadline: float) -> tuple[bytes, str | None]:
    """Return a child's output until it closes its end, and None or the reason why reading stopped early."""
    written = bytearray()
    while len(written) <= LARGEST:
        ready = select.select([descriptor, caller], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            return b"", "time limit by the clock"
        if caller in ready:  # it sends nothing while it waits, so it has ended
            return b"", "its caller is gone"
        part = os.read(descriptor, 2**16)
        if not part:
            return bytes(written), None
        written += part
    return b"", f"its result is larger than {LARGEST} bytes"


def _end(child: int) -> int:
    """Kill a child and all processes that it started; return its exit status, negative for a signal."""
    for kill in (os.killpg, os.kill):  # it may not be the leader of a group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    with suppress(OSError):
        while orphans := children.read_text().split():  # orphans become our children, whatever session they created
            for orphan in map(int, orphans):
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
    return status


def _run(function: Callable[..., Any], args: Sequence[Any], seconds: float, descriptor: int) -> NoReturn:
    """Run one call in the child, and write [whether the call returned, its result or exception]."""
    try:
        os.setsid()
        prctl(DEATH_SIGNAL, signal.SIGKILL)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # the first process to be killed when memory runs out
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer = json.dumps([True, function(*args)])
        except BaseException as error:
            answer = json.dumps([False, f"{type(error).__name__}: {str(error)[:200]}"])
        with open(descriptor, "wb") as stream:
            stream.write(answer.encode())
    finally:
        os._exit(0)
