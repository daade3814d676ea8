"""Sums of gradients over processes, in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from posttrain.core.protocols import World

BUCKET = 1 << 26
"""Bytes of gradients that are summed at once. Meanwhile a process holds two copies of them."""


def sum_gradients(world: World, parameters: Sequence[nn.Parameter], *others: Tensor) -> None:
    """Sum the gradients of parameters over a world, in place, and `others`, which are contiguous. A missing gradient is 0.

    All processes call this with parameters of the same sizes in the same order, which alone decide the order of additions.
    """
    gradients = []
    for parameter in parameters:
        own = torch.zeros_like(parameter, dtype=parameter.grad_dtype) if parameter.grad is None else parameter.grad
        parameter.grad = own.contiguous()
        gradients.append(parameter.grad)
    for bucket in _buckets([*gradients, *others]):
        _sum_bucket(world, bucket)


def _sum_bucket(world: World, pieces: list[Tensor]) -> None:
    found = world.sum(torch.cat(pieces)).split([len(piece) for piece in pieces])
    for piece, total in zip(pieces, found, strict=True):
        piece.copy_(total)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield views [n] of the numbers of tensors, in order, at most `BUCKET` bytes at a time."""
    bucket: list[Tensor] = []
    room = BUCKET
    for tensor in tensors:
        rest = tensor.detach().view(-1)
        while len(rest):
            count = min(len(rest), max(1, room // rest.itemsize))
            bucket.append(rest[:count])
            rest, room = rest[count:], room - count * rest.itemsize
            if room < tensor.itemsize:
                yield bucket
                bucket, room = [], BUCKET
    if bucket:
        yield bucket
