"""Decides how products with weights are computed, and the gated activation between two of them.

T    tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW = 256  # rows up to which a weight is read faster turned round, as decoding does it over and over


class Linear(nn.Module):
    """x W^T + b. Comes uninitialised: torch's own layer would import the compiler (a second) just to be made on "meta"."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.turned = Turned()

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        if self.turned.pays(x):
            turned = self.turned.of(self.weight)
            return x @ turned if self.bias is None else torch.addmm(self.bias, x, turned)
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of a table, uninitialised."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size))

    def forward(self, index: Tensor) -> Tensor:
        return functional.embedding(index, self.weight)


class Turned:
    """A copy of a weight, turned round, for products of few rows on a processor: without it each call turns it again, and
    under autocast each batch of tokens narrows it again.

    It is used within `decoding` alone, whoever opens that forgets copies of weights that have changed (`forget`), and a
    change in place that a tensor's version shows is seen anyway.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._version = -1

    def pays(self, x: Tensor) -> bool:
        return _decoding is not None and x.shape[0] <= FEW and not x.is_cuda

    def of(self, weight: Tensor, at_least: torch.dtype | None = None) -> Tensor:
        """weight [outputs, inputs] as a contiguous [inputs, outputs], in the type of the decoding or one given."""
        if self._copy is None or self._version != weight._version:
            self._copy = weight.detach().t().contiguous().to(at_least or _decoding)
            self._version = weight._version
        return self._copy

    def forget(self) -> None:
        self._copy = None


_decoding: torch.dtype | None = None


@contextmanager
def decoding(dtype: torch.dtype) -> Iterator[None]:
    """Within it weights stand still and the same few rows go through them over and over, in products of `dtype`."""
    global _decoding
    before, _decoding = _decoding, dtype
    try:
        yield
    finally:
        _decoding = before


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x = (gate, up): [T, 2 n] -> [T, n] (arXiv 2002.05202)."""
    out: Tensor = _SwiGLU.apply(x) if torch.is_grad_enabled() else _swiglu(x)
    return out


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """Keeps x alone, and writes both halves of its gradient in place; can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), (grad,) = ctx.saved_tensors, grads
        gate, up = x.chunk(2, -1)
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted
            share = torch.sigmoid(gate)
            silu = gate * share
            return torch.cat((grad * up * (share + silu * (1 - share)), grad * silu), -1)
        out = torch.empty_like(x)
        to_gate, to_up = out.chunk(2, -1)
        torch.mul(grad, functional.silu(gate), out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return out
