"""Choice of the rollouts whose token values are recorded, and splitting of recorded columns.

n_i    scored tokens of rollout i
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from posttrain.core.seeds import seed_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GROUPS = 8
"""Number of groups of a step that are recorded with the level "sample"."""


@dataclass(frozen=True)
class TokenRecording:
    """Options of the recording of token values."""

    level: Literal["full", "sample", "tokens"] = "sample"
    after: bool = False  # whether to record log-probabilities under the weights at the step's end, too
    seed: int = 0

    def chosen(self, number: int, groups: Iterable[str]) -> frozenset[str]:
        """Return the groups of step `number` whose token values are recorded, drawn by the seed, not by their order."""
        if self.level == "tokens":
            return frozenset()
        named = set(groups)
        if self.level == "full":
            return frozenset(named)
        return frozenset(sorted(named, key=lambda group: (seed_of(self.seed, "record", number, group), group))[:GROUPS])

    def describe(self, wants: frozenset[str], reference: bool) -> list[str]:
        """Describe work beyond the algorithm's own.

        `wants`: outputs that its loss reads; `reference`: whether it has one.
        """
        found = []
        if self.level == "full":
            found += [] if "entropy" in wants else ["the entropy of every token, which the loss does not read"]
            found += [] if reference else ["no reference (the algorithm has none; its column stays empty)"]
        if self.after:
            found.append(
                "a forward pass a step for --record-after" + (f" ({GROUPS} groups)" * (self.level == "sample"))
            )
        return [f"recorded besides: {'; '.join(found)}"] if found else []


SAMPLE = TokenRecording()


def on_cpu(columns: Sequence[Tensor]) -> list[NDArray[np.float32]]:
    """Copy values, [n_i] each, to the CPU in one transfer."""
    if not columns:
        return []
    whole: Any = torch.cat([values.detach() for values in columns]).float().cpu().numpy()
    ends = accumulate((values.numel() for values in columns), initial=0)
    return [whole[first:last] for first, last in pairwise(ends)]
