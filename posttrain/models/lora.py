"""Low-rank adapters of a decoder (LoRA, arXiv 2106.09685): which products have one, how they begin, what they add up to.

Decides what is shared. An adapted decoder's own weights are frozen, so a second decoder over the very same tensors, with
other adapters or none, costs no memory: the model as it was before training is such a one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from posttrain.models.decoder import Decoder
from posttrain.models.linear import Adapter, Linear
from posttrain.models.stored import stored_pieces
from posttrain.seeds import seed_of
from posttrain.types import UserError

if TYPE_CHECKING:
    from posttrain.protocols import Model

ALL = "all-linear"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What a decoder's adapted matrices are called by PEFT."""


@dataclass(frozen=True)
class LoRA:
    """How a decoder is adapted."""

    rank: int
    alpha: float
    rslora: bool = False
    base: str = ""  # where the weights below lie: a folder, or a Hugging Face model's name
    digest: str = ""  # a fingerprint of these

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def named_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """The matrices that these words name, or several with commas between. Raises UserError for one that there is not."""
    targets = [name for word in targets for name in word.split(",")]
    if ALL in targets:
        if len(targets) > 1:
            raise UserError(f"--lora-targets {ALL} is all of them: leave out the others, or that")
        return TARGETS
    if odd := [name for name in targets if name not in TARGETS]:
        raise UserError(f"--lora-targets {odd[0]:.60} is none: there are {ALL}, {', '.join(TARGETS)}")
    if not targets:  # a recipe may say so
        raise UserError(f"--lora-targets is empty: give {ALL}, or some of {', '.join(TARGETS)}")
    return tuple(name for name in TARGETS if name in targets)


def decoder_of(model: Model) -> Decoder:
    """The decoder that a model is, or is built on. Raises UserError where there is none to be adapted."""
    found = model if isinstance(model, Decoder) else getattr(model, "backbone", None)
    if not isinstance(found, Decoder):
        raise UserError(f"--lora adapts decoders, and a {type(model).__name__} is none: leave it out")
    return found


def is_adapted(model: Model) -> bool:
    found = model if isinstance(model, Decoder) else getattr(model, "backbone", None)
    return isinstance(found, Decoder) and found.lora is not None


def attach(decoder: Decoder, lora: LoRA, adapts: Callable[[str], bool]) -> None:
    """Freeze a decoder and give it adapters, uninitialised, for the stored matrices of which `adapts` holds.

    These are named as in a checkpoint, such as model.layers.0.self_attn.q_proj.
    """
    decoder.requires_grad_(False)
    decoder.lora = lora
    for _, linear, matrices in linears(decoder):
        pieces, end = [], 0
        for stored, rows in matrices:
            begin, end = end, end + rows
            if adapts(stored):
                pieces.append((stored, slice(begin, end)))
        outputs, inputs = linear.weight.shape
        if pieces:
            with torch.device(linear.weight.device):
                linear.adapter = Adapter(inputs, outputs, pieces, lora.rank, lora.scale).to(linear.weight.dtype)


def begin(decoder: Decoder, seed: int) -> None:
    """Adapters that change nothing yet: B is 0, and A as PEFT has it, kaiming_uniform with a = sqrt(5) (arXiv 1502.01852).

    A matrix begins with the same A whichever others are adapted.
    """
    with torch.no_grad():
        for adapter in adapters(decoder):
            bound = 1 / math.sqrt(adapter.a.shape[1])  # sqrt(6 / ((1 + 5) inputs))
            for name, place in zip(adapter.names, adapter.places, strict=True):
                generator = torch.Generator().manual_seed(seed_of(seed, "lora", name))
                drawn = torch.empty(adapter.rank, adapter.a.shape[1]).uniform_(-bound, bound, generator=generator)
                adapter.a[place.inner].copy_(drawn)
            adapter.b.zero_()


def linears(decoder: Decoder) -> Iterator[tuple[str, Linear, list[tuple[str, int]]]]:
    """(name, module, the stored matrices that it is made of: name and rows) of every product of the layers."""
    stored = stored_pieces(decoder.config)
    for name, module in decoder.named_modules():
        if isinstance(module, Linear):
            pieces = stored[f"{name}.weight"]
            yield name, module, [(piece.removesuffix(".weight"), shape[0]) for piece, shape in pieces]


def adapters(decoder: Decoder) -> Iterator[Adapter]:
    return (module for module in decoder.modules() if isinstance(module, Adapter))


def sharing(decoder: Decoder) -> Decoder:
    """A decoder over the very same weights, without adapters."""
    with torch.device("meta"):
        other = Decoder(decoder.config)
    for name, module in other.named_modules():
        own = decoder.get_submodule(name)
        for key, _ in list(module.named_parameters(recurse=False)):
            setattr(module, key, getattr(own, key))
    other.source, other.generation, other.eos_ids = decoder.source, decoder.generation, decoder.eos_ids
    return other


def shared_copy(decoder: Decoder) -> Decoder:
    """A decoder over the very same weights, with a copy of the adapters as they are, all frozen."""
    assert decoder.lora is not None
    other, names = sharing(decoder), {name for adapter in adapters(decoder) for name in adapter.names}
    attach(other, decoder.lora, lambda name: name in names)
    with torch.no_grad():
        for mine, theirs in zip(adapters(other), adapters(decoder), strict=True):
            mine.a.copy_(theirs.a)
            mine.b.copy_(theirs.b)
    return other.requires_grad_(False)


def frozen_copy(model: Model) -> Model:
    """The model as it is, which no update of the other moves. What is frozen in that is shared where it is a decoder's."""
    if isinstance(model, Decoder) and model.lora is not None:
        return shared_copy(model)
    copied: Model = copy.deepcopy(model)
    return copied.requires_grad_(False)


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters as the same model has them without adapters, each merged when it is its turn.

    One of which processes hold some rows each comes as it lies: `whole` gathers it.
    """
    merged = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, Linear) and m.adapter is not None}
    inside = {id(p) for module in model.modules() if isinstance(module, Adapter) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            yield name, merged[name].merged() if name in merged else parameter


def merge(decoder: Decoder) -> None:
    """Put the adapters into the weights."""
    with torch.no_grad():
        for _, linear, _ in linears(decoder):
            if linear.adapter is not None:
                linear.weight.copy_(linear.merged())
                linear.adapter = None
    decoder.lora = None
