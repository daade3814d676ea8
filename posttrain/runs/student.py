"""The interval of a mean of a few independent values, such as those of several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def student_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of a few independent values, assumed normal: (low, high); (nan, nan) of fewer than two."""
    if len(values) < 2:
        return math.nan, math.nan
    half = student_quantile((1 + level) / 2, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return mean - half, mean + half


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile, above the median, of Student's distribution, by bisection of its distribution function.

    With t = sqrt(freedom) tan(angle) the density becomes cos(angle)^(freedom - 1), which is smooth on a finite range.
    """
    angle = np.linspace(0.0, math.pi / 2, 20001)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp((probability - 0.5) * 2 * mass[-1], mass, angle)))
