"""Engines of containers for tests: a stand-in, and the installed one, if there is one that works."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import stand_in_engine

from posttrain.core.types import UserError
from posttrain.sandbox import container_choice
from posttrain.sandbox.containers import CHOICE, ContainerEngine, find_engine

SET = Path(__file__).parents[1] / "harbor_tasks"
BASE = "localhost/posttrain-test-base"
BUSYBOX = "/bin/busybox"
STAND_IN, REAL = "a stand-in", "a real engine"


def forget_engines() -> None:
    """Let engines be looked for again."""
    find_engine.cache_clear()
    container_choice._of_this_machine.cache_clear()


@contextmanager
def engine_of(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[ContainerEngine]:
    """Yield an engine of a kind; skip the test where there is none. `folder`: of the stand-in."""
    forget_engines()
    try:
        if kind == STAND_IN:
            stand_in_engine.install(folder / "bin", folder / "engine")
            patch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
            patch.setenv(CHOICE, "podman")
            yield find_engine()
            return
        try:
            found = find_engine()
        except UserError as error:
            pytest.skip(f"needs Docker or Podman: {error}")
        _make_base(found)
        yield found
    finally:
        forget_engines()


def _make_base(engine: ContainerEngine) -> None:
    """Make an image of a static busybox, without a registry; skip the test where there is none, or it does not run."""
    call = [engine.program]
    if subprocess.run([*call, "image", "inspect", BASE], capture_output=True).returncode:
        if shutil.which(BUSYBOX) is None:
            pytest.skip(f"needs {BUSYBOX}, linked statically (apt install busybox-static)")
        made = subprocess.run([*call, "import", "-", BASE], input=_busybox(), capture_output=True)
        assert made.returncode == 0, made.stderr
    tried = subprocess.run([*call, "run", "--rm", "--network", "none", BASE, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"{engine} starts no container here: {tried.stderr.strip().splitlines()[-1:]}")


def _busybox() -> bytes:
    """Return a file system with busybox under all its names, as a tar archive."""
    names = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout.split()
    passwords = b"root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1000::/tmp:/bin/sh\n"
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for folder, mode in {"bin": 0o755, "etc": 0o755, "tmp": 0o1777, "proc": 0o755, "dev": 0o755}.items():
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        for place, content, mode in (
            ("bin/busybox", Path(BUSYBOX).read_bytes(), 0o755),
            ("etc/passwd", passwords, 0o644),
        ):
            entry = tarfile.TarInfo(place)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
        for name in set(names) - {"busybox"}:
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(entry)
    return held.getvalue()
