"""Small random models of many architectures, made by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from posttrain.models.hf.backed import Backed
from posttrain.models.hf.transformers_folder import load_backed

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "head_dim": 4,
}  # fmt: skip
WINDOW = {"sliding_window": 4}
WINDOWS = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("flat", {}),
    "qwen3_moe": ("flat", {**MOE, "decoder_sparse_step": 1, "norm_topk_prob": True}),
    "mixtral": ("flat", MOE),
    "phi3": ("flat", {}),
    "olmo2": ("flat", {}),
    "deepseek_v3": ("flat", {**MOE, **LATENT}),
    "gpt2": ("flat", {"tie_word_embeddings": True}),
    "granite": ("flat", {"logits_scaling": 8.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "cohere": ("flat", {"logit_scale": 0.0625}),
    "phi": ("flat", {"partial_rotary_factor": 0.5}),
    "gemma2": ("flat", {**WINDOWS, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3_text": ("flat", WINDOWS),
    "gemma4_text": ("flat", {**WINDOWS, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "gpt_oss": ("flat", {**MOE, **WINDOWS}),
    "mamba2": ("rows", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8}),
    "qwen3_next": ("flat", {**MOE, **LINEAR, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}),
    "qwen3_5_text": ("flat", LINEAR),
    "lfm2": ("flat", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
}
"""model_type -> (the way it goes, what its configuration has besides `SIZES`)."""
DROPPING: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"ffn_dim": 48, "attention_heads": 4, "d_model": 32, "num_layers": 2},
}
"""The same of models that drop out numbers in the forward of a layer, or of the model, by its own flag."""
MIXED: dict[str, dict[str, Any]] = {
    "zamba2": {
        "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_expand": 2,
        "chunk_size": 8, "num_mem_blocks": 1, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_key_value_heads": 4, "attention_head_dim": 16, "adapter_rank": 4, "head_dim": 16, "num_attention_heads": 4,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8, "mamba_expand": 2,
    },
}  # fmt: skip
"""State spaces beside attention, which layers of the first share."""
SELECTING: dict[str, Any] = {**MOE, **LATENT, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 8}
OTHERS: dict[str, dict[str, Any]] = {
    **DROPPING, **MIXED, "phimoe": {**MOE, "router_jitter_noise": 0.01}, "glm_moe_dsa": SELECTING,
}  # fmt: skip
"""What the table of models does not list."""

_PLACES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4,
          "spatial_merge_size": 2}  # fmt: skip
_GRID = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
         "size": {"shortest_edge": 64, "longest_edge": 4096}}  # fmt: skip
_TILES = {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 32}, "do_image_splitting": True,
          "max_image_size": {"longest_edge": 16}}  # fmt: skip
_TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}

SEEING: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"rope_parameters": _PLACES}, {**_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}, _TOKENS, _GRID
    ),
    "qwen3_vl": (
        {"rope_parameters": {**_PLACES, "mrope_interleaved": True}},
        {**_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, _TOKENS, _GRID
    ),
    "smolvlm": (
        {"model_type": "llama"},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
         "patch_size": 4}, {"image_token_id": 5, "scale_factor": 2, "tie_word_embeddings": False}, _TILES
    ),
}  # fmt: skip
SEEING["idefics3"] = (*SEEING["smolvlm"][:3], {**_TILES, "image_processor_type": "Idefics3ImageProcessor"})
"""model_type -> what the configurations of text, of vision and of both have; the image processor's."""


class InDouble(TorchFunctionMode):
    """Within it nothing is cast to float32: transformers does that for norms and softmax, whatever the weights are.

    `angles`: nor for the angles of rotary embeddings, which the native decoder computes in float32 too.
    """

    def __init__(self, angles: bool = True) -> None:
        super().__init__()
        self.angles = angles

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.float and self.angles:
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if function in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if function is torch.Tensor.matmul and args[0].dtype != args[1].dtype:  # angles, in transformers 5.17
            args = tuple(value.to(torch.float32) for value in args)
        return function(*args, **kwargs)


def make(kind: str, folder: Path, seed: int = 0, **changed: Any) -> Path:
    """A folder with random weights, some times larger than is usual: so that every part moves the output."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **(OTHERS.get(kind) or KINDS[kind][1]), **changed})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def make_seeing(kind: str, folder: Path, seed: int = 0, **changed: Any) -> Path:
    """The same of a model that sees, with its image processor. `changed`: of the text's configuration."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, vision, both, processor = SEEING[kind]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, text_config={**SIZES, **text, **changed}, vision_config=vision, **both)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


class Folders:
    """Folders of models by their kind, each made when it is first asked for."""

    def __init__(self, place: Path, make: Callable[..., Path] = make, **changed: Any) -> None:
        self.place, self.make, self.changed, self.made = place, make, changed, dict[str, Path]()

    def __call__(self, kind: str) -> Path:
        if kind not in self.made:
            self.made[kind] = self.make(kind, self.place / kind, **self.changed)
        return self.made[kind]


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> Backed:
    """The model of a folder, by transformers even where it is native."""
    return load_backed(folder, json.loads((folder / "config.json").read_text()), dtype)
