"""Loads Hugging Face checkpoint folders.

`LOADERS` lists the supported model types. A checkpoint is loaded completely or refused: no tensor may be missing or
unknown, every shape must agree with config.json, every number must be finite, and the free memory must suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.core.progress import doing
from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_config import ADAPTER, CLASSIFIER, PREFIX, is_adapter, read_adapter_config
from posttrain.models.adapters.adapter_folder import checked_base, fingerprint, packed_kind, read_adapter
from posttrain.models.adapters.lora import merge
from posttrain.models.backbone import Backbone
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.hf.backed import Backed
from posttrain.models.json_files import read_json
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_config import (
    ARCHITECTURES,
    NotNativeError,
    read_config,
    read_eos_ids,
    unsupported,
)
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.linear import give_memory
from posttrain.models.native.quantized import PACKED_BYTES, pack, require
from posttrain.models.native.weight_names import Pieces, stored_pieces
from posttrain.models.row_shards import here, slices_here, whole_shape
from posttrain.models.tensor_files import open_tensors
from posttrain.models.weight_files import (
    HEADS,
    INNER,
    SCORE,
    check_dtype,
    check_finite,
    reward_model_error,
    tensors_error,
    weight_files,
)

OURS = "posttrain_reward_model"  # the model_type of a reward model for which transformers has no class
BACKBONE = "posttrain_backbone"  # the entry with the model_type of such a reward model's decoder
FORM = (BACKBONE, "posttrain_pooling", "posttrain_head")  # entries of config.json that describe a reward model


@dataclass(frozen=True)
class WeightOptions:
    """How the weights of a model are held in this process."""

    dtype: torch.dtype = torch.float32  # of the parameters, and of what they compute
    device: str | torch.device = "cpu"
    shard: Callable[[Decoder | Backed], None] | None = None  # keeps one of `shares` shares of a decoder's rows
    shares: int = 1
    matrices: torch.dtype | None = None  # a narrower type of the matrices, which are then frozen
    packed: str = ""  # the kind of quantization of a native decoder's matrices


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shard: Callable[[Decoder | Backed], None] | None = None,
    shares: int = 1,
    matrices: torch.dtype | None = None,
    packed: str = "",
) -> Model:
    """Load a checkpoint folder (or a Hugging Face model by name). For the options see `WeightOptions`.

    A native decoder packs each matrix of its layers as soon as it is read, so no more than one is there in `dtype`, and
    reads only its own share of the rows. Models of transformers are not packed here but with their adapters.

    Raises UserError if there is no such folder, if the architecture is not supported, or if weights are missing,
    damaged, of the wrong shape or unknown.
    """
    return _load(folder, WeightOptions(dtype, torch.device(device), shard, shares, matrices, packed))


def _load(folder: str | Path, how: WeightOptions) -> Model:
    doing(f"opening {folder}")
    folder = checkpoint_folder(folder)
    if is_adapter(folder):
        return _load_adapted(folder, how)
    source = read_json(folder / "config.json")
    kind = source.get("model_type")
    if not isinstance(kind, str):
        raise unsupported(folder, kind, LOADERS)
    if kind == OURS:
        raise reward_model_error(folder, OURS)
    loader: Callable[..., Model] = LOADERS.get(kind, _load_other)
    if loader not in (_load_decoder, _load_other):
        return _load_own(folder, kind, loader, source, how)
    try:
        model = loader(folder, source, how)
    except NotNativeError as error:
        try:
            model = _load_other(folder, source, how)
        except UserError:
            raise error from None
    if how.shard is not None and isinstance(model, Backed):
        how.shard(model)
    return model


def _load_own(
    folder: Path, kind: str, loader: Callable[..., Model], source: dict[str, Any], how: WeightOptions
) -> Model:
    """Load a kind of model that is neither native nor of transformers."""
    if how.matrices is not None:
        raise UserError(
            f"bfloat16 is for the weights of a decoder, and a {kind} is not one: leave out --frozen-weights"
        )
    if how.shard is not None:
        raise UserError(
            f"only a decoder can be divided among processes, and a {kind} is not one: leave out --shard, "
            "--tensor-parallel or --expert-parallel"
        )
    return loader(folder, source, how.dtype, how.device)


def load_backbone(
    folder: str | Path, device: str | torch.device = "cpu", matrices: torch.dtype | None = None
) -> tuple[Backbone, Tensor | None]:
    """Load the decoder of a checkpoint without its output head, and the score head [hidden] of a reward model if it has
    one.

    For critics: reads causal language models, sequence-classification checkpoints (`score.weight`, one label) of the
    same architectures, and this package's reward models. A head of two layers is ignored, since it does not score
    hidden states directly. `matrices`: see `load_model`; all weights still learn, and merged adapters keep float32.
    Raises UserError as `load_model` does.
    """
    folder = checkpoint_folder(folder)
    if is_adapter(folder):
        return merged_backbone(folder, device)
    model, read = load_headless(folder, device, matrices)
    model.requires_grad_(True)
    score = None if INNER in read else read.get(SCORE)
    if score is not None and score.shape != (1, model.config.hidden):
        raise UserError(
            f"{folder}: {SCORE} has shape {list(score.shape)}; a reward model has one label: {[1, model.config.hidden]}"
        )
    return model, None if score is None else score[0].float()


def load_headless(
    folder: Path, device: str | torch.device = "cpu", matrices: torch.dtype | None = None, packed: str = ""
) -> tuple[Decoder | Backed, dict[str, Tensor]]:
    """Load the decoder of a checkpoint folder without its output head, and the stored heads by name. `matrices`,
    `packed`: see `load_model`.
    """
    how = WeightOptions(device=torch.device(device), matrices=matrices, packed=packed)
    source = of_backbone(read_json(folder / "config.json"))
    config, kind = None, source.get("model_type")
    if not isinstance(kind, str):
        raise unsupported(folder, kind, LOADERS)
    if kind in ARCHITECTURES:
        with suppress(NotNativeError):
            config = read_config(folder, source)
    if config is None:
        return _load_other(folder, source, how, headless=True), _read_heads(folder)
    model = allocate(folder, replace(config, tied=True), how)
    found = read_weights(model, folder, HEADS, packed)
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
    """Convert the config.json of a reward model into that of its decoder alone."""
    own = {name: value for name, value in source.items() if name not in FORM}
    return {**own, "model_type": source.get(BACKBONE)} if source.get("model_type") == OURS else own


def _load_decoder(folder: Path, source: dict[str, Any], how: WeightOptions) -> Decoder:
    config = read_config(folder, source)
    generation = read_json(folder / "generation_config.json", optional=True)
    eos_ids = read_eos_ids(folder, source, generation, config.vocab)
    model = allocate(folder, config, how)
    read_weights(model, folder, packed=how.packed)
    model.source, model.generation, model.eos_ids = source, generation, eos_ids
    return model


def allocate(folder: Path, config: DecoderConfig, how: WeightOptions) -> Decoder:
    """Allocate the model with uninitialised weights. Raises UserError if there is no room for them.

    Matrices of layers that are packed stay on "meta" until they are read.
    """
    device, packed = torch.device(how.device), how.packed
    if packed:
        require(packed)
    number = PACKED_BYTES[packed] if packed else 0.0
    config.require_memory(how.matrices or how.dtype, device, str(folder / "config.json"), how.shares, number)
    with torch.device("meta"):  # no memory for weights that are about to be replaced
        model = Decoder(config).to(how.dtype)
        if how.matrices is not None:
            model.narrow(how.matrices)
    if how.shard is not None:
        how.shard(model)
    give_memory(model, device, {id(linear.weight) for _, linear, _ in model.linears()} if packed else ())
    return model


def _load_other(folder: Path, source: dict[str, Any], how: WeightOptions, headless: bool = False) -> Backed:
    """Load a model through transformers, imported only here because the import takes seconds."""
    from posttrain.models.hf.transformers_folder import load_backed

    return load_backed(folder, source, how.dtype, how.device, headless, how.matrices)


LOADERS: dict[str, Callable[..., Model]] = dict.fromkeys(ARCHITECTURES, _load_decoder)
"""Loader of each model_type. Add your own kind of model here: (folder, its config.json, dtype, device) -> model."""


def _pieces_here(parameter: Tensor, pieces: Pieces) -> Iterator[tuple[str, Tensor, tuple[slice, ...]]]:
    """Yield (name of the stored tensor, destination, what to read of it) for each part of a parameter in this process."""
    (dim, slices), own = slices_here(parameter), here(parameter)
    if dim:  # some columns of one stored tensor
        widths = [s.stop - s.start for s in slices]
        ((stored, _),) = pieces
        yield from ((stored, to, (slice(None), s)) for to, s in zip(own.split(widths, dim), slices, strict=True))
        return
    unit = sum(shape[0] for _, shape in pieces) // whole_shape(parameter)[0]  # stored rows per row of the parameter
    flat, filled = own.view(len(own) * unit, *pieces[0][1][1:]), 0
    for rows in slices:
        begin, end, at = rows.start * unit, rows.stop * unit, 0
        for stored, shape in pieces:
            low, high = max(at, begin), min(at + shape[0], end)
            if low < high:
                to = flat[filled + low - begin : filled + high - begin]
                yield stored, to, (slice(low - at, high - at),)
            at += shape[0]
        filled += end - begin


def read_weights(model: Decoder, folder: Path, also: Sequence[str] = (), packed: str = "") -> dict[str, Tensor]:
    """Fill the parameters, with one stored tensor in memory at a time. Return the tensors of `also` that are stored.

    `packed`: the kind of quantization of the parameters on "meta", one of which is there unpacked at a time.
    """
    expected = stored_pieces(model.config)
    with ExitStack() as opened:
        where: dict[str, tuple[Path, Any]] = {}  # name of a tensor -> its file: path, and opened
        for file in weight_files(folder):
            shard = opened.enter_context(open_tensors(file))
            where.update(dict.fromkeys(shard.keys(), (file, shard)))
        slices = {name: shard.get_slice(name) for name, (_, shard) in where.items()}
        _check_shapes(folder, {n: tuple(s.get_shape()) for n, s in slices.items() if n not in also}, model)
        for name in [stored for pieces in expected.values() for stored, _ in pieces]:
            check_dtype(where[name][0], name, slices[name].get_dtype())
        for name, parameter in list(model.named_parameters()):
            own: Tensor = parameter
            if packed and parameter.is_meta:
                own = torch.empty(parameter.shape, dtype=parameter.dtype, device=model.head.device)
            for stored, piece, part in _pieces_here(own, expected[name]):
                file, shard = where[stored]
                whole_piece = list(piece.shape) == slices[stored].get_shape()
                piece.copy_(shard.get_tensor(stored) if whole_piece else slices[stored][part])
                check_finite(file, stored, piece)
            if own is not parameter:
                pack(model, name.removesuffix(".weight"), own, packed)
            own = piece = parameter  # nothing unpacked is left while the next one is read
        found = {name: where[name][1].get_tensor(name) for name in also if name in where}
        for name, tensor in found.items():
            check_dtype(where[name][0], name, slices[name].get_dtype())
            check_finite(where[name][0], name, tensor)
        return found


def stored_names(folder: Path) -> set[str]:
    """Return the names of all tensors of a checkpoint folder. Raises UserError if its files are absent or damaged."""
    files = [folder / ADAPTER] if is_adapter(folder) else weight_files(folder)
    with ExitStack() as opened:
        shards = [opened.enter_context(open_tensors(file)) for file in files]
        return {name.removeprefix(PREFIX) for shard in shards for name in shard.keys()}  # noqa: SIM118  it is not a dict


def _check_shapes(folder: Path, found: Mapping[str, tuple[int, ...]], model: Decoder) -> None:
    expected = {stored: shape for pieces in stored_pieces(model.config).values() for stored, shape in pieces}
    # older checkpoints store the frequencies of rotary embeddings, and the head of tied models beside the embedding
    known = {*expected, "lm_head.weight"} if model.config.tied else {*expected}
    left = [name for name in found if name not in known and "rotary_emb." not in name]
    if SCORE in left:
        raise reward_model_error(folder, SCORE)
    for names, problem in (([name for name in expected if name not in found], "lacks"), (left, "holds unknown")):
        if names:
            raise tensors_error(folder, problem, names)
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(f"{folder}: {name} has shape {list(found[name])}, config.json says {list(shape)}")


def _load_adapted(folder: Path, how: WeightOptions) -> Backbone:
    """Load the base of a folder of adapters, and the adapters, which alone are trainable. Raises UserError if the
    base is not the one that they were trained on.
    """
    if read_adapter_config(folder).task == CLASSIFIER:
        raise UserError(
            f"{folder} adapts a reward model ({SCORE}), and a language model is required here: give its base, or "
            "pass this as --reward-model"
        )
    base, packed = checked_base(folder), packed_kind(folder)
    model = _load(base, replace(how, packed=packed if how.shard is None else ""))
    if not isinstance(model, Decoder | Backed):
        raise UserError(f"{folder} adapts {base}, a {type(model).__name__}, but adapters require a decoder")
    read_adapter(model, folder)
    assert model.lora is not None
    if not model.lora.digest:  # written by PEFT
        model.lora = replace(model.lora, digest=fingerprint(base))
    return model


def merged_backbone(folder: Path, device: str | torch.device) -> tuple[Backbone, Tensor | None]:
    """Load a folder of adapters as `load_backbone` loads a model, with the adapters merged into the weights."""
    model, score = load_backbone(checked_base(folder), device)
    found = read_adapter(model, folder, (SCORE, INNER))
    merge(model)
    if SCORE in found and INNER not in found:
        score = found[SCORE][0].float()
    return model.requires_grad_(True), score
