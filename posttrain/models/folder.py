"""Hugging Face checkpoint folders in and out.

It decides which checkpoints this library reads (`LOADERS`), how their config.json becomes a `DecoderConfig`, and which
of their tensors make up which parameter: q, k, v and gate, up are stored apart and computed together. A checkpoint is
taken whole or refused: nothing missing, nothing left over, every shape as announced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.models.decoder import ROPE_TYPES, Decoder, DecoderConfig
from posttrain.models.tokenizer import Tokenizer, checkpoint_folder, read_json, write_json
from posttrain.types import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SCORE = "score.weight"  # the head of a sequence-classification checkpoint
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

Pieces = tuple[tuple[str, tuple[int, ...]], ...]
"""The stored tensors (name, shape) that one after the other, along their first dimension, fill one parameter."""


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """The model of a checkpoint folder (or of a Hugging Face model name), its parameters of this dtype on this device.

    Raises UserError if there is no such folder, if the architecture is not supported, or if weights are missing,
    damaged, of the wrong shape or unknown.
    """
    folder = checkpoint_folder(folder)
    source = read_json(folder / "config.json")
    kind = source.get("model_type")
    if kind not in LOADERS:
        raise UserError(f"{folder}: model_type {kind!r} is not supported; supported are {', '.join(LOADERS)}")
    return LOADERS[kind](folder, source, dtype, torch.device(device))


def load_backbone(folder: str | Path, device: str | torch.device = "cpu") -> tuple[Decoder, Tensor | None]:
    """The decoder of a checkpoint without its output head, and the score head [hidden] of a reward model if it has one.

    For critics: reads causal language models and the sequence-classification checkpoints (`score.weight`, one label) of
    the same architectures. Raises UserError as `load_model` does.
    """
    folder = checkpoint_folder(folder)
    source = read_json(folder / "config.json")
    kind = source.get("model_type")
    if kind not in LOADERS:
        raise UserError(f"{folder}: model_type {kind!r} is not supported; supported are {', '.join(LOADERS)}")
    with torch.device("meta"):
        model = Decoder(replace(read_config(folder, source), tied=True))
    model.to_empty(device=device)
    read = _read_weights(model, folder, also=("lm_head.weight", SCORE, "score.bias"))
    score = read.get(SCORE)
    if score is not None and score.shape != (1, model.config.hidden):
        raise UserError(
            f"{folder}: {SCORE} has shape {list(score.shape)}; a reward model has one label: {[1, model.config.hidden]}"
        )
    return model, None if score is None else score[0].float()


def save_model(
    model: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that `load_model` and transformers.AutoModelForCausalLM read.

    `dtype` is that of the written weights (None: the model's). Weights go to files of at most `shard_bytes` bytes each,
    larger single tensors excepted. Weights of an earlier save in the folder are removed. A model without eos_ids gets
    the tokenizer's.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.head.dtype
    for old in folder.iterdir():
        if old.name in (WEIGHTS, INDEX) or re.fullmatch(r"model-\d+-of-\d+\.safetensors", old.name):
            old.unlink()
    _write_weights(model, folder, dtype, shard_bytes)
    write_json(folder / "generation_config.json", {**model.generation, **_ends(model, tokenizer)})
    source = dict(model.source) or described(model, tokenizer)
    source.pop("torch_dtype", None)  # the name of "dtype" in older checkpoints
    write_json(folder / "config.json", {**source, "dtype": str(dtype).removeprefix("torch.")})
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
    """The weights as a checkpoint stores them, name by name: what other programs call them. Views, no copies."""
    pieces = stored_pieces(model.config)
    for name, parameter in model.named_parameters():
        for (stored, _), piece in zip(pieces[name], _split(parameter.detach(), pieces[name]), strict=True):
            yield stored, piece


def read_config(folder: Path, source: Mapping[str, Any]) -> DecoderConfig:
    """What a config.json says of a decoder. `folder` is for messages. Raises UserError for what is not supported."""
    absent = [
        key
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if not isinstance(source.get(key), int)
    ]
    if absent:
        raise UserError(f"{folder}/config.json lacks {', '.join(absent)}: give a complete Hugging Face checkpoint")
    if source.get("hidden_act", "silu") != "silu":
        raise UserError(f"{folder}: hidden_act {source['hidden_act']!r} is not supported; supported is silu")
    if source.get("quantization_config"):
        raise UserError(f"{folder}: quantized weights cannot be trained; give the unquantized checkpoint")
    family, heads = source["model_type"], source["num_attention_heads"]
    attention_bias = family in ("llama", "qwen3") and bool(source.get("attention_bias"))
    default_head_size = 128 if family == "qwen3" else source["hidden_size"] // heads
    theta, scaling = _read_rope(folder, source)
    return DecoderConfig(
        vocab=source["vocab_size"],
        hidden=source["hidden_size"],
        layers=source["num_hidden_layers"],
        heads=heads,
        kv_heads=source.get("num_key_value_heads") or heads,
        head_size=source.get("head_dim") or default_head_size,
        intermediate=source["intermediate_size"],
        context=_read_context(source),
        norm_eps=source.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and bool(source.get("mlp_bias")),
        qk_norm=family == "qwen3",
        tied=bool(source.get("tie_word_embeddings")),
        family=family,
    )


def written_config(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model that was not loaded from one."""
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.intermediate,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,  # absent, transformers would fill in ids of its own
        "eos_token_id": None,
        "pad_token_id": None,
    }


def stored_pieces(config: DecoderConfig) -> dict[str, Pieces]:
    """For each parameter of `Decoder`, by name, the tensors of a checkpoint that it is made of."""
    hidden, size = config.hidden, config.head_size
    width, kv_width, intermediate = config.heads * size, config.kv_heads * size, config.intermediate
    pieces: dict[str, Pieces] = {"embed.weight": (("model.embed_tokens.weight", (config.vocab, hidden)),)}
    for number in range(config.layers):
        ours, theirs = f"layers.{number}.", f"model.layers.{number}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        linear = {
            "qkv": (
                ((attention + "q_proj", width), (attention + "k_proj", kv_width), (attention + "v_proj", kv_width)),
                hidden,
            ),
            "o": (((attention + "o_proj", hidden),), width),
            "gate_up": (((mlp + "gate_proj", intermediate), (mlp + "up_proj", intermediate)), hidden),
            "down": (((mlp + "down_proj", hidden),), intermediate),
        }
        biased = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
        for name, (outputs, inputs) in linear.items():
            pieces[f"{ours}{name}.weight"] = tuple((f"{stored}.weight", (rows, inputs)) for stored, rows in outputs)
            if biased[name]:
                pieces[f"{ours}{name}.bias"] = tuple((f"{stored}.bias", (rows,)) for stored, rows in outputs)
        pieces[ours + "attention_norm.weight"] = ((theirs + "input_layernorm.weight", (hidden,)),)
        pieces[ours + "mlp_norm.weight"] = ((theirs + "post_attention_layernorm.weight", (hidden,)),)
        if config.qk_norm:
            norms = (attention + "q_norm.weight", attention + "k_norm.weight")
            pieces[ours + "qk_norm"] = tuple((stored, (size,)) for stored in norms)
    pieces["norm.weight"] = (("model.norm.weight", (hidden,)),)
    if not config.tied:
        pieces["output"] = (("lm_head.weight", (config.vocab, hidden)),)
    return pieces


def _load_decoder(folder: Path, source: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Decoder:
    config = read_config(folder, source)
    with torch.device("meta"):  # no memory is taken for weights that are about to be replaced
        model = Decoder(config).to(dtype)
    model.to_empty(device=device)
    _read_weights(model, folder)
    model.source = source
    model.generation = read_json(folder / "generation_config.json", optional=True)
    eos = model.generation.get("eos_token_id")
    eos = source.get("eos_token_id") if eos is None else eos
    model.eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return model


LOADERS: dict[str, Callable[[Path, dict[str, Any], torch.dtype, torch.device], Decoder]] = dict.fromkeys(
    ARCHITECTURES, _load_decoder
)
"""How each model_type is loaded: (folder, its config.json, dtype, device) -> model."""


def _read_rope(folder: Path, source: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling). transformers 5 writes one `rope_parameters`; before, `rope_theta` and `rope_scaling`."""
    stored = source.get("rope_scaling") or source.get("rope_parameters") or {}
    theta = float(stored.get("rope_theta") or source.get("rope_theta") or 10_000.0)
    kind = stored.get("rope_type") or stored.get("type") or "default"
    partial = stored.get("partial_rotary_factor") or source.get("partial_rotary_factor") or 1.0
    if any(isinstance(value, dict) for value in stored.values()) or partial != 1.0:
        raise UserError(f"{folder}: rotary embeddings by layer type or of a part of each head are not supported")
    if kind == "default":
        return theta, None
    if kind not in ROPE_TYPES:
        raise UserError(
            f"{folder}: rope_type {kind!r} is not supported; supported are default, {', '.join(ROPE_TYPES)}"
        )
    scaling = {"rope_type": kind, "factor": stored.get("factor")}
    if kind == "llama3":
        scaling |= {key: stored.get(key) for key in ("low_freq_factor", "high_freq_factor")}
        original = stored.get("original_max_position_embeddings") or source.get("max_position_embeddings")
        scaling["original_max_position_embeddings"] = original
    absent = [key for key, value in scaling.items() if value is None]
    if absent:
        raise UserError(f"{folder}/config.json: rope_type {kind!r} needs {', '.join(absent)}")
    return theta, scaling


def _read_context(source: Mapping[str, Any]) -> int:
    """Within the sliding window, windowed attention is full attention: the context ends there."""
    context: int = source.get("max_position_embeddings", 2048)
    layers = source["num_hidden_layers"]
    windowed = source["model_type"] == "mistral" or (
        bool(source.get("use_sliding_window")) and source.get("max_window_layers", 28) < layers
    )
    window: int | None = source.get("sliding_window") if windowed else None
    return min(context, window) if window else context


def _split(parameter: Tensor, pieces: Pieces) -> tuple[Tensor, ...]:
    """One view of the parameter for each piece, in the shape of the piece."""
    rows = [shape[0] for _, shape in pieces]
    return parameter.view(sum(rows), *pieces[0][1][1:]).split_with_sizes(rows)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        convert = ": convert its pytorch_model.bin to safetensors" if (folder / "pytorch_model.bin").exists() else ""
        raise UserError(f"{folder} holds no {WEIGHTS} and no {INDEX}{convert or ': copy the weights into it'}")
    files = [folder / name for name in sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))]
    if absent := [file.name for file in files if not file.exists()]:
        raise UserError(f"{folder} lacks {', '.join(absent)}, named in {INDEX}: copy the missing files into it")
    return files


def _read_weights(model: Decoder, folder: Path, also: Sequence[str] = ()) -> dict[str, Tensor]:
    """Fill the parameters, one stored tensor in memory at a time. Returns those of `also`, known besides, that are there."""
    expected = stored_pieces(model.config)
    with ExitStack() as opened:
        where = {}
        for file in _weight_files(folder):
            try:
                shard = opened.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is damaged, copy it again: {' '.join(str(error).split())}") from None
            where.update(dict.fromkeys(shard.keys(), shard))
        shapes = {name: tuple(s.get_slice(name).get_shape()) for name, s in where.items() if name not in also}
        _check_shapes(folder, shapes, model)
        for name, parameter in model.named_parameters():
            for (stored, _), piece in zip(expected[name], _split(parameter.detach(), expected[name]), strict=True):
                piece.copy_(where[stored].get_tensor(stored))
        return {name: where[name].get_tensor(name) for name in also if name in where}


def _check_shapes(folder: Path, found: Mapping[str, tuple[int, ...]], model: Decoder) -> None:
    expected = {stored: shape for pieces in stored_pieces(model.config).values() for stored, shape in pieces}
    # older checkpoints store the frequencies of rotary embeddings, and the head of tied models beside the embedding
    known = {*expected, "lm_head.weight"} if model.config.tied else {*expected}
    left = [name for name in found if name not in known and "rotary_emb." not in name]
    for names, problem in (([name for name in expected if name not in found], "lacks"), (left, "holds unknown")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{folder} {problem} tensors {', '.join(names[:3])}{more}: config.json does not describe it"
            )
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(f"{folder}: {name} has shape {list(found[name])}, config.json says {list(shape)}")


def _write_weights(model: Decoder, folder: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room, total = shard_bytes, 0
    for name, tensor in checkpoint_tensors(model):
        size = tensor.numel() * dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= size
        total += size
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS]
    else:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file, shard in zip(names, shards, strict=True):
        written = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in shard.items()}
        save_file(written, folder / file, metadata={"format": "pt"})
