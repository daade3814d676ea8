"""A child process that answers calls, each limited in time and memory: the process is killed if a call exceeds a limit.

The next call starts another process. It is for code that cannot be interrupted and cannot limit its own memory, such as
a function of a database. The child stays alive between calls and keeps the state of its module. The module is ours, so
answers are pickled.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import resource
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.system.child_processes import Child, pair
from posttrain.system.temp_folders import TempFolder
from posttrain.system.without_pandas import without_pandas

START_SECONDS = 120.0  # for an interpreter and its imports, on a busy machine with a slow file system
GRACE_SECONDS = 0.5  # in which a call may still report a timeout itself

LATE = "the query took longer than {seconds:g} s: ask for less"
LARGE = "the query takes more than {gib:.1f} GiB of memory: ask for less"


class BoundedProcess:
    """Answers one call at a time. The process starts with the first call. May be used from any thread."""

    def __init__(self, module: str, late: str = LATE, large: str = LARGE) -> None:
        """Create it without starting it. `module`: full name of the module with the functions; `late`, `large`:
        messages for exceeded limits of time and memory.
        """
        self._module, self._late, self._large = module, late, large
        self._child: Child | None = None
        self._turn = threading.Lock()

    def call(self, function: str, *args: Any, seconds: float, gib: float, descriptors: Sequence[int] = ()) -> Any:
        """Return the result of a function of the module. It gets copies of `descriptors` after its arguments, and
        closes them.

        Raises the function's UserError, or one for a call that took too long (counted from when the process is running)
        or too much memory.
        """
        if not self._turn.acquire(timeout=START_SECONDS):
            raise UserError("earlier queries are still running: wait, and try again")
        try:
            if self._child is None or self._child.ended:
                self._start()
            kind, answer = self._asked((function, args, gib, len(descriptors)), descriptors, seconds)
        except (EOFError, OSError):  # the system has killed the process
            self.close()
            raise UserError(self._large.format(gib=gib)) from None
        except BaseException:  # such as an interrupt: the call would go on in the child
            self.close()
            raise
        finally:
            self._turn.release()
        if kind == "answer":
            return answer
        raise UserError(self._large.format(gib=gib) if kind == "memory" else answer)

    def close(self) -> None:
        """Kill the process, whatever it is doing. The next call starts another one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            self._socket.close()
            self._connection.close()
            self._own.cleanup()

    def _start(self) -> None:
        self.close()
        self._socket, theirs = pair()
        with theirs:
            self._own = TempFolder("process")
            self._child = Child(f"{__name__}:serve", [theirs.fileno()], environment={"TMPDIR": self._own.name})
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._connection.send(self._module)
        if not self._connection.poll(START_SECONDS):
            raise UserError(f"the process did not start within {START_SECONDS:g} s: try again")
        self._connection.recv()

    def _asked(self, call: Any, descriptors: Sequence[int], seconds: float) -> tuple[str, Any]:
        self._connection.send(call)
        if descriptors:
            socket.send_fds(self._socket, [b"d"], list(descriptors))
        if not self._connection.poll(seconds + GRACE_SECONDS):
            raise UserError(self._late.format(seconds=seconds))
        kind, answer = self._connection.recv()
        return kind, answer


def serve(descriptor: int) -> None:
    """Run the child: answer calls until the parent closes the connection."""
    end = socket.socket(fileno=descriptor)
    connection: Connection[Any, Any] = Connection(os.dup(descriptor))
    with without_pandas(), suppress(EOFError, OSError):
        module = importlib.import_module(connection.recv())
        before = _data()
        connection.send("ready")
        while True:
            name, args, gib, count = connection.recv()
            descriptors = socket.recv_fds(end, 1, count)[1] if count else []
            _bound(before + int(gib * 2**30))
            try:
                answer = pickle.dumps(("answer", getattr(module, name)(*args, *descriptors)))
            except UserError as error:
                answer = pickle.dumps(("refused", str(error)))
            except MemoryError:
                answer = pickle.dumps(("memory", None))
            except Exception as error:
                said = f"that cannot be answered: {type(error).__name__}: {one_line(error)}"
                answer = pickle.dumps(("refused", said))
            connection.send_bytes(answer)


def _data() -> int:
    """Return the private memory of this process in bytes, without mapped files and shared memory."""
    with suppress(OSError):
        found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) * 1024
    return 0


def _bound(most: int) -> None:
    with suppress(OSError, ValueError, OverflowError):  # some systems have none
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
