"""Decides how attention runs over a layout: segments of ragged length, some of which continue a shared prefix.

Linear layers see the T real tokens and nothing else. Only inside attention are segments padded, to others of about the
same length, and the padding is dropped again at once.

    T    tokens of a micro-batch    B    segments of a bucket    n, m    padded query and key length
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.batch import Layout
from posttrain.kernels import build

PREFIX_TOKENS = 128
"""Tokens of a micro-batch for each of its prefixes from which on attention to prefixes is computed apart."""
_GROWTH = math.log(1.25)  # segments of one bucket differ by at most this factor in length: at most 20% of it is padding


class SegmentAttention:
    """An `attend` for `Decoder.forward`: every segment looks at its prefix and, causally, at itself."""

    def __init__(self, layout: Layout) -> None:
        assert all(p < 0 or layout.prefix[p] < 0 for p in layout.prefix), "prefixes are one level deep"
        self.layout = layout

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, size], k and v [T, kv_heads, size] -> [T, heads, size]."""
        if q.device.type != "cpu":
            return self._masked(q, k, v)
        # Fused kernels are switched off where a second derivative is wanted: they have none.
        if torch.backends.cuda.flash_sdp_enabled():
            attended: Tensor
            if self._families.compiled(k.shape[1], k.shape[2], q.dtype):
                attended = _Compiled.apply(q, k, v, self._families)
                return attended
            if self._few_prefixes:
                attended = _Joined.apply(q, k, v, self._joined)
                return attended
        return self._masked(*map(_wide, (q, k, v))).to(q.dtype)

    @cached_property
    def _few_prefixes(self) -> bool:
        """Whether going through prefixes one by one pays."""
        return PREFIX_TOKENS * len({p for p in self.layout.prefix if p >= 0}) <= self.layout.tokens.shape[0]

    @cached_property
    def _families(self) -> _Families:
        return _Families(self.layout)

    @cached_property
    def _joined(self) -> _Parts:
        return _Parts(self.layout)

    @cached_property
    def _masked(self) -> _Masked:
        return _Masked(self.layout)


def filled(layout: Layout, multiple: int) -> Layout:
    """With a last segment that nobody looks at, so that the number of tokens is a multiple of this."""
    total = layout.tokens.shape[0]
    if not (missing := -total % multiple):
        return layout
    more = torch.arange(missing, device=layout.tokens.device)
    return Layout(
        torch.cat((layout.tokens, torch.zeros_like(more))),
        torch.cat((layout.position, more)),
        (*layout.start, total),
        (*layout.length, missing),
        (*layout.prefix, -1),
    )


class _Own:
    """A bucket: segments of about one length, side by side."""

    def __init__(self, layout: Layout, segments: list[int]) -> None:
        start = np.array([layout.start[k] for k in segments])
        length = np.array([layout.length[k] for k in segments])
        column = np.arange(int(length.max()))
        self.size = len(segments)
        self.inside = column[None, :] < length[:, None]  # bool [B, n], False at padding
        self.index = start[:, None] + np.where(
            self.inside, column[None, :], 0
        )  # [B, n]; padding: the segment's first token
        device = layout.tokens.device
        self.tokens = torch.from_numpy(self.index.reshape(-1)).to(device)  # int64 [B * n]
        self.padding = torch.from_numpy(np.flatnonzero(~self.inside)).to(device)

    def gather(self, x: Tensor) -> Tensor:
        """[T, heads, ...] -> [B, heads, n, ...]."""
        return _gathered(x, self.tokens, self.size)

    def gather_gradient(self, x: Tensor) -> Tensor:
        """The same, with 0 at padding: a padded query must not move the keys it sees."""
        flat = x.index_select(0, self.tokens)
        if self.padding.numel():
            flat.index_fill_(0, self.padding, 0.0)
        return flat.view(self.size, -1, *x.shape[1:]).transpose(1, 2)


def _gathered(x: Tensor, index: Tensor, size: int) -> Tensor:
    """[T, heads, ...] -> [B, heads, n, ...], of the tokens at index int64 [B * n]."""
    return x.index_select(0, index).view(size, -1, *x.shape[1:]).transpose(1, 2)


def _places(layout: Layout, buckets: list[_Own]) -> Tensor:
    """int64 [T]: where each token lies among the queries of the buckets, laid end to end."""
    place = np.empty(layout.tokens.shape[0], dtype=np.int64)
    offset = 0
    for bucket in buckets:
        place[bucket.index[bucket.inside]] = offset + np.flatnonzero(bucket.inside)
        offset += bucket.inside.size
    return torch.from_numpy(place).to(layout.tokens.device)


def _grade(length: int) -> int:
    return math.ceil(math.log(max(length, 8)) / _GROWTH)


# -- compiled ----------------------------------------------------------------------------------------------------------


def _kernel() -> ctypes.CDLL | None:
    loaded = build.library("attention.c")
    return None if loaded is None else _typed(loaded)


@cache
def _typed(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.attention.argtypes, loaded.attention.restype = (ctypes.POINTER(_Attention), ctypes.c_int), None
    assert loaded.attention_size() == ctypes.sizeof(_Attention)
    return loaded


class _Attention(ctypes.Structure):
    """As attention.c declares it."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("families", "heads", "kv_heads", "size", "threads")),
        ("scale", ctypes.c_float),
        *((n, ctypes.c_void_p) for n in ("first", "start", "length", "prefix_start", "prefix_length", "q", "k", "v")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_void_p) for name in ("out", "mass", "grad", "to_q", "to_k", "to_v", "room")),
        *((name, ctypes.c_int64) for name in ("room_size", "room_row")),
    ]


class _Families:
    """A layout's segments, each behind the one that it continues, as attention.c reads them."""

    def __init__(self, layout: Layout) -> None:
        members: dict[int, list[int]] = {k: [k] for k, prefix in enumerate(layout.prefix) if prefix < 0}
        for k, prefix in enumerate(layout.prefix):
            if prefix >= 0:
                members[prefix].append(k)
        seen = [n + (layout.length[p] if p >= 0 else 0) for n, p in zip(layout.length, layout.prefix, strict=True)]
        # the longest first: threads that are done early find something short
        families = sorted(members.values(), key=lambda family: -sum(layout.length[k] * seen[k] for k in family))
        order = [k for family in families for k in family]
        before = [layout.prefix[k] for k in order]
        self.count = len(families)
        self.widest = max(seen)
        self.first = torch.tensor([0, *accumulate(map(len, families))])
        self.start = torch.tensor([layout.start[k] for k in order])
        self.length = torch.tensor([layout.length[k] for k in order])
        self.prefix_start = torch.tensor([layout.start[p] if p >= 0 else 0 for p in before])
        self.prefix_length = torch.tensor([layout.length[p] if p >= 0 else 0 for p in before])

    def compiled(self, kv_heads: int, size: int, dtype: torch.dtype = torch.float32) -> bool:
        """Whether compiled code covers heads of this size and type, and every thread gets something to do."""
        kernel = _kernel()
        return (
            kernel is not None
            and torch.promote_types(dtype, torch.float32) == torch.float32
            and size % kernel.panel() == 0
            and self.count * kv_heads >= torch.get_num_threads()
        )

    def call(self, q: Tensor, k: Tensor, v: Tensor, backward: bool, **tensors: Tensor) -> None:
        """q, k and v are float32 [T, heads, size], heads side by side."""
        kernel, threads = _kernel(), torch.get_num_threads()
        assert kernel is not None
        (_, heads, size), panel = q.shape, kernel.panel()
        row = -(-self.widest // panel) * panel
        room = torch.empty(threads, (2 + backward) * size * row + (1 + backward) * kernel.queries() * row)
        names = ("first", "start", "length", "prefix_start", "prefix_length")
        pointers = {name: getattr(self, name) for name in names} | {"q": q, "k": k, "v": v, "room": room} | tensors
        how = _Attention(
            **{name: x.data_ptr() for name, x in pointers.items()},
            **dict(families=self.count, heads=heads, kv_heads=k.shape[1], size=size, threads=threads, scale=size**-0.5),
            **dict(q_stride=q.stride(0), k_stride=k.stride(0), v_stride=v.stride(0)),
            **dict(room_size=room.shape[1], room_row=row),
        )
        kernel.attention(how, backward)


class _Compiled(torch.autograd.Function):
    """Differentiable once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, families: _Families) -> Tensor:
        narrow = q, k, v
        q, k, v = (_side_by_side(_wide(x)) for x in narrow)
        out, mass = torch.empty(q.shape), torch.empty(q.shape[:2])
        families.call(q, k, v, False, out=out, mass=mass)
        ctx.save_for_backward(*narrow, out.to(narrow[0].dtype), mass)
        ctx.families = families
        return out.to(narrow[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, mass = ctx.saved_tensors
        q, k, v, out = (_side_by_side(_wide(x)) for x in tensors)
        to_q, to_k, to_v = torch.empty(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
        tensors = {"out": out, "mass": mass, "grad": _wide(grad).contiguous(), "to_q": to_q, "to_k": to_k, "to_v": to_v}
        ctx.families.call(q, k, v, True, **tensors)
        return to_q.to(grad.dtype), to_k.to(grad.dtype), to_v.to(grad.dtype), None


def _side_by_side(x: Tensor) -> Tensor:
    """x [T, heads, size] with the heads of a token without gaps between them."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


# -- without masks: a segment's own tokens and its prefix apart --------------------------------------------------------


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention [B, heads, n, size] on a processor, and its normaliser, the logsumexp of the scores, [B, heads, n].

    What scaled_dot_product_attention runs there; only this name of it returns the normaliser too.
    """
    out, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    return out, mass


def joined(one: Tensor, one_mass: Tensor, other: Tensor, other_mass: Tensor) -> Tensor:
    """Attention [..., size] to two sets of keys, from that to each and its normaliser [...]."""
    share = torch.sigmoid(one_mass - other_mass).unsqueeze(-1)
    return torch.lerp(other, one, share.to(one.dtype))


class _Parts:
    """A layout's tokens as keys of their own segment, in buckets, and as keys of the segments that continue them."""

    def __init__(self, layout: Layout) -> None:
        members: dict[int, list[int]] = defaultdict(list)
        for k, length in enumerate(layout.length):
            members[_grade(length)].append(k)
        self.own = [_Own(layout, segments) for _, segments in sorted(members.items())]
        self.place = _places(layout, self.own)
        users: dict[int, list[np.ndarray]] = defaultdict(list)
        for start, length, prefix in zip(layout.start, layout.length, layout.prefix, strict=True):
            if prefix >= 0:
                users[prefix].append(np.arange(start, start + length))
        self.prefixes = [  # (where the prefix lies, int64: the tokens of all who continue it)
            (slice(layout.start[p], layout.start[p] + layout.length[p]), torch.from_numpy(np.concatenate(tokens)))
            for p, tokens in users.items()
        ]

    def flat(self, pieces: list[Tensor]) -> Tensor:
        """What the buckets say of their queries, each [B, heads, n, ...] -> [T, heads, ...]."""
        whole = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in pieces])
        return whole.index_select(0, self.place)


class _Joined(torch.autograd.Function):
    """Attention to two sets of keys apart, joined by their normalisers; on a processor, differentiable once.

    With the joined output and normaliser, the kernel's own backward gives each set's part of the gradient: a key's weight
    is exp(score - normaliser) wherever the other keys are. So nothing is masked, causal halves are skipped, and the keys
    of a prompt are read once for all replies to it.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: _Parts) -> Tensor:
        narrow = q, k, v
        q, k, v = map(_wide, narrow)
        found = [fused(own.gather(q), own.gather(k), own.gather(v), causal=True) for own in parts.own]
        out, mass = (parts.flat(list(pieces)) for pieces in zip(*found, strict=True))
        for where, tokens in parts.prefixes:
            before, its_mass = map(_many, fused(_one(q.index_select(0, tokens)), _one(k[where]), _one(v[where])))
            own, own_mass = out.index_select(0, tokens), mass.index_select(0, tokens)
            out.index_copy_(0, tokens, joined(own, own_mass, before, its_mass))
            mass.index_copy_(0, tokens, torch.logaddexp(own_mass, its_mass))
        out = out.to(narrow[0].dtype)
        ctx.save_for_backward(*narrow, out, mass)
        ctx.parts = parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, mass = ctx.saved_tensors
        parts: _Parts = ctx.parts
        q, k, v, out, to_out = map(_wide, (*tensors, grad))
        found = [
            _backward(own.gather_gradient(to_out), *map(own.gather, (q, k, v, out, mass)), causal=True)
            for own in parts.own
        ]
        to_q, to_k, to_v = (parts.flat(list(pieces)) for pieces in zip(*found, strict=True))
        for where, tokens in parts.prefixes:
            queries, its_out, its_grad, its_mass = (_one(x.index_select(0, tokens)) for x in (q, out, to_out, mass))
            more = _backward(its_grad, queries, _one(k[where]), _one(v[where]), its_out, its_mass, causal=False)
            to_q.index_add_(0, tokens, _many(more[0]))
            to_k[where] += _many(more[1])
            to_v[where] += _many(more[2])
        return to_q.to(grad.dtype), to_k.to(grad.dtype), to_v.to(grad.dtype), None


def _backward(*tensors: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, from that of the output, q, k, v, the output and the normaliser."""
    *found, mass = tensors
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    to_q, to_k, to_v = kernel(*found, mass.contiguous(), 0.0, causal)
    return to_q, to_k, to_v


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: in bfloat16 these kernels gain nothing, lose in the backward pass, and are compiled for each
    new length.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _one(x: Tensor) -> Tensor:
    """[n, heads, ...] -> [1, heads, n, ...]."""
    return x.transpose(0, 1).unsqueeze(0)


def _many(x: Tensor) -> Tensor:
    """The inverse of `_one`."""
    return x.squeeze(0).transpose(0, 1)


# -- with masks: one call a bucket, whatever the kernel ----------------------------------------------------------------


@dataclass(frozen=True)
class _Bucket:
    queries: _Own
    keys: Tensor  # int64 [B * m]
    mask: Tensor | None  # bool [B, 1, n, m], True where a query may look; None: causal


class _Masked:
    """The same through `scaled_dot_product_attention` alone: on a GPU, and where a second derivative is wanted."""

    def __init__(self, layout: Layout) -> None:
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for k, (own, prefix) in enumerate(zip(layout.length, layout.prefix, strict=True)):
            members[_grade(own), _grade(layout.length[prefix]) if prefix >= 0 else -1].append(k)
        device = layout.tokens.device
        self.buckets: list[_Bucket] = []
        for (_, prefixed), segments in sorted(members.items()):
            queries = _Own(layout, segments)
            keys, mask = queries.tokens, None
            if prefixed >= 0:
                index, visible = _with_prefix(layout, segments, queries.index)
                keys, mask = torch.from_numpy(index.reshape(-1)).to(device), torch.from_numpy(visible).to(device)
            self.buckets.append(_Bucket(queries, keys, mask))
        self.place = _places(layout, [bucket.queries for bucket in self.buckets])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for bucket in self.buckets:
            keys, values = (_gathered(x, bucket.keys, bucket.queries.size) for x in (k, v))
            repeat = q.shape[1] // k.shape[1]
            if repeat > 1 and q.is_cuda and (bucket.mask is not None or q.dtype == torch.float32):
                # On CUDA only the kernels without a mask and below float32 share key-value heads; the others would fall
                # back to one that keeps all [n, m] scores.
                keys, values = (x.repeat_interleave(repeat, 1) for x in (keys, values))
                repeat = 1
            out = F.scaled_dot_product_attention(
                bucket.queries.gather(q),
                keys,
                values,
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                enable_gqa=repeat > 1,
            )
            outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
        return torch.cat(outputs).index_select(0, self.place)


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
