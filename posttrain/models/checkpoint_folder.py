"""Hugging Face checkpoint folders in and out.

It decides which checkpoints this library reads (`LOADERS`). A checkpoint is taken whole or refused: nothing missing,
nothing left over, every shape as announced, every number finite, and room for it before anything is allocated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_config import ADAPTER, PREFIX, is_adapter
from posttrain.models.adapters.lora import plain_weights
from posttrain.models.hf.backed import Backed
from posttrain.models.json_files import read_json, shown, write_json
from posttrain.models.native.decoder import Decoder, DecoderConfig
from posttrain.models.native.decoder_config import (
    ARCHITECTURES,
    NotNativeError,
    read_config,
    read_eos_ids,
    unsupported,
    written_config,
)
from posttrain.models.native.weight_names import Pieces, stored_pieces
from posttrain.models.row_shards import here, whole
from posttrain.models.tensor_files import open_tensors, size_of, write_tensors
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.tokenizer.tokenizer_files import checkpoint_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SCORE = "score.weight"  # the head of a sequence-classification checkpoint
OURS = "posttrain_reward_model"  # the model_type of a reward model that transformers cannot hold
BACKBONE = "posttrain_backbone"  # the model_type of its decoder
INNER = "score.inner.weight"  # of its head, if that has two layers
HEADS = ("lm_head.weight", "lm_head.bias", SCORE, "score.bias", INNER)
"""Tensors of heads, which may or may not lie beside a decoder that is read without its own."""
FILE_BYTES = 5_000_000_000  # most of one file of weights
DTYPES = ("F64", "F32", "F16", "BF16")
"""What weights may be stored as. Integers and 8-bit floats are quantized: their numbers mean nothing without scales."""


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shard: Callable[[Decoder | Backed], None] | None = None,
    shares: int = 1,
) -> Model:
    """The model of a checkpoint folder (or of a Hugging Face model name), its parameters of this dtype on this device.

    `shard` leaves one of `shares` shares of a decoder's rows to this process: of a native one only these are then read.

    Raises UserError if there is no such folder, if the architecture is not supported, or if weights are missing,
    damaged, of the wrong shape or unknown.
    """
    folder = checkpoint_folder(folder)
    if is_adapter(folder):
        from posttrain.models.adapters.adapter_folder import load_adapted

        if shard is not None:
            raise UserError(f"--shard deals out plain weights, and {folder} is an adapter: posttrain merge it first")
        return load_adapted(folder, dtype, device)
    source = read_json(folder / "config.json")
    kind = source.get("model_type")
    if not isinstance(kind, str):
        raise unsupported(folder, kind, LOADERS)
    if kind == OURS:
        raise is_reward_model(folder, OURS)
    loader = LOADERS.get(kind, _load_other)
    try:
        if shard is not None and loader is _load_decoder:
            return _load_decoder(folder, source, dtype, torch.device(device), shard, shares)
        model = loader(folder, source, dtype, torch.device(device))
    except NotNativeError as error:
        try:
            model = _load_other(folder, source, dtype, torch.device(device))
        except UserError:
            raise error from None
    if shard is not None:
        if not isinstance(model, Backed):
            raise UserError(f"--shard deals out the layers of a decoder, and a {kind} is none: leave it out")
        shard(model)
    return model


def load_backbone(folder: str | Path, device: str | torch.device = "cpu") -> tuple[Decoder | Backed, Tensor | None]:
    """The decoder of a checkpoint without its output head, and the score head [hidden] of a reward model if it has one.

    For critics: reads causal language models and the sequence-classification checkpoints (`score.weight`, one label) of
    the same architectures, and reward models of ours; a head of two layers is no score head of states, and is left. Raises
    UserError as `load_model` does.
    """
    folder = checkpoint_folder(folder)
    if is_adapter(folder):
        from posttrain.models.adapters.adapter_folder import merged_backbone

        return merged_backbone(folder, device)
    model, read = load_headless(folder, device)
    score = None if INNER in read else read.get(SCORE)
    if score is not None and score.shape != (1, model.config.hidden):
        raise UserError(
            f"{folder}: {SCORE} has shape {list(score.shape)}; a reward model has one label: {[1, model.config.hidden]}"
        )
    return model, None if score is None else score[0].float()


def load_headless(folder: Path, device: str | torch.device = "cpu") -> tuple[Decoder | Backed, dict[str, Tensor]]:
    """The decoder of a checkpoint folder, without an output head of its own, and the heads that are there, by name."""
    source = of_backbone(read_json(folder / "config.json"))
    config = None
    if source.get("model_type") in ARCHITECTURES:
        with suppress(NotNativeError):
            config = read_config(folder, source)
    if config is None:
        other = _load_other(folder, source, torch.float32, torch.device(device), headless=True)
        return other, _read_heads(folder)
    model = allocate(folder, replace(config, tied=True), torch.float32, torch.device(device))
    found = read_weights(model, folder, also=HEADS)
    model.generation = read_json(folder / "generation_config.json", optional=True)
    model.eos_ids = read_eos_ids(folder, source, model.generation, config.vocab)
    model.source = source
    return model, found


def _read_heads(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in weight_files(folder):
        with open_tensors(file) as shard:
            for name in set(HEADS).intersection(shard.keys()):
                check_dtype(file, name, shard.get_slice(name).get_dtype())
                found[name] = shard.get_tensor(name)
                check_finite(file, name, found[name])
    return found


def of_backbone(source: dict[str, Any]) -> dict[str, Any]:
    """A config.json as its decoder alone would have it."""
    return {**source, "model_type": source.get(BACKBONE)} if source.get("model_type") == OURS else source


def save_model(
    model: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = FILE_BYTES,
    also: Mapping[str, Tensor] | None = None,
    told: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that `load_model` and transformers.AutoModelForCausalLM read.

    `dtype` is that of the written weights (None: the model's). Weights go to files of at most `shard_bytes` bytes each,
    larger single tensors excepted. Weights of an earlier save in the folder are removed. A model without eos_ids gets
    the tokenizer's. `also`: further tensors; `told`: further entries of config.json, or other values of them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.head.dtype
    also = also or {}
    pieces = stored_pieces(model.config)
    shapes = {stored: shape for name, _ in model.named_parameters() for stored, shape in pieces.get(name, ())}
    shapes |= {name: tuple(tensor.shape) for name, tensor in also.items()}
    write_weights(shapes, chain(checkpoint_tensors(model), also.items()), folder, dtype, shard_bytes)
    write_json(folder / "generation_config.json", {**model.generation, **_ends(model, tokenizer)})
    source = dict(model.source) or described(model, tokenizer)
    source.pop("torch_dtype", None)  # the name of "dtype" in older checkpoints
    write_json(folder / "config.json", {**source, "dtype": str(dtype).removeprefix("torch."), **(told or {})})
    if tokenizer is not None:
        tokenizer.save(folder)


def described(model: Decoder, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The config.json of a model that was not loaded from one, with the tokenizer's ids."""
    ids = {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    return {**written_config(model.config), **_ends(model, tokenizer), **ids}


def _ends(model: Decoder, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The ids that end a reply, as both files of a checkpoint name them."""
    ids = list(model.eos_ids) or ([tokenizer.eos_id] if tokenizer and tokenizer.eos_id is not None else [])
    return {"eos_token_id": ids if len(ids) > 1 else ids[0]} if ids else {}


def checkpoint_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The weights as a checkpoint stores them, name by name: what other programs call them. Views, no copies.

    A parameter of which processes hold some rows each is gathered when it is its turn: all of them have to ask. Adapters
    are merged, each when it is its turn.
    """
    pieces = stored_pieces(model.config)
    for name, parameter in plain_weights(model):
        yield from _as_stored(whole(parameter), pieces[name])  # and keeps nothing of it


def _as_stored(parameter: Tensor, pieces: Pieces) -> Iterator[tuple[str, Tensor]]:
    return zip((stored for stored, _ in pieces), _split(parameter, pieces), strict=True)


def _load_decoder(
    folder: Path,
    source: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    shard: Callable[[Decoder | Backed], None] | None = None,
    shares: int = 1,
) -> Decoder:
    config = read_config(folder, source)
    generation = read_json(folder / "generation_config.json", optional=True)
    eos_ids = read_eos_ids(folder, source, generation, config.vocab)
    model = allocate(folder, config, dtype, device, shard, shares)
    read_weights(model, folder)
    model.source, model.generation, model.eos_ids = source, generation, eos_ids
    return model


def allocate(
    folder: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Callable[[Decoder | Backed], None] | None = None,
    shares: int = 1,
) -> Decoder:
    """The model with weights yet to be read. Raises UserError if there is no room for them."""
    config.require_memory(dtype, device, str(folder / "config.json"), shares)
    with torch.device("meta"):  # no memory is taken for weights that are about to be replaced
        model = Decoder(config).to(dtype)
    if shard is not None:
        shard(model)
    return model.to_empty(device=device)


def _load_other(
    folder: Path, source: dict[str, Any], dtype: torch.dtype, device: torch.device, headless: bool = False
) -> Backed:
    """By transformers, whose import takes seconds: only where it is needed."""
    from posttrain.models.hf.transformers_folder import load_backed

    return load_backed(folder, source, dtype, device, headless)


LOADERS: dict[str, Callable[[Path, dict[str, Any], torch.dtype, torch.device], Model]] = dict.fromkeys(
    ARCHITECTURES, _load_decoder
)
"""How each model_type is loaded: (folder, its config.json, dtype, device) -> model. A kind of one's own is added here."""


def _split(parameter: Tensor, pieces: Pieces) -> tuple[Tensor, ...]:
    """One view of the parameter for each piece, in the shape of the piece."""
    rows = [shape[0] for _, shape in pieces]
    return parameter.view(sum(rows), *pieces[0][1][1:]).split_with_sizes(rows)


def _pieces_here(parameter: Tensor, pieces: Pieces) -> Iterator[tuple[str, Tensor, slice]]:
    """What of a parameter lies in this process: the stored tensor, the place, which rows of the one are for the other."""
    first, own = here(parameter)
    total = sum(shape[0] for _, shape in pieces)
    unit = total // parameter.shape[0]  # rows as they are stored, of one of the parameter's
    flat = own.view(len(own) * unit, *pieces[0][1][1:])
    begin, end, at = first * unit, first * unit + len(flat), 0
    for stored, shape in pieces:
        low, high = max(at, begin), min(at + shape[0], end)
        if low < high:
            yield stored, flat[low - begin : high - begin], slice(low - at, high - at)
        at += shape[0]


def weight_files(folder: Path) -> list[Path]:
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


def read_weights(model: Decoder, folder: Path, also: Sequence[str] = ()) -> dict[str, Tensor]:
    """Fill the parameters, one stored tensor in memory at a time. Returns those of `also`, known besides, that are there."""
    expected = stored_pieces(model.config)
    with ExitStack() as opened:
        where: dict[str, tuple[Path, Any]] = {}  # by tensor, its file, closed and open
        for file in weight_files(folder):
            shard = opened.enter_context(open_tensors(file))
            where.update(dict.fromkeys(shard.keys(), (file, shard)))
        slices = {name: shard.get_slice(name) for name, (_, shard) in where.items()}
        _check_shapes(folder, {n: tuple(s.get_shape()) for n, s in slices.items() if n not in also}, model)
        for name in [stored for pieces in expected.values() for stored, _ in pieces]:
            check_dtype(where[name][0], name, slices[name].get_dtype())
        for name, parameter in model.named_parameters():
            for stored, piece, rows in _pieces_here(parameter, expected[name]):
                file, shard = where[stored]
                whole_piece = rows.stop - rows.start == slices[stored].get_shape()[0]
                piece.copy_(shard.get_tensor(stored) if whole_piece else slices[stored][rows])
                check_finite(file, stored, piece)
        found = {name: where[name][1].get_tensor(name) for name in also if name in where}
        for name, tensor in found.items():
            check_dtype(where[name][0], name, slices[name].get_dtype())
            check_finite(where[name][0], name, tensor)
        return found


def stored_names(folder: Path) -> set[str]:
    """The names of all tensors of a checkpoint folder. Raises UserError if its files are absent or damaged."""
    files = [folder / ADAPTER] if is_adapter(folder) else weight_files(folder)
    with ExitStack() as opened:
        shards = [opened.enter_context(open_tensors(file)) for file in files]
        return {name.removeprefix(PREFIX) for shard in shards for name in shard.keys()}  # noqa: SIM118  it is not a dict


def check_finite(file: Path, name: str, tensor: Tensor) -> None:
    """Raises UserError if a weight is NaN or infinite: one pass over memory, by the sum, which such a number spoils."""
    if not math.isfinite(tensor.sum(dtype=torch.float32).item()) and not tensor.isfinite().all():
        raise UserError(
            f"{file}: {name} holds numbers that are not finite (NaN or infinity, as {tensor.dtype}): training would "
            "spread them; use a checkpoint from before they arose"
        )


def check_dtype(file: Path, name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise UserError(
            f"{file}: {name} is stored as {dtype}; supported are {', '.join(DTYPES)}: give the unquantized checkpoint"
        )


def is_reward_model(folder: Path, sign: str) -> UserError:
    """The error that one deserves where a language model is needed."""
    return UserError(
        f"{folder} is a reward model ({sign}), and a language model is needed here: give the one that it was made from, or "
        "give this as --reward-model"
    )


def _check_shapes(folder: Path, found: Mapping[str, tuple[int, ...]], model: Decoder) -> None:
    expected = {stored: shape for pieces in stored_pieces(model.config).values() for stored, shape in pieces}
    # older checkpoints store the frequencies of rotary embeddings, and the head of tied models beside the embedding
    known = {*expected, "lm_head.weight"} if model.config.tied else {*expected}
    left = [name for name in found if name not in known and "rotary_emb." not in name]
    if SCORE in left:
        raise is_reward_model(folder, SCORE)
    for names, problem in (([name for name in expected if name not in found], "lacks"), (left, "holds unknown")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{folder} {problem} tensors {', '.join(f'{n:.80}' for n in names[:3])}{more}: config.json does not "
                "describe it"
            )
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(f"{folder}: {name} has shape {list(found[name])}, config.json says {list(shape)}")


def write_weights(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int = FILE_BYTES,
) -> None:
    """Write them to files of at most so many bytes. Only one of them has to be there at a time.

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
