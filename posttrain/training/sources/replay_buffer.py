"""Replay buffer of rollouts of earlier steps. It is training state.

n_i    scored tokens of rollout i
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.core.rollouts import Rollout
from posttrain.training.sources.rollout_state import restored, stored


class ReplayBuffer:
    """The last `capacity` rollouts, for algorithms that learn from more than the step's own."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rollouts: list[Rollout] = []
        self.advantages: list[Tensor] = []  # [n_i] of each

    def extend(self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor]) -> None:
        self.rollouts = [*self.rollouts, *rollouts][-self.capacity :]
        self.advantages = [*self.advantages, *advantages][-self.capacity :]

    def state(self) -> list[dict[str, Any]]:
        """Return the rollouts as JSON data."""
        pairs = zip(self.rollouts, self.advantages, strict=True)
        return [{**stored(rollout), "advantage": advantage.tolist()} for rollout, advantage in pairs]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        self.rollouts, self.advantages = [], []
        for row in state:
            self.rollouts.append(restored(row, {}))
            self.advantages.append(torch.tensor(row["advantage"]))
