"""Builds a wheel, installs it into a new environment, and uses it from outside the checkout.

    make wheel
    python tools/wheel.py [--reuse] [--keep FOLDER]

The wheel is built from the files that git tracks, so that neither a file that was never added nor a stale `build/` can
hide a mistake. `--reuse` takes the dependencies of the running environment instead of installing them again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REWARD = """
def reward(task, reply):
    return float(reply.strip() == task["answer"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reuse", action="store_true", help="take the dependencies of the running environment")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it behind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        wheel = build(folder)
        check_content(wheel)
        binaries = install(wheel, folder / "environment", options.reuse)
        use(binaries, folder / "elsewhere")
    print(f"{wheel.name}: built, installed and used")
    return 0


def build(folder: Path) -> Path:
    """The wheel of the tracked files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    for name in filter(None, listed.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    made = folder / "wheel"
    shutil.rmtree(made, ignore_errors=True)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, source], folder)
    [wheel] = made.glob("*.whl")
    return wheel


def check_content(wheel: Path) -> None:
    """Every module, every file of C, the files of a first run, the licence; no tests."""
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "posttrain"
    wanted = {
        str(f.relative_to(ROOT))
        for pattern in ("*.py", "*.pyi", "py.typed", "*.c", "*.h")
        for f in package.rglob(pattern)
    }
    wanted |= {str(f.relative_to(ROOT)) for f in (package / "cli" / "init_files").glob("*/*")}
    assert wanted <= names, f"not in the wheel: {', '.join(sorted(wanted - names))}"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names), "the licence is not in the wheel"
    others = {name.partition("/")[0] for name in names if ".dist-info/" not in name} - {"posttrain"}
    assert not others, f"also in the wheel: {', '.join(sorted(others))}"


def install(wheel: Path, environment: Path, reuse: bool) -> Path:
    """A new environment that has the wheel -> the folder of its commands."""
    run([sys.executable, "-m", "venv", "--clear", environment], environment.parent)
    python = environment / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
    if reuse:
        library = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(library) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run([*pip, "--no-deps", wheel], environment)
    else:
        constraint = ["--constraint", ROOT / "constraints.txt"]
        run([*pip, *constraint, "torch==2.13.0"], environment)  # a build for processors alone, where there is one
        run([*pip, *constraint, wheel], environment)
    return environment / "bin"


def use(binaries: Path, folder: Path) -> None:
    """The commands of a first hour, with the installed package."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    sums = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "my.py").write_text(REWARD)
    where = run([binaries / "python", "-c", "import posttrain; print(posttrain.__file__)"], folder).strip()
    assert Path(where).is_relative_to(binaries.parent), f"another package was imported: {where}"
    posttrain = binaries / "posttrain"
    version = run([posttrain, "--version"], folder).strip()
    assert f"posttrain-{version}-" in "".join(p.name for p in (folder.parent / "wheel").glob("*.whl")), version
    assert "grpo" in run([posttrain, "algorithms"], folder)
    small = [
        "--tokenizer",
        "characters",
        "--hidden",
        "32",
        "--layers",
        "2",
        "--heads",
        "2",
        "--context",
        "32",
        "--steps",
        "3",
        "--quiet",
    ]
    run([posttrain, "sft", "--tasks", "sums.jsonl", "--out", "sft", *small], folder)
    learn = [
        "--env",
        "my.py:reward",
        "--model",
        "sft",
        "--out",
        "rl",
        "--steps",
        "2",
        "--prompts",
        "4",
        "--group",
        "4",
        "--max-tokens",
        "4",
        "--quiet",
    ]
    run([posttrain, "rl", "--tasks", "sums.jsonl", *learn], folder)
    recorded = (folder / "rl" / "run.json").read_text()
    if any(map(shutil.which, ("gcc", "cc", "clang"))):
        assert "compiled code" in recorded, "the C files were not compiled"
    assert (folder / "rl" / "checkpoints").is_dir()


def run(command: list[str | Path], folder: Path) -> str:
    """What the command prints. It ends this one if it fails."""
    alone = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    print("$", *command, flush=True)
    ran = subprocess.run(list(map(str, command)), cwd=folder, env=alone, capture_output=True, text=True)
    if ran.returncode:
        print(ran.stdout, ran.stderr, sep="\n")
        raise SystemExit(f"exit code {ran.returncode}: {' '.join(map(str, command))}")
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
