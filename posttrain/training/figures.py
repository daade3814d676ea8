"""How an evaluation turns samples into figures: mean reward, accuracy, pass@k, differences of two checkpoints.

It decides that the task is the unit: every task counts once however many samples it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np

from posttrain.core.intervals import LEVEL, mean_interval, paired_interval, share_interval, stated
from posttrain.core.types import UserError, succeeds


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold at least one of the c correct ones.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of arXiv:2107.03374; in whole numbers, so it is exact to the last
    bit. ValueError if k > n: the samples are too few to say.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs k from 1 to the number of samples, {n}")
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct of {n} samples is not possible")
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def summary(
    per_task_rewards: Sequence[Sequence[float]],
    ks: Sequence[int] = (),
    success: float | None = 1.0,
    level: float = LEVEL,
) -> dict[str, Any]:
    """The figures of an evaluation. `per_task_rewards` holds, for each task, the valid rewards of its samples.

    A sample is right if its reward is at least `success`; None: nothing says so, and there is only the reward. The result:

        {"tasks": 100, "samples": 800,
         "reward": {"mean": 0.52, "low": 0.44, "high": 0.60, "tasks": 100},
         "accuracy": {...}, "pass@4": {...}}

    Where there is no interval, low and high are None, and "why" says why. Tasks without a valid sample are left out, and
    from pass@k those with fewer than k; "tasks" says how many remained. UserError if none did.
    """
    groups = [np.asarray(rewards, dtype=np.float64) for rewards in per_task_rewards if len(rewards)]
    if not groups:
        raise UserError(
            "no task has a valid reward: look at the reasons in the rollouts, the verifier failed every time"
        )
    result: dict[str, Any] = {"tasks": len(groups), "samples": sum(map(len, groups))}
    means = [float(rewards.mean()) for rewards in groups]
    found = share_interval(means, level=level) if _has_binary_rewards(groups) else mean_interval(means, level)
    result["reward"] = stated(float(np.mean(means)), found, tasks=len(means))
    if success is None:
        return result
    correct = [(len(rewards), int(succeeds(rewards, success).sum())) for rewards in groups]
    result["accuracy"] = _share([c / n for n, c in correct], level)
    for k in ks:
        rates = [pass_at_k(n, c, k) for n, c in correct if n >= k]
        if not rates:
            raise UserError(f"pass@{k} needs {k} samples of a task: draw more samples, or ask for a smaller k")
        result[f"pass@{k}"] = _share(rates, level)
    return result


def differences(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], success: float | None = 1.0, level: float = LEVEL
) -> dict[str, dict[str, Any]]:
    """Of the same tasks, the valid rewards of two checkpoints: the first minus the second, in reward and in accuracy."""
    first, second = ([np.asarray(pair[side], dtype=np.float64) for pair in pairs] for side in (0, 1))
    found = {"reward": _difference(first, second, level, _has_binary_rewards([*first, *second]))}
    if success is not None:
        own, theirs = ([succeeds(rewards, success) for rewards in side] for side in (first, second))
        found["accuracy"] = _difference(own, theirs, level, share=True)
    return found


def _difference(first: list[Any], second: list[Any], level: float, share: bool) -> dict[str, Any]:
    a, b = ([float(np.mean(rewards)) for rewards in side] for side in (first, second))
    return stated(float(np.mean(a)) - float(np.mean(b)), paired_interval(a, b, level, share=share), tasks=len(a))


def _has_binary_rewards(groups: Sequence[Any]) -> bool:
    """Whether rewards say nothing but right and wrong: then their mean is a share."""
    return all(bool(np.isin(rewards, (0.0, 1.0)).all()) for rewards in groups)


def _share(rates: list[float], level: float) -> dict[str, Any]:
    return stated(float(np.mean(rates)), share_interval(rates, level=level), tasks=len(rates))
