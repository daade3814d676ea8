"""Protocol of a decoder that adapters, heads of reward models and critics, and engines need in addition to `Model`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor, nn

from posttrain.core.protocols import Model

if TYPE_CHECKING:
    from posttrain.core.batch import Layout
    from posttrain.models.adapters.lora import LoRA
    from posttrain.models.hf.experts import Routers
    from posttrain.models.native.linear import Linear


class Backbone(Model, Protocol):
    """A decoder, a torch module, that supports adapters, other heads, and weight sync to engines in other processes."""

    lora: LoRA | None  # settings of the adapters, whose base weights are then frozen; None: no adapters
    generation: dict[str, Any]  # content of generation_config.json

    @property
    def family(self) -> str:
        """The model_type in config.json."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations between matrix products; the matrices may be stored in a narrower type."""
        ...

    @property
    def layers(self) -> Any:
        """Modules of the layers, in order; empty if the model does not keep them in one list."""
        ...

    @property
    def decoder(self) -> Self: ...

    # -- adapters

    def matrices(self) -> list[str]:
        """Return the names of all matrices that can be adapted, as a checkpoint names them."""
        ...

    def linears(self) -> Iterator[tuple[str, Linear, list[tuple[str, int]]]]:
        """Yield (name, module, [(name of a stored matrix, its rows), ...]) of every product that may be adapted."""
        ...

    def open_linears(self, wanted: Callable[[str], bool]) -> None:
        """Make the wanted matrices available in `linears`. Raises UserError if that is impossible."""
        ...

    # -- another head

    def classifier(self) -> str | None:
        """Name of the class of transformers for this decoder with a head of one number; None if there is none."""
        ...

    def save_headless(self, folder: Path, also: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
        """Write a checkpoint without output head. `also`: further tensors; `told`: further entries of config.json."""
        ...

    def grow(self, vocab: int) -> None:
        """Extend the embeddings of a headless model by more tokens: zeros, which are never read."""
        ...

    # -- for programs that read checkpoints

    def described(self) -> dict[str, Any]:
        """Return the content of config.json."""
        ...

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        ...

    @property
    def embedding_name(self) -> str:
        """Name of the embedding's weight in a checkpoint."""
        ...

    @property
    def kept_numbers(self) -> int:
        """Maximum of numbers that a cache stores per token: keys and values of all layers."""
        ...

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the weights as a checkpoint stores them, with adapters merged; views if possible."""
        ...

    def how_it_runs(self) -> dict[str, Any] | None:
        """Return the choices made at loading, with which an engine builds the model again; None: config.json is
        enough.
        """
        ...

    def empty_like(self, products: torch.dtype | None = None) -> Self:
        """Return a model of the same kind, not sharded, with uninitialised weights. `products`: type of the matrices of
        layers; None: that of all weights.
        """
        ...

    @property
    def native(self) -> bool:
        """Whether the model takes flat tokens and an attention function from outside, so that the engine with our KV
        cache can sample from it.
        """
        ...

    def recompute_layers(self) -> None:
        """Keep only the input of each layer, and recompute the layer in the backward pass. Raises UserError if that is
        impossible.
        """
        ...

    def prepare_shards(self) -> None:
        """Prepare the layers for sharding. Raises UserError where they cannot be sharded."""
        ...

    @property
    def apart(self) -> bool:
        """Whether `hidden_apart` can compute several texts at once such that the result of each is bit-identical to its
        result alone.
        """
        ...

    def hidden_apart(self, layout: Layout, at: Tensor) -> Tensor:
        """Compute `hidden` such that the bits of each text's result do not depend on the other texts."""
        ...

    # -- mixtures of experts

    routers: Routers | None  # None: not a mixture of experts
    replays: bool  # whether tokens use the experts that a layout names

    # -- pictures

    @property
    def sees(self) -> bool:
        """Whether the model reads pictures."""
        ...

    def vision_weights(self) -> Iterable[nn.Parameter]:
        """Return the weights that compute features of pictures."""
        ...

    def tower(self) -> set[str]:
        """Return the names of the modules that compute features of pictures."""
        ...

    # -- methods of every torch module
    def buffers(self) -> Iterator[Tensor]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def set_submodule(self, target: str, module: nn.Module) -> None: ...
    def register_forward_hook(self, hook: Callable[..., Any]) -> Any: ...


def decoders_in(held: nn.Module) -> list[Backbone]:
    """Return all decoders in a model or a critic: itself, or those that it is built on."""
    return [module for module in held.modules() if is_backbone(module)]


def is_backbone(held: object) -> TypeGuard[Backbone]:
    """Return whether this is a decoder that can get adapters.

    `isinstance` with the protocol does not work: from Python 3.12 on it does not find attributes that a torch module
    stores among its submodules.
    """
    return hasattr(type(held), "open_linears")
