"""Small GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tiny_models import SIZES
from torch import Tensor

from posttrain.models.tokenizer.tokenizer import Tokenizer

TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|eos|>{% endfor %}<|assistant|>"
QUANTIZED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
WIDE = {
    **SIZES,
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
}  # rows of whole blocks
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def tiny(kind: str, tied: bool = False, **more: Any) -> Any:
    """A random model of transformers of a native architecture, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**WIDE, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5, **more})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def stored_name(name: str) -> str:
    """The name of a tensor in a GGUF file."""
    module, _, leaf = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, number, inner = module.split(".", 3)
        return f"blk.{number}.{NAMES[inner]}.{leaf}"
    return f"{NAMES[module]}.{leaf}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order: of each head the numbers 0, n/2, 1, n/2 + 1 ..."""
    size = len(weight) // heads
    order = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def blocks(weight: np.ndarray, kind: str) -> np.ndarray:
    """A tensor in blocks of a type; random ones of about its size for types that gguf cannot write."""
    known = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return gguf.quantize(weight, known)
    block, size = gguf.GGML_QUANT_SIZES[known]
    made = np.random.default_rng(weight.size).integers(
        0, 256, (*weight.shape[:-1], weight.shape[-1] // block, size), np.uint8
    )
    scale = np.array([1e-3], np.float16).view(np.uint8)
    places = {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]
    for place in places:
        made[..., place : place + 2] = scale
    return made.reshape(*weight.shape[:-1], -1)


def write_gguf(
    path: Path,
    model: Any,
    quantized: str = "F32",
    tokenizer: Tokenizer | None = None,
    also: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Write a model of transformers. `also`: further entries; `without`: entries and tensors that are left out.

    Returns the weights that a reader should find, by Hugging Face's names.
    """
    config, found = model.config, {}
    kind = config.model_type
    writer = gguf.GGUFWriter(path, kind)
    entries = {
        f"{kind}.context_length": config.max_position_embeddings, f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.block_count": config.num_hidden_layers, f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": config.head_dim if kind != "qwen2" else None,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]), "general.name": "tiny",
        f"{kind}.vocab_size": config.vocab_size,
    } | ({f"{kind}.rope.dimension_count": config.head_dim} if kind == "llama" else {})  # fmt: skip
    if tokenizer is not None:
        entries |= described(tokenizer)
    for key, value in {**entries, **(also or {})}.items():
        if key not in without and value is not None:
            add(writer, key, value)
    for name, weight in model.state_dict().items():
        stored = stored_name(name)
        if stored in without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        numbers = weight.numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stored.split(".")[-2])
        if heads and kind == "llama":
            numbers = interleaved(numbers, heads)
        how = quantized if numbers.ndim > 1 else "F32"
        data, known = blocks(numbers, how), gguf.GGMLQuantizationType[how]
        writer.add_tensor(stored, data, raw_dtype=known)
        back = gguf.dequantize(data, known)
        if heads and kind == "llama":
            order = interleaved(np.arange(len(back)), heads)
            back = back[np.argsort(order)]
        found[name] = torch.from_numpy(back.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def described(tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries of a byte-level tokenizer."""
    import json

    told = json.loads(tokenizer.backend.to_str())
    tokens = sorted(tokenizer.vocabulary, key=tokenizer.vocabulary.__getitem__)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in told["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if id in tokenizer.added else 1 for id in range(len(tokens))],
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_id, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
