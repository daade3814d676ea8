"""Output heads of every kind, and what they compute, written out."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.models.losses.likelihood import Hidden
from posttrain.models.native.head import Head

KINDS = ("plain", "biased", "scaled", "capped", "all")


def new_head(kind: str, rows: int, width: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Head:
    """A random head whose tensors want a gradient."""
    weight = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    biased = kind in ("biased", "all")
    bias = torch.randn(rows, generator=generator, dtype=dtype).requires_grad_() if biased else None
    scale, cap = 0.3 if kind in ("scaled", "all") else 1.0, 1.7 if kind in ("capped", "all") else None
    return Head(weight, bias, scale, cap)


def plain_logits(hidden: Tensor, head: Head) -> Tensor:
    """[N, V], by torch's own operations."""
    x = hidden @ head.weight.T
    if head.bias is not None:
        x = x + head.bias
    x = x * head.scale
    return x if head.cap is None else head.cap * torch.tanh(x / head.cap)


def tensors(head: Head) -> list[Tensor]:
    return [head.weight] if head.bias is None else [head.weight, head.bias]


def unread() -> Hidden:
    """A policy's hidden states for a critic with a backbone of its own, which does not look at them."""
    return Hidden(torch.zeros(1, 32), Head(torch.zeros(4, 32)))
