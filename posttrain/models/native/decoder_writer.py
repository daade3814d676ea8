"""Writes a decoder in the Hugging Face format of its family: separate q, k, v and gate, up, with adapters merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.models.json_files import write_json
from posttrain.models.native.decoder_config import written_config
from posttrain.models.native.merged_weights import plain_weights
from posttrain.models.native.weight_names import Pieces, stored_pieces
from posttrain.models.rope_entries import written_rope
from posttrain.models.row_shards import whole
from posttrain.models.weight_files import FILE_BYTES, write_weights

if TYPE_CHECKING:
    from posttrain.models.native.decoder import Decoder
    from posttrain.models.tokenizer.tokenizer import Tokenizer


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

    `dtype`: type of the written weights (None: the model's). Files have at most `shard_bytes` bytes each, except for
    larger single tensors. Weights of an earlier save in the folder are removed. A model without eos_ids gets the
    tokenizer's. `also`: further tensors; `told`: additional or replaced entries of config.json.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.dtype
    also = also or {}
    pieces = stored_pieces(model.config)
    shapes = {stored: shape for name, _ in model.named_parameters() for stored, shape in pieces.get(name, ())}
    shapes |= {name: tuple(tensor.shape) for name, tensor in also.items()}
    write_weights(shapes, chain(checkpoint_tensors(model), also.items()), folder, dtype, shard_bytes)
    write_json(folder / "generation_config.json", {**model.generation, **_ends(model, tokenizer)})
    source = dict(model.source) or described(model, tokenizer)
    source.pop("torch_dtype", None)  # the name of "dtype" in older checkpoints
    if "rope_parameters" in source:
        source = {**written_rope(model.config.rope_theta, model.config.rope_scaling), **source}
    write_json(folder / "config.json", {**source, "dtype": str(dtype).removeprefix("torch."), **(told or {})})
    if tokenizer is not None:
        tokenizer.save(folder)


def described(model: Decoder, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the config.json of a model that was not loaded from a checkpoint, with the tokenizer's ids."""
    ids = {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    return {**written_config(model.config), **_ends(model, tokenizer), **ids}


def _ends(model: Decoder, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the entry with the ids that end a reply, for config.json and generation_config.json."""
    ids = list(model.eos_ids) or ([tokenizer.eos_id] if tokenizer and tokenizer.eos_id is not None else [])
    return {"eos_token_id": ids if len(ids) > 1 else ids[0]} if ids else {}


def checkpoint_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the weights as a checkpoint stores them: views, no copies.

    Sharded parameters are gathered and adapters merged one at a time, so all processes have to iterate.
    """
    pieces = stored_pieces(model.config)
    for name, parameter in plain_weights(model):
        yield from _as_stored(whole(parameter), pieces[name])  # no reference to it is kept


def _as_stored(parameter: Tensor, pieces: Pieces) -> Iterator[tuple[str, Tensor]]:
    return zip((stored for stored, _ in pieces), _split(parameter, pieces), strict=True)


def _split(parameter: Tensor, pieces: Pieces) -> tuple[Tensor, ...]:
    """Split a parameter into one view for each piece, in the shape of the piece."""
    rows = [shape[0] for _, shape in pieces]
    return parameter.view(sum(rows), *pieces[0][1][1:]).split_with_sizes(rows)
