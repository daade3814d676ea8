"""Attention with capped scores over a layout, through torch's flex attention: on a GPU.

The flash kernels that torch calls have no soft cap. Flex attention compiles a kernel for any function of a score. It gets
the visible keys as a function of two tokens, and as two lists of blocks of 128 x 128 pairs: those in which the function
decides, and those in which all keys are visible. It reads no others.

T    tokens of a micro-batch, filled up to whole blocks    K    segments
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from posttrain.core.batch import Layout
from posttrain.models.native.segments import Forest

BLOCK = 128


class FlexAttention:
    """Attention over one layout. `window`: tokens that a query sees, itself included; None: all."""

    def __init__(self, layout: Layout, forest: Forest, window: int | None = None) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        total, device = layout.tokens.shape[0], layout.tokens.device
        self.missing = -total % BLOCK
        some, whole = blocks(layout, forest, window)
        partly, full = ([torch.from_numpy(x).to(device) for x in _listed(marked)] for marked in (some & ~whole, whole))
        length = total + self.missing
        see = sight(layout, forest, window)
        self.mask = BlockMask.from_kv_blocks(
            partly[0], partly[1], full[0], full[1], BLOCK_SIZE=BLOCK, mask_mod=see, seq_lengths=(length, length)
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
        """Attend: q [T, heads, size], k and v [T, kv_heads, size] -> [T, heads, size]."""

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            return torch.tanh(score / cap) * cap

        total = q.shape[0]
        q, k, v = (functional.pad(x, (0, 0, 0, 0, 0, self.missing)).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out: Tensor = _function(q.is_cuda)(q, k, v, score_mod=capped, block_mask=self.mask, enable_gqa=True)
        return out[0].transpose(0, 1)[:total]


@cache
def _function(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    found: Callable[..., Any] = flex_attention
    return torch.compile(found) if compiled else found


def sight(layout: Layout, forest: Forest, window: int | None) -> Callable[..., Tensor]:
    """Return a function of flex attention: whether token q sees token k. Depth first, the descendants of a segment follow
    it, so a pair of numbers shows whether one segment continues another.
    """
    order = [k for tree in forest.trees for k in tree]
    first, behind = (np.empty(len(order) + 1, dtype=np.int32) for _ in range(2))
    first[order] = np.arange(len(order))
    for k in order:
        behind[k] = first[k] + len(forest.subtree(k))
    first[-1], behind[-1] = len(order), len(order) + 1  # what fills the last block
    lengths = [*layout.length, -layout.tokens.shape[0] % BLOCK]
    columns = [np.arange(n) + before for n, before in zip(lengths, [*forest.before, 0], strict=True)]
    device = layout.tokens.device
    enter, leave = (torch.from_numpy(np.repeat(x, lengths)).to(device) for x in (first, behind))
    column = torch.from_numpy(np.concatenate(columns).astype(np.int32)).to(device)
    # a tensor: a number would compile the kernel anew for each
    far = torch.tensor(len(column) if window is None else window, device=device)

    def see(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = column[q] - column[k]
        return (enter[k] <= enter[q]) & (enter[q] < leave[k]) & (distance >= 0) & (distance < far)

    return see


def blocks(layout: Layout, forest: Forest, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return for blocks of queries and keys, bool [T / BLOCK, T / BLOCK]: whether some query may see some key; whether
    all see all. Computed from segments, without looking at pairs of tokens.
    """
    total = layout.tokens.shape[0]
    count = -(-total // BLOCK)
    some, whole = np.zeros((2, count, count), dtype=bool)
    far = total if window is None else window
    for k, (start, length) in enumerate(zip(layout.start, layout.length, strict=True)):
        ancestor, distance = k, 0  # tokens from the ancestor's first to the segment's first
        while ancestor >= 0:
            begin, size = layout.start[ancestor], layout.length[ancestor]
            for block in range(start // BLOCK, (start + length - 1) // BLOCK + 1):
                low, high = max(start, block * BLOCK) - start, min(start + length, (block + 1) * BLOCK) - 1 - start
                # the keys that the first query and the last one see, as places behind the ancestor's first token
                last, least = (high, low) if ancestor == k else (size - 1, size - 1)
                early, late = (max(0, at + distance - far + 1) for at in (low, high))
                if early <= last:
                    some[block, (begin + early) // BLOCK : (begin + last) // BLOCK + 1] = True
                if high - low == BLOCK - 1:
                    whole[block, -(-(begin + late) // BLOCK) : (begin + least + 1) // BLOCK] = True
            ancestor = layout.prefix[ancestor]
            distance += layout.length[ancestor] if ancestor >= 0 else 0
    if total % BLOCK:
        some[-1, -1] = True  # what fills the last block sees itself
    return some, whole


def _listed(marked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the count of the marked blocks of each row, int32 [1, 1, n], and their places, which come first in int32
    [1, 1, n, n].
    """
    places = np.argsort(~marked, axis=1, kind="stable")
    return marked.sum(1).astype(np.int32)[None, None], places.astype(np.int32)[None, None]
