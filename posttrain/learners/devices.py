"""Moves inputs and outputs of models between devices: a reference, a critic or teachers may be on one of their own."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from posttrain.core.batch import Packed

T = TypeVar("T")


def moved(value: T, device: torch.device) -> T:
    """Return a tensor, or a dataclass or tuple of tensors, on a device. Tensors that are
    there already are not copied, and gradients return to the first device.
    """
    found: Any = value
    if isinstance(value, Tensor):
        found = value.to(device)
    elif isinstance(value, tuple) and type(value) is tuple:
        found = tuple(moved(one, device) for one in value)
    elif is_dataclass(value) and not isinstance(value, type):
        found = replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return found


def input_on(batch: Packed, device: torch.device) -> Packed:
    """Return a micro-batch for a model on another device, without the values that only a loss needs; on its own device,
    itself.
    """
    if batch.at.device == device:
        return batch
    own = {f.name: getattr(batch, f.name) for f in fields(Packed) if f.name != "readings"}
    return Packed(**{name: moved(x, device) for name, x in own.items()})
