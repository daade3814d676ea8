"""An environment without a reward: only a teacher scores the replies, or `posttrain sample` keeps them."""

from __future__ import annotations

from posttrain.core.types import Task


def reward(task: Task, reply: str) -> float:
    return 0.0
