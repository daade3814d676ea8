"""Advantages of turns: an episode's turn is compared with the turns of its group that began in the same state.

R_t    sum of the rewards of turn t and later turns of a rollout, discounted per turn
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
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
        states: list[list[list[State]]] = [
            [[(group, getattr(turn, self.state))] for turn in turns]
            for group, turns in zip(scores.group.tolist(), scores.turns, strict=True)
        ]
        eps = self.eps if self.scale == "group" else None
        of_turns = [
            [self.weight * standardised([value], same, eps)[0] for value, [same] in turns]
            for turns in compared(scores, self.gamma, states)
        ]
        return over_turns(scores, of_turns, whole)


@dataclass(frozen=True)
class TurnHistories(Advantage):
    """Credits single turns without a critic, and trusts turns with the same longer history more (HGPO).

    A turn is compared K + 1 times: with the turns of its group behind the same observation, behind the same last two
    observations, and so on up to K + 1. A_k is R_t less the mean of those behind the same k, over their standard deviation.
    A comparison that gives 0, such as that of a turn with itself alone, is left out, and the others are averaged with
    weights (k + 1)^power (HGPO, arXiv 2602.22817). There is no advantage of the whole rollout.
    """

    history: int = setting(
        2, "turn-history", "Number K of earlier observations that turns of the same state may share.", least=0
    )
    power: float = setting(
        1.0, "turn-history-power", "Exponent of the weight k + 1 of turns with the same last k observations.", least=0
    )
    gamma: float = setting(0.95, "turn-gamma", "Discount factor per turn.", least=0, most=1)
    scale: Literal["none", "group"] = setting(
        "group", "scale", "Divide advantages by the standard deviation of the group."
    )
    eps: float = setting(1e-6, above=0)
    needs = frozenset({Need.GROUP, Need.TURNS})
    source = "HGPO, arXiv 2602.22817, and its authors' code"
    interpretation = (
        "The weights are powers of k + 1, as in the authors' code: 2, 3, 4 for three comparisons. Descriptions of the "
        "paper's equation 7 give 1, 2, 3. As in that code, a turn whose return is the mean of its state counts as a turn "
        "without others. "
        "The option of that code which adds the whole rollout is left out: `gigpo` has such a part."
    )
    by_token = True

    @property
    def formula(self) -> str:
        over = "" if self.scale == "none" else f" / (pstd + {self.eps:g})"
        gamma = "" if self.gamma == 1 else f", each {self.gamma:g} times less a turn away"
        weight = "(k + 1)" if self.power == 1 else f"(k + 1)^{self.power:g}"
        return (
            f"sum_k {weight} A_k / sum_k {weight} over A_k != 0, A_k = (R_t - mean(state_k)){over}, R_t: rewards of rollout "
            f"i from the turn of token t on{gamma}; state_k: turns of the group behind the same last k observations, k = 1 "
            f"to {self.history + 1}"
        )

    def __call__(self, scores: Scores) -> list[Tensor]:
        assert len(scores.turns) == len(scores.reward), "the scoreboard has the turns where they are needed"
        states = [
            [self._states(group, turns, place) for place in range(len(turns))]
            for group, turns in zip(scores.group.tolist(), scores.turns, strict=True)
        ]
        of_turns = [
            [self._advantage(value, same) for value, same in turns] for turns in compared(scores, self.gamma, states)
        ]
        return over_turns(scores, of_turns, [0.0] * len(of_turns))

    def _states(self, group: int, turns: tuple[TurnStart, ...], place: int) -> list[State]:
        """Return the state of a turn for k = 1, 2 ...: its group and the last k observations, as far as there are k."""
        seen = [turn.observation for turn in turns[: place + 1]]
        return [(group, *seen[-k:]) for k in range(1, min(self.history, place) + 2)]

    def _advantage(self, value: float, states: list[list[float]]) -> float:
        """Return the weighted mean of the advantages of a turn with this return among the returns of each state."""
        eps = self.eps if self.scale == "group" else None
        total = weights = 0.0
        for k, among in enumerate(states, 1):
            advantage = standardised([value], among, eps, population=True)[0]
            if abs(value - fmean(among)) > 1e-8 * max(1.0, *map(abs, among)):  # rounding must not make it count
                total += (k + 1) ** self.power * advantage
                weights += (k + 1) ** self.power
        return total / weights if weights else 0.0


State = tuple[int, ...]
"""A group, and what its turns of this state have in common."""


def compared(
    scores: Scores, gamma: float, states: list[list[list[State]]]
) -> list[list[tuple[float, list[list[float]]]]]:
    """Return, for each turn of each rollout, R_t and the returns of all turns of each of its states."""
    returns = [_returns(own, turns, gamma) for own, turns in zip(earnings(scores), scores.turns, strict=True)]
    of_state: dict[State, list[float]] = defaultdict(list)
    for own, values in zip(states, returns, strict=True):
        for known, value in zip(own, values, strict=True):
            for state in known:
                of_state[state].append(value)
    return [
        [(value, [of_state[state] for state in known]) for known, value in zip(own, values, strict=True)]
        for own, values in zip(states, returns, strict=True)
    ]


def _returns(earned: Tensor, turns: tuple[TurnStart, ...], gamma: float) -> list[float]:
    """Return R_t of each turn, given the reward that each token earned, [n_i]."""
    ends = [*(turn.before for turn in turns), len(earned)]
    found: list[float] = []
    behind = 0.0
    for first, end in reversed(list(pairwise(ends))):
        behind = earned[first:end].sum().item() + gamma * behind
        found.append(behind)
    return found[::-1]


def over_turns(scores: Scores, of_turns: list[list[float]], of_rollouts: list[float]) -> list[Tensor]:
    """Return the advantages of tokens, [n_i] for each rollout: that of the rollout plus that of the token's turn."""
    out = []
    for i, length in enumerate(scores.length.long().tolist()):
        advantage = torch.full((length,), of_rollouts[i], dtype=torch.float64)
        ends = [*(turn.before for turn in scores.turns[i]), length]
        for (first, end), own in zip(pairwise(ends), of_turns[i], strict=True):
            advantage[first:end] += own
        out.append(advantage.to(scores.reward.dtype))
    return out
