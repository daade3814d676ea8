"""Low-rank adapters of a decoder (LoRA, arXiv 2106.09685): which products have one, how they begin, what they add up to.

Decides what is shared. An adapted decoder's own weights are frozen, so a second decoder over the very same tensors, with
other adapters or none, costs no memory: the model as it was before training is such a one.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from posttrain.core.seeds import seed_of
from posttrain.core.types import UserError
from posttrain.models.adapters.quantized import QuantizedLinear, require
from posttrain.models.free_memory import available_memory, in_gib
from posttrain.models.hf.backed import Backed
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.linear import Adapter, Linear, LinearOfRows
from posttrain.models.native.weight_names import stored_pieces

if TYPE_CHECKING:
    from posttrain.core.protocols import Model

Adaptable = Decoder | Backed
ALL = "all-linear"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What a decoder's adapted matrices are called by PEFT."""


EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Matrices of mixtures of experts: PEFT takes adapters of these names for those of the experts, also in dense layers."""


@dataclass(frozen=True)
class LoRA:
    """How a decoder is adapted."""

    rank: int
    alpha: float
    rslora: bool = False
    base: str = ""  # where the weights below lie: a folder, or a Hugging Face model's name
    digest: str = ""  # a fingerprint of these
    quantize: str = ""  # how they are packed, if they are: see `quantized`
    dora: bool = False  # whether the length of each row learns by itself (arXiv 2402.09353)

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def named_targets(targets: Sequence[str], there: Sequence[str] = TARGETS) -> tuple[str, ...]:
    """The matrices that these words name, or several with commas between. Raises UserError for one that is not `there`."""
    targets = [name for word in targets for name in word.split(",")]
    if ALL in targets:
        if len(targets) > 1:
            raise UserError(f"--lora-targets {ALL} is all of them: leave out the others, or that")
        return tuple(there)
    if odd := [name for name in targets if name not in there]:
        raise UserError(f"--lora-targets {odd[0]:.60} is none: there are {ALL}, {', '.join(there)}")
    if not targets:  # a recipe may say so
        raise UserError(f"--lora-targets is empty: give {ALL}, or some of {', '.join(there)}")
    return tuple(name for name in there if name in targets)


def targets_of(model: Adaptable) -> tuple[str, ...]:
    """What the matrices of a model that can be adapted are called. Raises UserError if there are none."""
    if isinstance(model, Decoder):
        return TARGETS
    found = tuple(dict.fromkeys(name.rpartition(".")[2] for name, _ in products(model)))
    if not found:
        raise UserError(f"--lora adapts linear layers, and {type(model.inner).__name__} has none: leave it out")
    return found


def decoder_of(model: Model) -> Adaptable:
    """The decoder that a model is, or is built on. Raises UserError where there is none to be adapted."""
    found = model if isinstance(model, Decoder | Backed) else getattr(model, "backbone", None)
    if not isinstance(found, Decoder | Backed):
        raise UserError(f"--lora adapts decoders, and a {type(model).__name__} is none: leave it out")
    return found


def is_adapted(model: Model) -> bool:
    found = model if isinstance(model, Decoder | Backed) else getattr(model, "backbone", None)
    return isinstance(found, Decoder | Backed) and found.lora is not None


def attach(decoder: Adaptable, lora: LoRA, adapts: Callable[[str], bool]) -> None:
    """Freeze a decoder and give it adapters, uninitialised, for the stored matrices of which `adapts` holds.

    These are named as in a checkpoint, such as model.layers.0.self_attn.q_proj. Raises UserError if there is no room.
    """
    decoder.requires_grad_(False)
    decoder.lora = lora
    if isinstance(decoder, Backed):
        places = _places_of_weights(decoder)
        for name, layer in list(products(decoder)):
            if isinstance(layer, nn.Linear) and (adapts(name) or lora.quantize):
                if places[layer.weight] > 1:  # merged in one place, it would be another weight in the others
                    raise UserError(
                        f"--lora: {name} of {type(decoder.inner).__name__} shares its weight with other layers; choose "
                        "others by --lora-targets, without --quantize, or leave it out"
                    )
                decoder.inner.set_submodule(name, LinearOfRows(layer))
    needed, room = 0, available_memory(decoder.head.device)
    for _, linear, matrices in linears(decoder):
        pieces, end = [], 0
        for stored, rows in matrices:
            begin, end = end, end + rows
            if adapts(stored):
                pieces.append((stored, slice(begin, end)))
        outputs, inputs = linear.weight.shape
        needed += lora.rank * sum(inputs + rows.stop - rows.start for _, rows in pieces) * decoder.head.dtype.itemsize
        if needed > room:
            raise UserError(
                f"adapters of rank {lora.rank:,} take more than the {in_gib(room)} of memory that are free: take a smaller "
                "rank"
            )
        if pieces:
            with torch.device(linear.weight.device):
                linear.adapter = Adapter(inputs, outputs, pieces, lora.rank, lora.scale, lora.dora).to(
                    linear.weight.dtype
                )
    if lora.quantize:
        require(lora.quantize)
        for name, linear, _ in list(linears(decoder)):
            if not isinstance(linear, QuantizedLinear):
                _put(decoder, name, QuantizedLinear(linear, lora.quantize))


def _places_of_weights(model: Backed) -> Counter[Tensor]:
    """In how many places of the model each parameter is read. A block that several layers are is one place."""
    children = (child for parent in model.modules() for child in parent._modules.values() if child is not None)
    return Counter(p for child in children for p in child._parameters.values() if p is not None)


def _put(decoder: Adaptable, name: str, module: nn.Module) -> None:
    (decoder.inner if isinstance(decoder, Backed) else decoder).set_submodule(name, module)


def begin(decoder: Adaptable, seed: int) -> None:
    """Adapters that change nothing yet: B is 0, and A as PEFT has it, kaiming_uniform with a = sqrt(5) (arXiv 1502.01852).

    A matrix begins with the same A whichever others are adapted. A magnitude begins as the lengths of the rows.
    """
    with torch.no_grad():
        for _, linear, _ in linears(decoder):
            if (adapter := linear.adapter) is None:
                continue
            bound = 1 / math.sqrt(adapter.a.shape[1])  # sqrt(6 / ((1 + 5) inputs))
            for name, place in zip(adapter.names, adapter.places, strict=True):
                generator = torch.Generator().manual_seed(seed_of(seed, "lora", name))
                drawn = torch.empty(adapter.rank, adapter.a.shape[1]).uniform_(-bound, bound, generator=generator)
                adapter.a[place.inner].copy_(drawn)
            adapter.b.zero_()
            if adapter.magnitude is not None:
                adapter.magnitude.copy_(adapter.lengths(linear.weight))


def products(model: Backed) -> Iterator[tuple[str, nn.Linear | Linear]]:
    """(name within transformers' model, module) of every linear layer that may be adapted: all but the output head."""
    head, left = model.inner.get_output_embeddings(), set[str]()
    # a state-space mixer: fused kernels read the weight of its last product themselves, as PEFT knows too of some
    mixers = {name for name, m in model.inner.named_modules() if {"A_log", "D"} <= m._parameters.keys()}
    if any("experts" in name and parameter.ndim == 3 for name, parameter in model.inner.named_parameters()):
        left.update(EXPERTS)
    for name, module in model.inner.named_modules():
        place, _, last = name.rpartition(".")
        within = last == "out_proj" and place in mixers
        if module is not head and last not in left and not within and _is_a_product(module):
            yield name, module


def _is_a_product(module: nn.Module) -> TypeGuard[nn.Linear | Linear]:
    """Whether a layer is linear and no more: routers of some mixtures are made of one, and choose experts with it."""
    if type(module) is nn.Linear or isinstance(module, Linear):
        return True
    if not isinstance(module, nn.Linear):
        return False
    with torch.no_grad():
        x = torch.ones_like(module.weight[:1])
        found = module(x)
    return isinstance(found, Tensor) and torch.allclose(found, functional.linear(x, module.weight, module.bias))


def stored_matrices(decoder: Adaptable) -> list[str]:
    """The names of all matrices that could be adapted, as a checkpoint has them."""
    if isinstance(decoder, Backed):
        return [name for name, _ in products(decoder)]
    return [stored for _, _, matrices in linears(decoder) for stored, _ in matrices]


def linears(decoder: Adaptable) -> Iterator[tuple[str, Linear, list[tuple[str, int]]]]:
    """(name, module, the stored matrices that it is made of: name and rows) of every product that may have an adapter."""
    if isinstance(decoder, Backed):
        ours = ((name, module) for name, module in products(decoder) if isinstance(module, Linear))
        yield from ((name, module, [(name, module.weight.shape[0])]) for name, module in ours)
        return
    stored = stored_pieces(decoder.config)
    for name, module in decoder.named_modules():
        if isinstance(module, Linear):
            pieces = stored[f"{name}.weight"]
            yield name, module, [(piece.removesuffix(".weight"), shape[0]) for piece, shape in pieces]


def adapters(decoder: Adaptable) -> Iterator[Adapter]:
    return (module for module in decoder.modules() if isinstance(module, Adapter))


def sharing(decoder: Adaptable) -> Adaptable:
    """A decoder over the very same weights, without adapters."""
    if isinstance(decoder, Backed):
        shared = copy.deepcopy(decoder, {id(t): t for t in (*decoder.parameters(), *decoder.buffers())})
        for _, linear, _ in linears(shared):
            linear.adapter = None
        shared.lora = None
        return shared
    with torch.device("meta"):
        other = Decoder(decoder.config)
    for name, module in list(other.named_modules()):
        own = decoder.get_submodule(name)
        if isinstance(own, QuantizedLinear):
            other.set_submodule(name, own.shared())
            continue
        for key, _ in list(module.named_parameters(recurse=False)):
            setattr(module, key, getattr(own, key))
    other.source, other.generation, other.eos_ids = decoder.source, decoder.generation, decoder.eos_ids
    return other


def shared_copy(decoder: Adaptable) -> Adaptable:
    """A decoder over the very same weights, with a copy of the adapters as they are, all frozen."""
    assert decoder.lora is not None
    other, names = sharing(decoder), {name for adapter in adapters(decoder) for name in adapter.names}
    attach(other, decoder.lora, lambda name: name in names)
    with torch.no_grad():
        for mine, theirs in zip(adapters(other), adapters(decoder), strict=True):
            for own, other_own in zip(mine.parameters(), theirs.parameters(), strict=True):
                own.copy_(other_own)
    return other.requires_grad_(False)


def frozen_copy(model: Model) -> Model:
    """The model as it is, which no update of the other moves. What is frozen in that is shared where it is a decoder's."""
    if isinstance(model, Decoder | Backed) and model.lora is not None:
        return shared_copy(model)
    copied: Model = copy.deepcopy(model)
    return copied.requires_grad_(False)


def held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model, and behind them what else its checkpoint holds: numbers that nothing learns, such as the
    biases of a router (DeepSeek-V3) or the factors of layers (Gemma 4).
    """
    yield from model.named_parameters()
    yield from _beside(model)


def _beside(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The second of these; packed weights are not among them."""
    for place, module in model.named_modules():
        for name, buffer in (
            module.named_buffers(place, recurse=False) if not isinstance(module, QuantizedLinear) else ()
        ):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What `held` gives of the same model without adapters, each matrix merged when it is its turn.

    One of which processes hold some rows each comes as it lies: `whole` gathers it.
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
            if id(parameter) not in seen:  # tied ones come once
                seen.add(id(parameter))
                yield f"{place}.{key}".lstrip("."), parameter
    yield from _beside(model)


def merge(decoder: Adaptable) -> None:
    """Put the adapters into the weights."""
    with torch.no_grad():
        for name, linear, _ in list(linears(decoder)):
            if isinstance(linear, QuantizedLinear):
                _put(decoder, name, linear.restored())
            elif linear.adapter is not None:
                linear.weight.copy_(linear.merged())
                linear.adapter = None
    decoder.lora = None
