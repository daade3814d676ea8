"""Weights of a decoding step on CUDA in the type of products, cast once per version of the weights, not per token.

Copies keep their addresses when weights change, so that captured graphs remain valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from posttrain.models.native.decoder import Decoder, Layer
from posttrain.models.native.linear import Linear


class Product(NamedTuple):
    """Weight [inputs, outputs] and bias [outputs] of a linear layer."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [B, inputs] -> [B, outputs]."""
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)


class LayerWeights(NamedTuple):
    attention_norm: Tensor
    qkv: Product
    qk_norm: Tensor | None  # float32 [heads + kv_heads, size]
    o: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


class StepWeights:
    """Weights of a decoder for products of `dtype`, with adapters merged. Weights that need no cast and no merge are
    not copied.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        self._decoder, self._dtype = decoder, dtype
        self._copied: list[tuple[Tensor, Callable[[], Tensor]]] = []  # (copy, function that returns its source)
        self._parameters = list(decoder.parameters())
        self._own = {p.data_ptr() for p in self._parameters}
        self.layers = [self._layer(cast(Layer, layer)) for layer in decoder.layers]
        self.embedding = decoder.embed.weight.detach()
        self.norm = decoder.norm.weight.detach()
        self.head = self._held(lambda: decoder.head.weight.detach())
        self._versions, self._addresses = self._state()

    @property
    def bytes(self) -> int:
        """Return the size of the copies in bytes."""
        return sum(copy.nbytes for copy, _ in self._copied)

    def same(self, changed: bool) -> bool:
        """Return whether the model still has the same tensors. `changed`: parameters may have been replaced."""
        current = list(self._decoder.parameters()) if changed else self._parameters
        return (
            len(current) == len(self._parameters)
            and all(one is other for one, other in zip(current, self._parameters, strict=True))
            and self._addresses == [p.data_ptr() for p in current]
        )

    @torch.no_grad()
    def refresh(self, changed: bool) -> None:
        """Overwrite the copies, in place, if weights have changed. `changed`: they may have, undetected by torch."""
        versions, _ = self._state()
        if changed or versions != self._versions:
            for copy, source in self._copied:
                copy.copy_(source())
            self._versions = versions

    def _state(self) -> tuple[list[int], list[int]]:
        return [p._version for p in self._parameters], [p.data_ptr() for p in self._parameters]

    def _layer(self, layer: Layer) -> LayerWeights:
        def repeated() -> Tensor:
            assert layer.qk_norm is not None
            counts = torch.tensor((layer.heads, layer.kv_heads), device=layer.qk_norm.device)
            return layer.qk_norm.detach().repeat_interleave(counts, 0)

        return LayerWeights(
            attention_norm=layer.attention_norm.weight.detach(),
            qkv=self._product(layer.qkv),
            qk_norm=None if layer.qk_norm is None else self._held(repeated, torch.float32),
            o=self._product(layer.o),
            mlp_norm=layer.mlp_norm.weight.detach(),
            gate_up=self._product(layer.gate_up),
            down=self._product(layer.down),
        )

    def _product(self, linear: Linear) -> Product:
        bias = linear.bias
        shift = None if bias is None else self._held(lambda: bias.detach())
        return Product(self._held(linear.merged).t(), shift)

    def _held(self, source: Callable[[], Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return the result of `source` in the type of products: a copy, unless it is a weight of that type."""
        dtype, value = dtype or self._dtype, source()
        if value.dtype == dtype and value.data_ptr() in self._own:
            return value
        copy = value.to(dtype, copy=True)
        self._copied.append((copy, source))
        return copy
