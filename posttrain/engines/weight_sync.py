"""Weight sync with engines in other processes of this machine: concatenated tensors in shared memory.

Each sync makes an *offer*: the place of the weights, their version, and their checksum. An engine loads them, and
returns the version and the checksum of the weights that it read. The weights of a version remain until the next version
is put, so a restarted engine gets them without the learner. `pool.ray_engines`, `servers` and
`vllm` have further transports.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from posttrain.core import user_files
from posttrain.core.protocols import World
from posttrain.models.row_shards import is_sharded, whole, whole_shape
from posttrain.models.tensor_files import size_of

Named = Iterable[tuple[str, Tensor]]
Offer = dict[str, Any]
"""Description of the offered weights: plain JSON data."""
BLOCK = 1024
"""Number of 8-byte words in a block; the checksum covers the sum of each block."""
Call = Callable[[str, Any], Any]
"""Calls a method of an engine by name, with plain JSON data or None; returns its answer. Raises `pool_protocol.Gone`."""


@dataclass(frozen=True)
class Receiver:
    """An engine that waits for weights."""

    name: str
    first: bool  # it has just started
    call: Call


@dataclass(frozen=True)
class Stored:
    """Position of a tensor in memory that two processes share."""

    name: str
    shape: tuple[int, ...]
    offset: int  # bytes

    def bytes_in(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bytes of the tensor: a view, uint8 [n]."""
        return memory[self.offset : self.offset + size_of(dtype, self.shape)]

    def tensor_in(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor: a view of its shape."""
        return self.bytes_in(memory, dtype).view(dtype).view(self.shape)

    def checksum(self, memory: Tensor, dtype: torch.dtype, before: int) -> int:
        """Continue the checksum `before` with name and content."""
        return _continued(self.name, self.bytes_in(memory, dtype), before)


class WeightLayout:
    """Layout of a model's concatenated tensors, aligned to 64 bytes."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        named: Callable[[Any], Named],
        same: tuple[str, str] | None = None,
    ) -> None:
        """Lay out the tensors. `named`: yields (name, tensor) in order. `same`: two names, of which the second has the
        position of the first.
        """
        self.dtype, self.named, self.stored, self.bytes = dtype, named, list[Stored](), 0
        places: dict[str, int] = {}
        for name, tensor in named(model):
            shared = same is not None and name == same[1]
            places[name] = places[same[0]] if same is not None and shared else self.bytes
            shape = whole_shape(tensor)
            self.stored.append(Stored(name, tuple(shape), places[name]))
            self.bytes += 0 if shared else -(-size_of(dtype, shape) // 64) * 64

    @property
    def described(self) -> dict[str, Any]:
        """Return the layout as plain JSON data."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "stored": [asdict(s) for s in self.stored]}

    def pass_by(self, weights: Any) -> None:
        """Take part in gathering sharded weights, which another process writes."""
        if any(map(is_sharded, weights.parameters())):
            for _, tensor in self.named(weights):
                whole(tensor)

    def write(self, weights: Any, memory: Tensor) -> int:
        """Copy the weights into memory, and return their checksum."""
        checksum = 0
        with torch.no_grad():
            for stored, (name, tensor) in zip(self.stored, self.named(weights), strict=True):
                assert stored.name == name, "tensors come in their order, one at a time"
                stored.tensor_in(memory, self.dtype).copy_(whole(tensor))
                checksum = stored.checksum(memory, self.dtype, checksum)
        return checksum


def shared_memory(descriptor: int) -> Tensor:
    """Map the memory behind a file descriptor, uint8 [n]."""
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


def checksum_of(tensors: Named) -> int:
    """Return the checksum of names and contents, as `Stored.checksum` computes it, where the tensors are."""
    found = 0
    for name, tensor in tensors:
        found = _continued(name, tensor.detach().contiguous().view(-1).view(torch.uint8), found)
    return found


def _continued(name: str, content: Tensor, before: int) -> int:
    """Continue a CRC-32 with a name, the sums of the whole blocks of a content, uint8 [n], and its rest.

    It detects errors, not attacks. Sums take as long as reading; a CRC-32 of all bytes, of which a thread computes 1 GB in
    a second, would take longer than the copy of the weights.
    """
    content = content if content.storage_offset() % 8 == 0 else content.clone()
    whole_blocks = content[: len(content) // (8 * BLOCK) * 8 * BLOCK]
    found = zlib.crc32(name.encode(), before)
    for part in (whole_blocks.view(torch.int64).view(-1, BLOCK).sum(1), content[len(whole_blocks) :]):
        found = zlib.crc32(part.cpu().numpy().data, found)
    return found


def checksum_of_names(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    return zlib.crc32(json.dumps([list(names), list(dtypes), [list(shape) for shape in shapes]]).encode())


class Transport(Protocol):
    """Transport of weights to the engines of a pool."""

    offer: Offer | None  # offer of the version that was put last; None: no engine can get it any more

    def put(self, weights: Any, version: int) -> None: ...  # makes the weights of a version available to all engines
    def send(self, to: Sequence[Receiver]) -> dict[str, str]:
        """Send the data that engines need before the offer. Return why it did not reach an engine, by the engine's name.

        After each `put` it is called once at the same place by all training processes, also with no engine that waits.
        """
        ...

    def done(self) -> None: ...  # allows the caller to change the weights that were put
    def close(self) -> None: ...


class Fetched:
    """Base class of transports from which engines fetch the weights themselves, by the offer."""

    offer: Offer | None = None

    def send(self, to: Sequence[Receiver]) -> dict[str, str]:
        return {}

    def done(self) -> None:
        pass


class SharedMemory(Fetched):
    """Transport through shared memory, for processes of this machine and user, which open it by this process's number."""

    def __init__(self, weight_layout: WeightLayout) -> None:
        self.weight_layout = weight_layout
        # no file: nothing to clean up, and /dev/shm may be small
        self.descriptor = os.memfd_create("posttrain weights")
        os.truncate(self.descriptor, weight_layout.bytes)
        self.memory = shared_memory(self.descriptor)

    def put(self, weights: Any, version: int) -> None:
        place = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        checksum = self.weight_layout.write(weights, self.memory)
        self.offer = {"version": version, "checksum": checksum, "file": place}

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor, self.memory = -1, self.memory[:0].clone()  # the map has a descriptor of its own


class OneWriter(Fetched):
    """Shared memory that one training process of each machine writes, for the engines of all that it has. Each version is
    there once, and the others offer it under the writer's place, version and checksum.

    All processes have to make the same calls: as many `put`, in the same order.
    """

    def __init__(self, memory: SharedMemory, world: World) -> None:
        self.memory, self.world = memory, world.apart()
        machines = self.world.gather(machine())
        self.writer = machines.index(machines[self.world.rank])

    def put(self, weights: Any, version: int) -> None:
        self.world.gather(None)  # until no engine of any process reads the previous version
        if self.writer == self.world.rank:
            self.memory.put(weights, version)
        else:
            self.memory.weight_layout.pass_by(weights)
        self.offer = self.world.gather(self.memory.offer)[self.writer]

    def close(self) -> None:
        self.memory.close()


def machine() -> str:
    """Return a name that the processes share which can open each other's memory: host, process numbers and user."""
    return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"


def shared_writer(memory: SharedMemory, world: World) -> SharedMemory | OneWriter:
    """Return the transport of a process of `world` whose engines are on this machine."""
    return memory if world.size == 1 else OneWriter(memory, world)


class Received:
    """Received weights, with the model's names of the tensors. `layout`: see `WeightLayout.described`."""

    def __init__(self, layout: Any, memory: Tensor) -> None:
        self.memory, self.dtype = memory, getattr(torch, layout["dtype"])
        self.stored = [Stored(s["name"], tuple(s["shape"]), s["offset"]) for s in layout["stored"]]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for stored in self.stored:
            yield stored.name, stored.tensor_in(self.memory, self.dtype)


def offered(offer: Offer) -> Tensor:
    """Return the bytes of an offer's weights, uint8 [n]: the memory of the other process, mapped. Raises OSError."""
    with user_files.opened(offer["file"]) as file:
        size = os.fstat(file.fileno()).st_size
        return torch.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


if TYPE_CHECKING:
    _proof: tuple[Callable[..., Transport], ...] = (SharedMemory, OneWriter)
