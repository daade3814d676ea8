"""Decides how attention runs over a layout: segments of ragged length, some of which continue a shared prefix.

Linear layers see the T real tokens and nothing else. Only inside attention are segments padded, to others of about the
same length, and the padding is dropped again at once.

    T    tokens of a micro-batch    B    segments of a bucket    n, m    padded query and key length
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.types import Layout

_GROWTH = math.log(1.25)  # segments of one bucket differ by at most this factor in length: at most 20% of it is padding


@dataclass(frozen=True)
class _Bucket:
    size: int  # B
    queries: Tensor  # int64 [B * n], index in [T]; padding points at the segment's first token
    keys: Tensor  # int64 [B * m]
    mask: Tensor | None  # bool [B, 1, n, m], True where a query may look; None: causal


class SegmentAttention:
    """An `attend` for `Decoder.forward`: every segment looks at its prefix and, causally, at itself."""

    def __init__(self, layout: Layout) -> None:
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for k, (own, prefix) in enumerate(zip(layout.length, layout.prefix, strict=True)):
            assert prefix < 0 or layout.prefix[prefix] < 0, "prefixes are one level deep"
            members[_grade(own), _grade(layout.length[prefix]) if prefix >= 0 else -1].append(k)
        device = layout.tokens.device
        self.buckets: list[_Bucket] = []
        place = np.empty(layout.tokens.shape[0], dtype=np.int64)  # where each token's output lies among the buckets'
        offset = 0
        for (_, prefixed), segments in sorted(members.items()):
            start = np.array([layout.start[k] for k in segments])
            length = np.array([layout.length[k] for k in segments])
            n = int(length.max())
            column = np.arange(n)
            inside = column[None, :] < length[:, None]  # [B, n]
            queries = start[:, None] + np.where(inside, column[None, :], 0)
            place[queries[inside]] = offset + np.flatnonzero(inside)
            offset += inside.size
            keys, mask = queries, None
            if prefixed >= 0:
                keys, visible = _with_prefix(layout, segments, queries)
                mask = torch.from_numpy(visible).to(device)
            self.buckets.append(
                _Bucket(
                    len(segments),
                    torch.from_numpy(queries.reshape(-1)).to(device),
                    torch.from_numpy(np.ascontiguousarray(keys).reshape(-1)).to(device),
                    mask,
                )
            )
        self.place = torch.from_numpy(place).to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, size], k and v [T, kv_heads, size] -> [T, heads, size]."""
        outputs = []
        for bucket in self.buckets:

            def gather(x: Tensor, index: Tensor, size: int = bucket.size) -> Tensor:
                return x.index_select(0, index).view(size, -1, *x.shape[1:]).transpose(1, 2)

            keys, values = gather(k, bucket.keys), gather(v, bucket.keys)
            repeat = q.shape[1] // k.shape[1]
            if repeat > 1 and q.is_cuda and (bucket.mask is not None or q.dtype == torch.float32):
                # On CUDA only the kernels without a mask and below float32 share key-value heads; the others would fall
                # back to one that keeps all [n, m] scores.
                keys, values = (x.repeat_interleave(repeat, 1) for x in (keys, values))
                repeat = 1
            out = F.scaled_dot_product_attention(
                gather(q, bucket.queries),
                keys,
                values,
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                enable_gqa=repeat > 1,
            )
            outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
        return torch.cat(outputs).index_select(0, self.place)


def _grade(length: int) -> int:
    return math.ceil(math.log(max(length, 8)) / _GROWTH)


def _with_prefix(layout: Layout, segments: list[int], queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys [B, p + n] with the prefixes flush right before the segments' own tokens, and who may look at what."""
    before = np.array([layout.length[layout.prefix[k]] for k in segments])
    first = np.array([layout.start[layout.prefix[k]] for k in segments])
    p, n = int(before.max()), queries.shape[1]
    back = np.arange(p)[None, :] - (p - before[:, None])  # [B, p], index in the prefix; negative: padding
    keys = np.concatenate([first[:, None] + np.maximum(back, 0), queries], axis=1)
    causal = np.tril(np.ones((n, n), dtype=bool))
    mask = np.empty((len(segments), 1, n, p + n), dtype=bool)
    mask[:, 0, :, :p] = (back >= 0)[:, None, :]
    mask[:, 0, :, p:] = causal
    return keys, mask
