"""Shape of a decoder: sizes, their limits, and the memory that they require."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.types import UserError
from posttrain.models.free_memory import available_memory, in_gib

ROPE_TYPES = ("linear", "llama3")
"""Allowed values of `rope_scaling["rope_type"]`; no scaling is None."""


SIZE_MOST = 2**31 - 1  # token ids, and the sizes in compiled code, have 32 bits


LAYERS_MOST = 2_000  # a layer of any size takes a millisecond to build


CONTEXT_MOST = 2**31 - 1


THETA = (1.0, 1e15)  # smaller and larger bases leave no float32 frequencies


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder.

    Raises UserError when the numbers do not fit together.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    context: int  # maximum of tokens in one sequence
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None  # "rope_type" is one of ROPE_TYPES, and the numbers it needs
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and of k, before the rotation (Qwen3)
    tied: bool = False  # the output head is the embedding
    family: str = "llama"  # the Hugging Face model_type; `new_decoder` sets it

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
        """Count the parameters of a model of this shape, without allocating it."""
        width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        biases = self.qkv_bias * (width + 2 * kv_width) + self.o_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        norms = 2 * self.hidden + 2 * self.qk_norm * self.head_size
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return ends + self.layer_numbers + self.layers * (biases + norms)

    @property
    def layer_numbers(self) -> int:
        """Number of elements in the matrices of all layers."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def activation_bytes(
        self, narrow: bool, recompute: bool = False, tensor: int = 1, offloaded: bool = False, float8: bool = False
    ) -> int:
        """Count the bytes per token that an update keeps for its backward pass, with compiled operations.

        A layer keeps the residual stream at both of its norms, q, k, v, the output of attention, and the input of
        SwiGLU. `narrow`: products are in bfloat16, the residual stream still in float32. `recompute`: layers keep only
        their inputs, and one layer at a time keeps all. `tensor`: processes that divide heads and MLP. `offloaded`:
        activations are on the host, but for two layers at most: one that is computed, and one on its way. `float8`: products
        are `native.float8`'s, which keep their inputs too, instead of computing them again.
        """
        number = 2 if narrow else 4
        products = (2 * self.intermediate + 2 * (self.heads + self.kv_heads) * self.head_size) // tensor
        products += (2 * self.hidden + self.intermediate) * float8
        of_layer = 2 * 4 * self.hidden + number * products
        if offloaded:
            return min(2, self.layers) * of_layer
        return self.layers * 4 * self.hidden + of_layer if recompute else self.layers * of_layer

    def require_memory(
        self, dtype: torch.dtype, device: torch.device, what: str, shares: int = 1, packed: float = 0.0
    ) -> None:
        """Raise UserError if the weights alone, or one of `shares` shares of them, exceed the free memory of `device`.

        `what`: the file or option that gives this shape, for the message. `packed`: bytes of a number of the layers'
        matrices if they are packed, 0 if they have the type.

        A model that passes may still be too large for training: gradients and moments take three times as much in
        addition.
        """
        whole = self.parameters * dtype.itemsize - int(self.layer_numbers * (dtype.itemsize - packed) * bool(packed))
        needed, room = whole // shares, available_memory(device)
        if needed > room:
            raise UserError(
                f"{what} announces {self.parameters:,} parameters (vocabulary {self.vocab:,}, hidden {self.hidden:,}, "
                f"intermediate {self.intermediate:,}, {self.layers:,} layers), {in_gib(needed)} of weights; "
                f"{device.type} has {in_gib(room)} of memory free: correct the sizes or use a larger machine"
            )
