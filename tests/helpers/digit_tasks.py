"""Tasks from which a model that knows nothing can learn: to say digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import posttrain
from posttrain.core.types import Task

TASKS = [{"prompt": f"{i}+{j}="} for i in range(5) for j in range(4)]


def digits(task: Task, reply: str) -> float:
    return sum(c.isdigit() for c in reply) / max(1, len(reply))


def goes_on_exactly(out: Path, steps: int, half: int, **how: Any) -> posttrain.Run:
    """A run, out/whole, after it was seen that one that ends at half of its steps and is resumed, out/parts, repeats it."""
    whole = posttrain.rl(TASKS, digits, steps=steps, out=str(out / "whole"), **how)
    before = posttrain.rl(TASKS, digits, steps=half, out=str(out / "parts"), **how).metrics
    rest = posttrain.rl(TASKS, digits, out=str(out / "parts"), resume=True, steps=steps, **how)
    assert rest.metrics == whole.metrics and before == whole.metrics[:half]
    return whole
