"""Builds the content of config.json and generation_config.json from the metadata of a GGUF file.

For the architectures of the native decoder, config.json is complete. For others transformers reads the metadata itself
when the model is loaded, and only the entries that are needed before that are built here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.models.gguf.gguf_file import GgufFile, StoredTensor, read_gguf, require_package
from posttrain.models.rope_entries import written_rope

NATIVE = ("llama", "qwen2", "qwen3")
PERMUTED = ("llama",)
"""Architectures whose q and k are stored with the two halves of each head interleaved, as llama.cpp rotates them."""
MODEL_TYPES = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2",
    "command-r": "cohere",
}  # fmt: skip
"""model_type of an architecture, where transformers writes it otherwise."""
SCALED_THERE = ("gpt-oss",)  # architectures whose scaling of rotary embeddings transformers reads
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the frequencies: Llama 3's scaling, as numbers
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of every Llama 3 that llama.cpp converts."""
CONTEXT = 2048  # context length in tokens if the file has none
F32 = 0


def described(path: Path, name: str) -> dict[str, Any] | None:
    """Return the content of config.json or generation_config.json, built from a GGUF file; None for another name."""
    require_package(path)
    if name == "config.json":
        return _config(read_gguf(path))
    return _generation(read_gguf(path)) if name == "generation_config.json" else None


def _generation(file: GgufFile) -> dict[str, Any]:
    """Return generation_config.json: the ids that end a text, and a turn if the file has another token for that."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ends = list(dict.fromkeys(_whole(file, key, low=0) for key in keys if key in file.metadata))
    return {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}


def _config(file: GgufFile) -> dict[str, Any]:
    kind = file.architecture
    _check_rope(file, kind)

    def size_of(name: str, default: int | None = None) -> int:
        return _whole(file, f"{kind}.{name}", default)

    found: dict[str, Any] = {
        "model_type": MODEL_TYPES.get(kind, kind),
        "max_position_embeddings": size_of("context_length", CONTEXT),
        "num_hidden_layers": size_of("block_count"),
        **_tokens(file),
    }
    if kind not in NATIVE:
        return found
    if file.metadata.get(f"{kind}.expert_count"):
        raise UserError(f"{file.path}: a mixture of experts of architecture {kind} is not supported: give its folder")
    heads, hidden = size_of("attention.head_count"), size_of("embedding_length")
    size = size_of("attention.key_length", size_of("rope.dimension_count", max(1, hidden // heads)))
    rotated = size_of("rope.dimension_count", size)
    if rotated != size or size_of("attention.value_length", size) != size:
        raise UserError(f"{file.path}: heads of {size} numbers of which {rotated} are rotated are not supported")
    biased = "blk.0.attn_q.bias" in file.tensors and kind != "qwen2"
    scaling = _rope_scaling(file, size)
    return {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}.get(kind, "Qwen3ForCausalLM")],
        **found,
        "hidden_size": hidden,
        "vocab_size": _vocabulary(file),
        "intermediate_size": size_of("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": size_of("attention.head_count_kv", heads),
        "head_dim": size,
        "hidden_act": "silu",
        "rms_norm_eps": _number(file, f"{kind}.attention.layer_norm_rms_epsilon", 1e-6),
        **written_rope(_theta(file), scaling),
        "attention_bias": biased,
        **({"mlp_bias": "blk.0.ffn_up.bias" in file.tensors} if kind == "llama" else {"use_sliding_window": False}),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _tokens(file: GgufFile) -> dict[str, Any]:
    """Return the special ids. A missing one is None, since transformers would fill in a default for an absent entry."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}


def _whole(file: GgufFile, key: str, default: int | None = None, low: int = 1) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or not low <= value < 2**31:
        raise file.refuse(key, f"a whole number from {low}")
    return value


def _number(file: GgufFile, key: str, default: float) -> float:
    value = file.metadata.get(key, default)
    if type(value) is not float or not 0.0 < value < math.inf:
        raise file.refuse(key, "a number above 0")
    return value


def _theta(file: GgufFile) -> float:
    return _number(file, f"{file.architecture}.rope.freq_base", 10_000.0)


def _vocabulary(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{file.path} has no token_embd.weight, the embedding: give the file of a whole language model")
    return embedding.shape[0]


def _check_rope(file: GgufFile, kind: str) -> None:
    """Raise UserError for a scaling of rotary embeddings that neither this module nor transformers would apply."""
    key = f"{kind}.rope.scaling.type"
    scaling = file.metadata.get(key, "none" if _linear_factor(file) == 1.0 else "linear")
    lost = scaling not in ("none", "linear") if kind in NATIVE else scaling != "none" and kind not in SCALED_THERE
    if lost or (ROPE_FACTORS in file.tensors and kind not in NATIVE):
        said = f"{key} {scaling!r:.40}" if lost else ROPE_FACTORS
        raise UserError(f"{file.path}: {said} cannot be read from a GGUF file of {kind}: give the Hugging Face folder")


def _rope_scaling(file: GgufFile, size: int) -> dict[str, Any]:
    kind = file.architecture
    if ROPE_FACTORS in file.tensors:
        return _llama3(file, file.tensors[ROPE_FACTORS], size)
    factor = _linear_factor(file)
    if factor == 1.0 or file.metadata.get(f"{kind}.rope.scaling.type", "linear") != "linear":
        return {}
    return {"rope_type": "linear", "factor": factor}


def _linear_factor(file: GgufFile) -> float:
    """Return the factor of linear scaling, which llama.cpp applies even if no type is given; 1.0: no scaling."""
    new, old = f"{file.architecture}.rope.scaling.factor", f"{file.architecture}.rope.scale_linear"
    key = new if new in file.metadata else old
    return 1.0 if file.metadata.get(key) == 0.0 else _number(file, key, 1.0)


def _llama3(file: GgufFile, tensor: StoredTensor, size: int) -> dict[str, Any]:
    """Return the settings of Llama 3's scaling, recovered from the stored divisors of the frequencies. Raises UserError
    if the divisors do not belong to that scaling.
    """
    count = math.prod(tensor.shape)
    if tensor.kind != F32 or 2 * count != size or tensor.begin + 4 * count > file.size:
        raise UserError(f"{file.path}: {ROPE_FACTORS} does not have the {size // 2} numbers (F32) of half a head")
    with user_files.opened(file.path) as content:
        content.seek(tensor.begin)
        found = struct.unpack(f"<{count}f", content.read(4 * count))
    if not all(0.0 < x < math.inf for x in found):
        raise UserError(f"{file.path} is damaged, copy it again: {ROPE_FACTORS} has a divisor of 0")
    settings = {"rope_type": "llama3", "factor": max(found), **LLAMA3}
    expected = _divisors(settings, _theta(file), size)
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected, strict=True)):
        raise UserError(
            f"{file.path}: {ROPE_FACTORS} is not the scaling of Llama 3 with a context of 8192: give the Hugging Face folder"
        )
    return settings


def _divisors(settings: dict[str, Any], theta: float, size: int) -> Iterator[float]:
    """Yield the divisors as transformers computes them for `rope_type` "llama3"."""
    low, high, factor = settings["low_freq_factor"], settings["high_freq_factor"], settings["factor"]
    for place in range(0, size, 2):
        turns = settings["original_max_position_embeddings"] / (2 * math.pi * theta ** (place / size))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1.0 / ((1.0 - smooth) / factor + smooth)
