"""An optimizer's step in chunks of the weights, for optimizers that have more memory for some weights at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

CHUNK = 1 << 28
"""Bytes of the weights, as float32, that are updated at once."""


def gradients_in_chunks(groups: Sequence[Mapping[str, Any]], in_chunks: bool = True) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that have a gradient, chunk by chunk; meanwhile only those of the chunk have it.

    An optimizer that updates each weight by its own gradient and state alone gives the same bits as in one step.
    `in_chunks` False: all at once.
    """
    gradients: dict[nn.Parameter, Tensor] = {p: p.grad for g in groups for p in g["params"] if p.grad is not None}
    for parameter in gradients:
        parameter.grad = None
    for chunk in _chunks(list(gradients), in_chunks):
        for parameter in chunk:
            parameter.grad = gradients[parameter]
        yield chunk
        for parameter in chunk:
            parameter.grad = None
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def wide_bytes(parameter: Tensor) -> int:
    """Return the bytes of a tensor of this shape in float32, or in the parameter's type if that is wider."""
    return parameter.numel() * max(4, parameter.itemsize)


def _chunks(parameters: Sequence[nn.Parameter], in_chunks: bool) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    for parameter in parameters:
        if chunk and in_chunks and sum(map(wide_bytes, [*chunk, parameter])) > CHUNK:
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk
