"""Figures of an evaluation: mean reward, accuracy, pass@k, maj@k, differences of two checkpoints.

Every task counts once, whatever the number of its samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from math import comb
from operator import itemgetter
from typing import Any

import numpy as np

from posttrain.core.intervals import mean_interval, paired_interval, share_interval, stated
from posttrain.core.types import UserError, succeeds


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n samples, drawn without replacement, contain at least one of the c correct ones.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of arXiv:2107.03374; in integers, so it is exact to the last bit.
    Raises ValueError if k > n: there are too few samples.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs k from 1 to the number of samples, {n}")
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct of {n} samples is not possible")
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def majority_at_k(answers: Sequence[str], correct: Sequence[bool], k: int) -> float:
    """Return how often the most frequent answer among k samples is correct: maj@k of arXiv:2203.11171.

    The samples are voted on in groups of k, one after another, so the estimate is unbiased; those left over do not vote.
    Of answers with equally many votes each is chosen equally often. Raises ValueError if k > n: there are too few samples.
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} needs k from 1 to the number of samples, {n}")
    return float(np.mean([_vote(answers[i : i + k], correct[i : i + k]) for i in range(0, n - k + 1, k)]))


def _vote(answers: Sequence[str], correct: Sequence[bool]) -> float:
    """Return the chance that the answer with the most votes is correct."""
    votes = Counter(answers)
    most = max(votes.values())
    chosen = {answer for answer, number in votes.items() if number == most}
    # Replies with equal answers may differ in correctness, as a verifier can ask for more than the answer.
    return float(np.mean([c for answer, c in zip(answers, correct, strict=True) if answer in chosen]))


def best_at_k(scores: Sequence[float], correct: Sequence[bool], k: int) -> float:
    """Return how often the sample with the highest score of k is correct: best-of-k, the mean over all choices of k of n.

    Of n samples, let a(s) have at most the score s, and b(s) less. The best of k has the score s in
    (C(a, k) - C(b, k)) / C(n, k) of the choices, and each sample with that score is chosen equally often. Raises ValueError
    if k > n: there are too few samples.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"best@{k} needs k from 1 to the number of samples, {n}")
    found, below, all_choices = 0.0, 0, comb(n, k)
    for _, equal in groupby(sorted(zip(scores, correct, strict=True)), key=itemgetter(0)):
        own = [c for _, c in equal]
        upto = below + len(own)
        found += (comb(upto, k) - comb(below, k)) / all_choices * (sum(own) / len(own))
        below = upto
    return float(found)


def summary(
    per_task_rewards: Sequence[Sequence[float]],
    ks: Sequence[int] = (),
    success: float | None = 1.0,
    outcomes: Sequence[Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Return the figures of an evaluation. `per_task_rewards`: for each task, the valid rewards of its samples.

    A sample is correct if its outcome is at least `success`; None: no success threshold exists, and only the reward is
    reported. `outcomes`: one for each reward, by default the reward itself. The result:

        {"tasks": 100, "samples": 800,
         "reward": {"mean": 0.52, "low": 0.44, "high": 0.60, "tasks": 100},
         "accuracy": {...}, "pass@4": {...}}

    Without an interval, low and high are None, and "why" is the reason. Tasks without a valid sample are left out, and
    from pass@k those with fewer than k; "tasks" is the number of tasks used. Raises UserError if none is left.
    """
    groups = [np.asarray(rewards, dtype=np.float64) for rewards in per_task_rewards if len(rewards)]
    if not groups:
        raise UserError(
            "no task has a valid reward, as the verifier failed every time: look at the reasons in the rollouts"
        )
    result: dict[str, Any] = {"tasks": len(groups), "samples": sum(map(len, groups))}
    means = [float(rewards.mean()) for rewards in groups]
    found = share_interval(means) if is_binary(groups) else mean_interval(means)
    result["reward"] = stated(float(np.mean(means)), found, tasks=len(means))
    if success is None:
        return result
    decided = groups if outcomes is None else [np.asarray(own, dtype=np.float64) for own in outcomes if len(own)]
    correct = [(len(own), int(succeeds(own, success).sum())) for own in decided]
    result["accuracy"] = _share([c / n for n, c in correct])
    for k in ks:
        rates = [pass_at_k(n, c, k) for n, c in correct if n >= k]
        if not rates:
            raise UserError(f"pass@{k} needs {k} samples of a task: draw more samples, or ask for a smaller k")
        result[f"pass@{k}"] = _share(rates)
    return result


def majorities(
    answers: Sequence[Sequence[str]],
    outcomes: Sequence[Sequence[float]],
    ks: Sequence[int],
    success: float | None,
) -> dict[str, Any]:
    """Return {"maj@8": {...}} for each k, in the form of `summary`: see `majority_at_k`.

    `answers` and `outcomes`: for each task, those of its valid samples. From maj@k tasks with fewer than k are left out.
    """
    if success is None:
        return {}
    pairs = [(own, succeeds(np.asarray(won), success)) for own, won in zip(answers, outcomes, strict=True)]
    return {f"maj@{k}": _share([majority_at_k(own, won, k) for own, won in pairs if len(own) >= k]) for k in ks}


def bests(ranked: Sequence[Sequence[tuple[float, float]]], ks: Sequence[int], success: float | None) -> dict[str, Any]:
    """Return {"best@8": {...}} for each k, in the form of `summary`: see `best_at_k`.

    `ranked`: for each task, (score, outcome) of its valid samples. From best@k tasks with fewer than k are left out.
    """
    if success is None:
        return {}
    groups = [([score for score, _ in own], [succeeds(outcome, success) for _, outcome in own]) for own in ranked]
    return {f"best@{k}": _share([best_at_k(s, won, k) for s, won in groups if len(s) >= k]) for k in ks}


def differences(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    success: float | None = 1.0,
    outcomes: Sequence[tuple[Sequence[float], Sequence[float]]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the differences of two checkpoints on the same tasks, first minus second, in reward and in accuracy.

    `outcomes`: see `summary`.
    """
    first, second = ([np.asarray(pair[side], dtype=np.float64) for pair in pairs] for side in (0, 1))
    found = {"reward": difference(_means(first), _means(second), is_binary([*first, *second]))}
    if success is not None:
        decided = pairs if outcomes is None else outcomes
        own, theirs = (
            [succeeds(np.asarray(pair[side], dtype=np.float64), success) for pair in decided] for side in (0, 1)
        )
        found["accuracy"] = difference(_means(own), _means(theirs), share=True)
    return found


def difference(first: Sequence[float], second: Sequence[float], share: bool) -> dict[str, Any]:
    """Return the mean of first - second over the same tasks. `share`: both are shares of a task's samples."""
    gap = float(np.mean(first)) - float(np.mean(second))
    return stated(gap, paired_interval(first, second, share=share), tasks=len(first))


def _means(groups: Sequence[Any]) -> list[float]:
    return [float(np.mean(rewards)) for rewards in groups]


def is_binary(groups: Sequence[Any]) -> bool:
    """Return whether all rewards are 0 or 1, so that their mean is a share."""
    return all(bool(np.isin(rewards, (0.0, 1.0)).all()) for rewards in groups)


def _share(rates: list[float]) -> dict[str, Any]:
    return stated(float(np.mean(rates)), share_interval(rates), tasks=len(rates))
