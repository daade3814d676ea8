"""Optimal transport between two sets of scores of an optimizer batch, so that their distributions are compared.

C    comparisons of an optimizer batch    V    its labels    P    pieces of the transport    k    a quantile
u    lp of the better less that of the worse response    v    the same of the reference    s    score of a response
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from posttrain.core.component import Component


@dataclass(frozen=True)
class OptimalTransport(Component):
    """Aligns whole distributions: the k-th smallest score is compared with the k-th smallest of the other side (AOT).

    One distribution is made to dominate the other at every quantile; the compared numbers may come from different rows
    (arXiv 2406.05882). Both sides are sorted over the whole optimizer batch, before each update; pieces of unequal weight
    are split. Every link of a score difference can be the cost.

    paired      the margins u of the policy against the margins v of the reference (section 3, paired).
    unpaired    the scores of good responses against those of bad ones, of any prompts; their numbers may differ (section 3,
                unpaired). It reads labels of single responses, or comparisons.
    """

    data: Literal["paired", "unpaired"] = "paired"
    source = "AOT, arXiv 2406.05882, section 3"

    @property
    def formula(self) -> str:
        if self.data == "paired":
            return "s_w - s_l = u_(k) - v_(k), u = lp_w - lp_l, v = ref_w - ref_l, each sorted over the optimizer batch"
        return "s_w = k-th smallest score of good responses, s_l = k-th of bad ones, over the optimizer batch"


class Move(NamedTuple):
    """A piece of a transport: this much weight goes from a place of the one side to a place of the other."""

    first: int
    second: int
    weight: float


def monotone(
    first: Sequence[float], share: Sequence[float], second: Sequence[float], other: Sequence[float]
) -> list[Move]:
    """Return the transport between weighted numbers that keeps their order: optimal in one dimension for a convex cost.

    `share`, `other`: weights of `first` and of `second`; each side's are scaled to add up to 1. With equal numbers of
    equal weights it pairs the k-th smallest of both. Empty if either side is.
    """
    ours, theirs = (_by_size(values, weights) for values, weights in ((first, share), (second, other)))
    found: list[Move] = []
    i = j = 0
    below = 0.0
    while i < len(ours) and j < len(theirs):
        (a, until), (b, to) = ours[i], theirs[j]
        end = min(until, to)
        if end > below:
            found.append(Move(a, b, end - below))
        # sums of equal weights in another order differ by rounding, which is no piece of its own
        i, j = i + (until <= to + ROUNDING), j + (to <= until + ROUNDING)
        below = end
    return found


ROUNDING = 1e-12


def _by_size(values: Sequence[float], weights: Sequence[float]) -> list[tuple[int, float]]:
    """Return (place, share of the weight up to it and with it), in ascending order of the values."""
    total, up_to, found = sum(weights), 0.0, []
    for place in sorted(range(len(values)), key=values.__getitem__):
        up_to += weights[place]
        found.append((place, up_to / total))
    return found
