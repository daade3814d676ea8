"""The matrices of a checkpoint that one parameter stacks, such as q, k and v."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from posttrain.models.backbone import decoders_in
from posttrain.models.native.linear import Adapter


def stacked_rows(model: nn.Module) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield (parameter, rows of each of its matrices) for each parameter of a model that stacks several."""
    for decoder in decoders_in(model):
        for _, linear, matrices in decoder.linears():
            if linear.parameter is not None:
                yield linear.parameter, [rows for _, rows in matrices]
    for module in model.modules():
        if isinstance(module, Adapter):
            yield module.a, [place.inner.stop - place.inner.start for place in module.places]
            yield module.b, [place.rows.stop - place.rows.start for place in module.places]
