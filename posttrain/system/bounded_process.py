"""A child process that answers calls, each with limits of time and memory: one that exceeds them is killed.

The next call starts another. It is for code that no interrupt reaches and that cannot limit its own memory, such as a
function of a database. The child stays between calls, with the state of its functions. Its functions are ours, so
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
    """Answers one call at a time. It starts with the first one. May be used from any thread."""

    def __init__(self, module: str, late: str = LATE, large: str = LARGE) -> None:
        """Create it. `module`: full name of the module whose functions are called. `late`, `large`: messages of
        exceeded limits.
        """
        self._module, self._late, self._large = module, late, large
        self._child: Child | None = None
        self._turn = threading.Lock()

    def call(self, function: str, *args: Any, seconds: float, gib: float, descriptors: Sequence[int] = ()) -> Any:
        """Return the result of the function; it gets copies of the descriptors behind its arguments, which it has to
        close.

        Raises the function's UserError, or one for a call that took too long (from when the process is running) or too
        much memory.
        """
        if not self._turn.acquire(timeout=START_SECONDS):
            raise UserError("earlier queries are still running: wait, and try again")
        try:
            if self._child is None or self._child.ended:
                self._start()
            kind, answer = self._asked((function, args, gib, len(descriptors)), descriptors, seconds)
        except (EOFError, OSError):  # the system has killed it
            self._kill()
            raise UserError(self._large.format(gib=gib)) from None
        except BaseException:  # the call goes on there
            self._kill()
            raise
        finally:
            self._turn.release()
        if kind == "answer":
            return answer
        raise UserError(self._large.format(gib=gib) if kind == "memory" else answer)

    def close(self) -> None:
        """Kill it, whatever it is doing. Another call starts it again."""
        self._kill()

    def _start(self) -> None:
        self._kill()
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

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            self._socket.close()
            self._connection.close()
            self._own.cleanup()


def serve(descriptor: int) -> None:
    """Run the child: answer calls until the other side closes."""
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
    """Return the private memory of this process in bytes: without mapped files and shared memory."""
    with suppress(OSError):
        found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) * 1024
    return 0


def _bound(most: int) -> None:
    with suppress(OSError, ValueError, OverflowError):  # some systems have none
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
