"""Files of a checkpoint's weights: names, supported tensor types, and the writer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from posttrain.core.types import UserError
from posttrain.models.gguf.gguf_file import is_gguf
from posttrain.models.json_files import read_json, shown, write_json
from posttrain.models.tensor_files import size_of, write_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


SCORE = "score.weight"  # the head of a sequence-classification checkpoint


INNER = "score.inner.weight"  # the first layer of a head of two layers


HEADS = ("lm_head.weight", "lm_head.bias", SCORE, "score.bias", INNER)
"""Tensors of heads, which may be stored beside a decoder that is read without its own."""


FILE_BYTES = 5_000_000_000  # maximal size of one file of weights


DTYPES = ("F64", "F32", "F16", "BF16")
"""Supported types of stored weights. Integers and 8-bit floats are quantized and need scales, so they are refused.
"""


def weight_files(folder: Path) -> list[Path]:
    if is_gguf(folder):
        return [folder]
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        convert = ": convert its pytorch_model.bin to safetensors" if (folder / "pytorch_model.bin").exists() else ""
        raise UserError(f"{folder} holds no {WEIGHTS} and no {INDEX}{convert or ': copy the weights into it'}")
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError(f"{folder / INDEX}: weight_map must be an object that names the file of each tensor")
    for tensor, name in names.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise UserError(
                f"{folder / INDEX}: weight_map names {shown(name)} as the file of {shown(tensor)}; it must be a "
                ".safetensors file of the same folder"
            )
    files = [folder / name for name in sorted(set(names.values()))]
    if absent := [file.name for file in files if not file.exists()]:
        raise UserError(f"{folder} lacks {', '.join(absent)}, named in {INDEX}: copy the missing files into it")
    return files


def check_finite(file: Path, name: str, tensor: Tensor) -> None:
    """Raise UserError if a weight is NaN or infinite. The sum is checked first: it takes one pass over memory."""
    if not math.isfinite(tensor.sum(dtype=torch.float32).item()) and not tensor.isfinite().all():
        raise UserError(
            f"{file}: {name} has numbers that are not finite (NaN or infinity, as {tensor.dtype}): use an earlier "
            "checkpoint"
        )


def check_dtype(file: Path, name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise UserError(
            f"{file}: {name} is stored as {dtype}; supported are {', '.join(DTYPES)}: give the unquantized checkpoint"
        )


def reward_model_error(folder: Path, sign: str) -> UserError:
    """Return the error for a reward model given where a language model is required."""
    return UserError(
        f"{folder} is a reward model ({sign}), and a language model is required here: give its base, or pass "
        "this as --reward-model"
    )


def tensors_error(folder: Path, problem: str, names: Sequence[str]) -> UserError:
    """Return the error for tensors that a folder "lacks" or "holds unknown", as `problem` has it."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    shortened = ", ".join(f"{name:.80}" for name in names[:3])
    return UserError(f"{folder} {problem} tensors {shortened}{more}: config.json does not describe it")


def write_weights(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int = FILE_BYTES,
) -> None:
    """Write weights to files of at most `shard_bytes` bytes. Only one tensor has to be in memory at a time.

    Weights of an earlier save in the folder are removed.
    """
    for old in folder.iterdir():
        if old.name in (WEIGHTS, INDEX) or re.fullmatch(r"model-\d+-of-\d+\.safetensors", old.name):
            old.unlink()
    files: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    room, total = shard_bytes, 0
    for name, shape in shapes.items():
        size = size_of(dtype, shape)
        if size > room and files[-1]:
            files.append({})
            room = shard_bytes
        files[-1][name] = dtype, shape
        room -= size
        total += size
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [WEIGHTS]
    else:
        weight_map = {name: file for file, described in zip(names, files, strict=True) for name in described}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    coming = iter(tensors)
    for file, described in zip(names, files, strict=True):
        write_tensors(folder / file, described, coming)
    assert next(coming, None) is None, "all tensors are written"
