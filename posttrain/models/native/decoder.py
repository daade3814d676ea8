"""The native language model: one configurable decoder-only transformer.

It covers Llama 2 and 3, Mistral, Qwen2 / 2.5, Qwen3 and what is stored under those types (SmolLM). It decides two
things. Tokens lie flat, `[T]`, without batch dimension or padding. And attention is plugged in from outside: packed
training, prefill and cached decoding are three `attend` functions over this one model.

    T  tokens of one forward pass, of any number of sequences laid end to end
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from posttrain.core.batch import Layout
from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.models.free_memory import available_memory, in_gib
from posttrain.models.head import Head
from posttrain.models.native.attention import SegmentAttention, filled
from posttrain.models.native.fused import norm_linear, rms_norm, rope, rope_heads, swiglu_linear
from posttrain.models.native.linear import ROUND, Embedding, Linear, rounds

if TYPE_CHECKING:
    from posttrain.models.adapters.lora import LoRA

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, head_size], k and v [T, kv_heads, head_size]) -> [T, heads, head_size]. q and k come rotated."""

ROPE_TYPES = ("linear", "llama3")
"""What `rope_scaling["rope_type"]` may be; no scaling is None."""

SIZE_MOST = 2**31 - 1  # token ids, and the sizes that compiled code is told, have 32 bits
LAYERS_MOST = 2_000  # each takes a millisecond to make, however small
CONTEXT_MOST = 2**31 - 1
THETA = (1.0, 1e15)  # smaller and larger bases leave no float32 frequencies


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    Raises UserError when the numbers do not fit together.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    context: int  # most tokens of one sequence
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None  # "rope_type" is one of ROPE_TYPES, and the numbers it needs
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and of k, before the rotation (Qwen3)
    tied: bool = False  # the output head is the embedding
    family: str = "llama"  # the Hugging Face model_type; `new_decoder` chooses it itself

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("vocab", "hidden", "heads", "kv_heads", "head_size", "intermediate"), SIZE_MOST)
        for name, most in {**sizes, "layers": LAYERS_MOST, "context": CONTEXT_MOST}.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise UserError(f"a decoder's {name} must be a whole number from 1 to {most:,}, not {value!r:.40}")
        if self.heads % self.kv_heads:
            raise UserError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_size % 2:
            raise UserError(
                f"head_size ({self.head_size}, from scratch hidden / heads) must be even: rotary embeddings turn pairs "
                "of dimensions"
            )
        low, high = THETA
        if not low <= self.rope_theta <= high or not 0.0 <= self.norm_eps <= 1.0:
            raise UserError(
                f"rope_theta must be from {low:g} to {high:g} and norm_eps from 0 to 1, not {self.rope_theta:g} and "
                f"{self.norm_eps:g}"
            )

    @property
    def parameters(self) -> int:
        """How many numbers a model of this shape has; nothing is allocated to count them."""
        width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = self.hidden * (2 * width + 2 * kv_width)
        mlp = 3 * self.hidden * self.intermediate
        biases = self.qkv_bias * (width + 2 * kv_width) + self.o_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        norms = 2 * self.hidden + 2 * self.qk_norm * self.head_size
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return ends + self.layers * (attention + mlp + biases + norms)

    def require_memory(self, dtype: torch.dtype, device: torch.device, what: str, shares: int = 1) -> None:
        """Raises UserError if the weights alone, or one of `shares` shares of them, are more than `device` has room for.

        `what` announces this shape.

        A model that passes may still be too large to be trained: gradients and moments take three times as much again.
        """
        needed, room = self.parameters * dtype.itemsize // shares, available_memory(device)
        if needed > room:
            raise UserError(
                f"{what} announces {self.parameters:,} parameters (vocabulary {self.vocab:,}, hidden {self.hidden:,}, "
                f"intermediate {self.intermediate:,}, {self.layers:,} layers), {in_gib(needed)} of weights; "
                f"{device.type} has {in_gib(room)} of memory free: correct the sizes or use a larger machine"
            )


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in float32 for narrower inputs."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Layer(nn.Module):
    """One transformer block: attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.eps = config.norm_eps
        width = config.heads * config.head_size
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.qkv = Linear(config.hidden, width + 2 * config.kv_heads * config.head_size, bias=config.qkv_bias)
        self.qk_norm = nn.Parameter(torch.empty(2, config.head_size)) if config.qk_norm else None  # rows: q, k
        self.o = Linear(width, config.hidden, bias=config.o_bias)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.gate_up = Linear(config.hidden, 2 * config.intermediate, bias=config.mlp_bias)
        self.down = Linear(config.intermediate, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, at: Tensor | None = None) -> Tensor:
        """[T, hidden] -> [T, hidden], or of some tokens only: at int64 [n]; cos and sin as `Decoder.rotary` makes them."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = norm_linear(x, self.attention_norm.weight, self.eps, self.qkv)
        # q and k go through norm and rotation as one tensor: half the operations
        if self.qk_norm is None:
            qk, v = rope_heads(qkv, cos, sin, heads + kv_heads)
        else:
            weight = torch.cat((self.qk_norm[:1].expand(heads, -1), self.qk_norm[1:].expand(kv_heads, -1)))
            qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, self.head_size))
            qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
            qk = rope(rms_norm(qk, weight, self.eps), cos, sin)
        q, k = qk.split_with_sizes((heads, kv_heads), 1)
        attended = attend(self.number, q, k, v).flatten(1)
        if at is not None:
            attended, x = attended.index_select(0, at), x.index_select(0, at)
        x = x + self.o(attended)
        return x + swiglu_linear(norm_linear(x, self.mlp_norm.weight, self.eps, self.gate_up), self.down)


class Decoder(nn.Module):
    """The model. Its parameters come uninitialised: make one with `new_decoder` or `models.folder.load_model`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.source: dict[str, Any] = {}  # the config.json it came from, so that a save keeps what is unknown here
        self.generation: dict[str, Any] = {}  # its generation_config.json
        self.eos_ids: tuple[int, ...] = ()  # every token id that ends a reply
        self.lora: LoRA | None = None  # how it is adapted; the weights themselves are then frozen
        self.embed = Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.output = None if config.tied else nn.Parameter(torch.empty(config.vocab, config.hidden))
        # not a buffer: a model cast to bfloat16 must keep its float32 frequencies
        self._frequency: dict[torch.device, Tensor] = {}

    @property
    def head(self) -> Head:
        """The embedding is its weight when tied."""
        return Head(self.embed.weight if self.output is None else self.output)

    def forward(self, tokens: Tensor, position: Tensor, attend: Attend, at: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, float [T, hidden], of tokens int64 [T] at position int64 [T].

        `at` int64 [n]: only these tokens' are wanted, [n, hidden]. Behind its attention the last layer sees no others.
        """
        x: Tensor = self.embed(tokens)
        cos, sin = self.rotary(position, x.dtype)
        for layer in self.layers[:-1]:
            x = layer(x, cos, sin, attend)
        x = self.layers[-1](x, cos, sin, attend, at)
        x = self.norm(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab], in float32 at least. For few rows: a learner never holds all logits at once."""
        return self.head.logits(hidden)

    def hidden(self, layout: Layout, at: Tensor) -> Tensor:
        """See `posttrain.core.protocols.Model`."""
        assert layout.position.ndim == 1, "positions in time, height and width are for models that see pictures"
        count = len(at)
        if rounds(at.device) and count:
            layout, at = filled(layout, ROUND), torch.cat((at, at[:1].expand(-count % ROUND)))
        hidden: Tensor = self(layout.tokens, layout.position, SegmentAttention(layout), at)
        return hidden[:count]

    def save(self, folder: Path) -> None:
        """Write config.json, generation_config.json and the weights, as `models.folder.load_model` reads them.

        Of an adapted model the adapters alone.
        """
        if self.lora is not None:
            from posttrain.models.adapters.adapter_folder import save_adapter

            return save_adapter(self, folder)
        from posttrain.models.checkpoint_folder import save_model

        save_model(self, folder)

    def rotary(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables (cos, sin), each [T, 1, head_size]: rotated(x) = x * cos + x.roll(head_size // 2) * sin.

        The sign of the rotation is in the first half of sin. Angles are float32 whatever the dtype of the result.
        """
        if position.device not in self._frequency:
            self._frequency[position.device] = rotary_frequency(self.config).to(position.device)
        angle = position[:, None, None].float() * self._frequency[position.device]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


if TYPE_CHECKING:
    _proof: Callable[..., Model] = Decoder


def rotary_frequency(config: DecoderConfig) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [head_size / 2] (arXiv 2104.09864), scaled if asked."""
    exponent = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequency = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / float(scaling["factor"])
    assert scaling["rope_type"] == "llama3", "the checkpoint reader refuses other kinds"
    # Llama 3.1: dimensions that turn often within the original context stay, those that turn rarely are slowed down
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept: Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / float(scaling["factor"]))


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The plain `Attend` of one sequence: every token sees itself and what is before it."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return attended[0].transpose(0, 1)


def new_decoder(config: DecoderConfig, seed: int) -> Decoder:
    """A freshly initialised float32 model on the CPU; equal seeds give equal weights, the global RNG is not touched.

    Weights are normal(0, 0.02), those that write to the residual stream divided by sqrt(2 * layers) (GPT-2); norms are
    1 and biases 0. Raises UserError if no Hugging Face family could store such a model, or if no memory could hold it.
    """
    config.require_memory(torch.float32, torch.device("cpu"), "a model from scratch")
    with torch.device("meta"):  # no memory, and no draw from the global RNG
        model = Decoder(replace(config, family=storable_family(config)))
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    residual = 0.02 / math.sqrt(2 * config.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                deviation = residual if name.endswith((".o.weight", ".down.weight")) else 0.02
                parameter.normal_(0.0, deviation, generator=generator)
    return model


def storable_family(config: DecoderConfig) -> str:
    """The Hugging Face model_type whose checkpoints hold just these biases and norms."""
    if config.qk_norm and config.qkv_bias == config.o_bias and not config.mlp_bias:
        return "qwen3"
    if config.qkv_bias and not (config.o_bias or config.mlp_bias or config.qk_norm):
        return "qwen2"
    if config.qkv_bias == config.o_bias and not config.qk_norm:
        return "llama"
    raise UserError(
        "no Hugging Face family stores this mix of qkv_bias, o_bias, mlp_bias and qk_norm: set qkv_bias alone (qwen2), "
        "qk_norm alone or with both attention biases (qwen3), or both attention biases or none (llama)"
    )
