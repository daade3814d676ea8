"""Advantages of turns: an episode's turn is compared with the turns of its group that began in the same state.

R_t    sum of the rewards of turn t and later turns of a rollout, discounted per turn
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from posttrain.algorithms.credit import Advantage, Baselined
from posttrain.algorithms.earned_rewards import earnings, standardised
from posttrain.core.batch import Scores, TurnStart
from posttrain.core.component import Need, setting
from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TurnGroups(Advantage):
    """Credits single turns without a critic, also good turns of bad episodes: group-in-group advantages (GiGPO).

    Each turn has the advantage of its rollout in the group plus `weight` times its own among the turns of the group that
    began in the same state: R_t less their mean, over their standard deviation. A state with a single turn, or whose
    turns all earned the same, adds nothing (arXiv 2505.10978, eq. 3 to 8).

    state    `observation`: turns that follow the same text of the environment, as in the paper. `history`: turns with the
    same whole context, for environments whose text alone does not determine the state.
    """

    weight: float = setting(
        1.0,
        "turn-weight",
        "Weight of a turn's advantage among turns of the same state, relative to its rollout's.",
        above=0,
    )
    gamma: float = setting(0.95, "turn-gamma", "Discount factor per turn.", least=0, most=1)
    state: Literal["observation", "history"] = setting(
        "observation",
        "turn-state",
        "State of a turn: the observation before it, or the whole context before it.",
    )
    scale: Literal["none", "group"] = setting(
        "group", "scale", "Divide advantages by the standard deviation of the group."
    )
    eps: float = setting(1e-6, above=0)
    needs = frozenset({Need.GROUP, Need.TURNS})
    source = "GiGPO, arXiv 2505.10978, eq. 3 to 8"
    by_token = True

    @property
    def formula(self) -> str:
        over = "" if self.scale == "none" else f" / (std + {self.eps:g})"
        gamma = "" if self.gamma == 1 else f", each {self.gamma:g} times less a turn away"
        weight = "" if self.weight == 1 else f"{self.weight:g} "
        return (
            f"(R_i - mean(group)){over} + {weight}(R_t - mean(state)){over}, R_t: rewards of rollout i from the turn of "
            f"token t on{gamma}; state: turns of the group behind the same {self.state}"
        )

    def __call__(self, scores: Scores) -> list[Tensor]:
        assert len(scores.turns) == len(scores.reward), "the scoreboard has the turns where they are needed"
        whole = Baselined("group", self.scale, eps=self.eps)(scores).double().tolist()
        returns = [self._returns(own, turns) for own, turns in zip(earnings(scores), scores.turns, strict=True)]
        states: dict[tuple[int, int], list[float]] = defaultdict(list)
        keys = [
            [(group, getattr(turn, self.state)) for turn in turns]
            for group, turns in zip(scores.group.tolist(), scores.turns, strict=True)
        ]
        for own, values in zip(keys, returns, strict=True):
            for key, value in zip(own, values, strict=True):
                states[key].append(value)
        eps = self.eps if self.scale == "group" else None
        out = []
        for i, length in enumerate(scores.length.long().tolist()):
            advantage = torch.full((length,), whole[i], dtype=torch.float64)
            ends = [*(turn.before for turn in scores.turns[i]), length]
            for (first, end), key, value in zip(pairwise(ends), keys[i], returns[i], strict=True):
                advantage[first:end] += self.weight * standardised([value], states[key], eps)[0]
            out.append(advantage.to(scores.reward.dtype))
        return out

    def _returns(self, earned: Tensor, turns: tuple[TurnStart, ...]) -> list[float]:
        """Return R_t of each turn, given the reward that each token earned, [n_i]."""
        ends = [*(turn.before for turn in turns), len(earned)]
        found: list[float] = []
        behind = 0.0
        for first, end in reversed(list(pairwise(ends))):
            behind = earned[first:end].sum().item() + self.gamma * behind
            found.append(behind)
        return found[::-1]
