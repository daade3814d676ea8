"""How an engine in the learner's process gets its weights: it shares the learner's, or has a copy that is written over."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.protocols import Model
from posttrain.models.adapters.lora import held, is_adapted, merge, plain_weights
from posttrain.models.hf.backed import Backed
from posttrain.models.native.decoder import Decoder
from posttrain.models.row_shards import is_sharded, whole


def own_copy(model: Model) -> Model:
    """A copy that no update moves, with adapters merged.

    Of weights that lie in several processes each of them makes one, at the same time.
    """
    if not any(map(is_sharded, model.parameters())) and not is_adapted(model):
        copied: Model = copy.deepcopy(model)
        return copied.requires_grad_(False)
    assert isinstance(model, Decoder | Backed), "others are neither sharded nor adapted"
    if isinstance(model, Backed):
        own_one = _whole_one(model) if any(map(is_sharded, model.parameters())) else copy.deepcopy(model)
        merge(own_one)
        return own_one.requires_grad_(False)
    with torch.device("meta"):  # no memory is taken for weights that are about to be replaced
        own = Decoder(model.config).to(model.head.dtype)
    own = own.to_empty(device=model.head.device).requires_grad_(False)
    own.source, own.generation, own.eos_ids = model.source, model.generation, model.eos_ids
    take_over(own, model)
    return own


def _whole_one(model: Backed) -> Backed:
    from posttrain.models.hf.transformers_folder import empty_like

    own = empty_like(model).requires_grad_(False)
    take_over(own, model)
    return own


def named_weights(weights: Any) -> Iterable[tuple[str, Tensor]]:
    """What an engine samples with: of a model with adapters, these are merged; what was handed over is so already."""
    return plain_weights(weights) if isinstance(weights, nn.Module) else weights.named_parameters()


def take_over(own: Model, weights: Model) -> None:
    """Write these weights over those of a copy, in place."""
    mine = dict(held(own))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in named_weights(weights):
            mine.pop(name).copy_(whole(weight))
    assert not mine, f"weights that are not handed over: {', '.join(mine)}"
