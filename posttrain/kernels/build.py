"""Decides whether what torch has no single operation for runs as compiled code on a processor, and compiles it.

A file of C is compiled where a compiler is found, once for a machine, and kept in the user's cache folder. Without a
compiler, or with `use(False)`, torch's operations do the same work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fPIC", "-std=gnu11", "-fno-math-errno", f"-I{HERE}")

_used = True


def use(compiled: bool) -> None:
    """Whether compiled code is used from now on, where there is any."""
    global _used
    _used = compiled


def backend(compiled: bool) -> str:
    """What something runs as, in words."""
    return "compiled code" if compiled else "torch's operations"


def library(source: str) -> ctypes.CDLL | None:
    """A file of this folder, compiled and loaded; None where that cannot be, or is not wanted."""
    return _loaded(source) if _used else None


@cache
def _loaded(source: str) -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(HERE / source, compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # no room, no home, no result
        return None


def _compiled(source: Path, compiler: str) -> Path:
    """Compiled for this processor by this compiler, now or before."""
    built = os.stat(compiler)
    texts = (source.read_text(), (HERE / "vectors.h").read_text(), _processor())
    parts = (*texts, *FLAGS, compiler, str(built.st_mtime_ns), str(built.st_size))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain"
    path = folder / f"{source.stem}-{name}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        half, whole = Path(place, "half.o"), Path(place, "whole.so")
        # Linked without OpenMP's library: its names are those that torch has loaded, so both share one set of threads.
        for command in (
            (compiler, *FLAGS, "-fopenmp", "-c", str(source), "-o", str(half)),
            (compiler, "-shared", str(half), "-lm", "-o", str(whole)),
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        whole.replace(path)
    return path


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))})
    )
