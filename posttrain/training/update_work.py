"""The work of a step's updates: the sizes that their arithmetic depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.batch import Layout, Packed


@dataclass(frozen=True)
class UpdateWork:
    """Sizes of the micro-batches of a step's updates."""

    fed: int = 0  # tokens
    scored: int = 0  # of these, tokens whose probability is learned
    pairs: int = 0  # see `attended_pairs`

    def adding(self, batches: Sequence[Packed]) -> UpdateWork:
        """Return the work with that of an update's micro-batches."""
        layouts = [batch.layout for batch in batches]
        return UpdateWork(
            self.fed + sum(layout.tokens.numel() for layout in layouts),
            self.scored + sum(batch.target.numel() for batch in batches),
            self.pairs + sum(attended_pairs(layout) for layout in layouts),
        )


def attended_pairs(layout: Layout) -> int:
    """Return the number of pairs (token, token that it sees), itself included."""
    before: list[int] = []  # tokens that a segment continues
    for prefix in layout.prefix:
        before.append(before[prefix] + layout.length[prefix] if prefix >= 0 else 0)
    return sum(n * own + n * (n + 1) // 2 for n, own in zip(layout.length, before, strict=True))
