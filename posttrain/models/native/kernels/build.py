"""Compiles and loads the C code for inner loops on a processor, and decides whether it is used.

If a compiler is found, a C file is compiled once per machine and stored in the user's cache folder. If that is
impossible, or after `use(False)`, torch's operations do the same work: no error is raised.

Loaded code runs with the user's rights. So the folder must be accessible to the user alone (`private_folder.py`), and a
library must have the checksum in the manifest beside it; one that is damaged or truncated is built again.

    attention-KEY.sha256        manifest: checksum and name of the library, as sha256sum writes them; KEY is a digest of
                                everything that determines the library
    attention-CHECKSUM.so       the library, named by its content, so that several processes can build at once
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from posttrain.core.extras import COMPILERS
from posttrain.core.progress import doing

HERE = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fPIC", "-std=gnu11", "-fno-math-errno", f"-I{HERE}")
LINK_FLAGS = ("-lm",)
COMPILER_SECONDS = 120.0
"""Seconds of a compilation: one that takes longer hangs."""

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of Intel and AMD, Intel, ARM

_used = True
_missing: dict[str, str] = {}  # source -> reason why there is no library
_hung: set[str] = set()  # compilers that hung, and are not run again


def use(compiled: bool) -> None:
    """Set whether compiled code is used from now on, if there is any."""
    global _used
    _used = compiled


def used() -> bool:
    """Return whether compiled code is to be used, as set by `use`."""
    return _used


def backend(compiled: bool) -> str:
    """Return a description of the implementation in use."""
    return "compiled code" if compiled else "torch's operations"


def missing() -> str | None:
    """Return the reason why requested compiled code could not be built; None if there is none."""
    return next(iter(_missing.values()), None)


def library(source: str) -> ctypes.CDLL | None:
    """Compile and load a C file of this folder; None if that is impossible, or switched off."""
    return _loaded(source) if _used else None


@cache
def _loaded(source: str) -> ctypes.CDLL | None:
    try:
        return _load(HERE / source)
    # no compiler, no home, disk full, a folder that is not private; RuntimeError: the home cannot be determined
    except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
        _missing[source] = str(problem)
        return None


def _load(source: Path) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None or not hasattr(os, "getuid"):
        raise FileNotFoundError("no C compiler was found")
    folder = cache_folder()
    manifest = folder / f"{source.stem}-{_key(source, compiler)}.sha256"
    try:
        return ctypes.CDLL(str(_verified(manifest)))
    except OSError:  # missing, damaged, or built for another system
        doing(f"compiling {source.name} (once for this machine)")
        return _build(source, compiler, manifest)


def cache_folder() -> Path:
    """Return the folder of compiled libraries: $XDG_CACHE_HOME/posttrain or ~/.cache/posttrain. Raises NotPrivate,
    OSError.
    """
    from posttrain.models.native.kernels.private_folder import private_folder  # requires Unix

    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path.home() / ".cache"
    if not base.is_absolute():
        raise FileNotFoundError(f"{base} cannot hold compiled code: it must be an absolute path")
    return private_folder(base / "posttrain")


def _verified(manifest: Path) -> Path:
    """Return the library of a manifest. Raises OSError if its checksum differs."""
    noted = re.fullmatch(r"([0-9a-f]{64})  ([\w-]+\.so)\n", manifest.read_text("ascii", "replace"))
    if noted is None:
        raise OSError(f"{manifest} is damaged")
    path = manifest.with_name(noted[2])
    if hashlib.sha256(path.read_bytes()).hexdigest() != noted[1]:
        raise OSError(f"{path} is damaged")
    return path


def _build(source: Path, compiler: str, manifest: Path) -> ctypes.CDLL:
    """Compile and load a library, and store it if loading succeeds."""
    with tempfile.TemporaryDirectory(dir=manifest.parent) as place:
        half, whole, note = Path(place, "half.o"), Path(place, "whole.so"), Path(place, "note")
        # Linked without OpenMP's library: the symbols resolve to the one that torch has loaded, and threads are shared.
        _compile(compiler, *FLAGS, "-fopenmp", "-c", str(source), "-o", str(half))
        _compile(compiler, "-shared", str(half), *LINK_FLAGS, "-o", str(whole))
        loaded = ctypes.CDLL(str(whole))
        checksum = hashlib.sha256(whole.read_bytes()).hexdigest()
        kept = manifest.with_name(f"{source.stem}-{checksum[:24]}.so")
        note.write_text(f"{checksum}  {kept.name}\n")
        whole.replace(kept)
        note.replace(manifest)
    return loaded


def _compile(compiler: str, *arguments: str) -> None:
    """Run the compiler. If it hangs, kill it with its children, and do not run it again."""
    if compiler in _hung:
        raise subprocess.SubprocessError(f"{compiler} did not finish")
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        (compiler, *arguments), stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    ) as process:
        try:
            code = process.wait(COMPILER_SECONDS)
        except BaseException as problem:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(problem, subprocess.TimeoutExpired):
                _hung.add(compiler)
            raise
    if code:
        raise subprocess.SubprocessError(f"{compiler} failed on {arguments[-3]}")


def _key(source: Path, compiler: str) -> str:
    """Return a digest of everything that determines a library: files, flags, compiler, processor."""
    built = os.stat(compiler)
    texts = [file.read_text(encoding="utf-8") for file in (source, *sorted(HERE.glob("*.h")))]
    parts = (*texts, _processor(), *FLAGS, *LINK_FLAGS, compiler, str(built.st_mtime_ns), str(built.st_size))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        text = CPUINFO.read_text(errors="replace")
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))})
    )


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16; True where Linux does not list its instructions."""
    listed = CPUINFO.read_text() if CPUINFO.exists() else ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)", listed, re.MULTILINE)
    return found is None or not BFLOAT16_FLAGS.isdisjoint(found[1].split())
