"""Operations between the matrix products, by compiled code or by torch with explicit backward passes.

Compiled code (`layer.c` on a processor, `gpu_layer.py` on a GPU) reads memory once, torch's operations several times.
It is fast enough to recompute norms and activations in the backward pass instead of keeping them. It supports float32,
and products in bfloat16; all other cases use torch's operations, which can be differentiated twice.

T    tokens
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from posttrain.models.native.kernels import binder
from posttrain.models.native.kernels.gpu_layer import GPULayer, gpu_layer
from posttrain.models.native.linear import (
    Linear,
    accumulates,
    add_product,
    before_scale,
    collected,
    computed_with,
    in_one,
    learned,
    multiplied,
    narrowed,
    of_learned,
    product_type,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), in float32 for narrower
    inputs.

    weight [..., size] has x's last dimensions.
    """
    if x.is_cuda:  # there torch has one kernel; on a processor its backward has more operations than the one below
        if weight.ndim == 1:
            return functional.rms_norm(x, weight.shape, weight, eps)
        return (functional.rms_norm(x, x.shape[-1:], None, eps) * weight).to(x.dtype)
    out: Tensor = _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _normed(x, weight, _rate(x, eps))
    return out


def _rate(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps), [..., 1]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=wide)
    return (length * length).div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: Tensor, weight: Tensor, rate: Tensor) -> Tensor:
    return (x * rate).mul_(weight).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that keeps x and one number per row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rate = _rate(x, eps)
        ctx.save_for_backward(x, weight, rate)
        ctx.eps = eps
        return _normed(x, weight, rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rate = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is needed: the rate depends on x
            rate = (x.to(rate.dtype).square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        unit = x * rate
        grad_weight = (grads[0] * unit).sum_to_size(weight.shape)
        grad = grads[0] * weight.to(rate.dtype)
        mean = (grad * unit).mean(-1, keepdim=True)
        grad_x = torch.addcmul(grad, unit, mean, value=-1) * rate
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up of x = (gate, up): [T, 2 n] -> [T, n] (arXiv 2002.05202)."""
    out: Tensor = _SwiGLU.apply(x) if torch.is_grad_enabled() else _swiglu(x)
    return out


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that keeps only x for the backward pass, which writes both halves of the gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), (grad,) = ctx.saved_tensors, grads
        gate, up = x.chunk(2, -1)
        if torch.is_grad_enabled():  # a gradient of this gradient is needed
            sigmoid = torch.sigmoid(gate)
            silu = gate * sigmoid
            return torch.cat((grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu), -1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grad, functional.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiles() -> bool:
    """Return whether the operations between the products of an update run as compiled code on the processor."""
    return binder.layer() is not None


def _covering(x: Tensor, float32: bool, *others: Tensor | None) -> binder.LayerLibrary | GPULayer | None:
    """Return the compiled code if it supports this case: at most one derivative, float32 or bfloat16; else None.

    `float32`: x has to be float32, whatever the type of products; otherwise x has to be of the type of products.
    """
    if (
        (accumulates() or not torch.is_grad_enabled())
        and x.device.type in ("cpu", "cuda")
        and x.is_contiguous()
        and product_type(x) in (torch.float32, torch.bfloat16)
        and x.dtype == (torch.float32 if float32 else product_type(x))
        and all(y is None or y.dtype == torch.float32 for y in others)
    ):
        return gpu_layer() if x.is_cuda else binder.layer()
    return None


def _library(x: Tensor) -> binder.LayerLibrary | GPULayer:
    library = gpu_layer() if x.is_cuda else binder.layer()
    assert library is not None
    return library


def norm_linear(x: Tensor, weight: Tensor, eps: float, linear: Linear) -> Tensor:
    """Compute linear(rms_norm(x)): [T, inputs] -> [T, outputs]."""
    own = learned(linear)
    if in_one(linear) and _covering(x, True, weight, *computed_with(linear)):
        out: Tensor = _NormLinear.apply(x, weight, eps, linear, *own)
        return out
    return linear(rms_norm(x, weight, eps))


def swiglu_linear(x: Tensor, linear: Linear) -> Tensor:
    """Compute linear(swiglu(x)): [T, 2 inputs] -> [T, outputs]."""
    own = learned(linear)
    if in_one(linear) and _covering(x, False, *computed_with(linear)):
        out: Tensor = _SwiGLULinear.apply(x, linear, *own)
        return out
    return linear(swiglu(x))


def rope_heads(x: Tensor, cos: Tensor, sin: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (the first `count` heads of x [T, heads * size] with rotary embedding, [T, count, size]; the other heads).

    May overwrite x. cos and sin [T, 1, size] as `Decoder.rotary` returns them.
    """
    size = cos.shape[-1]
    heads = x.shape[-1] // size
    compiled = _covering(x, False, cos, sin)
    if compiled:
        x = _RoPE.apply(x, cos, sin, count)
    some, others = x.unflatten(-1, (heads, size)).split_with_sizes((count, heads - count), 1)
    return some if compiled else rope(some, cos, sin), others


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to heads x (arXiv 2104.09864). The result has x's type, even if cos and sin are wider."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).type_as(x)


class _NormLinear(torch.autograd.Function):
    """`norm_linear` that keeps x and one number per row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, linear: Linear, *learned: Tensor | None) -> Tensor:
        normed, rate = torch.empty_like(x, dtype=product_type(x)), x.new_empty(x.shape[0])
        _library(x).rms_norm(x, norm, eps, normed, rate, known=False)
        ctx.save_for_backward(x, norm, rate)
        ctx.linear = linear
        return multiplied(normed, linear)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, norm, rate), weight, adapter = ctx.saved_tensors, ctx.linear.weight, ctx.linear.adapter
        place = collected(weight)
        through = before_scale(adapter, grad, weight)
        to_normed = through @ narrowed(weight, grad.dtype) if any(ctx.needs_input_grad[:2]) else None
        to_inner = None if adapter is None else adapter.back(through, to_normed)
        if place is not None or adapter is not None:
            normed = torch.empty_like(x, dtype=grad.dtype)
            _library(x).rms_norm(x, norm, 0.0, normed, rate, known=True)
            if place is not None:
                add_product(place, grad.t(), normed)
            if to_inner is not None:
                adapter.collect(to_inner, through, normed)
                adapter.collect_magnitude(grad, normed, weight)
        to_x = to_norm = None
        if to_normed is not None:
            to_x, norms = torch.empty_like(x), x.new_zeros(torch.get_num_threads(), x.shape[1])
            _library(x).rms_norm_backward(to_normed, x, norm, rate, to_x, norms)
            to_norm = norms.sum(0)
        return to_x, to_norm, None, None, *of_learned(ctx, grad)


class _SwiGLULinear(torch.autograd.Function):
    """`swiglu_linear` that keeps only x for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Linear, *learned: Tensor | None) -> Tensor:
        inner = x.new_empty(x.shape[0], x.shape[1] // 2)
        _library(x).swiglu(x, inner)
        ctx.save_for_backward(x)
        ctx.linear = linear
        return multiplied(inner, linear)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, adapter = ctx.saved_tensors, ctx.linear.weight, ctx.linear.adapter
        through = before_scale(adapter, grad, weight)
        to_inner = through @ narrowed(weight, grad.dtype)
        to_low = None if adapter is None else adapter.back(through, to_inner)
        inner, to_x = torch.empty_like(to_inner), torch.empty_like(x)
        _library(x).swiglu_backward(to_inner, x, inner, to_x)
        if (place := collected(weight)) is not None:
            add_product(place, grad.t(), inner)
        if to_low is not None:
            adapter.collect(to_low, through, inner)
            adapter.collect_magnitude(grad, inner, weight)
        return to_x, None, *of_learned(ctx, grad)


class _RoPE(torch.autograd.Function):
    """Rotary embedding, on a processor in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, count: int) -> Tensor:
        out = torch.empty_like(x) if x.is_cuda else x
        if out is x:
            ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin)
        ctx.count = count
        _library(x).rope(x, cos, sin, count, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _library(grad).rope_backward(grad.contiguous(), cos, sin, ctx.count, grad_x)
        return grad_x, None, None, None
