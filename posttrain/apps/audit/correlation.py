"""Correlations and changes of means, with intervals over prompts, as replies to one prompt are not independent."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.core.intervals import Interval, change_interval, correlation_interval

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval; nan where it is unknown."""

    value: float
    low: float = nan
    high: float = nan
    why: str = ""  # reason for a missing interval

    @staticmethod
    def of(value: float, interval: Interval) -> Estimate:
        return Estimate(value, interval.low, interval.high, interval.why)

    def __str__(self) -> str:
        if not isfinite(self.value):
            return "-"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]" if isfinite(self.low) else f"{self.value:.2f} *"

    def as_dict(self) -> dict[str, Any]:
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        shown = {name: number if isfinite(number) else None for name, number in numbers.items()}
        return {**shown, "why": self.why} if self.why else shown


def ranks(x: Floats) -> Floats:
    """Return ranks from 1 on, [n]; equal values share their mean rank."""
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return ((2 * last - count + 1) / 2)[place]


def correlation(x: Floats, y: Floats, prompt: Integers) -> Estimate:
    """Return Pearson's correlation with its interval over prompts.

    `prompt`: [n], each reply's prompt number, from 0 on.
    """
    sums = _sums(x, y, prompt)
    value = float(_correlated(sums.sum(0, keepdims=True))[0])
    return Estimate.of(value, correlation_interval(sums, _correlated)) if isfinite(value) else Estimate(nan)


def rank_correlation(x: Floats, y: Floats, prompt: Integers) -> Estimate:
    """Return Spearman's correlation. The interval leaves prompts out without recomputing the ranks of the others."""
    return correlation(ranks(x), ranks(y), prompt)


def centred(x: Floats, cell: Integers) -> Floats:
    """Return x minus the mean of its cell, [n]: differences between replies to one prompt in one step. `cell`: [n]."""
    count = np.bincount(cell)
    centre = np.bincount(cell, weights=x) / np.maximum(count, 1)
    out: Floats = x - centre[cell]
    out[np.abs(out) < 1e-12 * max(1.0, float(np.abs(x).max(initial=0.0)))] = 0.0  # rounding is no difference
    return out


def change(x: Floats, late: NDArray[np.bool_], prompt: Integers) -> Estimate:
    """Return the mean of x where `late` minus its mean elsewhere, with an interval over prompts; nan if either is
    empty.
    """
    if late.all() or not late.any():
        return Estimate(nan)
    size = int(prompt.max()) + 1

    def totals(side: NDArray[np.bool_]) -> tuple[Any, Any]:
        of_side = prompt[side]
        return np.bincount(of_side, weights=x[side], minlength=size), np.bincount(of_side, minlength=size)

    interval = change_interval(totals(late), totals(~late), share=bool(np.isin(x, (0.0, 1.0)).all()))
    return Estimate.of(float(x[late].mean() - x[~late].mean()), interval)


def _sums(x: Floats, y: Floats, prompt: Integers) -> Floats:
    """Return [prompts, 6]: count and sums of x, y, xx, yy, xy.

    Both are standardised first, which changes no correlation.
    """
    x, y = _standard(x), _standard(y)
    columns = (np.ones(len(x)), x, y, x * x, y * y, x * y)
    return np.stack([np.bincount(prompt, weights=column) for column in columns], axis=1)


def _standard(x: Floats) -> Floats:
    if not len(x):
        return x
    moved = x - x.mean()
    spread = sqrt(float(np.mean(moved * moved)))
    constant = float(x.max()) == float(x.min())
    return np.zeros_like(x) if constant else moved / spread


def _correlated(totals: Floats) -> Floats:
    """Return the correlations [r] of rows of sums [r, 6]."""
    n, x, y, xx, yy, xy = totals.T
    with np.errstate(invalid="ignore", divide="ignore"):
        of_x, of_y = xx - x * x / n, yy - y * y / n
        found = (xy - x * y / n) / np.sqrt(of_x * of_y)
    found[(of_x <= 1e-12 * n) | (of_y <= 1e-12 * n)] = nan
    clipped: Floats = np.clip(found, -1.0, 1.0)
    return clipped
