"""Starts the processes that are measured, asks them in turns, and says what went wrong when one dies."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from side import ANSWERS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Failed(Exception):
    """A side ended before it had answered."""


@dataclass(frozen=True)
class Machine:
    """Where the environments are, and with how many threads everything runs."""

    ours: Path  # python
    trl: Path
    vllm: Path
    place: Path  # models, logs, runs
    threads: int
    root: Path = ROOT  # the checkout that is measured

    def python(self, name: str) -> Path:
        return {"posttrain": self.ours, "trl": self.trl, "generate": self.trl, "vllm": self.vllm}[name]

    def model(self, name: str) -> str:
        return str(self.place / "models" / name)

    def environment(self) -> dict[str, str]:
        """What every side gets. Threads wait as they do by default: the Makefile's setting for tests is no user's."""
        threads = str(self.threads)
        return {
            **{name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"},
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",
        }


class Side:
    """A running process, and the answers that came from it."""

    def __init__(self, machine: Machine, name: str, part: str, settings: Mapping[str, Any]) -> None:
        # Two of the same part may run at once, and a run's folder has one owner.
        kinds = [str(settings[key]) for key in ("reward", "packed") if key in settings]
        self.name = "-".join([name, part, Path(settings["model"]).name, *kinds])
        self.log = machine.place / "logs" / f"{self.name}.txt"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        whole = {"threads": machine.threads, "scratch": str(machine.place / "scratch" / self.name), **settings}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    machine.python(name),
                    machine.root / "benchmarks" / "speed" / f"{name}_side.py",
                    part,
                    json.dumps(whole),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                env={**machine.environment(), ANSWERS: str(writing)},
                cwd=machine.root,
            )
        os.close(writing)
        self.answers = os.fdopen(reading)
        self.first: dict[str, Any] = {}  # what it said when it was ready

    def hear(self) -> dict[str, Any]:
        """The next answer. Raises Failed with the end of the log if none comes."""
        line = self.answers.readline()
        if not line:
            self.process.wait()
            raise Failed(f"{self.name} ended with {self.process.returncode}:\n" + self.log.read_text()[-3000:])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        self.process.stdin.flush()
        return self.hear()

    def dismiss(self) -> list[dict[str, Any]]:
        """No more requests: what it has to say at last."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        last = [json.loads(line) for line in self.answers]
        self.process.wait()
        self.answers.close()
        return last


class Sides(ExitStack):
    """The processes of one part. They start one after another; leaving the block ends those that still run."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def start(self, name: str, part: str, **settings: Any) -> Side:
        """A side that is ready: it has loaded its model, and trainers have made their first step."""
        side = Side(self.machine, name, part, settings)
        self.enter_context(_ended(side))
        side.first = side.hear()
        return side


@contextmanager
def _ended(side: Side) -> Iterator[None]:
    try:
        yield
    finally:
        if side.process.poll() is None:
            assert side.process.stdin is not None
            side.process.stdin.close()
            try:
                side.process.wait(20)
            except subprocess.TimeoutExpired:
                side.process.kill()
                side.process.wait()
