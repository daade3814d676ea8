"""How an evaluation turns samples into figures with their uncertainty.

It decides that the task is the unit: every task counts once however many samples it has, and intervals resample tasks,
because the samples of one task are not independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb, nan, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.core.types import UserError, succeeds

Interval = tuple[float, float]
Floats = NDArray[np.float64]


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


def bootstrap_interval(
    values_per_task: Sequence[float], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of the mean over tasks: (low, high).

    `values_per_task` holds one figure for each task, such as its mean reward. One task says nothing of the spread
    between tasks: the interval is then (nan, nan). ValueError without tasks.
    """
    values = np.asarray(values_per_task, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError("an interval needs one figure for each task, and at least one task")
    if len(values) == 1:
        return nan, nan
    generator = np.random.default_rng(seed)
    block = max(1, 2**20 // len(values))  # resamples at a time: bounds the memory, whatever the number of tasks
    means = [
        values[generator.integers(len(values), size=(min(block, resamples - done), len(values)))].mean(axis=1)
        for done in range(0, resamples, block)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_interval(
    a: Sequence[float], b: Sequence[float], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Bootstrap interval of mean(a - b), where a[i] and b[i] are two models' figures on the same task i.

    Much narrower than the intervals of a and b apart: what makes a task hard for both cancels.
    """
    if len(a) != len(b):
        raise ValueError(f"a pair needs the same tasks on both sides, not {len(a)} and {len(b)}")
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    return bootstrap_interval(difference.tolist(), level, resamples, seed)


def clustered_interval(
    totals: Floats, figure: Callable[[Floats], Floats], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of a figure of sums where whole prompts are drawn: what belongs to one is not independent.

    `totals`: [prompts, m], sums over what belongs to each; `figure`: [r, m] sums over resamples -> [r], nan where it is
    not defined. (nan, nan) for one prompt, and where it is defined for less than half of the resamples.
    """
    prompts = len(totals)
    if prompts < 2:
        return nan, nan
    generator = np.random.default_rng(seed)
    block = max(1, 2**22 // prompts)  # resamples at a time: bounds the memory
    even = np.full(prompts, 1 / prompts)
    found = np.concatenate(
        [
            figure(generator.multinomial(prompts, even, size=min(block, resamples - done)) @ totals)
            for done in range(0, resamples, block)
        ]
    )
    found = found[np.isfinite(found)]
    if len(found) < resamples / 2:
        return nan, nan
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def ratio_interval(sums: Sequence[float], counts: Sequence[float]) -> Interval:
    """Interval of sum / count, such as the share of comparisons that were won. `sums`, `counts`: one for each prompt."""

    def ratio(totals: Floats) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Floats = totals[:, 0] / totals[:, 1]
        return found

    return clustered_interval(np.array([sums, counts], dtype=np.float64).T, ratio)


def wilson_interval(successes: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (J. Am. Stat. Assoc. 22:209, 1927).

    For the one case where resampling fails: when every task came out alike, resamples do not differ at all, yet 20
    successes in 20 tasks do not prove a success rate of 1.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes in {n} tasks is not a proportion")
    z = NormalDist().inv_cdf((1 + level) / 2)
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # The ends are exact where rounding would leave 1e-17.
    return (centre - half if successes else 0.0), (centre + half if successes < n else 1.0)


def summary(
    per_task_rewards: Sequence[Sequence[float]],
    ks: Sequence[int] = (),
    success: float | None = 1.0,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Any]:
    """The figures of an evaluation. `per_task_rewards` holds, for each task, the valid rewards of its samples.

    A sample is right if its reward is at least `success`; None: nothing says so, and there is only the reward. The result:

        {"tasks": 100, "samples": 800,
         "reward": {"mean": 0.52, "low": 0.44, "high": 0.60, "tasks": 100},
         "accuracy": {...}, "pass@4": {...}}

    Tasks without a valid sample are left out, and from pass@k those with fewer than k; "tasks" says how many remained.
    UserError if none did.
    """
    groups = [np.asarray(rewards, dtype=np.float64) for rewards in per_task_rewards if len(rewards)]
    if not groups:
        raise UserError(
            "no task has a valid reward: look at the reasons in the rollouts, the verifier failed every time"
        )
    result: dict[str, Any] = {"tasks": len(groups), "samples": sum(map(len, groups))}
    result["reward"] = _figure([float(rewards.mean()) for rewards in groups], bootstrap_interval, level, seed)
    if success is None:
        return result
    correct = [(len(rewards), int(succeeds(rewards, success).sum())) for rewards in groups]
    result["accuracy"] = _figure([c / n for n, c in correct], _rate_interval, level, seed)
    for k in ks:
        rates = [pass_at_k(n, c, k) for n, c in correct if n >= k]
        if not rates:
            raise UserError(f"pass@{k} needs {k} samples of a task: draw more samples, or ask for a smaller k")
        result[f"pass@{k}"] = _figure(rates, _rate_interval, level, seed)
    return result


def _figure(values: list[float], interval: Callable[..., Interval], level: float, seed: int) -> dict[str, float]:
    low, high = interval(values, level=level, seed=seed)
    return {"mean": float(np.mean(values)), "low": low, "high": high, "tasks": len(values)}


def _rate_interval(values: Sequence[float], level: float, seed: int) -> Interval:
    """Interval of the mean of rates in [0, 1]."""
    if min(values) == max(values) and values[0] in (0.0, 1.0):
        return wilson_interval(int(sum(values)), len(values), level)
    return bootstrap_interval(values, level, seed=seed)
