"""Offloading to the memory of the host: moments of the optimizer between updates, activations until the backward pass,
frozen models while no micro-batch is computed with them.

Numbers are copied there and back, so results have the same bits. On CUDA the memory is pinned, and copies are ordered by the
current stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from posttrain.core.protocols import Model
from posttrain.learners.library_optimizer import Optimizer
from posttrain.learners.optimizer_chunks import gradients_in_chunks

LEAST = 1 << 16
"""Bytes from which an activation is moved. Copies of smaller ones would take longer than they save."""


def to_host(x: Tensor, place: Tensor | None = None) -> Tensor:
    """Return a copy of a tensor in the host's memory, without gaps between its numbers, and with the same order of
    dimensions. `place`: an earlier copy, to be overwritten.
    """
    if place is None:
        place = torch.empty_like(x, device="cpu", requires_grad=False, pin_memory=x.is_cuda)
    return place.copy_(x.detach(), non_blocking=x.is_cuda)


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
                places[name] = state[name] = to_host(value, places.get(name))


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
        kept: dict[int, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in cast(nn.Module, model).modules():
            module._buffers.update({name: x.to(device) for name, x in module._buffers.items() if x is not None})
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in kept:
                    host = parameter.detach() if parameter.device.type == "cpu" else to_host(parameter)
                    host = host.pin_memory() if torch.cuda.is_available() else host
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
