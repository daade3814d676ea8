"""A stand-in for the command line program of a container engine, for tests where no engine is installed.

It contains nothing and limits nothing: a container is a folder, and a command runs on this machine with the paths
/tests, /logs and /solution replaced. It can prove which commands an environment gives an engine, in which order, and the
treatment of their results. Every call is a line of the file `calls` in its folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

PLACES = re.compile(r"(?<![\w./-])/(tests|logs|solution)\b")
WHAT_RUNS = "exec 2>&1; command -v bash"
KILLS = "kill -9 -1"
SCRIPT = "#!{python} -SEs\nimport sys\nsys.path.append({here!r})\nfrom stand_in_engine import main\nmain({folder!r})\n"


def install(bin: Path, folder: Path, program: str = "podman") -> None:
    """Write the program into `bin`; it keeps its images and containers in `folder`."""
    bin.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    file = bin / program
    here = str(Path(__file__).parent)
    file.write_text(SCRIPT.format(python=sys.executable, here=here, folder=str(folder)))
    file.chmod(0o755)


def calls(folder: Path) -> list[list[str]]:
    """Return the arguments of every call so far."""
    file = folder / "calls"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def containers(folder: Path) -> list[str]:
    """Return the names of the containers that exist."""
    return sorted(path.name for path in (folder / "containers").glob("*"))


# -- the program -------------------------------------------------------------------------------------------------------


def main(place: str) -> None:
    folder, arguments = Path(place), sys.argv[1:]
    with open(folder / "calls", "a") as file:
        file.write(json.dumps(arguments) + "\n")
    {"info": info, "image": image, "build": build, "run": run, "exec": execute, "cp": copy, "rm": remove, "ps": listed}[
        arguments[0]
    ](folder, arguments)


def info(folder: Path, arguments: list[str]) -> None:
    print("0.stand-in")


def image(folder: Path, arguments: list[str]) -> None:
    sys.exit(0 if _image(folder, arguments[-1]).exists() else 1)


def _image(folder: Path, name: str) -> Path:
    return folder / "images" / name.replace("/", "_")


def build(folder: Path, arguments: list[str]) -> None:
    context, made = Path(arguments[-1]), _image(folder, arguments[arguments.index("--tag") + 1])
    copied = re.findall(r"^COPY (\S+) \.$", (context / "Dockerfile").read_text(), re.MULTILINE)
    if "RUN false" in (context / "Dockerfile").read_text():
        sys.exit("STEP 2/2: RUN false\nError: building at STEP RUN false: exit status 1")
    (made / "app").mkdir(parents=True)
    for name in copied:
        source = context / name
        shutil.copytree(source, made / "app", dirs_exist_ok=True) if source.is_dir() else shutil.copy(
            source, made / "app"
        )


def run(folder: Path, arguments: list[str]) -> None:
    name, label = (arguments[arguments.index(option) + 1] for option in ("--name", "--label"))
    root = folder / "containers" / name
    shutil.copytree(_image(folder, arguments[-4]), root)
    (root / "label").write_text(label.partition("=")[2])
    (root / "variables").write_text(json.dumps(_variables(arguments)))
    print(arguments[-1].split("'")[1], flush=True)
    sys.stdin.read()
    shutil.rmtree(root, ignore_errors=True)


def _variables(arguments: list[str]) -> dict[str, str]:
    pairs = [arguments[place + 1] for place, word in enumerate(arguments) if word == "--env"]
    return dict(pair.split("=", 1) for pair in pairs)


def execute(folder: Path, arguments: list[str]) -> None:
    at = arguments.index("sh")
    root = folder / "containers" / arguments[at - 1]
    if arguments[at + 2] == KILLS:
        for file in root.glob("group-*"):
            os.killpg(int(file.name.partition("-")[2]), signal.SIGKILL)
        return
    assert arguments[at + 2].startswith(WHAT_RUNS), arguments
    command = PLACES.sub(rf"{root}/\1", arguments[at + 3])
    assert not re.search(r"(^|\s)/(tests|logs|solution)", command), command
    given = {**os.environ, **json.loads((root / "variables").read_text()), **_variables(arguments)}
    process = subprocess.Popen(
        ["sh", "-c", command], cwd=root / "app", env=given, stderr=subprocess.STDOUT, start_new_session=True
    )
    (root / f"group-{process.pid}").touch()
    code = process.wait()
    (root / f"group-{process.pid}").unlink(missing_ok=True)
    sys.exit(code if code >= 0 else 128 - code)


def copy(folder: Path, arguments: list[str]) -> None:
    name, _, target = arguments[2].partition(":")
    root = folder / "containers" / name
    shutil.copytree(arguments[1], str(root) + target, dirs_exist_ok=True)
    for file in Path(str(root) + target).rglob("*"):
        if file.is_file():
            file.write_text(PLACES.sub(rf"{root}/\1", file.read_text()))


def remove(folder: Path, arguments: list[str]) -> None:
    for name in arguments[2:]:
        shutil.rmtree(folder / "containers" / name, ignore_errors=True)


def listed(folder: Path, arguments: list[str]) -> None:
    for path in sorted((folder / "containers").glob("*")):
        print(path.name, (path / "label").read_text())
