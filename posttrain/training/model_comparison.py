"""The comparison of an evaluated model with others on the same tasks: differences, a sign test, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from posttrain.core.intervals import LEVEL, holm, share_interval, sign_test, stated
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Invalid, UserError, succeeds
from posttrain.training.figures import difference, is_binary

UNDECIDED = "undecided"


@dataclass(frozen=True)
class ModelComparison:
    """The evaluated model compared with another one."""

    model: str  # the other model, as the user named it
    figures: dict[str, Any]  # of the other model
    differences: dict[str, dict[str, Any]]  # in reward and accuracy: the evaluated model minus the other one
    wins: dict[str, Any]  # see `with_verdicts`
    win_rate: dict[str, Any] = field(default_factory=dict)  # with a scorer: see `win_rate`, and its "wins" as above
    rollouts: list[Rollout] = field(default_factory=list, repr=False)  # of the other model

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data, without rollouts."""
        told = {"model": self.model, "figures": self.figures, "differences": self.differences, "wins": self.wins}
        return told | ({"win_rate": self.win_rate} if self.win_rate else {})


@dataclass(frozen=True)
class Played:
    """The results of a model: for each task the valid rewards of its samples, and their outcomes (see `figures.summary`).

    If the policy plays several sides, each side of a task has a key of its own; `tasks`: key -> task.
    """

    rewards: dict[str, list[float]]
    outcomes: dict[str, list[float]]
    tasks: dict[str, str]


def compare(own: Played, other: Played, success: float | None) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the differences of two models, first minus second, and on how many tasks the first is better: more often
    right, or without a success threshold with more reward.

    A task counts once, however many sides of it are played: results of its sides depend on each other. Its difference is
    d_t = mean over sides s of (mean of the first as s - mean of the second as s), over the sides of which both have valid
    rewards: of the rewards, or of 1 for right and 0 for wrong rollouts. It is won if d_t > 0. With W tasks won and L lost,
    the sign test has p = min(1, 2 P(X <= min(W, L))), X ~ Binomial(W + L, 1/2).

    Raises UserError if no task has valid rewards of both.
    """
    both = [key for key, rewards in own.rewards.items() if rewards and other.rewards.get(key)]
    if not both:
        raise UserError("no task has a valid reward for both checkpoints: look at the reasons in their rollouts")
    sides: dict[str, list[str]] = {}
    for key in both:
        sides.setdefault(own.tasks[key], []).append(key)

    def rewards(played: Played, key: str) -> float:
        return _mean(played.rewards[key])

    def right(played: Played, key: str) -> float:
        return _mean([success is not None and succeeds(x, success) for x in played.outcomes[key]])

    def apart(mean: Callable[[Played, str], float], share: bool) -> dict[str, Any]:
        first, second = (
            [_mean([mean(played, key) for key in keys]) for keys in sides.values()] for played in (own, other)
        )
        return difference(first, second, share)

    found = {"reward": apart(rewards, is_binary([played.rewards[key] for played in (own, other) for key in both]))}
    if success is not None:
        found["accuracy"] = apart(right, share=True)
    mean = rewards if success is None else right
    gaps = [_mean([mean(own, key) - mean(other, key) for key in keys]) for keys in sides.values()]
    return found, {"by": "reward" if success is None else "accuracy", **_wins(gaps)}


def _wins(gaps: Sequence[float]) -> dict[str, Any]:
    """Return on how many tasks the first model is better, worse and equal, and the p of the sign test."""
    won, lost = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    p = sign_test([1.0] * won + [-1.0] * lost)
    return {"won": won, "lost": lost, "tied": len(gaps) - won - lost, "p": p}


def preferences(own: Sequence[float | Invalid], other: Sequence[float | Invalid]) -> list[float | Invalid]:
    """Return for each pair of scores 1 if the first is higher, 0 if it is lower, 0.5 if they are equal, or Invalid."""
    found: list[float | Invalid] = []
    for a, b in zip(own, other, strict=True):
        if isinstance(a, Invalid) or isinstance(b, Invalid):
            found.append(a if isinstance(a, Invalid) else b)
        else:
            found.append(0.5 if a == b else float(a > b))
    return found


def win_rate(tasks: Sequence[str], preferred: Sequence[float | Invalid]) -> dict[str, Any]:
    """Return how often the replies of a model are preferred to those of another one; ties count half.

    `tasks`: the task of each pair of replies; `preferred`: see `preferences`. A task counts once, with the mean of its
    pairs; it is won if that is above 1/2, and the sign test is that of `compare`. The result:

        {"mean": 0.62, "low": 0.51, "high": 0.72, "tasks": 40, "pairs": 160, "wins": {"won": 25, "lost": 10, ...}}

    Invalid pairs are left out; {}: all are.
    """
    by_task: dict[str, list[float]] = {}
    for task, value in zip(tasks, preferred, strict=True):
        if not isinstance(value, Invalid):
            by_task.setdefault(task, []).append(value)
    if not by_task:
        return {}
    shares = [_mean(own) for own in by_task.values()]
    figure = stated(_mean(shares), share_interval(shares), tasks=len(shares), pairs=sum(map(len, by_task.values())))
    return figure | {"wins": _wins([share - 0.5 for share in shares])}


def _mean(rewards: Sequence[float]) -> float:
    return fsum(rewards) / len(rewards)  # whatever their order, so that equal rewards are a tie


def with_verdicts(wins: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return these comparisons with the verdict of each.

    {"by": "accuracy", "won": 9, "lost": 1, "tied": 2, "p": 0.02, "p_holm": 0.04, "verdict": "better"}: tasks on which the
    evaluated model is better, worse, and equal, by accuracy or reward; the p of the sign test; and p corrected by Holm's
    method for all comparisons given. The verdict, "better", "worse" or "undecided", is that of the corrected p at 5%.
    """
    corrected = holm([one["p"] for one in wins])
    return [
        {
            **one,
            "p_holm": p,
            "verdict": UNDECIDED if p > 1 - LEVEL else "better" if one["won"] > one["lost"] else "worse",
        }
        for one, p in zip(wins, corrected, strict=True)
    ]


def verdicts_of_rates(rates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return these results of `win_rate` with the verdict of each, corrected for all of them."""
    verdicts = iter(with_verdicts([rate["wins"] for rate in rates if rate]))
    return [{**rate, "wins": next(verdicts)} if rate else {} for rate in rates]
