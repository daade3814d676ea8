"""Steps of posttrain's own trainers, watched from outside: seconds by phase, memory, and how a run is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any

from findings import Setting, Watch
from posttrain_side import also, leave

from posttrain.config.training import RL
from posttrain.learners.local_learner import LocalLearner
from posttrain.training.loop import FinishedStep
from posttrain.training.training_run import run_training

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


def laps_of(setting: Setting, config: Any) -> tuple[list[Lap], float]:
    """(each measured step, the most memory in GB) of a run that is left after them. Its first step is thrown away."""
    watch, laps, ended = Watch(setting), list[Lap](), list[float]()

    def after(trained: FinishedStep) -> bool | None:
        setting.wait()
        ended.append(time.perf_counter())
        if len(ended) > 1:
            own = {**trained.step.seconds, **trained.seconds, "between": trained.between}
            laps.append({**own, "step": ended[-1] - ended[-2], "tokens": trained.step.tokens, "fed": trained.fed})
        leave(len(laps) >= setting.rounds)
        return None

    with stepping(after), waiting(setting), suppress(SystemExit):
        run_training(config)
    assert len(laps) == setting.rounds, "the run ended before all steps were measured"
    return laps, watch.most()


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
