"""The k highest of many scores. Equal scores are ordered by index."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]


def best(scores: Floats, k: int, places: Integers | None = None) -> Integers:
    """Return the indices of the `k` highest scores, the highest first, equal ones by index. So the best three are the
    first three of the best ten.

    `places`: candidates, ascending; None: all.
    """
    values = scores if places is None else scores[places]
    if k < len(values):
        bound = np.partition(values, len(values) - k)[len(values) - k]
        kept = np.flatnonzero(values >= bound)
        values, places = values[kept], kept if places is None else places[kept]
    order = np.argsort(-values, kind="stable")[:k]
    return order if places is None else places[order]
