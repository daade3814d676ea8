"""Decides how long and with how much memory a check may run: in another process that can be killed at any moment.

Alarm signals do not work outside the main thread and do not interrupt a long computation in C, so the limit is a kill.
The workers are plain interpreters that import the function's module. They are not `multiprocessing` children: those
import the user's script again (which starts a second training when it has no `__main__` guard) and cannot be started
from a daemonic process. POSIX only.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from posttrain.types import Invalid, UserError

WORKERS = 2  # processes of each calling process; further callers wait for a free one
TASKS = 1000  # of one worker, then it is replaced: the caches of a computer algebra system only grow
MEMORY = 4 * 2**30  # bytes of address space of a worker
START_SECONDS = 120.0  # for an interpreter and its imports, on a busy machine with a slow file system

_BOOT = (
    "import sys; descriptor, sys.path[:] = int(sys.argv[1]), sys.argv[2:]; "
    "from posttrain.verify.limit import serve; serve(descriptor)"
)


class Worker:
    """One process that runs functions, one after the other."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.tasks = 0
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def call(self, function: Callable[..., Any], args: Sequence[Any], seconds: float, imports: Sequence[str]) -> Any:
        """The function's result. TimeoutError when the time is over; EOFError or OSError when the process died."""
        self.tasks += 1
        self.connection.send((function, args, seconds, imports))
        if not self.connection.poll(START_SECONDS):
            raise TimeoutError(f"the worker was not ready within {START_SECONDS:g} s")
        started = self.connection.recv()
        if started is not None:
            return started
        if not self.connection.poll(seconds):
            raise TimeoutError(f"time limit of {seconds:g} s")
        return self.connection.recv()

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class Workers:
    """The workers of this process: made when first needed, at most `WORKERS`, lent to one caller at a time."""

    def __init__(self) -> None:
        self.free = threading.BoundedSemaphore(WORKERS)
        self.lock = threading.Lock()
        self.idle: list[Worker] = []
        self.alive: set[Worker] = set()

    def take(self) -> Worker:
        with self.lock:
            worker = self.idle.pop() if self.idle else None
        if worker is not None:
            if worker.process.poll() is None:
                return worker
            self.drop(worker)  # the system killed it meanwhile
        worker = Worker()
        with self.lock:
            self.alive.add(worker)
        return worker

    def drop(self, worker: Worker) -> None:
        with self.lock:
            self.alive.discard(worker)
        worker.close()

    def give_back(self, worker: Worker) -> None:
        if worker.tasks >= TASKS:
            self.drop(worker)
            return
        with self.lock:
            self.idle.append(worker)

    def close(self) -> None:
        with self.lock:
            alive, self.alive, self.idle = self.alive, set(), []
        for worker in alive:
            worker.close()


_workers = Workers()


def limited(function: Callable[..., Any], *args: Any, seconds: float, imports: Sequence[str] = ()) -> Any | Invalid:
    """`function(*args)` in another process; Invalid when it takes longer than `seconds`, raises, or its process dies.

    The function is one of an importable module, its arguments and its result can be pickled. `imports` names modules
    that it imports itself: the worker loads them before the clock starts. Starting a worker and waiting for a free
    one are not counted either. May be called from any thread and from any process.
    """
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise UserError(f"move {function.__qualname__} to the top level of a module: another process must import it")
    workers = _workers
    with workers.free:
        worker = workers.take()
        reusable = False
        try:
            result = worker.call(function, args, seconds, imports)
            reusable = True
            return result
        except TimeoutError as error:
            return Invalid(f"{function.__qualname__}: {error}")
        except (EOFError, OSError):
            return Invalid(f"{function.__qualname__}: its process died")
        finally:
            (workers.give_back if reusable else workers.drop)(worker)


def serve(descriptor: int) -> None:
    """The worker's side: run what arrives until the other side closes."""
    import resource
    import signal
    from importlib import import_module

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":  # macOS refuses
        most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's affair
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # from here on: parsers that print their complaints
    connection = Connection(descriptor)
    while True:
        try:
            function, args, seconds, imports = connection.recv()
            for name in imports:
                import_module(name)
        except EOFError:
            return
        except Exception as error:
            connection.send(Invalid(f"could not be loaded: {type(error).__name__}: {error}"))
            continue
        connection.send(None)
        signal.setitimer(signal.ITIMER_REAL, seconds + 5.0)  # ends the worker of a caller that died meanwhile
        try:
            result = function(*args)
        except Exception as error:
            result = Invalid(f"{function.__qualname__}: {type(error).__name__}: {str(error)[:200]}")
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            connection.send(result)
        except OSError:
            return
        except Exception as error:
            connection.send(Invalid(f"{function.__qualname__}: its result cannot be sent: {error}"))


def _forget() -> None:
    """In a forked child: the parent's workers are not ours, and its locks may be held by threads that are not here."""
    global _workers
    for worker in list(_workers.alive):
        worker.connection.close()
    _workers = Workers()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _workers.close())
