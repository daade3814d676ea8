"""Small models of every kind with adapters, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from judged import own_pad
from tiny_models import make
from torch import Tensor

from posttrain.core.batch import Layout
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import TARGETS, LoRA, attach, begin, targets_of
from posttrain.models.backbone import Backbone
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.losses.likelihood import token_logp
from posttrain.models.native import fused
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.kernels import build
from posttrain.models.native.linear import accumulating

SHAPE = DecoderConfig(
    vocab=40, hidden=24, layers=2, heads=4, kv_heads=2, head_size=6, intermediate=36, context=64, qkv_bias=True
)
WAYS = (TARGETS, ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("o_proj", "down_proj"), ("gate_proj",))
"""Choices of matrices to adapt."""
NATIVE = DecoderConfig(
    vocab=48, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, intermediate=48, context=64, qkv_bias=True
)


def base_of(kind: str, folder: Path) -> Path:
    """The folder of a new model: "native", or a `model_type` of transformers."""
    if kind != "native":
        return make(kind, folder)
    save_model(new_decoder(NATIVE, 3), folder, own_pad())
    return folder


def opened(folder: Path) -> Backbone:
    model = load_model(folder)
    assert isinstance(model, Decoder | Backed)
    return model


def adapt(model: Backbone, lora: LoRA, targets: tuple[str, ...] = ()) -> Backbone:
    """The model with adapters that are far from nothing. `targets`: other matrices than those of `targets_of`."""
    names = targets or targets_of(model)
    attach(model, lora, lambda name: name.rpartition(".")[2] in names)
    begin(model, 1)
    stir(model)
    return model


def stir(model: Backbone, seed: int = 5) -> None:
    """Let every adapter add something, and move DoRA's lengths."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for adapter in adapters(model):
            adapter.b.normal_(0.0, 0.3, generator=generator)
            if adapter.magnitude is not None:
                adapter.magnitude.mul_(1 + 0.3 * torch.randn(adapter.magnitude.shape, generator=generator))


def logits(model: Backbone) -> Tensor:
    """Of twelve tokens in a row."""
    layout = Layout(torch.arange(3, 15), torch.arange(12), (0,), (12,), (-1,))
    with torch.no_grad():
        return model.head.logits(model.hidden(layout, torch.arange(12)))


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
