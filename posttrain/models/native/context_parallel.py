"""Context parallelism of a decoder: each of several processes computes a part of a layout's tokens (DeepSpeed-Ulysses,
arXiv 2309.14509).

Only attention needs other tokens. Before it the processes exchange tokens for heads: each attends with some of the heads
over all tokens, so segments and shared prefixes are those of one process, whatever the place of a cut. After it they
exchange back.

T    tokens of a layout    P    processes
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from posttrain.core.types import UserError
from posttrain.models.native.attention import SegmentAttention
from posttrain.models.native.linear import ROUND, rounds
from posttrain.models.peers import Peers, to_heads, to_tokens

if TYPE_CHECKING:
    from posttrain.models.native.decoder import Decoder


def refuse_undealt(decoder: Decoder, size: int) -> None:
    """Raise UserError if `size` processes cannot have whole heads each."""
    heads: int = cast(Any, decoder.layers[0]).heads
    if heads % size:
        raise UserError(
            f"--context-parallel {size} divides heads within attention, and each process has {heads}: give a divisor of "
            f"{heads}, or leave it out"
        )


def tokens_each(tokens: int, size: int, device: torch.device) -> int:
    """Return the number of neighbouring tokens of each of `size` processes; the last ones may be padding."""
    multiple = ROUND if rounds(device) else 1
    return -(-tokens // (size * multiple)) * multiple


class ExchangedAttention:
    """An `attend` for some tokens of a layout: tokens and heads are exchanged around the attention over all tokens."""

    def __init__(self, attention: SegmentAttention, peers: Peers) -> None:
        self.attention, self.peers = attention, peers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q [T / P, heads, size], k and v [T / P, kv_heads, size] -> [T / P, heads, size]."""
        size = self.peers.size
        repeated = size // math.gcd(size, k.shape[1])  # each process needs the key-value heads of its own heads
        if repeated > 1:
            k, v = (x.repeat_interleave(repeated, 1) for x in (k, v))
        heads, kv_heads = q.shape[1] // size, k.shape[1] // size
        parts = torch.cat([x.unflatten(1, (size, -1)) for x in (q, k, v)], 2).flatten(1, 2)
        q, k, v = to_heads(parts, self.peers).split_with_sizes((heads, kv_heads, kv_heads), 1)
        return to_tokens(self.attention(layer, q, k, v), self.peers)
