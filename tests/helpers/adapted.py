"""A small decoder to adapt, choices of its matrices, and a loss of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import Layout
from posttrain.models.adapters.lora import TARGETS
from posttrain.models.losses.likelihood import token_logp
from posttrain.models.native import fused
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import build
from posttrain.models.native.linear import accumulating

SHAPE = DecoderConfig(
    vocab=40, hidden=24, layers=2, heads=4, kv_heads=2, head_size=6, intermediate=36, context=64, qkv_bias=True
)
WAYS = (TARGETS, ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("o_proj", "down_proj"), ("gate_proj",))
"""Choices of matrices to adapt."""


def laid(seed: int = 3) -> tuple[Layout, Tensor, Tensor]:
    """Two groups of rollouts, each behind a prompt that they share: layout, scored places, their tokens."""
    generator = torch.Generator().manual_seed(seed)
    length, prefix = (5, 4, 6, 3, 5), (-1, 0, 0, -1, 3)
    start = tuple(sum(length[:i]) for i in range(len(length)))
    position = torch.cat([torch.arange(n) + (0 if p < 0 else length[p]) for n, p in zip(length, prefix, strict=True)])
    tokens = torch.randint(0, 40, (sum(length),), generator=generator)
    at = torch.cat([torch.arange(start[i], start[i] + length[i]) for i in (1, 2, 4)])
    return Layout(tokens, position, start, length, prefix), at, torch.randint(0, 40, (len(at),), generator=generator)


def loss_of(model: Decoder, layout: Layout, at: Tensor, target: Tensor) -> Tensor:
    return -token_logp(model.hidden(layout, at), model.head, target, 1.0).mean()


def compiled_and_plain(fresh: Callable[[], Decoder], precision: str) -> list[tuple[Tensor, Tensor]]:
    """The loss and each gradient, by compiled operations and by torch's. Skips where nothing is compiled."""
    if not fused.compiles():
        pytest.skip("nothing is compiled here")
    found = []
    for compiled in (True, False):
        model = fresh()
        build.use(compiled)
        try:
            with accumulating(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                loss = loss_of(model, *laid())
                loss.backward()
        finally:
            build.use(True)
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad and p.grad is not None)])
    return list(zip(*found, strict=True))
