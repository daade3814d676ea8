"""What a decoder is asked for besides training it: by adapters, by heads of reward models and critics, by engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from torch import Tensor, nn

from posttrain.core.protocols import Model

if TYPE_CHECKING:
    from posttrain.core.batch import Layout
    from posttrain.models.adapters.lora import LoRA
    from posttrain.models.hf.experts import Routers
    from posttrain.models.native.linear import Linear


@runtime_checkable
class Backbone(Model, Protocol):
    """A decoder that adapters and other heads can be put on, and whose weights engines elsewhere can take. It is a
    torch module."""

    lora: LoRA | None  # how it is adapted; the weights themselves are then frozen
    generation: dict[str, Any]  # its generation_config.json

    @property
    def family(self) -> str:
        """Its model_type."""
        ...

    @property
    def layers(self) -> Any:
        """The modules of its layers, in order; none where they do not lie in one list."""
        ...

    @property
    def decoder(self) -> Self: ...

    # -- adapters

    def matrices(self) -> list[str]:
        """The names of all matrices that could be adapted, as a checkpoint has them."""
        ...

    def linears(self) -> Iterator[tuple[str, Linear, list[tuple[str, int]]]]:
        """(name, module, the stored matrices in it: name and rows) of every product that may have an adapter."""
        ...

    def open_linears(self, wanted: Callable[[str], bool]) -> None:
        """Make those matrices ready for `linears` to list them. Raises UserError if one cannot be."""
        ...

    # -- another head

    def classifier(self) -> str | None:
        """The class of transformers with a head of one number on such a decoder; None: there is none."""
        ...

    def save_headless(self, folder: Path, also: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
        """Write a checkpoint without output head. `also`: further tensors; `told`: further entries of config.json."""
        ...

    def grow(self, vocab: int) -> None:
        """Let a headless model have embeddings of more tokens: zeros, which nothing ever reads."""
        ...

    # -- programs that read checkpoints

    def described(self) -> dict[str, Any]:
        """Its config.json."""
        ...

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        ...

    @property
    def embedding_name(self) -> str:
        """What a checkpoint calls the embedding's weight."""
        ...

    @property
    def kept_numbers(self) -> int:
        """How many numbers are kept of each token, at most: keys and values of all layers."""
        ...

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as a checkpoint stores them, name by name, adapters merged. Views where that is possible."""
        ...

    def how_it_runs(self) -> dict[str, Any] | None:
        """What was found out when it was loaded, for an engine that makes it anew; None: config.json says all."""
        ...

    def empty_like(self) -> Self:
        """A model of the same kind, whole, with weights yet to come."""
        ...

    @property
    def native(self) -> bool:
        """Whether tokens lie flat and attention is plugged in from outside: the engine with a KV cache of ours samples
        from it."""
        ...

    def prepare_shards(self) -> None:
        """Before its layers are sharded. Raises UserError where they cannot be."""
        ...

    @property
    def apart(self) -> bool:
        """Whether it can read many texts at once so that the bits of each depend on no other: see `hidden_apart`."""
        ...

    def hidden_apart(self, layout: Layout, at: Tensor) -> Tensor:
        """As `hidden`, of texts whose bits depend on no other text."""
        ...

    # -- mixtures of experts

    routers: Routers | None  # None: it is none
    replays: bool  # whether tokens take the experts that a layout names

    # -- pictures

    @property
    def sees(self) -> bool:
        """Whether it reads pictures."""
        ...

    def freeze_vision(self) -> None:
        """What makes features of pictures stays as it is."""
        ...

    def tower(self) -> set[str]:
        """The names of the modules that make features of pictures."""
        ...

    # -- what every torch module has
    def buffers(self) -> Iterator[Tensor]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def set_submodule(self, target: str, module: nn.Module) -> None: ...
    def register_forward_hook(self, hook: Callable[..., Any]) -> Any: ...


def decoders_in(held: nn.Module) -> list[Backbone]:
    """Those that a model or a critic is, or is built on."""
    return [module for module in held.modules() if isinstance(module, Backbone)]
