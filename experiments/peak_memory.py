"""The most memory that training takes, in a process of its own, which `python -m experiments.peak_memory` is."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.experiment import Settings
from experiments.harness import Arena, learn
from experiments.worked import ENV, imitation, tasks_of

TASKS = 64
SIZES = {"steps": 2, "prompts": 2, "group": 8, "minibatches": 1}
"""Two steps, as the optimizer's moments are there from the second on; few rollouts, as the peak is that of a micro-batch."""


def wide_model(out: Path, seed: int, settings: Settings) -> str:
    """A model as wide and deep as in the settings, which has learned next to nothing; returns its checkpoint."""
    return imitation(
        tasks_of(TASKS, seed, settings), out, seed, hidden=settings["wide"], layers=settings["deep"], steps=1,
        context=settings["context"],
    )  # fmt: skip


def peak_memory(out: Path, wide: str, small: str, seed: int, settings: Settings, options: Mapping[str, Any]) -> float:
    """Peak of the memory that training the wide model takes, above that of a process that has trained a small one, in MiB.

    `options`: those of `posttrain rl`, but for sizes.
    """
    chosen = {"lr": settings["lr"], "max_tokens": settings["max_tokens"], **options, **SIZES}
    given = {
        "out": str(out),
        "models": [small, wide],
        "tasks": tasks_of(TASKS, seed, settings),
        "seed": seed,
        "options": chosen,
    }
    checkout = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(given), capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def _held() -> float:
    """The most that this process has held so far, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says on Linux includes the process that started this one
        return float(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 1024  # type: ignore[index]
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held / 1024 / (1024 if sys.platform == "darwin" else 1)


def _main() -> None:
    """Train the models one after the other, and print by how much the second raised the peak."""
    given, peaks = json.load(sys.stdin), []
    for model in given["models"]:
        learn(Arena(given["tasks"], ENV, model), Path(given["out"]), given["seed"], **given["options"])
        peaks.append(_held())
    print(peaks[1] - peaks[0])


if __name__ == "__main__":
    _main()
