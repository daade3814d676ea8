"""The origin of a run in addition to its options, as far as results may depend on it: versions, code revision,
machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

PACKAGES = ("posttrain", "torch", "transformers", "tokenizers", "numpy")


def circumstances() -> dict[str, Any]:
    """Return the entries of run.json about this process."""
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    torch = sys.modules.get("torch")  # only if the run has imported it
    machine = {
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads() if torch else None,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    return {"versions": versions, "git": _git(), "machine": machine}


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Return the current directory's revision, and whether tracked files differ from it; None outside of git."""
    ask = partial(subprocess.check_output, text=True, timeout=10, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        revision, changes = ask(["git", "rev-parse", "HEAD"]), ask(["git", "status", "--porcelain", "-uno"])
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return {"revision": revision.strip(), "dirty": bool(changes.strip())}
