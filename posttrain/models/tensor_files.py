"""Reads and writes .safetensors files one tensor at a time; of a sharded tensor it reads only this process's rows.

The library's own writer needs all tensors at once. The format: eight bytes with the length of a JSON header, which
gives type, shape and offsets of each tensor; then the concatenated tensors
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.models.gguf.gguf_file import SUFFIX
from posttrain.models.gguf.gguf_tensors import GgufTensors
from posttrain.models.row_shards import here, slices_here, whole, whole_shape

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ALIGNED = 8  # bytes: the header is padded to a multiple of this

Described = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Type and shape of each tensor of a file, by its name, in their order."""


def size_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
    return dtype.itemsize * torch.Size(shape).numel()


def write_tensors(file: Path, described: Described, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the described tensors. `tensors` yields the same names in the same order; further tensors are not read."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in described.items():
        begin, end = end, end + size_of(dtype, shape)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNED)
    with user_files.opened(file, "wb") as out:
        out.write(len(head).to_bytes(8, "little"))
        out.write(head)
        coming = iter(tensors)
        for name, (dtype, shape) in described.items():
            found, tensor = next(coming)
            assert found == name and tensor.shape == torch.Size(shape), f"{name} {shape}, not {found} {tensor.shape}"
            plain = tensor.detach().to("cpu", dtype).contiguous().reshape(-1)
            out.write(plain.view(torch.uint8).numpy().data)
            del tensor, plain  # before the next one is built


def write_state(file: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, gathering sharded ones. `file` None: only take part in gathering, while another process writes."""
    if file is None:
        for tensor in tensors.values():
            whole(tensor)
        return
    known = {name: (tensor.dtype, whole_shape(tensor)) for name, tensor in tensors.items()}
    write_tensors(file, known, ((name, whole(tensor)) for name, tensor in tensors.items()))


def open_tensors(file: Path) -> Any:
    """Open a .safetensors or GGUF file for reading; both have the methods of `safe_open`. Raises UserError if it is
    absent or damaged.
    """
    if file.suffix == SUFFIX:
        return GgufTensors(file)
    try:
        return safe_open(user_files.readable(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged, copy it again: {one_line(error)}") from None


def read_state(file: Path, places: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, by name. Raises UserError if the file is damaged or has other names or shapes."""
    with open_tensors(file) as stored:
        if odd := set(stored.keys()) ^ places.keys():
            raise UserError(f"{file} is not a file of this model: it has the unexpected tensor {min(odd)}")
        for name, place in places.items():
            read_rows(file, stored, name, place)


def stored_kind(file: Path, stored: Any, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return type and shape of a stored tensor. Raises UserError for a type that is never written."""
    found = stored.get_slice(name)
    kind = next((dtype for dtype, own in NAMES.items() if own == found.get_dtype()), None)
    if kind is None:
        raise UserError(f"{file} is not a file of this model: {name} has the type {found.get_dtype()}")
    return kind, tuple(found.get_shape())


def read_rows(file: Path, stored: Any, name: str, place: Tensor) -> None:
    """Fill a tensor in place with the stored tensor of this name; of a sharded one, read only this process's part."""
    found, own = stored.get_slice(name), here(place)
    if tuple(found.get_shape()) != whole_shape(place):
        raise UserError(f"{file} is not a file of this model: it has the unexpected tensor {name}")
    if own.shape == whole_shape(place):
        own.copy_(stored.get_tensor(name))
        return
    dim, slices = slices_here(place)
    at = 0
    for part in slices:
        size = part.stop - part.start
        if size:
            own.narrow(dim, at, size).copy_(found[(slice(None),) * dim + (part,)])
        at += size
