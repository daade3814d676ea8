"""A game of two sides, in a module that a worker imports in no time."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from posttrain.core.types import Reply, Sides, Task, Turn

Game = Generator[Turn, Reply, Any]


def duel(task: Task) -> Game:
    """Two rounds; whose replies come first in the alphabet wins."""
    said = {"x": "", "y": ""}
    for _ in range(2):
        for side in said:
            said[side] += yield Turn(f"{task['prompt']} {side}=", side=side)
    return Sides({side: 1.0 if own == min(said.values()) else -1.0 for side, own in said.items()})
