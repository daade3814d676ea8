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

from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.models.row_shards import whole

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


class Laid:
    """How the tensors of a model lie end to end, on boundaries of 64 bytes."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        named: Callable[[Any], Named],
        same: tuple[str, str] | None = None,
    ) -> None:
        """`named`: the tensors, in their order. `same`: of two names, the second lies where the first does."""
        self.dtype, self.named, self.stored, self.bytes = dtype, named, list[Stored](), 0
        places: dict[str, int] = {}
        for name, tensor in named(model):
            shared = same is not None and name == same[1]
            places[name] = places[same[0]] if same is not None and shared else self.bytes
            self.stored.append(Stored(name, tuple(tensor.shape), places[name]))
            self.bytes += 0 if shared else -(-size_of(tensor.shape, dtype) // 64) * 64

    @property
    def said(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "stored": [asdict(s) for s in self.stored]}

    def write(self, weights: Any, memory: Tensor) -> int:
        """Copy the weights into memory; returns their checksum."""
        checksum = 0
        with torch.no_grad():
            for stored, (name, tensor) in zip(self.stored, self.named(weights), strict=True):
                assert stored.name == name, "tensors come in their order, one at a time"
                stored.tensor_in(memory, self.dtype).copy_(whole(tensor))
                checksum = stored.checksum(memory, self.dtype, checksum)
        return checksum


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


class Copied:
    """What the transports share that copy weights to where engines see them, end to end."""

    def __init__(self, laid: Laid) -> None:
        self.laid = laid
        self.offer: Offer | None = None

    @property
    def layout(self) -> dict[str, Any]:
        return self.laid.said

    def send(self, name: str, first: bool, call: Call) -> None:
        pass  # engines fetch them

    def done(self) -> None:
        pass


class SharedMemory(Copied):
    """See `Transport`. For processes of this machine, which get the descriptor when they are started."""

    def __init__(self, laid: Laid) -> None:
        super().__init__(laid)
        self.descriptor = os.memfd_create(
            "posttrain weights"
        )  # no file: nothing to clean up, and /dev/shm may be small
        os.truncate(self.descriptor, laid.bytes)
        self.memory = shared_memory(self.descriptor)

    def put(self, weights: Any, version: int) -> None:
        self.offer = {"version": version, "checksum": self.laid.write(weights, self.memory)}

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Files(Copied):
    """See `Transport`. For engines that see the same disk: a file for each version, whole as soon as it has its name.

    `rank`: of the process whose engines these are.
    """

    def __init__(self, folder: Path, rank: int, laid: Laid) -> None:
        super().__init__(laid)
        self.folder, self.rank = folder.absolute(), rank

    def put(self, weights: Any, version: int) -> None:
        """Raises UserError where the file cannot be written."""
        path = self.folder / f"weights-{self.rank}-{version}"
        partial = path.with_name(f"{path.name}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, self.laid.bytes)  # a full disk is told here, not by a signal
                checksum = self.laid.write(weights, shared_memory(file.fileno()))
                os.fsync(file.fileno())
            partial.rename(path)
        except OSError as error:
            raise UserError(f"the weights for the engines cannot be written to {path}: {one_line(error)}") from error
        self._forget(but=path)
        self.offer = {"version": version, "checksum": checksum, "file": str(path)}

    def close(self) -> None:
        self._forget()
        with suppress(OSError):  # it is not empty, or was never made
            self.folder.rmdir()

    def _forget(self, but: Path | None = None) -> None:
        """The file of the last version, unless it has just been written again."""
        if self.offer is not None and self.offer["file"] != str(but):
            Path(self.offer["file"]).unlink(missing_ok=True)
        self.offer = None


def stored_in(layout: Any) -> tuple[torch.dtype, tuple[Stored, ...]]:
    """What a layout says, as it came: the inverse of `Laid.said`."""
    return getattr(torch, layout["dtype"]), tuple(
        Stored(s["name"], tuple(s["shape"]), s["offset"]) for s in layout["stored"]
    )


class Received:
    """The other side: weights that lie as a layout says, with the names that a model has for them."""

    def __init__(self, layout: Any, memory: Tensor) -> None:
        self.memory, self.dtype, self.stored = memory, *stored_in(layout)

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
