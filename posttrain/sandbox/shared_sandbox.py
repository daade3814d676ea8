"""One sandbox per process: started when first needed, and ended with the process."""

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

STEP = "POSTTRAIN_ENV_TIMEOUT"  # the environment variable with the time limit of a step, in a worker of environments
SHARE = 0.75  # of a step, for a program: one that hangs then ends before its worker is killed, which would be invalid

_lock = threading.Lock()
_sandbox: Sandbox | None = None


def shared() -> Sandbox:
    """Return the sandbox of this process. Raises UserError if programs cannot be run safely, and SandboxError."""
    global _sandbox
    with _lock:
        if _sandbox is None:
            _sandbox = Sandbox()
        return _sandbox


def begin_in_worker() -> None:
    """Start the sandbox now in a worker of environments: within a step, the start would use a program's time."""
    if STEP in os.environ:
        with suppress(SandboxError):  # raised again at the first use
            shared()


def about() -> list[str]:
    """Return the active protections as lines for the start of a run. Raises UserError, as `shared` does."""
    try:
        return [f"sandbox: {shared().protections}"]
    except SandboxError as error:
        raise UserError(str(error)) from error
    finally:
        close()


def usual_limits() -> ProgramLimits:
    """Return the limits of a program for whose verdict a worker waits."""
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
    """Drop the sandbox in a forked child: it belongs to the parent, and a thread that does not exist here may hold its
    lock.
    """
    global _sandbox, _lock
    if _sandbox is not None:
        _sandbox.forget()
    _sandbox, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
