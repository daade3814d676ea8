"""Steps of posttrain's own trainers, watched from outside: seconds by phase, memory, and how a run is left."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from findings import Setting
from posttrain_side import also, leave

from posttrain.config.training import RL
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.free_memory import gpu_memory
from posttrain.runs.run_reading import read_timing
from posttrain.training.loop import FinishedStep
from posttrain.training.memory_plan import plan_memory
from posttrain.training.training_run import run_training

SPARE = 5  # seconds
Lap = dict[str, float]
"""Seconds of a step by phase, `step` being the whole of it, and its `tokens`."""


@contextmanager
def stepping(hook: Callable[[FinishedStep], bool | None]) -> Iterator[None]:
    """Within it, the training loop calls this after each step."""
    end = also(hook)
    try:
        yield
    finally:
        end()
        gc.unfreeze()  # the loop has frozen all objects; one that is left by an error does not thaw them, nor their memory


@contextmanager
def waiting(setting: Setting) -> Iterator[None]:
    """Within it, an update ends when the card has done it, not when it was asked for: phases are then told apart."""
    original = LocalLearner.update

    def update(self: LocalLearner, *given: Any) -> Any:
        stats = original(self, *given)
        setting.wait()
        return stats

    LocalLearner.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalLearner.update = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class Memory:
    """Memory of the card in GB: the most that the tensors of a run had, nan on a processor, and the estimate before it."""

    most: float
    estimated: float

    @property
    def ratio(self) -> float:
        return self.estimated / self.most


def memory_of(setting: Setting, config: Any) -> Memory:
    """The memory that a run took by its timing.jsonl, beside the estimate of `posttrain memory`."""
    peaks = [row["memory/policy"] for row in read_timing(config.out)] if setting.cuda else []
    room = gpu_memory(torch.device(setting.device)) or 80e9
    return Memory(max(peaks, default=float("nan")), plan_memory(config, float(room)).found.total / 1e9)


def laps_of(setting: Setting, config: Any, warm: bool = True, rounds: int | None = None) -> tuple[list[Lap], Memory]:
    """Return each measured step of a run, and its memory. The run ends after them.

    Its first step is thrown away; not `warm`: it is the one that is measured. `rounds`: of them, None: as the command
    says. Fewer steps are measured where another one would not fit into the time of the part.
    """
    laps, ended = list[Lap](), list[float]()
    wanted = (rounds or setting.rounds) if warm else 1

    def after(trained: FinishedStep) -> bool | None:
        setting.wait()
        ended.append(time.perf_counter())
        whole = ended[-1] - ended[-2] if len(ended) > 1 else sum(trained.seconds.values())
        if len(ended) > 1 or not warm:
            own = {**trained.step.seconds, **trained.seconds, "between": trained.between}
            laps.append({**own, "step": whole, "tokens": trained.step.tokens, "fed": trained.work.fed})
        late = setting.left() < 1.3 * whole + SPARE
        leave(len(laps) >= wanted or bool(laps and late))
        return None

    with stepping(after), waiting(setting), suppress(SystemExit):
        run_training(config)
    assert laps, "the run ended before a step was measured"
    return laps, memory_of(setting, config)


def common(setting: Setting, name: str) -> dict[str, Any]:
    """Options of every measured run. It has no end of its own and writes no checkpoint."""
    return {
        "out": str(setting.run_folder(name)),
        "overwrite": True,
        "quiet": True,
        "device": setting.device,
        "precision": "bfloat16",
        "schedule": "constant",
        "save_every": 1_000_000,
        "steps": 1_000_000,
        "health": "off",
    }


def known(**options: Any) -> dict[str, Any]:
    """Those of these options that posttrain has."""
    names = {field.name for field in fields(RL)}
    return {name: value for name, value in options.items() if name in names}
