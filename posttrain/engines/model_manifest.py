"""Description of a model for engines in other processes: config.json, tensors by name, and cache size."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.models.backbone import Backbone
from posttrain.models.row_shards import whole

HEAD = "lm_head.weight"


def backbone_of(model: Model) -> Backbone:
    """Return the backbone of a model. Raises UserError for a kind of model that other processes cannot build."""
    if model.decoder is None:
        raise UserError(
            f"engines in other processes cannot load the weights of a {type(model).__name__}: leave out --replicas "
            "and --engine"
        )
    return model.decoder


def with_head(model: Backbone) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a checkpoint, tensor) of a model, with the output head even if it is tied to the embedding."""
    for name, tensor in model.stored_tensors():
        if name != HEAD or not model.tied:
            yield name, tensor
    if model.tied:
        yield HEAD, whole(model.head.weight)
