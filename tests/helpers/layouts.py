"""Numbers and layouts for tests of attention and of the products around it."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.batch import Layout


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def segments(*lengths: tuple[int, int]) -> Layout:
    """A layout of segments, each of a length behind a prefix (its number, or -1)."""
    total = sum(length for length, _ in lengths)
    start = [sum(length for length, _ in lengths[:number]) for number in range(len(lengths))]
    zeros = torch.zeros(total, dtype=torch.int64)
    return Layout(zeros, zeros, tuple(start), *(tuple(column) for column in zip(*lengths, strict=True)))
