"""How weights reach an engine in another process: end to end in memory that both see, or in a file on a disk that both see.

What is handed over is an *offer*: where the weights lie, their version, and their checksum. An engine takes them over and
gives version and checksum back, the latter computed from what it got. One layout serves both ways: a file is mapped like
memory. Weights of a version stay until the next one is put, so an engine that comes back gets them without the learner.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from posttrain.messages import one_line
from posttrain.protocols import Model
from posttrain.types import UserError

Named = Iterable[tuple[str, Tensor]]
Offer = dict[str, Any]
"""What an engine is told: plain JSON data."""
Call = Callable[[str, Any], None]
"""Has an engine call a method of its own, by name, with plain JSON data or None; returns when it has."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in memory that two processes see."""

    name: str
    shape: tuple[int, ...]
    offset: int  # bytes

    def bytes_in(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [n], a view."""
        return memory[self.offset : self.offset + size_of(self.shape, dtype)]

    def tensor_in(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """A view of the shape."""
        return self.bytes_in(memory, dtype).view(dtype).view(self.shape)

    def checksum(self, memory: Tensor, dtype: torch.dtype, before: int) -> int:
        """CRC-32 of name and content, continued. It notices mistakes, not malice, and is quicker than the copy."""
        return zlib.crc32(self.bytes_in(memory, dtype).numpy().data, zlib.crc32(self.name.encode(), before))


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes."""
    return torch.Size(shape).numel() * dtype.itemsize


def laid(tensors: Named, dtype: torch.dtype, same: tuple[str, str] | None = None) -> tuple[Stored, ...]:
    """A place for each tensor, on boundaries of 64 bytes. `same`: of two names, the second lies where the first does."""
    offset, places = 0, dict[str, int]()
    found = []
    for name, tensor in tensors:
        shape = tuple(tensor.shape)
        shared = same is not None and name == same[1]
        places[name] = places[same[0]] if same is not None and shared else offset
        found.append(Stored(name, shape, places[name]))
        offset += 0 if shared else -(-size_of(shape, dtype) // 64) * 64
    return tuple(found)


def shared_memory(descriptor: int) -> Tensor:
    """uint8 [n]: the memory behind a file descriptor."""
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


def checksum_of(tensors: Named) -> int:
    """CRC-32 of names and contents, as `Stored.checksum` has it."""
    found = 0
    for name, tensor in tensors:
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        found = zlib.crc32(content.data, zlib.crc32(name.encode(), found))
    return found


def checksum_of_names(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    return zlib.crc32(json.dumps([list(names), list(dtypes), [list(shape) for shape in shapes]]).encode())


class Transport(Protocol):
    """Makes weights available to the engines of a pool."""

    offer: Offer | None  # of the version that was put last; None: there is none to be had

    @property
    def layout(self) -> dict[str, Any]: ...  # what is handed over, as an engine is told: plain JSON data
    def put(self, weights: Any, version: int) -> None: ...  # weights of a version, for all engines
    def send(self, name: str, first: bool, call: Call) -> None:
        """What comes before an engine is told the offer. `first`: it has just started. Raises `wire.Gone`."""

    def done(self) -> None: ...  # the weights that were put may change from now on
    def close(self) -> None: ...


class Laid:
    """What both ways share: tensors end to end. `named`: those of a model, in their order; `same`: see `laid`."""

    def __init__(
        self,
        model: Model,
        dtype: torch.dtype,
        named: Callable[[Any], Named] = lambda model: model.named_parameters(),
        same: tuple[str, str] | None = None,
    ) -> None:
        self.named, self.dtype = named, dtype
        self.offer: Offer | None = None
        self.stored = laid(named(model), dtype, same)
        self.bytes = max(s.offset + size_of(s.shape, dtype) for s in self.stored)

    @property
    def layout(self) -> dict[str, Any]:
        return {"dtype": str(self.dtype).removeprefix("torch."), "stored": [asdict(s) for s in self.stored]}

    def send(self, name: str, first: bool, call: Call) -> None:
        pass  # engines fetch them

    def done(self) -> None:
        pass

    def written(self, weights: Any, memory: Tensor) -> int:
        """The checksum of the weights, copied into memory."""
        tensors, checksum = dict(self.named(weights)), 0
        with torch.no_grad():
            for stored in self.stored:
                stored.tensor_in(memory, self.dtype).copy_(tensors[stored.name])
                checksum = stored.checksum(memory, self.dtype, checksum)
        return checksum


class SharedMemory(Laid):
    """See `Transport`. For processes of this machine, which get the descriptor when they are started."""

    def __init__(
        self,
        model: Model,
        dtype: torch.dtype,
        named: Callable[[Any], Named] = lambda model: model.named_parameters(),
        same: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(model, dtype, named, same)
        self.descriptor = os.memfd_create(
            "posttrain weights"
        )  # no file: nothing to clean up, and /dev/shm may be small
        os.truncate(self.descriptor, self.bytes)
        self.memory = shared_memory(self.descriptor)

    def write(self, weights: Any) -> int:
        """Copy the weights to where they are seen; returns their checksum."""
        return self.written(weights, self.memory)

    def put(self, weights: Any, version: int) -> None:
        self.offer = {"version": version, "checksum": self.write(weights)}

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Files(Laid):
    """See `Transport`. For engines that see the same disk: a file for each version, whole as soon as it has its name.

    `rank`: of the process whose engines these are.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        model: Model,
        dtype: torch.dtype,
        named: Callable[[Any], Named] = lambda model: model.named_parameters(),
        same: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(model, dtype, named, same)
        self.folder, self.rank = folder.absolute(), rank

    def put(self, weights: Any, version: int) -> None:
        """Raises UserError where the file cannot be written."""
        path = self.folder / f"weights-{self.rank}-{version}"
        partial = path.with_name(f"{path.name}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self.bytes)  # a full disk is told here, and is no signal in a mapping
                checksum = self.written(weights, shared_memory(descriptor))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            partial.rename(path)
        except OSError as error:
            raise UserError(f"the weights for the engines cannot be written to {path}: {one_line(error)}") from error
        before, self.offer = self.offer, {"version": version, "checksum": checksum, "file": str(path)}
        if before is not None and before["file"] != str(path):
            Path(before["file"]).unlink(missing_ok=True)

    def close(self) -> None:
        if self.offer is not None:
            Path(self.offer["file"]).unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty
                self.folder.rmdir()
            self.offer = None


class Received:
    """The other side: weights that lie as a layout says, with the names that a model has for them."""

    def __init__(self, layout: Any, memory: Tensor) -> None:
        """Raises ValueError or the like for a layout that is none, or does not fit into the memory."""
        self.memory, self.dtype = memory, getattr(torch, layout["dtype"])
        self.stored = [Stored(s["name"], tuple(s["shape"]), s["offset"]) for s in layout["stored"]]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for stored in self.stored:
            yield stored.name, stored.tensor_in(self.memory, self.dtype)


def offered(offer: Offer, memory: Tensor | None) -> Tensor:
    """The memory in which the weights of an offer lie. `memory`: that which is shared. Raises UserError for a lost file."""
    if "file" not in offer:
        assert memory is not None, "no memory is shared with this engine"
        return memory
    try:
        descriptor = os.open(offer["file"], os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"{offer['file']} cannot be read ({one_line(error)}): engines elsewhere need the run's folder on a disk that "
            "both machines see under the same path"
        ) from error
    try:
        size = os.fstat(descriptor).st_size
        return torch.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)


if TYPE_CHECKING:
    _proof: tuple[Callable[..., Transport], ...] = (SharedMemory, Files)
