"""Low-rank adapters of a decoder (LoRA, arXiv 2106.09685): which products have one, their initialisation, and merging.

The base weights of an adapted decoder are frozen and can be shared: a second decoder over the same tensors, with other
adapters or none, such as the reference, needs no further memory for them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.core.protocols import Model
from posttrain.core.seeds import seed_of
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_writer import adapters, save_adapter
from posttrain.models.backbone import Backbone, is_backbone
from posttrain.models.free_memory import available_memory, in_gib
from posttrain.models.native.linear import Adapter
from posttrain.models.native.quantized import QuantizedLinear
from posttrain.models.row_shards import whole, whole_shape

ALL = "all-linear"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""PEFT's names of a decoder's adapted matrices."""


@dataclass(frozen=True)
class LoRA:
    """Settings of a decoder's adapters."""

    rank: int
    alpha: float
    rslora: bool = False
    base: str = ""  # the base: a folder, or a Hugging Face model's name
    digest: str = ""  # fingerprint of the base
    quantize: str = ""  # quantization of the base, if any: see `quantized`
    dora: bool = False  # whether the magnitude of each row is trained (DoRA, arXiv 2402.09353)

    @property
    def scale(self) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def save(self, backbone: Backbone, folder: Path, **more: Any) -> None:
        """Write the adapters of a backbone, without its weights. `more`: see `save_adapter`."""
        save_adapter(backbone, folder, **more)


def named_targets(targets: Sequence[str], there: Sequence[str] = TARGETS) -> tuple[str, ...]:
    """Return the names of matrices in `targets`, each of one or several with commas between. Raises UserError for a
    name that is not in `there`.
    """
    targets = [name for word in targets for name in word.split(",")]
    if ALL in targets:
        if len(targets) > 1:
            raise UserError(f"--lora-targets {ALL} already means all: leave out {ALL}, or the others")
        return tuple(there)
    if odd := [name for name in targets if name not in there]:
        raise UserError(f"--lora-targets {odd[0]:.60} is unknown: give {ALL}, or some of {', '.join(there)}")
    if not targets:  # possible in a recipe
        raise UserError(f"--lora-targets is empty: give {ALL}, or some of {', '.join(there)}")
    return tuple(name for name in there if name in targets)


def targets_of(model: Backbone) -> tuple[str, ...]:
    """Return the names of a model's matrices that can be adapted. Raises UserError if there are none."""
    found = tuple(dict.fromkeys(name.rpartition(".")[2] for name in model.matrices()))
    if not found:
        raise UserError(f"--lora adapts linear layers, and {model.family} has none: leave it out")
    return found


def decoder_of(model: Model) -> Backbone:
    """Return the decoder of a model. Raises UserError if it has none that can be adapted."""
    found = getattr(model, "backbone", model)
    if not is_backbone(found):
        raise UserError(f"--lora adapts decoders, and a {type(model).__name__} is not one: leave it out")
    return found


def is_adapted(model: Model) -> bool:
    found = getattr(model, "backbone", model)
    return is_backbone(found) and found.lora is not None


def attach(decoder: Backbone, lora: LoRA, adapts: Callable[[str], bool]) -> None:
    """Freeze a decoder and add uninitialised adapters to the stored matrices for which `adapts(name)` is true.

    Names are those in a checkpoint, such as model.layers.0.self_attn.q_proj. Raises UserError if memory does not
    suffice.
    """
    decoder.requires_grad_(False)
    decoder.lora = lora
    decoder.open_linears(lambda name: adapts(name) or bool(lora.quantize))
    needed, room = 0, available_memory(decoder.head.device)
    for _, linear, matrices in decoder.linears():
        pieces, end = [], 0
        for stored, rows in matrices:
            begin, end = end, end + rows
            if adapts(stored):
                pieces.append((stored, slice(begin, end)))
        # a packed weight would be unpacked to be asked
        outputs, inputs = linear.shape if isinstance(linear, QuantizedLinear) else whole_shape(linear.weight)
        needed += lora.rank * sum(inputs + rows.stop - rows.start for _, rows in pieces) * decoder.dtype.itemsize
        if needed > room:
            raise UserError(
                f"adapters of rank {lora.rank:,} need more than the {in_gib(room)} of free memory: give a smaller rank"
            )
        if pieces:
            with torch.device(decoder.head.device):
                adapter = Adapter(inputs, outputs, pieces, lora.rank, lora.scale, lora.dora)
            linear.adapter = adapter.to(decoder.dtype)
    if lora.quantize:
        for name, linear, _ in list(decoder.linears()):
            if not isinstance(linear, QuantizedLinear):
                decoder.set_submodule(name, QuantizedLinear(linear, lora.quantize))


def begin(decoder: Backbone, seed: int) -> None:
    """Initialise adapters such that the output does not change: B is 0, and A as in PEFT, kaiming_uniform with a =
    sqrt(5) (arXiv 1502.01852).

    The A of a matrix does not depend on which others are adapted. Magnitudes are initialised to the norms of the rows.
    """
    with torch.no_grad():
        for _, linear, _ in decoder.linears():
            if (adapter := linear.adapter) is None:
                continue
            bound = 1 / math.sqrt(adapter.a.shape[1])  # sqrt(6 / ((1 + 5) inputs))
            for name, place in zip(adapter.names, adapter.places, strict=True):
                generator = torch.Generator().manual_seed(seed_of(seed, "lora", name))
                drawn = torch.empty(adapter.rank, adapter.a.shape[1]).uniform_(-bound, bound, generator=generator)
                adapter.a[place.inner].copy_(drawn)
            adapter.b.zero_()
            if adapter.magnitude is not None:
                adapter.magnitude.copy_(adapter.lengths(whole(linear.weight)))


def sharing(decoder: Backbone) -> Backbone:
    """Return a decoder over the same weights, without adapters."""
    shared = copy.deepcopy(decoder, {id(t): t for t in (*decoder.parameters(), *decoder.buffers())})
    for _, linear, _ in shared.linears():
        linear.adapter = None
    shared.lora = None
    return shared


def shared_copy(decoder: Backbone) -> Backbone:
    """Return a decoder over the same weights, with a copy of the adapters, all frozen."""
    assert decoder.lora is not None
    other, names = sharing(decoder), {name for adapter in adapters(decoder) for name in adapter.names}
    attach(other, decoder.lora, lambda name: name in names)
    with torch.no_grad():
        for mine, theirs in zip(adapters(other), adapters(decoder), strict=True):
            for own, other_own in zip(mine.parameters(), theirs.parameters(), strict=True):
                own.copy_(other_own)
    return other.requires_grad_(False)


def frozen_copy(model: Model) -> Model:
    """Return a copy of the model that no update changes. It shares the frozen weights of an adapted decoder."""
    if is_backbone(model) and model.lora is not None:
        return shared_copy(model)
    copied: Model = copy.deepcopy(model)
    return copied.requires_grad_(False)


def merge(decoder: Backbone) -> None:
    """Merge the adapters into the weights."""
    with torch.no_grad():
        for name, linear, _ in list(decoder.linears()):
            if isinstance(linear, QuantizedLinear):
                decoder.set_submodule(name, linear.restored())
            elif linear.adapter is not None:
                linear.weight.data = linear.merged()  # replaced: a weight of a narrower type would round the sum
                linear.adapter = None
    decoder.lora = None
