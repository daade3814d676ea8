"""Every interval of the project: one rule for shares, means, differences and seeds.

It decides that tasks (or prompts, whose replies are not independent) are the units. Each counts once, however many samples
it has, and the spread is estimated from the differences between tasks.

    shares          Wilson's score interval; where tasks have several samples, with the effective number of tasks
    means           Student's t; on the score scale where all values are within [0, 1] or [-1, 1], so that it ends there
    paired shares   Tango's score interval, which includes 0 wherever the exact test of McNemar does not reject it
    other pairs     as means, and 0 is included wherever a test that flips signs does not reject it
    seeds           Student's t; several of them together by Holm's correction

No interval has width 0. Below `FEWEST` tasks, or where their spread is unknown, there is none, and `why` gives the
reason. How often they cover the truth: docs/results/intervals.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, nan, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Totals = tuple[ArrayLike, ArrayLike]
"""[n] and [n]: for each unit, the sum of its values and their number."""

Scale = tuple[float, float]
"""The least possible value, and the width of the range of values."""

SHARES: Scale = (0.0, 1.0)
DIFFERENCES: Scale = (-1.0, 2.0)  # the scale of a difference of two shares
LEVEL = 0.95
FEWEST = 6
"""Fewest tasks for an interval: of fewer pairs, not even five wins to none are significant at 5% (2 / 2^5)."""

ENUMERATED = 16  # most differences of which all combinations of signs are tried; of more, the test is the normal one


@dataclass(frozen=True)
class Interval:
    """The two ends, or (nan, nan) with the reason why there is no interval. `low, high = interval` unpacks it."""

    low: float = nan
    high: float = nan
    why: str = ""

    def __iter__(self) -> Iterator[float]:
        return iter((self.low, self.high))

    def text(self, form: str = ".3f") -> str:
        """ "[0.120, 0.340]", or the reason in parentheses."""
        return f"({self.why})" if self.why else f"[{self.low:{form}}, {self.high:{form}}]"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data: the ends, None without an interval, and `why`."""
        return {"low": None, "high": None, "why": self.why} if self.why else {"low": self.low, "high": self.high}

    def holding(self, value: float) -> Interval:
        """Return the interval, extended where necessary to contain the value."""
        return self if self.why else Interval(min(self.low, value), max(self.high, value))


# -- shares and means --------------------------------------------------------------------------------------------------


def wilson_interval(successes: float, n: float, level: float = LEVEL, quantile: float | None = None) -> Interval:
    """Wilson's score interval of a share (J. Am. Stat. Assoc. 22:209, 1927). `n` may be an effective number.

    `quantile`: in place of the normal one, where `n` is estimated.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes of {n} are no share")
    z = NormalDist().inv_cdf((1 + level) / 2) if quantile is None else quantile
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # the ends are exact where rounding would leave 1e-17
    return Interval(centre - half if successes else 0.0, centre + half if successes < n else 1.0)


def shares_apart_interval(first: float, second: float, n: float, level: float = LEVEL) -> Interval:
    """Return the interval of the first share minus the second, each of `n` independent tasks.

    Newcombe's hybrid score interval (Statistics in Medicine 17:873, 1998, method 10) from Wilson's of both shares. It
    needs no result of single tasks; `paired_interval` is narrower where there are some.
    """
    one, other = (wilson_interval(min(max(share, 0.0), 1.0) * n, n, level) for share in (first, second))
    low = sqrt((first - one.low) ** 2 + (other.high - second) ** 2)
    high = sqrt((one.high - first) ** 2 + (second - other.low) ** 2)
    return Interval(first - second - low, first - second + high)


def shares_fell(first: float, second: float, n: float) -> bool:
    """Return whether the second share, of `n` tasks as the first, is lower by more than chance."""
    return first > second and n > 0 and shares_apart_interval(first, second, n).low > 0


def share_interval(sums: ArrayLike, counts: ArrayLike = 1.0, level: float = LEVEL, of: str = "tasks") -> Interval:
    """Return the interval of a share. `sums`: for each task (or the unit that `of` names) the sum of its right samples;
    `counts`: their number.

    With a count of 1, `sums` may be the shares of right samples: every task then counts once. Where each task is all
    right or all wrong, the interval is Wilson's. Otherwise Wilson's interval is computed with an effective number of
    tasks, p (1 - p) / variance (as for clustered surveys: Korn and Graubard 1998; Dean and Pagano 2015), and Student's
    quantile. The variance is that between the tasks and one additional task, which is all right or all wrong: otherwise
    a few tasks with the same result by chance would seem certain.
    """
    return _ratio(sums, counts, level, of, SHARES, share=True)


def mean_interval(values: ArrayLike, level: float = LEVEL, of: str = "tasks") -> Interval:
    """Return the interval of a mean of one value per task, such as its mean reward; of a share if all values are 0 or
    1.
    """
    own = np.asarray(values, dtype=np.float64)
    scales = (scale for scale in (SHARES, DIFFERENCES) if _within(own, scale))
    return _ratio(own, 1.0, level, of, next(scales, None))


def ratio_interval(sums: ArrayLike, counts: ArrayLike, level: float = LEVEL, of: str = "tasks") -> Interval:
    """Return the interval of sum / count for values that are not shares. Tasks are independent; values of one task are
    not.
    """
    return _ratio(sums, counts, level, of, None)


def _ratio(
    sums: ArrayLike, counts: ArrayLike, level: float, of: str, scale: Scale | None, share: bool = False
) -> Interval:
    values, sizes = _arrays(sums, counts)
    if len(values) < FEWEST:
        return _too_few(len(values), of)
    number, total = len(values), float(sizes.sum())
    mean = float(values.sum()) / total
    each = values / sizes
    error = values - mean * sizes
    quantile = student_quantile((1 + level) / 2, number - 1)
    if scale is None:
        if float(each.min()) == float(each.max()):
            return _alike(each, of)
        half = quantile * sqrt(number / (number - 1) * float(error @ error)) / total
        return Interval(mean - half, mean + half)
    least, width = scale
    rate = min(max((mean - least) / width, 0.0), 1.0)
    spread = rate * (1 - rate)
    if bool(np.isin(each, (least, least + width)).all()) and float(sizes.min()) == float(sizes.max()):
        found = wilson_interval(rate * number, number, level)
    else:
        if not spread:
            size = total * total / float(sizes @ sizes)
        else:
            squares = float(error @ error) / width**2
            squares = squares + spread * (total / number) ** 2 if share else squares * number / (number - 1)
            if squares <= 1e-24 * total * total:
                return _alike(each, of)
            size = spread * total * total / squares
        found = wilson_interval(rate * size, size, level, quantile)
    return Interval(least + width * found.low, least + width * found.high)


def _within(values: Floats, scale: Scale) -> bool:
    return bool(((values >= scale[0]) & (values <= sum(scale))).all())


# -- differences -------------------------------------------------------------------------------------------------------


def paired_interval(
    first: ArrayLike, second: ArrayLike, level: float = LEVEL, of: str = "tasks", share: bool = False
) -> Interval:
    """Return the interval of mean(first - second) over the same tasks. `share`: both are shares of a task's samples.

    It is much narrower than separate intervals of the two: the difficulty of a task cancels. If every value is 0 or 1,
    it excludes 0 exactly if McNemar's exact test rejects 0. Otherwise it excludes 0 only if a test that flips signs
    rejects 0 too, so that four wins to no loss are no proof however many ties there are.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"a pair needs the same tasks on both sides, not {len(a)} and {len(b)}")
    difference = a - b
    if len(difference) < FEWEST:
        return _too_few(len(difference), of)
    both = np.concatenate([a, b])
    if bool(np.isin(both, (0.0, 1.0)).all()):
        won, lost = int((difference > 0).sum()), int((difference < 0).sum())
        found = tango_interval(won, lost, len(difference), level)
    else:
        scale = DIFFERENCES if _within(both, SHARES) else None
        found = _ratio(difference, 1.0, level, of, scale, share)
    return found if sign_test(difference) < 1 - level else found.holding(0.0)


def sign_test(difference: ArrayLike) -> float:
    """Return the two-sided p of the mean of paired differences, if each were equally likely to have the other sign.

    For differences of equal size, and so for pairs of 0 and 1, it is McNemar's exact test. For up to `ENUMERATED` other
    differences, all signs are tried; for more, their sum is assumed normal. Differences of 0 have no effect.
    """
    sizes = np.asarray(difference, dtype=np.float64)
    sizes = sizes[sizes != 0]
    number, total = len(sizes), abs(float(sizes.sum()))
    if not number:
        return 1.0
    size = np.abs(sizes)
    if float(size.max() - size.min()) <= 1e-9 * float(size.max()):
        rarer = min(int((sizes > 0).sum()), int((sizes < 0).sum()))
        return min(1.0, 2 * binomial_tail(rarer, number))
    if number <= ENUMERATED:
        signs = (np.arange(2**number)[:, None] >> np.arange(number) & 1) * 2.0 - 1.0
        return float((np.abs(signs @ sizes) >= total * (1 - 1e-9)).mean())
    return 2 * (1 - NormalDist().cdf(total / float(np.sqrt(sizes @ sizes))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p of several tests, adjusted so that the chance of any false rejection among them stays below the level.

    Holm's step-down method (Scandinavian Journal of Statistics 6:65, 1979): the k-th smallest of n is multiplied by
    n - k + 1, and none is below a smaller one. It assumes nothing about how the tests depend on each other.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def binomial_tail(successes: int, n: int) -> float:
    """Return P(X <= successes) for X binomial of n and 1/2, computed in integers."""
    ways = total = 1
    for k in range(successes):
        ways = ways * (n - k) // (k + 1)  # math.comb(n, k) for each k takes hundreds of times as long
        total += ways
    return total / 2**n


def tango_interval(won: int, lost: int, n: int, level: float = LEVEL) -> Interval:
    """Tango's score interval of (won - lost) / n for n pairs of 0 and 1 (Statistics in Medicine 17:891, 1998).

    It holds all differences that the score test does not reject; at 0 that test is McNemar's.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)

    def score(difference: float) -> float:
        # q: the share of lost pairs with the highest likelihood under this difference
        a, c = 2 * n, -lost * difference * (1 - difference)
        b = (2 * n - won + lost) * difference - won - lost
        q = (sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        variance = n * (2 * q + difference * (1 - difference))
        distance = won - lost - n * difference
        return distance / sqrt(variance) if variance > 0 else math.copysign(inf, distance) if distance else 0.0

    mean = (won - lost) / n
    low = _crossing(lambda difference: score(difference) - z, -1.0, mean)
    high = _crossing(lambda difference: score(difference) + z, mean, 1.0)
    return Interval(low, high)


def _crossing(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a falling function, or the end of the range if it is outside."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def change_interval(
    first: Totals, second: Totals, level: float = LEVEL, of: str = "prompts", share: bool = False
) -> Interval:
    """Return the interval of the first ratio minus the second. Both have the same units in the same order; a unit may
    be absent from one.

    Each ratio has its own interval. Their distances are combined as by Newcombe for shares, and as by Zou and Donner
    (Statistics in Medicine 27:1693, 2008) for everything else, with the correlation between the two over units.
    """
    own, others = ([np.asarray(part, dtype=np.float64) for part in side] for side in (first, second))
    scale = SHARES if share else None
    one, other = (_ratio(side[0], side[1], level, of, scale, share) for side in (own, others))
    if one.why or other.why:
        return Interval(why=one.why or other.why)
    means = [float(side[0].sum() / side[1].sum()) for side in (own, others)]
    errors = [side[0] - mean * side[1] for side, mean in zip((own, others), means, strict=True)]
    size = sqrt(float(errors[0] @ errors[0]) * float(errors[1] @ errors[1]))
    together = float(errors[0] @ errors[1]) / size if size else 0.0

    def reach(a: float, b: float) -> float:
        return sqrt(max(0.0, a * a - 2 * together * a * b + b * b))

    difference = means[0] - means[1]
    low = difference - reach(means[0] - one.low, other.high - means[1])
    high = difference + reach(one.high - means[0], means[1] - other.low)
    if high - low <= 1e-6 * (one.high - one.low + other.high - other.low):  # the square root of a rounding error
        return Interval(why=f"no interval: the change is the same for all {of}")
    return Interval(low, high)


# -- correlations ------------------------------------------------------------------------------------------------------


def correlation_interval(
    sums: Floats, figure: Callable[[Floats], Floats], level: float = LEVEL, of: str = "prompts"
) -> Interval:
    """Return the interval of a correlation of sums by the jackknife over units, on Fisher's scale (atanh).

    `sums`: [n, m], one row per unit; `figure`: [r, m] sums -> [r] correlations, nan where there is none.
    """
    number = int((sums != 0).any(axis=1).sum())
    if number < FEWEST:
        return _too_few(number, of)
    total = sums.sum(axis=0, keepdims=True)
    with np.errstate(divide="ignore"):
        whole, without = np.arctanh(figure(total)), np.arctanh(figure(total - sums))
    if not np.isfinite(whole).all():
        return Interval(why="no interval: the correlation is exact, or there is none")
    if not np.isfinite(without).all():
        return Interval(why=f"no interval: without one of the {of} there is no correlation, or an exact one")
    spread = float(((without - without.mean()) ** 2).sum()) * (number - 1) / number
    if spread <= 1e-24:
        return Interval(why=f"no interval: it is the same without any of the {of}")
    half = student_quantile((1 + level) / 2, number - 1) * sqrt(spread)
    return Interval(math.tanh(float(whole[0]) - half), math.tanh(float(whole[0]) + half))


# -- seeds -------------------------------------------------------------------------------------------------------------


def student_interval(values: ArrayLike, level: float = LEVEL, of: str = "seeds") -> Interval:
    """Return the interval of the mean of a few independent values that are assumed normal, such as those of several
    seeds.
    """
    own = np.asarray(values, dtype=np.float64)
    if len(own) < 2:
        return Interval(why=f"{len(own)} of at least 2 {of}")
    if float(own.min()) == float(own.max()):
        return Interval(why=f"the same in all {len(own)} {of}")
    half = student_quantile((1 + level) / 2, len(own) - 1) * float(np.std(own, ddof=1)) / sqrt(len(own))
    mean = float(np.mean(own))
    return Interval(mean - half, mean + half)


@lru_cache(maxsize=4096)
def student_quantile(probability: float, freedom: int) -> float:
    """Return a quantile above the median of Student's distribution, by the inverse of its distribution function.

    With t = sqrt(freedom) tan(angle) the density becomes cos(angle)^(freedom - 1), which is smooth on a finite range.
    Beyond 10,000 degrees of freedom it equals the normal one to 1e-4.
    """
    if freedom > 10_000:
        return NormalDist().inv_cdf(probability)
    angle, mass = _student_mass(freedom)
    return sqrt(freedom) * math.tan(float(np.interp((probability - 0.5) * 2 * mass[-1], mass, angle)))


def student_test(distance: float, freedom: int) -> float:
    """Return the two-sided p of a mean that is `distance` standard errors away from a value, by Student's distribution.

    It is below 1 - level exactly if `student_interval` excludes the value.
    """
    if not freedom or freedom > 10_000:
        return 2 * (1 - NormalDist().cdf(abs(distance)))
    angle, mass = _student_mass(freedom)
    return float(1 - np.interp(math.atan(abs(distance) / sqrt(freedom)), angle, mass) / mass[-1])


def _student_mass(freedom: int) -> tuple[Floats, Floats]:
    """Return angles from 0 to pi / 2, and the mass of Student's distribution up to each, see `student_quantile`."""
    angle = np.linspace(0.0, math.pi / 2, 20001)
    density = np.cos(angle) ** (freedom - 1)
    return angle, np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])


def _arrays(sums: ArrayLike, counts: ArrayLike) -> tuple[Floats, Floats]:
    """Return sums and counts [n], without counts of 0. Raises ValueError if none are left."""
    values = np.asarray(sums, dtype=np.float64)
    sizes = np.broadcast_to(np.asarray(counts, dtype=np.float64), values.shape)
    if values.ndim != 1:
        raise ValueError("an interval needs one figure for each task")
    return values[sizes > 0], sizes[sizes > 0]


def _too_few(number: int, of: str) -> Interval:
    return Interval(why=f"too few {of} for an interval: {number}, and it takes {FEWEST}")


def _alike(each: Floats, of: str) -> Interval:
    return Interval(why=f"no interval: all {len(each)} {of} are at {float(each[0]):.4g}")


def stated(mean: float, interval: Interval, **more: Any) -> dict[str, Any]:
    """Return a figure as JSON data: mean, low, high, and why there are none."""
    return {"mean": mean, **interval.as_dict(), **more}


def told(figure: dict[str, Any], form: str = ".3f") -> str:
    """Return a stated figure as text."""
    interval = Interval(why=figure["why"]) if figure.get("why") else Interval(figure["low"], figure["high"])
    return f"{figure['mean']:{form}} {interval.text(form)}"
