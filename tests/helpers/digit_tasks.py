"""Tasks from which a model that knows nothing can learn: to say digits."""

from __future__ import annotations

from posttrain.core.types import Task

TASKS = [{"prompt": f"{i}+{j}="} for i in range(5) for j in range(4)]


def digits(task: Task, reply: str) -> float:
    return sum(c.isdigit() for c in reply) / max(1, len(reply))
