"""What tests of processes ask of the system. Linux."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import start_processes

FORKS = multiprocessing.get_context("forkserver")
"""Processes that are forked from one with the imports behind it, which take longer than most tests, and with no state."""
FORKS.set_forkserver_preload(
    [
        *("torch", "torch.distributed.fsdp", "safetensors.torch", "pytest", "hypothesis", "posttrain.cli.commands"),
        *(f"posttrain.training.verbs.{name}" for name in ("rl", "sft", "prefer", "reward_model_training")),
        *("posttrain.learners.fsdp", "posttrain.algorithms.policy_table"),
        *("matplotlib.figure", "matplotlib.backends.backend_agg"),  # of curves; pyarrow's own, where it is installed
        *("torch.fx.experimental.symbolic_shapes", "pandas"),
    ]
)


def in_processes(each: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Call a function of (rank, *arguments) in so many new processes; raises what one of them raises."""
    start_processes(each, arguments, count, start_method="forkserver")


def commanded(words: list[str], folder: Path, environment: dict[str, str] | None = None, terminal: str = "") -> None:
    """Run a posttrain command in this process. A new process imports this module and nothing else.

    `terminal`: the path of what it reads from and writes to; "": our own streams.
    """
    from posttrain.cli.main import entry

    os.chdir(folder)
    os.environ.update(environment or {})
    if terminal:
        for number, mode in enumerate("rww"):
            os.dup2(os.open(terminal, os.O_RDWR), number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], open(number, mode))  # noqa: SIM115
    sys.argv = ["posttrain", *words]
    entry()


def is_running(pid: int) -> bool:
    return _state_and_parent(pid)[0] not in "ZX"


def descendants(root: int) -> list[int]:
    """Of a process, those that run, in order of their numbers."""
    parents = {int(p.name): _state_and_parent(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
    found = {root}
    while more := {pid for pid, (_, parent) in parents.items() if parent in found} - found:
        found |= more
    return sorted(pid for pid in found - {root} if parents[pid][0] not in "ZX")


def gone(*pids: int, seconds: float = 20.0) -> None:
    """Wait for the end of these."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, f"{left} still run"
        time.sleep(0.01)


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return state, int(parent)
