"""Description of a model for engines in other processes: its config.json, its tensors by name, the size of its
cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.models.backbone import Backbone
from posttrain.models.row_shards import whole

HEAD = "lm_head.weight"


def backbone_of(model: Model) -> Backbone:
    """Return the backbone of a model. Raises UserError for a kind of model that only this process knows."""
    if model.decoder is None:
        raise UserError(f"engines in other processes cannot take over the weights of a {type(model).__name__}")
    return model.decoder


def with_head(model: Backbone) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names of a checkpoint, with the output head even where it is the embedding."""
    for name, tensor in model.stored_tensors():
        if name != HEAD or not model.tied:
            yield name, tensor
    if model.tied:
        yield HEAD, whole(model.head.weight)
