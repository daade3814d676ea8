"""The native language model: one configurable decoder-only transformer.

It covers Llama 2 and 3, Mistral, Qwen2 / 2.5, Qwen3 and models stored under those types (SmolLM). Tokens are flat,
`[T]`, without batch dimension or padding. Attention is passed in from outside: packed training, prefill and cached
decoding are three `attend` functions for the same model.

T  tokens of one forward pass, of any number of concatenated sequences
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from posttrain.core.batch import Layout
from posttrain.core.types import UserError
from posttrain.models.backbone import Backbone
from posttrain.models.native.attention import SegmentAttention, each_alone, filled
from posttrain.models.native.context_parallel import ExchangedAttention, tokens_each
from posttrain.models.native.decoder_config import CLASSIFIERS, written_config
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import checkpoint_tensors, save_model
from posttrain.models.native.fused import compiles, norm_linear, rms_norm, rope, rope_heads, swiglu_linear
from posttrain.models.native.head import Head, SharedVocabulary
from posttrain.models.native.linear import ROUND, Embedding, Linear, give_memory, in_blocks, narrow_layers, rounds
from posttrain.models.native.weight_names import stored_pieces
from posttrain.models.peers import Peers, copied, summed

if TYPE_CHECKING:
    from posttrain.models.adapters.lora import LoRA
    from posttrain.models.hf.experts import Routers

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, head_size], k and v [T, kv_heads, head_size]) -> [T, heads, head_size]. q and k are already
rotated.
"""


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
        self.peers: Peers | None = None  # processes of which each has some of the heads and of the inner units

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, at: Tensor | None = None) -> Tensor:
        """Compute [T, hidden] -> [T, hidden], or [n, hidden] for the tokens `at`, int64 [n], only. cos, sin: see
        `Decoder.rotary`.
        """
        heads, kv_heads = self.heads, self.kv_heads
        qkv = norm_linear(copied(x, self.peers), self.attention_norm.weight, self.eps, self.qkv)
        # norm and rotation of q and k as one tensor take half the operations
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
        x = x + summed(self.o(attended), self.peers)
        inner = norm_linear(copied(x, self.peers), self.mlp_norm.weight, self.eps, self.gate_up)
        return x + summed(swiglu_linear(inner, self.down), self.peers)


class Decoder(nn.Module):
    """The model, with uninitialised parameters: create it with `new_decoder` or `checkpoint_folder.load_model`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.source: dict[str, Any] = {}  # its original config.json, of which `save` keeps unknown entries
        self.generation: dict[str, Any] = {}  # content of generation_config.json
        self.eos_ids: tuple[int, ...] = ()  # every token id that ends a reply
        self.lora: LoRA | None = None  # settings of the adapters, whose base weights are then frozen
        self.routers: Routers | None = None  # the model has no experts
        self.replays = False
        self.recomputes = False  # whether a backward pass recomputes layers instead of using stored activations
        self.shared: SharedVocabulary | None = None  # with tensor parallelism: which ids each process has
        self.context: Peers | None = None  # processes of which each computes a part of a layout's tokens
        self.embed = Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.output = None if config.tied else nn.Parameter(torch.empty(config.vocab, config.hidden))
        # not a buffer: a model cast to bfloat16 must keep its float32 frequencies
        self._frequency: dict[torch.device, Tensor] = {}

    @property
    def decoder(self) -> Self:
        return self

    @property
    def head(self) -> Head:
        """Output head; its weight is the embedding if they are tied."""
        return Head(self.embed.weight if self.output is None else self.output, shared=self.shared)

    def forward(self, tokens: Tensor, position: Tensor, attend: Attend, at: Tensor | None = None) -> Tensor:
        """Compute hidden states after the final norm, float [T, hidden], of tokens int64 [T] at position int64 [T].

        `at` int64 [n]: return only these tokens' states, [n, hidden]. The last layer computes only these tokens after
        its attention.
        """
        x: Tensor = self.embed(tokens).to(self.dtype)
        cos, sin = self.rotary(position, x.dtype)
        for layer in self.layers[:-1]:
            x = self._through(layer, x, cos, sin, attend)
        x = self._through(self.layers[-1], x, cos, sin, attend, at)
        x = self.norm(x)
        return x

    def _through(self, layer: nn.Module, *given: Any) -> Tensor:
        """Compute a layer. If layers are recomputed, keep only its inputs for the backward pass."""
        if self.recomputes and torch.is_grad_enabled():
            kept: Tensor = checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)
            return kept
        out: Tensor = layer(*given)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, hidden] -> [n, vocab], in float32 at least. Meant for few rows: learners compute logits in
        blocks.
        """
        return self.head.logits(hidden)

    def hidden(self, layout: Layout, at: Tensor) -> Tensor:
        """See `posttrain.core.protocols.Model`."""
        assert layout.position.ndim == 1, "positions in time, height and width are for models that see pictures"
        if self.context is not None:
            return self._hidden_of_share(layout, at, self.context)
        count = len(at)
        if rounds(at.device) and count:
            layout, at = filled(layout, ROUND), torch.cat((at, at[:1].expand(-count % ROUND)))
        hidden: Tensor = self(layout.tokens, layout.position, SegmentAttention(layout), at)
        return hidden[:count]

    def _hidden_of_share(self, layout: Layout, at: Tensor, context: Peers) -> Tensor:
        """Compute `hidden` with context parallelism. `at`: only tokens of this process's share."""
        count, each = len(at), tokens_each(len(layout.tokens), context.size, at.device)
        layout = filled(layout, context.size * each)
        own = slice(context.rank * each, (context.rank + 1) * each)
        at = at - own.start if count else at.new_zeros(1)  # peers need the layers of a process that scores nothing
        if rounds(at.device):
            at = torch.cat((at, at[:1].expand(-len(at) % ROUND)))
        attend = ExchangedAttention(SegmentAttention(layout), context)
        hidden: Tensor = self(layout.tokens[own], layout.position[own], attend, at)
        return hidden[:count]

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def narrow(self, dtype: torch.dtype) -> None:
        """Freeze the model, and convert its matrices to a narrower type; norms, biases and activations keep theirs."""
        self.requires_grad_(False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "norm" not in name:
                parameter.data = parameter.data.to(dtype)

    def matrices(self) -> list[str]:
        """See `posttrain.models.backbone.Backbone`."""
        return [name for _, _, matrices in self.linears() for name, _ in matrices]

    def linears(self) -> Iterator[tuple[str, Linear, list[tuple[str, int]]]]:
        """See `posttrain.models.backbone.Backbone`."""
        stored = stored_pieces(self.config)
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                yield name, module, [(n.removesuffix(".weight"), shape[0]) for n, shape in stored[f"{name}.weight"]]

    def open_linears(self, wanted: Callable[[str], bool]) -> None:
        """Do nothing: `linears` already has all matrices."""

    def save(self, folder: Path) -> None:
        """Write config.json, generation_config.json and the weights, as `load_model` reads them; for an adapted model,
        only the adapters.
        """
        if self.lora is not None:
            return self.lora.save(self, folder)
        save_model(self, folder)

    def classifier(self) -> str | None:
        return CLASSIFIERS[self.config.family]

    def save_headless(self, folder: Path, also: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
        save_model(self, folder, also=also, told=told)

    def grow(self, vocab: int) -> None:
        old = self.embed.weight
        rows = old.new_zeros((vocab - len(old), old.shape[1]))
        self.embed.weight = nn.Parameter(torch.cat((old.detach(), rows)), old.requires_grad)
        self.config = replace(self.config, vocab=vocab)

    def described(self) -> dict[str, Any]:
        return dict(self.source) or written_config(self.config)

    @property
    def tied(self) -> bool:
        return self.config.tied

    @property
    def embedding_name(self) -> str:
        return "model.embed_tokens.weight"

    @property
    def kept_numbers(self) -> int:
        return 2 * self.config.layers * self.config.kv_heads * self.config.head_size

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return checkpoint_tensors(self)

    def how_it_runs(self) -> dict[str, Any] | None:
        return None

    def empty_like(self, products: torch.dtype | None = None) -> Decoder:
        with torch.device("meta"):  # no memory for weights that are about to be replaced
            own = Decoder(self.config).to(self.dtype)
        narrow_layers(own.layers, products)
        give_memory(own, self.head.device)
        own.source, own.generation, own.eos_ids = self.source, self.generation, self.eos_ids
        return own

    def recompute_layers(self) -> None:
        self.recomputes = True

    def prepare_shards(self) -> None:
        """Do nothing: layers share no weights."""

    @property
    def apart(self) -> bool:
        return self.embed.weight.device.type == "cpu" and compiles()

    def hidden_apart(self, layout: Layout, at: Tensor) -> Tensor:
        """Compute hidden states such that each text's bits are independent of the others: attention text by text, and
        products in blocks of one size.
        """
        count, texts, layout = len(at), len(layout.length), filled(layout, ROUND)
        at = torch.cat((at, at[:1].expand(-count % ROUND)))
        with in_blocks(ROUND):
            hidden: Tensor = self(layout.tokens, layout.position, each_alone(layout, texts), at)
        return hidden[:count]

    @property
    def native(self) -> bool:
        return True

    @property
    def sees(self) -> bool:
        return False

    def vision_weights(self) -> Iterable[nn.Parameter]:
        return ()  # the model is text-only

    def tower(self) -> set[str]:
        return set()

    def rotary(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return tables (cos, sin), each [T, 1, head_size]: rotated(x) = x * cos + x.roll(head_size // 2) * sin.

        The sign of the rotation is in the first half of sin. Angles are float32 whatever the dtype of the result.
        """
        if position.device not in self._frequency:
            self._frequency[position.device] = rotary_frequency(self.config).to(position.device)
        angle = position[:, None, None].float() * self._frequency[position.device]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


if TYPE_CHECKING:
    _proof: Callable[..., Backbone] = Decoder


def rotary_frequency(config: DecoderConfig) -> Tensor:
    """Return radians per position of each pair of dimensions, float32 [head_size / 2] (arXiv 2104.09864), scaled if
    configured.
    """
    exponent = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequency = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / float(scaling["factor"])
    assert scaling["rope_type"] == "llama3", "the checkpoint reader refuses other kinds"
    # Llama 3.1: frequencies with many turns within the original context stay, those with few turns are reduced
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept: Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / float(scaling["factor"]))


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within one sequence: every token attends to itself and to all tokens before it."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return attended[0].transpose(0, 1)


def new_decoder(
    config: DecoderConfig, seed: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """Create an initialised model. Equal seeds give equal weights on one kind of device; the global RNG is not used.

    Weights are normal(0, 0.02), those that write to the residual stream divided by sqrt(2 * layers) (GPT-2); norms are
    1 and biases 0. Raises UserError if no Hugging Face family can store such a model, or if memory does not suffice.
    """
    config.require_memory(dtype, torch.device(device), "a model from scratch")
    with torch.device("meta"):  # no memory, and no draw from the global RNG
        model = Decoder(replace(config, family=storable_family(config))).to(dtype)
    give_memory(model, device)
    generator = torch.Generator(device).manual_seed(seed)
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
    """Return the Hugging Face model_type whose checkpoints have exactly these biases and norms."""
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
