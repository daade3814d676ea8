"""Checks of config.json before memory is allocated, since transformers builds a model of any size.

The size of the model is measured on torch's "meta" device, that of the stored tensors in the headers of the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from posttrain.core.types import UserError
from posttrain.models.free_memory import available_memory, in_gib
from posttrain.models.json_files import Fields
from posttrain.models.native.decoder_shape import LAYERS_MOST
from posttrain.models.tensor_files import open_tensors
from posttrain.models.weight_files import check_dtype, weight_files

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
PARTS = ("text_config", "vision_config")  # entries of a vision-language model

Shapes = dict[str, tuple[int, ...]]


def check_layers(folder: Path, source: Mapping[str, Any]) -> None:
    """Raise UserError for more layers than can be built, even on the "meta" device."""
    for place in (source, *(source.get(part) for part in PARTS)):
        fields = Fields(folder / "config.json", place if isinstance(place, dict) else {})
        for name in LAYERS:
            fields.whole(name, 0, LAYERS_MOST, 0)


def check_room(folder: Path, inner: Any, dtype: torch.dtype) -> Shapes:
    """Return the shapes of the parameters of `inner`, a model on the "meta" device, by name.

    Raises UserError if memory does not suffice, or if files are absent, damaged, or quantized.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in inner.named_parameters()}
    count = sum(parameter.numel() for parameter in inner.parameters())
    needed, room = count * dtype.itemsize, available_memory(torch.device("cpu"))
    if needed > room:
        raise UserError(
            f"{folder / 'config.json'} announces {count:,} parameters, {in_gib(needed)} of weights, and {in_gib(room)} of "
            "memory are free: correct the sizes or use a larger machine"
        )
    for file, name, stored in _stored(folder):
        if name in shapes or name.endswith(".weight"):  # masks and positions may be integers
            check_dtype(file, name, stored.get_dtype())
    return shapes


def other_shape(folder: Path, shapes: Shapes) -> str | None:
    """Return a message about a stored tensor whose shape contradicts config.json; None if all agree."""
    for _, name, stored in _stored(folder):
        shape = tuple(stored.get_shape())
        for own, announced in shapes.items():
            if announced != shape and f".{own}".endswith(f".{name}"):  # the stored name may lack a prefix
                return f"{name} has shape {list(shape)}, config.json says {list(announced)}"
    return None


def _stored(folder: Path) -> Iterator[tuple[Path, str, Any]]:
    """Yield (file, name of the tensor, its slice) of each tensor of a folder."""
    for file in weight_files(folder):
        with open_tensors(file) as stored:
            yield from ((file, name, stored.get_slice(name)) for name in sorted(stored.keys()))
