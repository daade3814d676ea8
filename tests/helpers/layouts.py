"""Numbers and layouts for tests of attention and of the products around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.batch import Layout

DEPTH = 5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def segments(*lengths: tuple[int, int]) -> Layout:
    """A layout of segments, each of a length behind a prefix (its number, or -1)."""
    total = sum(length for length, _ in lengths)
    start = [sum(length for length, _ in lengths[:number]) for number in range(len(lengths))]
    zeros = torch.zeros(total, dtype=torch.int64)
    return Layout(zeros, zeros, tuple(start), *(tuple(column) for column in zip(*lengths, strict=True)))


@st.composite
def trees(draw: st.DrawFn, longest: int = 40) -> Layout:
    """A forest of segments up to 5 deep, in any order: a segment may lie before the one that it continues."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=14))
    parents, depths = [-1], [1]
    for k in range(1, len(lengths)):
        parents.append(draw(st.sampled_from([-1, *(p for p in range(k) if depths[p] < DEPTH)])))
        depths.append(1 if parents[k] < 0 else depths[parents[k]] + 1)
    order = draw(st.permutations(range(len(lengths))))
    place = {k: number for number, k in enumerate(order)} | {-1: -1}
    return laid([lengths[k] for k in order], [place[parents[k]] for k in order])


def laid(length: Sequence[int], prefix: Sequence[int]) -> Layout:
    """With tokens at random and positions that go on from the parent's."""
    start = [sum(length[:k]) for k in range(len(length))]
    position = [torch.arange(n) + sum(length[a] for a in ancestors(prefix, k)) for k, n in enumerate(length)]
    tokens = torch.randint(3, 40, (sum(length),), generator=torch.Generator().manual_seed(sum(length)))
    return Layout(tokens, torch.cat(position), tuple(start), tuple(length), tuple(prefix))


def ancestors(prefix: Sequence[int], k: int) -> list[int]:
    """The root's first."""
    return [] if prefix[k] < 0 else [*ancestors(prefix, prefix[k]), prefix[k]]


def transcripts(layout: Layout) -> list[Tensor]:
    """Of every path from a root to a leaf, where its tokens lie: int64 [L]."""
    leaves = set(range(len(layout.length))) - set(layout.prefix)
    return [
        torch.cat([torch.arange(layout.length[s]) + layout.start[s] for s in (*ancestors(layout.prefix, k), k)])
        for k in sorted(leaves)
    ]
