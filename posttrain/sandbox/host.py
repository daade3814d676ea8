"""The caller's side of the sandbox: a warm interpreter, and the programs that run in its jails.

    with Sandbox() as sandbox, sandbox.start() as program:
        program.run("def double(x): return 2 * x")
        program.ask({"do": "value", "source": "double(4)"})     # {"value": 8}

If the warm interpreter was killed, the next program starts another.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from posttrain.core.types import UserError
from posttrain.sandbox import syscalls
from posttrain.sandbox.json_messages import HEAD
from posttrain.sandbox.limits import ProgramLimits, Protections
from posttrain.sandbox.program import Program, SandboxError

START_SECONDS = 60.0  # for the warm interpreter, on a busy machine with a slow file system
END_SECONDS = 10.0  # for the warm interpreter to end
TELL = "POSTTRAIN_SANDBOX"  # the environment variable that changes the protections
UNPROTECTED, DENIED = "unprotected", "without-namespaces"  # its values; the second is as if they were denied
KEPT = ("LD_LIBRARY_PATH", "TMPDIR", "POSTTRAIN_CHILD")
"""Environment variables that the warm interpreter gets too."""

_SET = {
    "PYTHONHASHSEED": "0",  # equal programs have equal results
    "PYTHONUTF8": "1",
    "PYTHONIOENCODING": "utf-8:backslashreplace",
    "MALLOC_ARENA_MAX": "1",  # one arena per thread would use up a program's address space
}
_BOOT = (
    "import sys; control, root, *allowed = sys.argv[1:]; sys.path.insert(0, root); sys.argv[1:] = []; "
    "from posttrain.sandbox.fork_server import main; main(int(control), root, allowed)"
)


class Sandbox:
    """A warm interpreter of this process. May be used from several threads; each program belongs to one of them.

    Raises UserError if the system does not protect enough, unless the environment variable POSTTRAIN_SANDBOX is
    "unprotected". If it is "without-namespaces", no namespaces are used, as if the system denied them.
    """

    def __init__(self) -> None:
        if not syscalls.LINUX or syscalls.release() < (5, 3):
            raise UserError("the sandbox needs Linux 5.3 or later: use a virtual machine or container that has it")
        self._lock = threading.Lock()
        told = os.environ.get(TELL)
        if told not in (None, "", UNPROTECTED, DENIED):
            raise UserError(f"{TELL} may be {UNPROTECTED} or {DENIED}, not {told!r}")
        self._allowed = () if told == DENIED else tuple(syscalls.NAMESPACES)
        self._owner = os.getpid()
        self.protections = self._begin()
        if self.protections.missing and told != UNPROTECTED:
            self.close()
            raise UserError(
                "generated code cannot be run safely here: this system has no "
                f"{' and no '.join(self.protections.missing)} (active: {self.protections}); use a kernel that has it, or "
                f"set {TELL}={UNPROTECTED} to run it anyway"
            )

    def start(self, limits: ProgramLimits | None = None, output: bool = False) -> Program:
        """Start a jail with a program that has not run any code yet. `output`: keep its printed output.

        Raises SandboxError.
        """
        with self._lock:
            if self._process.poll() is not None:
                self._end()
                self._begin()
            return Program(self._control, limits or ProgramLimits(), output)

    def close(self) -> None:
        """End all programs, and the warm interpreter. May be called twice."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Drop the warm interpreter in a forked child: it belongs to the parent."""
        self._control.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _begin(self) -> Protections:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parents[2])
        clean = {name: os.environ[name] for name in KEPT if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-c", _BOOT, str(theirs.fileno()), root, *self._allowed],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**clean, **_SET},
                cwd="/",
                start_new_session=True,
            )
        try:
            greeting = json.loads(self._greeting()[HEAD:])
            if "failed" in greeting:
                raise SandboxError(f"the sandbox does not start: {greeting['failed']}")
        except BaseException:
            self._end()
            raise
        active = greeting["protections"]
        return Protections(**{**active, "namespaces": tuple(active["namespaces"])})

    def _greeting(self) -> bytes:
        self._control.settimeout(START_SECONDS)
        try:
            found = self._control.recv(1 << 16)
        except OSError as error:
            raise SandboxError(f"the sandbox does not start: {error}") from None
        self._control.settimeout(None)
        if not found:
            raise SandboxError("the sandbox does not start: its interpreter ended")
        return found

    def _end(self) -> None:
        self._control.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
