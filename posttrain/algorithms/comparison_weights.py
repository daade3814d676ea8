"""Weights of comparisons and labels in the loss. Only this module computes a denominator of comparisons.

A *unit* is an element of the loss: a comparison, or several that a link merges into one (`Link.units`). Weights are
functions of all preference examples of an optimizer batch, so they do not depend on the split into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.component import Component

Shares = Sequence[Sequence[float]]
"""Shares of the units of each preference example in an optimizer batch: their relative weights."""


class Denominator(Component):
    """Map from the shares of units to their weights in the loss, in the same shape. Weights add up to 1."""

    def __call__(self, shares: Shares) -> list[list[float]]:
        raise NotImplementedError


@dataclass(frozen=True)
class PerComparison(Denominator):
    """Gives every comparison the same weight, so prompts with many of them count more.

    a_c / sum of a over all comparisons of the optimizer batch, a_c the share of comparison c.
    """

    formula = "a_c / sum of a over the optimizer batch"
    source = "the mean over pairs: DPO, arXiv 2305.18290, eq. 7"

    def __call__(self, shares: Shares) -> list[list[float]]:
        total = math.fsum(share for item in shares for share in item)
        return [[share / total for share in item] for item in shares]


@dataclass(frozen=True)
class PerPrompt(Denominator):
    """Gives every prompt the same weight, however many of its responses were compared, so K-wise data do not overfit.

    a_c / (prompts x sum of a over the prompt's comparisons): 1 / (K choose 2) within each (InstructGPT, arXiv 2203.02155,
    eq. 1).
    """

    formula = "a_c / (prompts x sum of a over the prompt's comparisons)"
    source = "InstructGPT, arXiv 2203.02155, section 3.5 and eq. 1"

    def __call__(self, shares: Shares) -> list[list[float]]:
        prompts = sum(1 for item in shares if item)
        return [[share / (prompts * math.fsum(item)) for share in item] for item in shares]


DENOMINATORS: dict[str, Denominator] = {"comparison": PerComparison(), "prompt": PerPrompt()}
