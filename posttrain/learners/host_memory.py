"""Offloading to the memory of the host: moments of the optimizer between updates, activations until the backward pass,
frozen models while no micro-batch is computed with them.

Numbers are copied there and back, so results have the same bits. On CUDA the memory is pinned, and copies are ordered by the
current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from posttrain.core.protocols import Model
from posttrain.learners.library_optimizer import Optimizer
from posttrain.learners.optimizer_chunks import gradients_in_chunks

ALIGNED = 64  # bytes
SEGMENT = 1 << 31
"""Bytes of a segment of the host's memory, but for larger tensors, and the first ones, which double."""
LEAST = 1 << 16
"""Bytes from which an activation is moved. Copies of smaller ones would take longer than they save."""


def to_host(x: Tensor, place: Tensor | None = None) -> Tensor:
    """Return a copy of a tensor in the host's memory, without gaps between its numbers, and with the same order of
    dimensions. `place`: an earlier copy, to be overwritten.
    """
    if place is None:
        place = torch.empty_like(x, device="cpu", requires_grad=False, pin_memory=x.is_cuda)
    return place.copy_(x.detach(), non_blocking=x.is_cuda)


class HostSegments:
    """Memory of the host for tensors that remain, laid into few segments.

    torch rounds each pinned tensor up to a power of two (`CachingHostAllocator.h`). A segment is one already, and what a
    large tensor leaves of it takes others.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        """`allocate`: returns memory of so many bytes, uint8 [n]."""
        self._allocate = allocate
        self._segments: list[tuple[Tensor, int]] = []  # (memory, bytes of it that are taken)

    @property
    def bytes(self) -> int:
        return sum(len(memory) for memory, _ in self._segments)

    def place(self, x: Tensor) -> Tensor:
        """Return memory for a copy of a tensor, without gaps between its numbers, and with the same order of
        dimensions.
        """
        like = torch.empty_like(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
        size = -(-like.nbytes // ALIGNED) * ALIGNED
        number = next((n for n, (held, taken) in enumerate(self._segments) if len(held) - taken >= size), None)
        if number is None:
            number, least = len(self._segments), max(size, min(self.bytes, SEGMENT), 1)
            self._segments.append((self._allocate(1 << (least - 1).bit_length()), 0))
        memory, taken = self._segments[number]
        self._segments[number] = memory, taken + size
        return memory[taken : taken + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def host_segments(pinned: bool) -> HostSegments:
    return HostSegments(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=pinned))


def to_device(x: Tensor, device: torch.device, stride: tuple[int, ...] | None = None) -> Tensor:
    """Return a copy of a tensor of the host on a device. `stride`: its strides there; None: the same."""
    there = torch.empty_strided(x.shape, stride or x.stride(), dtype=x.dtype, device=device)
    return there.copy_(x.detach(), non_blocking=device.type == "cuda")


def wait_for(device: torch.device) -> None:
    """Wait until the host's copies of tensors of a device can be read."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class OffloadedOptimizer:
    """An optimizer whose state is on the host between updates. Implements `library_optimizer.Optimizer`.

    A step updates weights in chunks: their state is fetched, and stored again.
    """

    def __init__(self, inner: Optimizer, in_chunks: bool = True) -> None:
        """Wrap an optimizer. `in_chunks`: whether it updates each weight by itself; else all state is fetched at once."""
        self.inner, self._in_chunks = inner, in_chunks
        self.param_groups = inner.param_groups
        self._host: dict[nn.Parameter, dict[str, Tensor]] = {}  # memory of the state that belongs on the device
        devices = {p.device.type for group in inner.param_groups for p in group["params"]}
        self._memory = host_segments(pinned="cuda" in devices)

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        return self.inner.state

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        devices = set()
        for chunk in gradients_in_chunks(self.param_groups, self._in_chunks):
            for parameter in chunk:
                self._fetch(parameter)
            self.inner.step()
            for parameter in chunk:
                self._store(parameter)
                devices.add(parameter.device)
        for device in devices:
            wait_for(device)

    def restore(self, parameter: nn.Parameter, stored: Mapping[str, Tensor]) -> None:
        self.inner.restore(parameter, stored)
        self._store(parameter)
        wait_for(parameter.device)

    def moment_bytes(self) -> float:
        return self.inner.moment_bytes()

    def _fetch(self, parameter: nn.Parameter) -> None:
        for name, place in self._host.get(parameter, {}).items():
            self.state[parameter][name] = to_device(place, parameter.device)

    def _store(self, parameter: nn.Parameter) -> None:
        state, places = self.state.get(parameter, {}), self._host.setdefault(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device == parameter.device != torch.device("cpu"):
                if name not in places:
                    places[name] = self._memory.place(value)
                state[name] = to_host(value, places[name])


@contextmanager
def activations_on_host(models: Sequence[nn.Module]) -> Iterator[None]:
    """Context of a forward pass whose activations are on the host until the backward pass.

    Weights of `models`, which a backward pass reads too, remain where they are. A tensor that several operations keep is
    copied once, without the gaps of its strides.
    """
    weights = {StorageWeakRef(x.untyped_storage()).cdata for model in models for x in model.parameters()}
    copies: dict[Any, tuple[Tensor, StorageWeakRef]] = {}  # while a reference is held, no other storage has its key

    def pack(x: Tensor) -> Tensor | tuple[Tensor, torch.device, tuple[int, ...]]:
        storage = StorageWeakRef(x.untyped_storage())
        if x.device.type == "cpu" or x.nbytes < LEAST or _overlaps(x) or storage.cdata in weights:
            return x
        key = storage.cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
        if key not in copies:
            copies[key] = to_host(x), storage
        return copies[key][0], x.device, x.stride()  # other strides could change the bits of a product

    def unpack(packed: Tensor | tuple[Tensor, torch.device, tuple[int, ...]]) -> Tensor:
        return packed if isinstance(packed, Tensor) else to_device(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _overlaps(x: Tensor) -> bool:
    """Return whether numbers of a tensor share memory, as in one that was expanded, which could not be written."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


class HostModel:
    """Weights of a frozen model, which are on the host except within `on`."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """Move the weights to the host, and buffers, which are small, to the device of passes."""
        kept, pinned = dict[int, nn.Parameter](), torch.cuda.is_available()
        memory = host_segments(pinned)
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in cast(nn.Module, model).modules():
            module._buffers.update({name: x.to(device) for name, x in module._buffers.items() if x is not None})
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in kept:
                    copied = pinned or parameter.device.type != "cpu"
                    host = to_host(parameter, memory.place(parameter)) if copied else parameter.detach()
                    kept[id(parameter)] = nn.Parameter(host, requires_grad=False)
                self._places.append((module, name, kept[id(parameter)]))
        self._assign({id(parameter): parameter for _, _, parameter in self._places})

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Context in which the weights are on a device. Changes to them there are lost."""
        own = {id(parameter): parameter for _, _, parameter in self._places}
        self._assign({key: nn.Parameter(to_device(p, device), requires_grad=False) for key, p in own.items()})
        try:
            yield
        finally:
            self._assign(own)

    def _assign(self, tensors: Mapping[int, nn.Parameter]) -> None:
        for module, name, parameter in self._places:
            module._parameters[name] = tensors[id(parameter)]


def without_shared_weights(model: Model, others: Mapping[str, Model]) -> dict[str, Model]:
    """Return those of other models that share no weights with a model, as a reference shares an adapted policy's."""
    own = {id(p) for p in model.parameters()}
    return {name: other for name, other in others.items() if not any(id(p) in own for p in other.parameters())}
