"""Which groups, rollouts and tokens an update learns from.

S    rollouts    n_i    sampled tokens of rollout i    G    rollouts of a group    N    scored tokens of a micro-batch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posttrain.algorithms.credit import equal_rewards
from posttrain.types import Scores


@dataclass(frozen=True)
class DynamicSampling:
    """Groups that tell nothing are replaced by others, until the step is full (DAPO, arXiv 2503.14476, eq. 11).

    A group is kept if its rewards differ and, where asked for, its share of correct replies lies within (low, high).
    `rounds` is the budget: at most so many times the step's prompts are played; then the step goes on with what it has.
    """

    rounds: int = 4
    low: float = 0.0
    high: float = 1.0
    source: ClassVar[str] = "DAPO, arXiv 2503.14476, eq. 11"

    @property
    def formula(self) -> str:
        share = "" if (self.low, self.high) == (0, 1) else f" and {self.low:g} < share correct < {self.high:g}"
        return f"only groups with unequal rewards{share}; at most {self.rounds} x the step's prompts are played"

    def __call__(self, scores: Scores) -> Tensor:
        """bool [S]: whether the rollout's group is kept."""
        assert scores.correct is not None
        kept = ~equal_rewards(scores)
        if (self.low, self.high) != (0, 1):
            groups, group = scores.group.unique(return_inverse=True)
            sums = torch.zeros(2, len(groups), dtype=torch.float64)
            sums[0].index_add_(0, group, scores.correct.double())
            sums[1].index_add_(0, group, torch.ones_like(group, dtype=torch.float64))
            share = (sums[0] / sums[1])[group]
            kept &= (share > self.low) & (share < self.high)
        return kept


@dataclass(frozen=True)
class OverlongFilter:
    """Truncated rollouts teach nothing: they stay in their group's statistics and leave the loss and its denominators.

    Truncation is known from the engine's stop reason (DAPO, arXiv 2503.14476, section 3.4).
    """

    formula: ClassVar[str] = "without truncated rollouts, which count in their group's statistics only"
    source: ClassVar[str] = "DAPO, arXiv 2503.14476, section 3.4"

    def __call__(self, scores: Scores) -> Tensor:
        """bool [S]: whether the rollout is in the loss."""
        assert scores.truncated is not None
        return ~scores.truncated


@dataclass(frozen=True)
class TopEntropy:
    """Only the tokens at which the policy was least sure move it (arXiv 2506.01939, eq. 6).

    The `share` of the step's tokens with the highest entropy keep their advantage, that of the others becomes 0; every
    denominator stays that of the full batch.
    """

    share: float = 0.2
    source: ClassVar[str] = "Beyond the 80/20 rule, arXiv 2506.01939, eq. 6"

    @property
    def formula(self) -> str:
        return f"A = 0 except at the {self.share:g} of the step's tokens with the highest entropy"

    def __call__(self, entropy: list[Tensor]) -> list[Tensor]:
        """[n_i] of each rollout -> bool [n_i]: the tokens that are kept; ties at the threshold are."""
        every = torch.cat([e.float().cpu() for e in entropy])
        kept = max(1, round(self.share * len(every)))
        threshold = every.topk(kept).values[-1]
        return [e.float().cpu() >= threshold for e in entropy]


@dataclass(frozen=True)
class Replay:
    """Updates learn from rollouts drawn out of the last `capacity` ones, as many as the step played, in each update."""

    capacity: int = 4096
    source: ClassVar[str] = "Lin 1992; soft actor-critic, arXiv 1812.05905, algorithm 1"

    @property
    def formula(self) -> str:
        return f"drawn from the last {self.capacity} rollouts"
