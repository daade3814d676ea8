"""One sandbox for a process: started when it is first needed, and ended with the process."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from dataclasses import replace

from posttrain.core.types import UserError
from posttrain.sandbox.host import Sandbox
from posttrain.sandbox.limits import ProgramLimits
from posttrain.sandbox.program import SandboxError

STEP = (
    "POSTTRAIN_ENV_TIMEOUT"  # the environment variable that tells a worker how long a step of its environment may take
)
SHARE = (
    0.75  # of a step, for a program: so that one that hangs ends before its worker is killed, which would be invalid
)

_lock = threading.Lock()
_sandbox: Sandbox | None = None


def shared() -> Sandbox:
    """Return the sandbox of this process. Raises UserError where programs cannot be run safely, and Broken."""
    global _sandbox
    with _lock:
        if _sandbox is None:
            _sandbox = Sandbox()
        return _sandbox


def begin_in_worker() -> None:
    """Start it now where this is a worker of environments: within a step it would take of the time of a program."""
    if STEP in os.environ:
        with suppress(SandboxError):  # told by who needs it
            shared()


def about() -> list[str]:
    """Return the active protections, as lines for the start of a run. Raises UserError as `shared` does."""
    try:
        return [f"sandbox: {shared().protections}"]
    except SandboxError as error:
        raise UserError(str(error)) from error
    finally:
        close()


def usual_limits() -> ProgramLimits:
    """Return the limits of a program whose verdict a worker waits for."""
    usual = ProgramLimits()
    return replace(usual, life=min(usual.life, SHARE * float(os.environ.get(STEP, "inf"))))


def close() -> None:
    """End the sandbox. The next call of `shared` starts another."""
    global _sandbox
    with _lock:
        sandbox, _sandbox = _sandbox, None
    if sandbox is not None:
        sandbox.close()


def _forget() -> None:
    """Drop the sandbox in a forked child: it is the parent's, and a lock may be held by a thread that does not exist
    here.
    """
    global _sandbox, _lock
    if _sandbox is not None:
        _sandbox.forget()
    _sandbox, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
