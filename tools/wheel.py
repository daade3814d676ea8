"""Builds a source distribution and from it a wheel, as the release does, and uses each in a new environment.

    make wheel
    python tools/wheel.py [--reuse] [--keep FOLDER]

They are built from the files that git tracks, so that neither a file that was never added nor a stale `build/` can hide
a mistake, and checked as PyPI does. `--reuse` takes the dependencies of the running environment instead of installing
them again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILDERS = ("build==1.*", "twine==6.*")  # as in .github/workflows/release.yml
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
        wheel, source = build(folder)
        check_content(wheel)
        check_description(wheel)
        for package in (wheel, source):
            environment = folder / f"environment-{package.suffix[1:]}"
            use(install(package, environment, options.reuse), folder / "elsewhere", package is wheel)
            shutil.rmtree(environment)
    print(f"{wheel.name} and {source.name}: built, installed and used")
    return 0


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution of the tracked files, which PyPI would take."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    for name in filter(None, listed.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    made = folder / "dist"
    shutil.rmtree(made, ignore_errors=True)
    python = folder / "builder" / "bin" / "python"
    run([sys.executable, "-m", "venv", "--clear", folder / "builder"], folder)
    run([python, "-m", "pip", "install", "--quiet", *BUILDERS], folder)
    run([python, "-m", "build", "--outdir", made, source], folder)
    [wheel], [packed] = made.glob("*.whl"), made.glob("*.tar.gz")
    run([python, "-m", "twine", "check", "--strict", wheel, packed], folder)
    return wheel, packed


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


def check_description(wheel: Path) -> None:
    """PyPI shows the README, and no link of it leads into the checkout."""
    with zipfile.ZipFile(wheel) as files:
        [metadata] = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        about = message_from_bytes(files.read(metadata))
    text = about.get_payload()
    assert about["Description-Content-Type"] == "text/markdown" and text.startswith("# posttrain"), "no description"
    relative = re.findall(r"\]\((?!https?://)[^)]*\)", text)
    assert not relative, f"links that lead nowhere on PyPI: {', '.join(relative)}"


def install(package: Path, environment: Path, reuse: bool) -> Path:
    """A new environment that has the package -> the folder of its commands."""
    run([sys.executable, "-m", "venv", "--clear", environment], environment.parent)
    python = environment / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
    if reuse:
        library = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(library) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run([*pip, "--no-deps", package], environment)
    else:
        constraint = ["--constraint", ROOT / "constraints.txt"]
        run([*pip, *constraint, "torch==2.13.0"], environment)  # a build for processors alone, where there is one
        run([*pip, *constraint, package], environment)
    return environment / "bin"


def use(binaries: Path, folder: Path, train: bool) -> None:
    """The installed package is imported, and its command starts; with `train`, also the commands of a first hour."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    where = run([binaries / "python", "-c", "import posttrain; print(posttrain.__file__)"], folder).strip()
    assert Path(where).is_relative_to(binaries.parent), f"another package was imported: {where}"
    posttrain = binaries / "posttrain"
    version = run([posttrain, "--version"], folder).strip()
    assert f"posttrain-{version}-" in "".join(p.name for p in (folder.parent / "dist").glob("*.whl")), version
    assert "grpo" in run([posttrain, "algorithms"], folder)
    if train:
        first_hour(posttrain, folder)


def first_hour(posttrain: Path, folder: Path) -> None:
    """Imitate, then learn from a reward, with the compiled code where the machine has a compiler."""
    sums = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "my.py").write_text(REWARD)
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
