"""How an engine in the learner's process gets its weights: it shares the learner's, or has a copy that is written over."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.protocols import Model
from posttrain.models.adapters.lora import decoder_of, is_adapted, merge
from posttrain.models.native.merged_weights import held, plain_weights
from posttrain.models.row_shards import is_sharded, whole


def own_copy(model: Model) -> Model:
    """A copy that no update moves, with adapters merged.

    Of weights that lie in several processes each of them makes one, at the same time.
    """
    if not any(map(is_sharded, model.parameters())):
        copied: Model = copy.deepcopy(model)
        if is_adapted(copied):
            merge(decoder_of(copied))
        return copied.requires_grad_(False)
    assert model.decoder is not None, "others are not sharded"
    own = model.decoder.empty_like().requires_grad_(False)
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
