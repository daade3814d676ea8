"""How an engine in the learner's process gets its weights: it shares the learner's, or has a copy that is written over."""

from __future__ import annotations

import copy

import torch

from posttrain.models.decoder import Decoder
from posttrain.models.rows import is_sharded, whole
from posttrain.protocols import Model


def own_copy(model: Model) -> Model:
    """A copy that no update moves. Of weights that lie in several processes each of them makes one, at the same time."""
    if not any(map(is_sharded, model.parameters())):
        copied: Model = copy.deepcopy(model)
        return copied.requires_grad_(False)
    assert isinstance(model, Decoder), "others are not sharded"
    with torch.device("meta"):  # no memory is taken for weights that are about to be replaced
        own = Decoder(model.config).to(model.head.dtype)
    own = own.to_empty(device=model.head.device).requires_grad_(False)
    own.source, own.generation, own.eos_ids = model.source, model.generation, model.eos_ids
    take_over(own, model)
    return own


def take_over(own: Model, weights: Model) -> None:
    """Write these weights over those of a copy, in place."""
    mine = dict(own.named_parameters())
    with torch.no_grad():
        for name, parameter in weights.named_parameters():
            mine.pop(name).copy_(whole(parameter))
    assert not mine, f"weights that are not handed over: {', '.join(mine)}"
