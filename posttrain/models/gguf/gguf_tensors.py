"""Reads the tensors of a GGUF file as a checkpoint folder has them: Hugging Face's names and order of rows, as floats.

The class has the methods of an open .safetensors file. The gguf package dequantizes a tensor when it is read, in
pieces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posttrain.core.types import UserError
from posttrain.models.gguf.gguf_config import NATIVE, PERMUTED, ROPE_FACTORS
from posttrain.models.gguf.gguf_file import GgufFile, StoredTensor, read_gguf, require_package

PLAIN = {0: ("F32", torch.float32), 1: ("F16", torch.float16), 28: ("F64", torch.float64), 30: ("BF16", torch.bfloat16)}
"""Types that are no blocks, as ggml numbers them: stored as they are."""
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Names of modules in Hugging Face's checkpoints of the native architectures."""
AT_ONCE = 2**16  # numbers dequantized at a time: intermediate results fit into the processor's cache


class GgufTensors:
    """The tensors of a file, opened for reading. Architectures that are not native keep the file's own names."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises UserError if it is damaged or incomplete, or has tensors of an unknown type."""
        require_package(path)
        self.file = read_gguf(path)
        self._names = {_name(self.file, name): name for name in self.file.tensors if name != ROPE_FACTORS}
        for name, tensor in self.file.tensors.items():
            self._check(name, tensor)
        self._data = np.memmap(path, mode="r", dtype=np.uint8)

    def __enter__(self) -> GgufTensors:
        return self

    def __exit__(self, *_: object) -> None:
        del self._data  # views that are still in use keep the mapping alive

    def keys(self) -> list[str]:
        return list(self._names)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self, name)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor in its stored float type, or dequantized to float32."""
        tensor = self.stored(name)
        count = math.prod(tensor.shape)
        _, block, size, dequantize = self._kind(tensor)
        stored = self._data[tensor.begin : tensor.begin + self._bytes(tensor)]
        if tensor.kind in PLAIN:
            flat = torch.from_numpy(np.array(stored)).view(PLAIN[tensor.kind][1])
        else:
            flat = torch.empty(count)
            for first in range(0, count, AT_ONCE):
                last = min(first + AT_ONCE, count)
                part = dequantize(stored[first // block * size : last // block * size])
                flat[first:last] = torch.from_numpy(part)
        return self._in_order(self._names[name], flat.view(tensor.shape))

    def sample(self, name: str, most: int) -> list[bytes]:
        """Return stored bytes of a tensor, at most `most` each from its beginning, its middle and its end."""
        tensor = self.stored(name)
        begin, end = tensor.begin, tensor.begin + self._bytes(tensor)
        places = (begin, max(begin, (begin + end - most) // 2), max(begin, end - most))
        return [self._data[place : min(place + most, end)].tobytes() for place in places]

    def stored(self, name: str) -> StoredTensor:
        return self.file.tensors[self._names[name]]

    def _kind(self, tensor: StoredTensor) -> _StoredType:
        found = _kind(tensor.kind)
        assert found is not None, "checked when the file was opened"
        return found

    def _bytes(self, tensor: StoredTensor) -> int:
        kind = self._kind(tensor)
        return math.prod(tensor.shape) // kind.block * kind.size

    def _check(self, name: str, tensor: StoredTensor) -> None:
        path, kind, shape = self.file.path, _kind(tensor.kind), list(tensor.shape)
        if kind is None:
            raise UserError(
                f"{path}: tensor {name:.80} is stored as {_name_of(tensor.kind)}, which the installed gguf package cannot "
                f"dequantize: give a file of {_known_kinds()}"
            )
        damaged = f"{path} is damaged or incomplete, copy it again: tensor {name:.80} of shape {shape}"
        if not all(shape) or shape[-1] % kind.block:
            raise UserError(f"{damaged} cannot be stored as {kind.name}, in blocks of {kind.block} numbers")
        if (end := tensor.begin + self._bytes(tensor)) > self.file.size:
            raise UserError(f"{damaged} ends at byte {end:,}, and the file has {self.file.size:,}")

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        """Undo llama.cpp's order of the rows of q and k, in which the two rows that are rotated together are
        adjacent.
        """
        if self.file.architecture not in PERMUTED or not re.search(r"\.attn_[qk]\.", name):
            return tensor
        heads = self.file.metadata.get(f"{self.file.architecture}.attention.head_count")
        if ".attn_k." in name:
            heads = self.file.metadata.get(f"{self.file.architecture}.attention.head_count_kv", heads)
        if type(heads) is not int or heads < 1 or len(tensor) % (2 * heads):
            return tensor  # the later check of shapes reports it
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


class _Slice:
    """A tensor that has not been read, with the methods of a slice of an open .safetensors file."""

    def __init__(self, tensors: GgufTensors, name: str) -> None:
        self.tensors, self.name = tensors, name

    def get_shape(self) -> list[int]:
        return list(self.tensors.stored(self.name).shape)

    def get_dtype(self) -> str:
        """Return the name of its type in .safetensors files."""
        return PLAIN.get(self.tensors.stored(self.name).kind, PLAIN[0])[0]

    def __getitem__(self, rows: slice | tuple[slice, ...]) -> Tensor:
        return self.tensors.get_tensor(self.name)[rows]


def _name(file: GgufFile, name: str) -> str:
    """Return Hugging Face's name of a tensor; for architectures that are not native, its name in the file."""
    if file.architecture not in NATIVE:
        return name
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    number, module, leaf = found.groups() if found else (None, "", "")
    known = ENDS.get(module) if number is None else LAYER.get(module)
    if known is None:
        return name  # the loader reports it as unknown
    return f"{known}.{leaf}" if number is None else f"model.layers.{number}.{known}.{leaf}"


class _StoredType(NamedTuple):
    """A type of stored tensors."""

    name: str
    block: int  # numbers of one block
    size: int  # bytes of one block
    dequantize: Callable[[Any], Any]  # bytes of blocks [n] -> numbers


@cache
def _kind(number: int) -> _StoredType | None:
    """Return a type by ggml's number for it, if the gguf package can dequantize it."""
    import gguf

    try:
        known = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[known]
        gguf.dequantize(np.zeros((1, size), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError):
        plain = PLAIN.get(number)
        return _StoredType(plain[0], 1, plain[1].itemsize, lambda data: data) if plain else None
    return _StoredType(known.name, block, size, lambda data: gguf.dequantize(data.reshape(1, -1), known)[0])


def _known_kinds() -> str:
    import gguf

    return ", ".join(kind.name for known in gguf.GGMLQuantizationType if (kind := _kind(int(known))))


def _name_of(number: int) -> str:
    import gguf

    return next((known.name for known in gguf.GGMLQuantizationType if known == number), f"type {number}")
