"""Operations between the matrix products of an update on a GPU: counterparts of `layer.c`, compiled by torch.

Each reads memory once, torch's separate operations several times. torch compiles them at their first use, which takes
some seconds. Small tensors, whose time is the launch of kernels, are computed without compilation.

T    tokens
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.models.native.kernels import build

LEAST_NUMBERS = 1 << 20
"""Numbers of a tensor from which compiled operations are used."""


class GPULayer:
    """`LayerLibrary` for a GPU: the same operations, by the same names and arguments."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, rate: Tensor, known: bool) -> None:
        """Fill out [T, size] = x * rate * weight. rate [T] is computed too, unless it is known. x is float32."""
        if known:
            fused(_normed_again, x)(x, weight, rate, out)
        else:
            fused(_normed, x)(x, weight, eps, out, rate)

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, rate: Tensor, grad_x: Tensor, grad_weight: Tensor
    ) -> None:
        """Fill grad_x [T, size] and grad_weight [n, size], which is zeros at first, and the sum of whose rows is the
        gradient of the weight.
        """
        fused(_normed_backward, x)(grad, x, weight, rate, grad_x, grad_weight[0])

    def swiglu(self, x: Tensor, out: Tensor) -> None:
        """Fill out [T, n] = silu(gate) * up of x [T, gate n, up n]."""
        fused(_swiglu, x)(x, out)

    def swiglu_backward(self, grad: Tensor, x: Tensor, out: Tensor, grad_x: Tensor) -> None:
        """Fill out as `swiglu` does, and grad_x, the gradient of x, given grad, the gradient of out."""
        fused(_swiglu_backward, x)(grad, x, out, grad_x)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, rotated: int, out: Tensor) -> None:
        """Fill out [T, heads * size]: the first `rotated` heads of x with rotary embedding, the others unchanged."""
        fused(_rope, x)(x, cos, sin, rotated, out)

    def rope_backward(self, grad: Tensor, cos: Tensor, sin: Tensor, rotated: int, grad_x: Tensor) -> None:
        """Fill grad_x, the gradient of x, given grad, the gradient of out."""
        fused(_rope_backward, grad)(grad, cos, sin, rotated, grad_x)


def gpu_layer() -> GPULayer | None:
    """Return the operations; None if compiled code is switched off."""
    return _layer if build.used() else None


_layer = GPULayer()


def fused(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """Return a function of tensors on a GPU as one kernel. Return it unchanged for small tensors x, or if kernels
    cannot be compiled.
    """
    if x.numel() < LEAST_NUMBERS or not x.is_cuda or not build.used():
        return function
    return compiled(function)


@cache
def compiled(function: Callable[..., Any], any_size: bool = False) -> Callable[..., Any]:
    """Return a function of tensors on a GPU as one kernel for any number of rows; unchanged if none can be compiled.

    `any_size`: other dimensions change between calls too.
    """
    if not _can_compile():
        return function
    whole: Callable[..., Any] = torch.compile(function, dynamic=True if any_size else None)

    def run(*arguments: Any) -> Any:
        rows = arguments[0].shape[0]
        for x in arguments:
            if isinstance(x, Tensor) and x.shape[:1] == (rows,):
                torch._dynamo.maybe_mark_dynamic(x, 0)  # one kernel for any number of rows
        # without autocast, which is on only in forward passes, both passes use the same kernels
        with torch.autocast("cuda", enabled=False):
            return whole(*arguments)

    return run


@cache
def _can_compile() -> bool:
    """Return whether torch can compile for this GPU, which requires Triton and a C compiler."""
    if find_spec("triton") is None:
        return False
    try:
        torch.compile(_twice)(torch.ones(8, device="cuda"))
    except Exception:  # any error of torch's compiler means that it cannot compile
        return False
    return True


def _twice(x: Tensor) -> Tensor:
    return x + x


# -- the operations, each in float32 and rounded once --------------------------------------------------------------------


def _normed(x: Tensor, weight: Tensor, eps: float, out: Tensor, rate: Tensor) -> None:
    found = (x.square().mean(-1) + eps).rsqrt()
    rate.copy_(found)
    out.copy_(x * found[:, None] * weight)


def _normed_again(x: Tensor, weight: Tensor, rate: Tensor, out: Tensor) -> None:
    out.copy_(x * rate[:, None] * weight)


def _normed_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rate: Tensor, grad_x: Tensor, grad_weight: Tensor
) -> None:
    grad, unit = grad.float(), x * rate[:, None]
    scaled = grad * weight
    mean = (scaled * unit).mean(-1, keepdim=True)
    grad_x.copy_((scaled - unit * mean) * rate[:, None])
    grad_weight.copy_((grad * unit).sum(0))


def _swiglu(x: Tensor, out: Tensor) -> None:
    gate, up = x.float().chunk(2, -1)
    out.copy_(functional.silu(gate) * up)


def _swiglu_backward(grad: Tensor, x: Tensor, out: Tensor, grad_x: Tensor) -> None:
    grad, size = grad.float(), out.shape[-1]
    gate, up = x.float().chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    out.copy_(silu * up)
    grad_x[:, :size].copy_(grad * up * (sigmoid + silu * (1 - sigmoid)))
    grad_x[:, size:].copy_(grad * silu)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, rotated: int, out: Tensor) -> None:
    size = cos.shape[-1]
    heads, filled = x.unflatten(-1, (-1, size)), out.unflatten(-1, (-1, size))
    some = heads[:, :rotated].float()
    filled[:, :rotated].copy_(some * cos + some.roll(size // 2, -1) * sin)
    filled[:, rotated:].copy_(heads[:, rotated:])


def _rope_backward(grad: Tensor, cos: Tensor, sin: Tensor, rotated: int, grad_x: Tensor) -> None:
    size = cos.shape[-1]
    heads, filled = grad.unflatten(-1, (-1, size)), grad_x.unflatten(-1, (-1, size))
    some = heads[:, :rotated].float()
    filled[:, :rotated].copy_(some * cos + (some * sin).roll(size // 2, -1))
    filled[:, rotated:].copy_(heads[:, rotated:])
