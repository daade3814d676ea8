"""Linear layers of a model of transformers, and which of them may have adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from posttrain.core.types import UserError
from posttrain.models.native.linear import Linear, LinearOfRows

EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Matrices of mixtures of experts: PEFT applies adapters of these names to the experts, also in dense layers."""


def products(inner: Any) -> Iterator[tuple[str, nn.Linear | Linear]]:
    """Yield (name within transformers' model, module) of every linear layer that may be adapted: not the output head,
    EXPERTS beside packed experts, or the last one of a mixer.
    """
    head, left = inner.get_output_embeddings(), set[str]()
    # in state-space mixers, fused kernels read the weight of the last product directly; PEFT excludes some of them too
    mixers = state_spaces(inner)
    if any("experts" in name and parameter.ndim == 3 for name, parameter in inner.named_parameters()):
        left.update(EXPERTS)
    for name, module in inner.named_modules():
        place, _, last = name.rpartition(".")
        within = last == "out_proj" and place in mixers
        if module is not head and last not in left and not within and _is_a_product(module):
            yield name, module


def state_spaces(inner: nn.Module) -> set[str]:
    """Return the names of state-space mixers, such as Mamba's, by the names of their weights."""
    return {name for name, module in inner.named_modules() if {"A_log", "D"} <= module._parameters.keys()}


def _is_a_product(module: nn.Module) -> TypeGuard[nn.Linear | Linear]:
    """Return whether a module computes a linear layer and nothing else. Routers of some mixtures of experts are
    subclasses of nn.Linear.
    """
    if type(module) is nn.Linear or isinstance(module, Linear):
        return True
    if not isinstance(module, nn.Linear):
        return False
    with torch.no_grad():
        x = torch.ones_like(module.weight[:1])
        found = module(x)
    return isinstance(found, Tensor) and torch.allclose(found, functional.linear(x, module.weight, module.bias))


def open_products(inner: Any, wanted: Callable[[str], bool]) -> None:
    """Replace the wanted linear layers by ours, with the same weights. Raises UserError for a shared weight."""
    places = _places_of_weights(inner)
    for name, layer in list(products(inner)):
        if isinstance(layer, nn.Linear) and wanted(name):
            if places[layer.weight] > 1:  # merging an adapter of one layer would change the other layers
                raise UserError(
                    f"--lora: {name} of {type(inner).__name__} shares its weight with other layers; choose "
                    "others by --lora-targets, without --quantize, or leave it out"
                )
            inner.set_submodule(name, LinearOfRows(layer))


def narrow_products(inner: Any, dtype: torch.dtype) -> None:
    """Freeze a model, and convert the weights of linear layers to a narrower type, except weights shared by layers.

    Raises UserError if there is no layer to convert.
    """
    places = _places_of_weights(inner)
    open_products(inner, {name for name, layer in products(inner) if places[layer.weight] == 1}.__contains__)
    ours = [layer for _, layer in products(inner) if isinstance(layer, Linear)]
    if not ours:
        raise UserError(
            f"--frozen-weights needs linear layers, and {type(inner).__name__} has none of its own: leave it out"
        )
    inner.requires_grad_(False)
    for layer in ours:
        layer.weight.data = layer.weight.data.to(dtype)


def _places_of_weights(inner: nn.Module) -> Counter[Tensor]:
    """Count the modules that use each parameter. A module that occurs in several layers counts once per layer."""
    children = (child for parent in inner.modules() for child in parent._modules.values() if child is not None)
    return Counter(p for child in children for p in child._parameters.values() if p is not None)
