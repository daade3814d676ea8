"""Protocol of a decoder beyond training: what adapters, heads of reward models and critics, and engines use of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    """A decoder that can get adapters and other heads, and whose weights can be synced to engines in other processes.
    It is a torch module.
    """

    lora: LoRA | None  # settings of its adapters; its own weights are then frozen
    generation: dict[str, Any]  # its generation_config.json

    @property
    def family(self) -> str:
        """Its model_type."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of its arithmetic between products; its matrices may be held in a narrower one."""
        ...

    @property
    def layers(self) -> Any:
        """Modules of its layers, in order; empty where they are not in one list."""
        ...

    @property
    def decoder(self) -> Self: ...

    # -- adapters

    def matrices(self) -> list[str]:
        """Return the names of all matrices that can be adapted, as a checkpoint names them."""
        ...

    def linears(self) -> Iterator[tuple[str, Linear, list[tuple[str, int]]]]:
        """Yield (name, module, the stored matrices in it: name and rows) of every product that may have an adapter."""
        ...

    def open_linears(self, wanted: Callable[[str], bool]) -> None:
        """Make those matrices available in `linears`. Raises UserError if that is impossible."""
        ...

    # -- another head

    def classifier(self) -> str | None:
        """Class of transformers with a head of one number on such a decoder; None: there is none."""
        ...

    def save_headless(self, folder: Path, also: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
        """Write a checkpoint without output head. `also`: further tensors; `told`: further entries of config.json."""
        ...

    def grow(self, vocab: int) -> None:
        """Extend the embeddings of a headless model by more tokens: zeros, which are never read."""
        ...

    # -- for programs that read checkpoints

    def described(self) -> dict[str, Any]:
        """Return its config.json."""
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
        """Most numbers that a cache holds of each token: keys and values of all layers."""
        ...

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as a checkpoint stores them, by name, with adapters merged. Views where that is
        possible.
        """
        ...

    def how_it_runs(self) -> dict[str, Any] | None:
        """Return what was determined when it was loaded, for an engine that builds it anew; None: config.json is
        enough.
        """
        ...

    def empty_like(self) -> Self:
        """Return a model of the same kind, not sharded, with uninitialised weights."""
        ...

    @property
    def native(self) -> bool:
        """Whether tokens are flat and attention is plugged in from outside: the engine with our KV cache can sample
        from it.
        """
        ...

    def recompute_layers(self) -> None:
        """Keep only the input of each layer for a backward pass, and compute the layer again there. Raises UserError
        where that is impossible.
        """
        ...

    def prepare_shards(self) -> None:
        """Prepare the layers for sharding. Raises UserError where they cannot be sharded."""
        ...

    @property
    def apart(self) -> bool:
        """Whether it can process several texts at once so that the bits of each depend on no other: see
        `hidden_apart`.
        """
        ...

    def hidden_apart(self, layout: Layout, at: Tensor) -> Tensor:
        """Compute `hidden` of texts whose bits depend on no other text."""
        ...

    # -- mixtures of experts

    routers: Routers | None  # None: it has none
    replays: bool  # whether tokens use the experts that a layout names

    # -- pictures

    @property
    def sees(self) -> bool:
        """Whether it reads pictures."""
        ...

    def freeze_vision(self) -> None:
        """Freeze the weights that compute features of pictures."""
        ...

    def tower(self) -> set[str]:
        """Return the names of the modules that compute features of pictures."""
        ...

    # -- what every torch module has
    def buffers(self) -> Iterator[Tensor]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def set_submodule(self, target: str, module: nn.Module) -> None: ...
    def register_forward_hook(self, hook: Callable[..., Any]) -> Any: ...


def decoders_in(held: nn.Module) -> list[Backbone]:
    """Those that a model or a critic is, or is built on."""
    return [module for module in held.modules() if is_backbone(module)]


def is_backbone(held: object) -> TypeGuard[Backbone]:
    """Return whether this is a decoder that can get adapters.

    Not by `isinstance` with the protocol, which from Python 3.12 on does not find what a torch module keeps among its
    submodules.
    """
    return hasattr(type(held), "open_linears")
