"""Weights of a model as its checkpoint stores them: adapters merged, packed weights unpacked."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from posttrain.models.backbone import decoders_in
from posttrain.models.native.linear import Adapter, Linear
from posttrain.models.native.quantized import QuantizedLinear


def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a model's parameters, and then of stored tensors that are not trained, such as the biases
    of a router (DeepSeek-V3) or the factors of layers (Gemma 4).
    """
    yield from model.named_parameters()
    yield from _beside(model)


def _beside(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors that are not parameters, without packed weights."""
    for place, module in model.named_modules():
        for name, buffer in (
            module.named_buffers(place, recurse=False) if not isinstance(module, QuantizedLinear) else ()
        ):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield `held` of the model without adapters: each matrix is merged when it is yielded.

    A sharded weight is yielded as it is, and `whole` gathers it; with an adapter it is gathered and merged here.
    """
    seen: set[int] = set()
    for place, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, Adapter) or (not own and not isinstance(module, QuantizedLinear)):
            continue
        if isinstance(module, Linear) and (module.adapter is not None or module.parameter is None):
            own.pop("weight", None)
            yield f"{place}.weight", module.merged()
        for key, parameter in own.items():
            if id(parameter) not in seen:  # tied weights are yielded once
                seen.add(id(parameter))
                yield f"{place}.{key}".lstrip("."), parameter
    yield from _beside(model)


def copied_bytes(model: nn.Module, narrow: bool = False) -> float:
    """Return the bytes of a copy of a whole model with adapters merged. A merged weight has the wider type of weight and
    adapter; an unpacked one is float32. `narrow`: the copy holds the matrices of layers in bfloat16.
    """
    seen: dict[int, int] = {}
    layers = [layer for decoder in decoders_in(model) for layer in decoder.layers] if narrow else []
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if isinstance(module, Adapter):
            continue
        for parameter in module.parameters(recurse=False):
            seen[id(parameter)] = parameter.nbytes
        most = 2 if id(module) in in_layers else 4  # bytes of a number of a matrix
        if isinstance(module, QuantizedLinear):
            seen[id(module)] = most * module.shape.numel()
        elif isinstance(module, Linear) and module.adapter is not None:
            wide = torch.promote_types(module.weight.dtype, module.adapter.a.dtype)
            seen[id(module.weight)] = module.weight.numel() * min(most, wide.itemsize)
        elif isinstance(module, Linear) or type(module) is nn.Linear:
            seen[id(module.weight)] = module.weight.numel() * min(most, module.weight.itemsize)
    return float(sum(seen.values()))
