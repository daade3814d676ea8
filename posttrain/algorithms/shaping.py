"""Reward shaping: additions to a rollout's reward before credit is assigned.

S    rollouts    n_i    sampled tokens of rollout i
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from posttrain.core.batch import Scores
from posttrain.core.component import Component, Need, RunLimits, setting
from posttrain.core.lazy_torch import torch
from posttrain.core.types import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Shaping(Component):
    """Map from `Scores` to the addition to each reward, float64 [S]."""

    def __call__(self, scores: Scores) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class SoftOverlong(Shaping):
    """Penalises replies that approach the token budget, instead of only those that are cut off.

    Added to the reward of an episode of m_i sampled tokens: 0 up to limit - cache, then falling linearly to -1 at the
    limit, -1 above (DAPO, arXiv 2503.14476, eq. 13).
    """

    # L_max; None: the episode's budget, filled in when the run is configured
    limit: int | None = setting(None, above=0)
    cache: int | None = setting(  # L_cache; None: a fifth of the limit
        None,
        "overlong-cache",
        "Overlong penalty: tokens before the limit over which it grows to -1 (0: none).",
        above=0,
        absent=0,
    )
    source = "DAPO, arXiv 2503.14476, eq. 13"
    interpretation = (
        "With rewards of 0 and 1, as most rewards here give them, the overlong penalty of 1 is the whole distance between "
        "wrong and right: a right reply at the limit earns as much as a short wrong one. With rewards of -1 and 1, as in "
        "the paper, it is half of that distance: `--reward-floor -1`."
    )

    @property
    def formula(self) -> str:
        limit, cache = self.limit or "budget", self.cache or "cache"
        return f"0 if m_i <= {limit} - {cache}, (({limit} - {cache}) - m_i) / {cache} up to {limit}, -1 above"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(() if self.limit else {Need.EPISODE_TOKENS})

    def configured(self, limits: RunLimits) -> Self:
        limit = self.limit or limits.episode_tokens
        if limit is None:
            return self
        cache = self.cache or max(1, limit // 5)
        if cache >= limit:
            raise UserError(
                f"--overlong-cache {cache} must be below the maximum number of tokens of an episode, {limit}"
            )
        return replace(self, limit=limit, cache=cache)

    def __call__(self, scores: Scores) -> Tensor:
        """Return the addition to each reward, float64 [S]."""
        assert self.limit and self.cache, "both are filled in when the run is configured"
        assert scores.sampled is not None
        return ((self.limit - self.cache - scores.sampled.double()) / self.cache).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class RewardFloor(Shaping):
    """Maps rewards from 0..1 to floor..1, so that a wrong reply has a negative reward.

    floor + (1 - floor) R. With a baseline and a standard deviation of the group it changes nothing by itself; it changes
    the relative weight of other penalties, and estimators without a baseline. DAPO's rewards are -1 and 1 (arXiv
    2503.14476, eq. 7).
    """

    floor: float = setting(
        -1.0, "reward-floor", "Map rewards from 0..1 to this..1, such as -1 (0: unchanged).", most=0, absent=0
    )
    source = "DAPO, arXiv 2503.14476, eq. 7"

    @property
    def formula(self) -> str:
        return f"{self.floor:g} (1 - R_i)"

    def __call__(self, scores: Scores) -> Tensor:
        """Return the addition to each reward, float64 [S]. Raises UserError for rewards outside 0..1."""
        reward = scores.reward.double()
        if bool(((reward < 0) | (reward > 1)).any()):
            low, high = reward.min().item(), reward.max().item()
            raise UserError(
                f"--reward-floor needs rewards of 0..1, and this step's are {low:g} to {high:g}: leave it out, or change "
                "the reward"
            )
        return self.floor * (1 - reward)


@dataclass(frozen=True)
class LengthPenalty(Shaping):
    """Deducts a cost per token, so that of two right replies the shorter one earns more: -cost m_i, linear in the sampled
    tokens of the episode.
    """

    cost: float = setting(
        1e-4, "length-penalty", "Deduction from the reward for each sampled token (0: none).", least=0, absent=0
    )
    source = "a plain cost per token, of no single paper"

    @property
    def formula(self) -> str:
        return f"-{self.cost:g} m_i"

    def __call__(self, scores: Scores) -> Tensor:
        """Return the addition to each reward, float64 [S]."""
        assert scores.sampled is not None
        return -self.cost * scores.sampled.double()


@dataclass(frozen=True)
class GroupLength(Shaping):
    """Rewards brevity only among right replies.

    lambda = 1/2 - (n_i - shortest) / (longest - shortest) of the group; successes earn lambda, others min(0, lambda),
    times `weight`. 0 where all of a group are equally long (Kimi k1.5, arXiv 2501.12599, section 2.3.3).
    """

    weight: float = setting(
        0.1,
        "length-reward",
        "Weight of the reward for the shorter right replies of a group (0: none).",
        least=0,
        absent=0,
    )
    needs = frozenset({Need.GROUP, Need.SUCCESS})
    source = "Kimi k1.5, arXiv 2501.12599, section 2.3.3"

    @property
    def formula(self) -> str:
        return f"{self.weight:g} (1/2 - (n_i - min n) / (max n - min n)) over the group, at most 0 where it is not a success"

    def __call__(self, scores: Scores) -> Tensor:
        """Return the addition to each reward, float64 [S]."""
        assert scores.success is not None
        groups, group = scores.group.unique(return_inverse=True)
        length = scores.length.double()
        longest = torch.full((len(groups),), -torch.inf, dtype=torch.float64).scatter_reduce_(0, group, length, "amax")
        shortest = torch.full((len(groups),), torch.inf, dtype=torch.float64).scatter_reduce_(0, group, length, "amin")
        spread = (longest - shortest)[group]
        share = 0.5 - (length - shortest[group]) / spread.clamp_min(1.0)
        earned = torch.where(scores.success, share, share.clamp_max(0.0))
        return self.weight * earned.masked_fill(spread == 0, 0.0)
