"""Floating-point operations (FLOP) of a decoder that a result needs, whatever a program computes.

A multiplication with its addition is 2 FLOP. Counted are the matrices that every fed token goes through, the output head
at scored tokens only, and of attention the pairs that a mask leaves. Recomputed layers and padding do not count.
"""

from __future__ import annotations

from posttrain.models.native.decoder_shape import DecoderConfig

BACKWARD = 3
"""FLOP of an update over those of its forward pass: the backward pass has gradients of activations and of weights."""
FROZEN_BACKWARD = 2
"""The same if matrices are frozen, as below adapters: they have no gradients. Adapters are not counted."""


def trunk(config: DecoderConfig) -> int:
    """Return the matrix parameters that every token goes through."""
    attention = config.hidden * config.head_size * (2 * config.heads + 2 * config.kv_heads)
    return config.layers * (attention + 3 * config.hidden * config.intermediate)


def forward_flop(config: DecoderConfig, fed: int, scored: int, pairs: int) -> float:
    """Return the FLOP of a forward pass over `fed` tokens, of which the output head reads `scored`; `pairs`: (token, token
    that it attends to), itself included.
    """
    attention = 4 * config.layers * config.heads * config.head_size * pairs
    return 2.0 * trunk(config) * fed + 2.0 * config.vocab * config.hidden * scored + attention
