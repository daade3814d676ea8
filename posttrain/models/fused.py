"""Decides how what lies between the products is computed: by compiled code on a processor, or with gradients written out.

Compiled code (`layer.c`) goes through memory once where torch's operations go through it several times. That is cheap enough
to compute norms and activations again in the backward pass instead of keeping them. It knows float32, and products in
bfloat16; whatever it does not cover goes through torch's operations, each of which can be differentiated twice.

T    tokens
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from posttrain.kernels import build
from posttrain.models.linear import (
    Linear,
    accumulates,
    add_product,
    collected,
    collects,
    narrowed,
    product,
    product_type,
)


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


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiles() -> bool:
    """Whether what lies between the products of an update is compiled code here."""
    return _kernels() is not None


def _kernels() -> ctypes.CDLL | None:
    loaded = build.library("layer.c")
    return None if loaded is None else _typed(loaded)


@cache
def _typed(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, long, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    for name, kinds in {
        "norm": (pointer, pointer, real, long, long, pointer, pointer, number),
        "norm_backward": (*(pointer,) * 4, long, long, pointer, pointer),
        "activate": (pointer, long, long, pointer),
        "activate_backward": (pointer, pointer, long, long, pointer, pointer),
        "rotate": (pointer, pointer, pointer, *(long,) * 4, pointer, number),
    }.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = (number, *kinds, number), None  # narrow first, threads last
    return loaded


def _covers(x: Tensor, wide: bool, *others: Tensor) -> bool:
    """Whether compiled code can do it: differentiable once at most, on a processor, in float32 or bfloat16.

    wide: x is float32, whatever products are.
    """
    return (
        (accumulates() or not torch.is_grad_enabled())
        and x.device.type == "cpu"
        and x.is_contiguous()
        and product_type(x) in (torch.float32, torch.bfloat16)
        and x.dtype == (torch.float32 if wide else product_type(x))
        and all(y.dtype == torch.float32 for y in others)
        and _kernels() is not None
    )


def normed_product(x: Tensor, weight: Tensor, eps: float, linear: Linear) -> Tensor:
    """linear(rms_norm(x)): [T, inputs] -> [T, outputs]."""
    if _covers(x, True, weight, linear.weight) and (collects(linear.weight) or not torch.is_grad_enabled()):
        out: Tensor = _NormedProduct.apply(x, weight, eps, linear.weight, linear.bias)
        return out
    return linear(rms_norm(x, weight, eps))


def activated_product(x: Tensor, linear: Linear) -> Tensor:
    """linear(swiglu(x)): [T, 2 inputs] -> [T, outputs]."""
    if _covers(x, False, linear.weight) and (collects(linear.weight) or not torch.is_grad_enabled()):
        out: Tensor = _ActivatedProduct.apply(x, linear.weight, linear.bias)
        return out
    return linear(swiglu(x))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, turned: int) -> tuple[Tensor, Tensor]:
    """The first `turned` heads of x [T, heads * size] rotated, [T, turned, size], and the others. May overwrite x.

    cos and sin [T, 1, size] as `Decoder.rotary` makes them.
    """
    size = cos.shape[-1]
    heads = x.shape[-1] // size
    compiled = _covers(x, False, cos, sin)
    if compiled:
        x = _Rotated.apply(x, cos, sin, turned)
    some, others = x.unflatten(-1, (heads, size)).split_with_sizes((turned, heads - turned), 1)
    return some if compiled else turn(some, cos, sin), others


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x [T, heads, size] rotated; of x's type, also where the tables are wider."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).type_as(x)


def _call(name: str, narrow: torch.dtype, *arguments: Tensor | float) -> None:
    """A function of layer.c; `narrow`: the type of what products take and give."""
    kernels = _kernels()
    assert kernels is not None
    passed = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    getattr(kernels, name)(narrow == torch.bfloat16, *passed, torch.get_num_threads())


class _NormedProduct(torch.autograd.Function):
    """Keeps x and one number of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        normed, rate = torch.empty_like(x, dtype=product_type(x)), x.new_empty(x.shape[0])
        _call("norm", normed.dtype, x, norm, eps, *x.shape, normed, rate, False)
        narrow = narrowed(weight)
        ctx.save_for_backward(x, norm, rate, narrow)
        ctx.weight, ctx.bias = weight, bias
        return product(normed, narrow, None if bias is None else narrowed(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, rate, narrow = ctx.saved_tensors
        place = collected(ctx.weight)
        assert place is not None
        to_normed = grad @ narrow
        again = torch.empty_like(to_normed)
        _call("norm", again.dtype, x, norm, 0.0, *x.shape, again, rate, True)
        add_product(place, grad.t(), again)
        to_x, to_norm = torch.empty_like(x), x.new_zeros(torch.get_num_threads(), x.shape[1])
        _call("norm_backward", to_normed.dtype, to_normed, x, norm, rate, *x.shape, to_x, to_norm)
        return to_x, to_norm.sum(0), None, None, None if ctx.bias is None else grad.sum(0, dtype=ctx.bias.dtype)


class _ActivatedProduct(torch.autograd.Function):
    """Keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        inner, narrow = x.new_empty(x.shape[0], x.shape[1] // 2), narrowed(weight)
        _call("activate", x.dtype, x, *inner.shape, inner)
        ctx.save_for_backward(x, narrow)
        ctx.weight, ctx.bias = weight, bias
        return product(inner, narrow, None if bias is None else narrowed(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow = ctx.saved_tensors
        place = collected(ctx.weight)
        assert place is not None
        to_inner = grad @ narrow
        inner, to_x = torch.empty_like(to_inner), torch.empty_like(x)
        _call("activate_backward", x.dtype, to_inner, x, *inner.shape, inner, to_x)
        add_product(place, grad.t(), inner)
        return to_x, None, None if ctx.bias is None else grad.sum(0, dtype=ctx.bias.dtype)


class _Rotated(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin)
        ctx.turned = turned
        _rotate(x, cos, sin, turned, x, backward=False)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        to_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _rotate(grad.contiguous(), cos, sin, ctx.turned, to_x, backward=True)
        return to_x, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, turned: int, to: Tensor, backward: bool) -> None:
    assert cos.is_contiguous() and sin.is_contiguous()
    (rows, width), size = x.shape, cos.shape[-1]
    _call("rotate", x.dtype, x, cos, sin, rows, turned, width // size, size, to, backward)
