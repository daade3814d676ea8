"""Reads config.json: the shape of a decoder, its rotary embeddings, its end-of-sequence ids.

It defines which families are supported, and validates every number; other modules do not check them again. It
allocates no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.core.types import UserError
from posttrain.models.json_files import Fields, is_whole, shown
from posttrain.models.native.decoder_shape import CONTEXT_MOST, LAYERS_MOST, ROPE_TYPES, SIZE_MOST, THETA, DecoderConfig
from posttrain.models.rope_entries import written_rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CLASSIFIERS = {
    family: name.replace("ForCausalLM", "ForSequenceClassification") for family, name in ARCHITECTURES.items()
}
"""Classes of transformers with a head of one number on the same decoders."""
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


class NotNativeError(UserError):
    """Raised for a supported family with an unsupported setting, which transformers may support."""


def unsupported(folder: Path, kind: Any, supported: Iterable[str]) -> UserError:
    """Return the error for a folder's unsupported model_type."""
    names = ", ".join(supported)
    return UserError(f"{folder / 'config.json'}: model_type {shown(kind)} is not supported; supported are {names}")


def read_config(folder: Path, source: Mapping[str, Any]) -> DecoderConfig:
    """Read the shape of a decoder from a folder's config.json, parsed as `source`.

    Raises UserError, naming file and key, for a value that is unsupported, missing, of the wrong type or out of range.
    """
    fields = Fields(folder / "config.json", source)
    file, family = fields.file, source.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise unsupported(folder, family, ARCHITECTURES)
    if absent := [key for key in REQUIRED if source.get(key) is None]:
        raise UserError(f"{file} lacks {', '.join(absent)}: give a complete Hugging Face checkpoint")
    if fields.text("hidden_act", "silu") != "silu":
        raise NotNativeError(f"{file}: hidden_act {shown(source['hidden_act'])} is not supported; silu is supported")
    if source.get("quantization_config"):
        raise UserError(f"{file}: quantized weights cannot be trained; give the unquantized checkpoint")
    return _decoder_config(fields, family)


def _decoder_config(fields: Fields, family: str) -> DecoderConfig:
    vocab, hidden, heads, intermediate = (
        fields.whole(key, 1, SIZE_MOST)
        for key in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
    )
    kv_heads = fields.whole("num_key_value_heads", 1, SIZE_MOST, None) or heads
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a number that divides num_attention_heads, {heads}")
    head_size = fields.whole("head_dim", 1, SIZE_MOST, None) or (128 if family == "qwen3" else hidden // heads)
    if head_size < 2 or head_size % 2:
        raise UserError(
            f"{fields.file}: head_dim (else hidden_size / num_attention_heads) is {head_size}; it must be even: "
            "rotary embeddings turn pairs of dimensions"
        )
    attention_bias = fields.flag("attention_bias") and family in ("llama", "qwen3")
    theta, scaling = _read_rope(fields)
    return DecoderConfig(
        vocab=vocab,
        hidden=hidden,
        layers=fields.whole("num_hidden_layers", 1, LAYERS_MOST),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        intermediate=intermediate,
        context=_read_context(fields, family),
        norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        tied=fields.flag("tie_word_embeddings"),
        family=family,
    )


def _read_rope(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling). transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    stored = fields.table("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    theta = stored.number("rope_theta", *THETA, None) or fields.number("rope_theta", *THETA, 10_000.0)
    kind = stored.text("rope_type", None) or stored.text("type", "default")
    partial = stored.number("partial_rotary_factor", 0.0, 1.0, None)
    partial = fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) if partial is None else partial
    if any(isinstance(value, dict) for value in stored.values()) or partial != 1.0:
        raise NotNativeError(f"{fields.file}: per-layer or partial rotary embeddings are not supported")
    if kind == "default":
        return theta, None
    if kind not in ROPE_TYPES:
        supported = ", ".join(("default", *ROPE_TYPES))
        raise NotNativeError(f"{fields.file}: rope_type {shown(kind)} is not supported; supported are {supported}")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": stored.number("factor", 1.0, 1e6)}
    if kind == "llama3":
        scaling["low_freq_factor"] = low = stored.number("low_freq_factor", 1e-3, 1e6)
        scaling["high_freq_factor"] = stored.number("high_freq_factor", 1e-3, 1e6)
        if scaling["high_freq_factor"] <= low:
            raise stored.refuse("high_freq_factor", f"above low_freq_factor, {low:g}")
        original = stored.whole("original_max_position_embeddings", 1, CONTEXT_MOST, None)
        original = original or fields.whole("max_position_embeddings", 1, CONTEXT_MOST)
        scaling["original_max_position_embeddings"] = original
    return theta, scaling


def _read_context(fields: Fields, family: str) -> int:
    """Return the context length in tokens, at most the sliding window, within which windowed attention equals full
    attention.
    """
    context: int = fields.whole("max_position_embeddings", 1, CONTEXT_MOST, 2048)
    windowed = family == "mistral"
    if fields.flag("use_sliding_window"):
        first = fields.whole("max_window_layers", 0, LAYERS_MOST, 28)
        windowed = windowed or first < fields.whole("num_hidden_layers", 1, LAYERS_MOST)
    window: int | None = fields.whole("sliding_window", 1, CONTEXT_MOST, None) if windowed else None
    return min(context, window) if window else context


def read_eos_ids(folder: Path, source: Mapping[str, Any], generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """Read all token ids that end a reply, from generation_config.json or else config.json; () if neither has one.

    Raises UserError for an id that is not in the vocabulary.
    """
    name, eos = "generation_config.json", generation.get("eos_token_id")
    if eos is None:
        name, eos = "config.json", source.get("eos_token_id")
    if eos is None:
        return ()
    ids = eos if isinstance(eos, list) else [eos]
    if not ids or not all(is_whole(id, 0, vocab - 1) for id in ids):
        raise UserError(
            f"{folder / name}: eos_token_id is {shown(eos)}; it must be a token id, or a list of them, from 0 to "
            f"{vocab - 1}: the vocabulary ends there"
        )
    return tuple(dict.fromkeys(ids))


def written_config(config: DecoderConfig) -> dict[str, Any]:
    """Return the config.json of a model that was not loaded from one."""
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
        **written_rope(config.rope_theta, config.rope_scaling),
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,  # without the entry, transformers would fill in a default
        "eos_token_id": None,
        "pad_token_id": None,
    }
