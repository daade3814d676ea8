"""Functions that tests have called in a process with limits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def nested(depth: int) -> Any:
    made: Any = 0
    for _ in range(depth):
        made = [made]
    return made


def leave_behind(file: str, seconds: float = 0.0) -> str:
    """Start a process in a session of its own, whose parent ends; write its number to the file, and wait."""
    script = (
        "import os, sys, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    )
    with open(file, "w") as stream:
        subprocess.run([sys.executable, "-c", script], stdout=stream, check=True)
    while not Path(file).read_text().strip():
        pass
    if seconds:
        time.sleep(seconds)
    return Path(file).read_text().strip()


def forge(result: str) -> str:
    """Write an answer of one's own wherever one can, then return another."""
    for descriptor in range(3, 256):
        try:
            os.write(descriptor, result.encode())
        except OSError:
            continue
    return "mine"
