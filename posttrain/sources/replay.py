"""Rollouts remembered over steps, for rows that learn from more than the step's own. They are training state.

n_i    scored tokens of rollout i
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.types import Rollout, StopReason, Transcript


class ReplayBuffer:
    """The last rollouts, for rows that learn from more than the step's own."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rollouts: list[Rollout] = []
        self.advantages: list[Tensor] = []  # [n_i] of each

    def extend(self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor]) -> None:
        self.rollouts = [*self.rollouts, *rollouts][-self.capacity :]
        self.advantages = [*self.advantages, *advantages][-self.capacity :]

    def state(self) -> list[dict[str, Any]]:
        """As JSON: tokens and what is needed of each to learn from it again."""
        return [
            {
                "group": rollout.group,
                "side": rollout.side,
                "reward": rollout.reward,
                "stop": str(rollout.stop),
                "transcripts": [t.as_dict() for t in rollout.transcripts],
                "advantage": advantage.tolist(),
            }
            for rollout, advantage in zip(self.rollouts, self.advantages, strict=True)
        ]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        self.rollouts, self.advantages = [], []
        for row in state:
            transcripts = [Transcript.from_dict(plain) for plain in row["transcripts"]]
            stop = StopReason(row["stop"])
            rollout = Rollout({}, row["group"], transcripts, row["reward"], stop=stop, side=row["side"])
            self.rollouts.append(rollout)
            self.advantages.append(torch.tensor(row["advantage"]))
