"""What is added to a rollout's reward before credit is assigned.

S    rollouts    n_i    sampled tokens of rollout i
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posttrain.types import Scores


@dataclass(frozen=True)
class SoftOverlong:
    """What is added to the reward of long replies (DAPO, arXiv 2503.14476, eq. 13).

    0 up to limit - cache tokens, then falling to -1 at the limit, -1 above.
    """

    limit: int | None = None  # L_max, in tokens; None: the run's max_tokens, filled in when the run is configured
    cache: int | None = None  # L_cache, in tokens; None: a fifth of the limit
    source: ClassVar[str] = "DAPO, arXiv 2503.14476, eq. 13"

    @property
    def formula(self) -> str:
        limit, cache = self.limit or "max_tokens", self.cache or "cache"
        return f"0 if n_i <= {limit} - {cache}, (({limit} - {cache}) - n_i) / {cache} up to {limit}, -1 above"

    def __call__(self, scores: Scores) -> Tensor:
        """float64 [S]."""
        assert self.limit and self.cache, "both are filled in when the run is configured"
        return ((self.limit - self.cache - scores.length.double()) / self.cache).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class GroupLength:
    """Shorter replies of a group earn more (Kimi k1.5, arXiv 2501.12599, section 2.3.3).

    lambda = 1/2 - (n_i - shortest) / (longest - shortest) of the group; correct replies earn lambda, others min(0, lambda),
    times `weight`. 0 where all of a group are equally long.
    """

    weight: float = 0.1
    source: ClassVar[str] = "Kimi k1.5, arXiv 2501.12599, section 2.3.3"

    @property
    def formula(self) -> str:
        return f"{self.weight:g} (1/2 - (n_i - min n) / (max n - min n)) over the group, at most 0 for wrong replies"

    def __call__(self, scores: Scores) -> Tensor:
        """float64 [S]."""
        assert scores.correct is not None
        groups, group = scores.group.unique(return_inverse=True)
        length = scores.length.double()
        longest = torch.full((len(groups),), -torch.inf, dtype=torch.float64).scatter_reduce_(0, group, length, "amax")
        shortest = torch.full((len(groups),), torch.inf, dtype=torch.float64).scatter_reduce_(0, group, length, "amin")
        spread = (longest - shortest)[group]
        share = 0.5 - (length - shortest[group]) / spread.clamp_min(1.0)
        earned = torch.where(scores.correct, share, share.clamp_max(0.0))
        return self.weight * earned.masked_fill(spread == 0, 0.0)
