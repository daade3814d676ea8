"""Decides how what lies between the products is computed, where gradients written out are faster than torch's.

Each can be differentiated twice.

T    tokens
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), in float32 for narrower inputs.

    weight [..., size] has x's last dimensions.
    """
    if x.is_cuda:  # torch's is one kernel there; on a processor its backward is a chain of operations, longer than this
        if weight.ndim == 1:
            return functional.rms_norm(x, weight.shape, weight, eps)
        return functional.rms_norm(x, x.shape[-1:], None, eps) * weight
    out: Tensor = _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _normed(x, weight, _rate(x, eps))
    return out


def _rate(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), [..., 1]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=wide)
    return (length * length).div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: Tensor, weight: Tensor, rate: Tensor) -> Tensor:
    return (x * rate).mul_(weight).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rate = _rate(x, eps)
        ctx.save_for_backward(x, weight, rate)
        ctx.eps = eps
        return _normed(x, weight, rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rate = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted: the rate depends on x
            rate = (x.to(rate.dtype).square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        unit = x * rate
        to_weight = (grads[0] * unit).sum_to_size(weight.shape)
        grad = grads[0] * weight.to(rate.dtype)
        along = (grad * unit).mean(-1, keepdim=True)
        to_x = torch.addcmul(grad, unit, along, value=-1) * rate
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x = (gate, up): [T, 2 n] -> [T, n] (arXiv 2002.05202)."""
    out: Tensor = _SwiGLU.apply(x) if torch.is_grad_enabled() else _swiglu(x)
    return out


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """Keeps x alone, and writes both halves of its gradient in place."""

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
