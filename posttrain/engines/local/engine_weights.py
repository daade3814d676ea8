"""Weights of an engine in the learner's process: the learner's own, or a copy that each weight sync overwrites."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.protocols import Model
from posttrain.models.adapters.lora import decoder_of, is_adapted, merge
from posttrain.models.native.linear import matrices_read_rounded, narrow_layers
from posttrain.models.native.merged_weights import held, plain_weights
from posttrain.models.row_shards import is_sharded, whole


def own_copy(model: Model, products: torch.dtype | None = None) -> Model:
    """Copy a model, with adapters merged; no update changes the copy. `products`: the type of products, in which the copy
    holds the matrices of layers; None: as the model does. Embedding, output head, norms and biases are read in their own.

    If weights are sharded over processes, all processes have to call this at the same time.
    """
    layers = () if model.decoder is None else model.decoder.layers
    if not any(map(is_sharded, model.parameters())):
        found = matrices_read_rounded(layers if products is not None and not is_adapted(model) else ())
        memo = {key: nn.Parameter(weight.detach().to(products, copy=True)) for key, weight in found.items()}
        copied: Model = copy.deepcopy(model, memo)
        if is_adapted(copied):
            merge(decoder_of(copied))
        narrow_layers(() if copied.decoder is None else copied.decoder.layers, products)
        return copied.requires_grad_(False)
    assert model.decoder is not None, "others are not sharded"
    own = model.decoder.empty_like(products).requires_grad_(False)
    copy_weights(own, model)
    return own


def named_weights(weights: Any) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors for an engine, with adapters merged; weights received by a weight sync are merged already."""
    return plain_weights(weights) if isinstance(weights, nn.Module) else weights.named_parameters()


def copy_weights(own: Model, weights: Model) -> None:
    """Copy `weights` into an engine's own model, in place."""
    mine = dict(held(own))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in named_weights(weights):
            mine.pop(name).copy_(whole(weight))
    assert not mine, f"weights that the weight sync lacks: {', '.join(mine)}"
