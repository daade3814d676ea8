"""Attention over a layout: segments of different lengths, which may continue each other as a tree.

Linear layers process only the T real tokens. Segments are padded only inside attention, in batches of similar lengths,
and the padding is removed at once.

T    tokens of a micro-batch    B    segments of a bucket    n, m    padded query and key length
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.core.batch import Layout
from posttrain.models.native.attention_compiled import CompiledAttention, at_least_float32, compiled_covers
from posttrain.models.native.attention_flash import FlashAttention, flash_covers
from posttrain.models.native.attention_flex import FlexAttention
from posttrain.models.native.segments import Forest

PREFIX_TOKENS = 128
"""Tokens of a micro-batch per prefix from which on attention to prefixes is computed separately."""
_GROWTH = math.log(1.25)  # lengths of segments in a bucket differ by at most this factor: at most 20% is padding


Way = TypeVar("Way")


@dataclass(frozen=True)
class AttentionVariant:
    """How the attention of a layer differs from the plain causal one."""

    window: int | None = None  # tokens that a query sees, itself included; None: all
    cap: float | None = None  # a score becomes cap * tanh(score / cap)
    sinks: Tensor | None = None  # [heads], the score of a further key of each head, whose value is 0

    @property
    def plain(self) -> bool:
        return self.window is None and self.cap is None and self.sinks is None


class SegmentAttention:
    """An `attend` for `Decoder.forward`: every segment attends to all of its ancestors and, causally, to itself."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._ways: dict[Any, Any] = {}  # by class and window

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant | None = None) -> Tensor:
        """Attend: q [T, heads, size], k and v [T, kv_heads, size] -> [T, heads, size]."""
        # Fused kernels have no second derivative; callers that need one switch them off.
        fused_kernels = torch.backends.cuda.flash_sdp_enabled()
        if variant is not None and not (needed := self._needed(variant)).plain:
            return self._varied(q, k, v, needed, fused_kernels)
        if q.device.type != "cpu":
            return self.flash(q, k, v) if fused_kernels and flash_covers(q) else self.masked(q, k, v)
        if fused_kernels:
            if self.compiled.covers(k.shape[1], q.dtype):
                return self.compiled(q, k, v)
            if self._few_prefixes:
                return self.joined(q, k, v)
        return self._in_torch(q, k, v, AttentionVariant())

    def _needed(self, variant: AttentionVariant) -> AttentionVariant:
        """Return the variant without a window that reaches over every transcript."""
        far = variant.window is not None and variant.window >= self._longest
        return replace(variant, window=None) if far else variant

    def _varied(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionVariant, fused_kernels: bool) -> Tensor:
        """Attend where it is not plain."""
        if fused_kernels and flash_covers(q):
            if how.cap is None:
                return self._way(FlashAttention, how.window)(q, k, v, how.sinks)
            if how.sinks is None:
                return self._way(FlexAttention, how.window)(q, k, v, how.cap)
        return self._in_torch(q, k, v, how)

    def _in_torch(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionVariant) -> Tensor:
        """Attend with masks, at least in float32."""
        wide = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        return self._way(MaskedAttention, how.window)(*wide, how.cap, how.sinks).to(q.dtype)

    @cached_property
    def compiled(self) -> CompiledAttention:
        """Compiled attention: on a processor with a compiler, in float32, differentiable once. The size of heads is
        padded to whole panels.
        """
        return CompiledAttention(self.layout, self._forest)

    @property
    def flash(self) -> FlashAttention:
        """Attention by flash kernels: on a GPU, in bfloat16, differentiable once."""
        return self._way(FlashAttention)

    @cached_property
    def joined(self) -> JoinedAttention:
        """Joined attention: on a processor, differentiable once."""
        return JoinedAttention(self.layout, self._forest)

    @property
    def masked(self) -> MaskedAttention:
        """Masked attention: on every device, differentiable twice."""
        return self._way(MaskedAttention)

    def _way(self, kind: Callable[[Layout, Forest, int | None], Way], window: int | None = None) -> Way:
        """Return attention of this class, with this window, which is made once."""
        if (kind, window) not in self._ways:
            self._ways[kind, window] = kind(self.layout, self._forest, window)
        found: Way = self._ways[kind, window]
        return found

    @cached_property
    def _forest(self) -> Forest:
        return Forest(self.layout)

    @cached_property
    def _longest(self) -> int:
        """Tokens of the longest transcript."""
        return max(map(sum, zip(self._forest.before, self.layout.length, strict=True)))

    @cached_property
    def _few_prefixes(self) -> bool:
        """Return whether computing prefixes one by one is faster than masked attention."""
        return PREFIX_TOKENS * len(self._forest.prefixes) <= self.layout.tokens.shape[0]


def filled(layout: Layout, multiple: int) -> Layout:
    """Add a last, independent segment if the number of tokens is not a multiple of `multiple`."""
    total = layout.tokens.shape[0]
    if not (missing := -total % multiple):
        return layout
    more = torch.arange(missing, device=layout.tokens.device)
    return replace(
        layout,
        tokens=torch.cat((layout.tokens, torch.zeros_like(more))),
        position=torch.cat((layout.position, more.expand(*layout.position.shape[:-1], missing)), -1),
        start=(*layout.start, total),
        length=(*layout.length, missing),
        prefix=(*layout.prefix, -1),
    )


class _Bucket:
    """Segments of similar length, in one padded batch."""

    def __init__(self, layout: Layout, segments: list[int]) -> None:
        start = np.array([layout.start[k] for k in segments])
        length = np.array([layout.length[k] for k in segments])
        column = np.arange(int(length.max()))
        self.segments, self.size = segments, len(segments)
        self.inside = column[None, :] < length[:, None]  # bool [B, n], False at padding
        # [B, n]; padding: the segment's first token
        self.index = start[:, None] + np.where(self.inside, column[None, :], 0)
        device = layout.tokens.device
        self.tokens = torch.from_numpy(self.index.reshape(-1)).to(device)  # int64 [B * n]
        self.padding = torch.from_numpy(np.flatnonzero(~self.inside)).to(device)

    def gather(self, x: Tensor) -> Tensor:
        """Gather [T, heads, ...] -> [B, heads, n, ...]."""
        return _gathered(x, self.tokens, self.size)

    def gather_gradient(self, x: Tensor) -> Tensor:
        """Gather with 0 at padding: a padded query must not change the gradients of its keys."""
        flat = x.index_select(0, self.tokens)
        if self.padding.numel():
            flat.index_fill_(0, self.padding, 0.0)
        return flat.view(self.size, -1, *x.shape[1:]).transpose(1, 2)


def _gathered(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Gather the tokens at `index`, int64 [B * n]: [T, heads, ...] -> [B, heads, n, ...]."""
    return x.index_select(0, index).view(size, -1, *x.shape[1:]).transpose(1, 2)


def _places(layout: Layout, buckets: list[_Bucket]) -> Tensor:
    """Return int64 [T]: the index of each token in the concatenated queries of the buckets, padding included."""
    place = np.empty(layout.tokens.shape[0], dtype=np.int64)
    offset = 0
    for bucket in buckets:
        place[bucket.index[bucket.inside]] = offset + np.flatnonzero(bucket.inside)
        offset += bucket.inside.size
    return torch.from_numpy(place).to(layout.tokens.device)


def _grade(length: int) -> int:
    return math.ceil(math.log(max(length, 8)) / _GROWTH)


# -- without masks: a segment's own tokens and each ancestor separately -------------------------------------------------


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return attention [B, heads, n, size] on a processor, and its normaliser, the logsumexp of the scores, [B, heads,
    n].

    It is the kernel of scaled_dot_product_attention, called directly because only then it returns the normaliser.
    """
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    return out, logsumexp


def merged(one: Tensor, one_logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> Tensor:
    """Merge the attention outputs [..., size] for two sets of keys, given the normaliser [...] of each."""
    share = torch.sigmoid(one_logsumexp - other_logsumexp).unsqueeze(-1)
    return torch.lerp(other, one, share.to(one.dtype))


class JoinedAttention:
    """Attention to a segment's own tokens and to each of its ancestors separately, merged by their normalisers.

    With the merged output and normaliser, the kernel's own backward computes the gradient of each set of keys, since a
    key's weight, exp(score - normaliser), depends on the other keys only through the normaliser. So no mask is needed,
    causal halves are skipped, and the keys of a prefix are read once for all of its descendants.
    """

    def __init__(self, layout: Layout, forest: Forest) -> None:
        members: dict[int, list[int]] = defaultdict(list)
        for k, length in enumerate(layout.length):
            members[_grade(length)].append(k)
        self.own = [_Bucket(layout, segments) for _, segments in sorted(members.items())]
        self.place = _places(layout, self.own)
        self.prefixes = [  # (slice of a prefix's tokens, int64 indices of the tokens of all its descendants)
            (
                slice(layout.start[k], layout.start[k] + layout.length[k]),
                torch.from_numpy(forest.tokens(forest.subtree(k)[1:])),
            )
            for k in forest.prefixes
        ]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended: Tensor = _JoinedAttention.apply(q, k, v, self)
        return attended

    def flat(self, pieces: list[Tensor]) -> Tensor:
        """Flatten the results of the buckets, each [B, heads, n, ...] -> [T, heads, ...]."""
        whole = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in pieces])
        return whole.index_select(0, self.place)


class _JoinedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: JoinedAttention) -> Tensor:
        given = q, k, v
        q, k, v = map(at_least_float32, given)
        found = [fused(own.gather(q), own.gather(k), own.gather(v), causal=True) for own in parts.own]
        out, logsumexp = (parts.flat(list(pieces)) for pieces in zip(*found, strict=True))
        for where, tokens in parts.prefixes:
            to_prefix = fused(_one(q.index_select(0, tokens)), _one(k[where]), _one(v[where]))
            before, its_logsumexp = map(_many, to_prefix)
            so_far, so_far_logsumexp = out.index_select(0, tokens), logsumexp.index_select(0, tokens)
            out.index_copy_(0, tokens, merged(so_far, so_far_logsumexp, before, its_logsumexp))
            logsumexp.index_copy_(0, tokens, torch.logaddexp(so_far_logsumexp, its_logsumexp))
        out = out.to(given[0].dtype)
        ctx.save_for_backward(*given, out, logsumexp)
        ctx.parts = parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, logsumexp = ctx.saved_tensors
        parts: JoinedAttention = ctx.parts
        q, k, v, out, grad_out = map(at_least_float32, (*tensors, grad))
        found = [
            _fused_backward(own.gather_gradient(grad_out), *map(own.gather, (q, k, v, out, logsumexp)), causal=True)
            for own in parts.own
        ]
        grad_q, grad_k, grad_v = (parts.flat(list(pieces)) for pieces in zip(*found, strict=True))
        for where, tokens in parts.prefixes:
            queries, outs, grads, sums = (_one(x.index_select(0, tokens)) for x in (q, out, grad_out, logsumexp))
            more = _fused_backward(grads, queries, _one(k[where]), _one(v[where]), outs, sums, causal=False)
            grad_q.index_add_(0, tokens, _many(more[0]))
            grad_k[where] += _many(more[1])
            grad_v[where] += _many(more[2])
        return grad_q.to(grad.dtype), grad_k.to(grad.dtype), grad_v.to(grad.dtype), None


def _fused_backward(*tensors: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v. `tensors`: the output's gradient, q, k, v, the output, the normaliser."""
    *given, logsumexp = tensors
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad_q, grad_k, grad_v = kernel(*given, logsumexp.contiguous(), 0.0, causal)
    return grad_q, grad_k, grad_v


def _one(x: Tensor) -> Tensor:
    """Reshape [n, heads, ...] -> [1, heads, n, ...]."""
    return x.transpose(0, 1).unsqueeze(0)


def _many(x: Tensor) -> Tensor:
    """Invert `_one`."""
    return x.squeeze(0).transpose(0, 1)


# -- with masks: one call per bucket, with any kernel ------------------------------------------------------------------


@dataclass(frozen=True)
class _MaskedBucket:
    queries: _Bucket
    keys: Tensor  # int64 [B * m]
    mask: Tensor | None  # bool [B, 1, n, m], True where a query may attend; None: causal


class MaskedAttention:
    """Attention with masks: on a GPU in float32, and where a second derivative is needed. `window`: tokens that a query
    sees, itself included; None: all.
    """

    def __init__(self, layout: Layout, forest: Forest, window: int | None = None) -> None:
        reach = None if window is None else window - 1
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for k, (own, before) in enumerate(zip(layout.length, forest.before, strict=True)):
            before = before if reach is None else min(before, reach)
            members[_grade(own), _grade(before) if before else -1].append(k)
        device = layout.tokens.device
        self.buckets: list[_MaskedBucket] = []
        for (_, prefixed), segments in sorted(members.items()):
            queries = _Bucket(layout, segments)
            keys, mask = queries.tokens, None
            if prefixed >= 0 or window is not None:
                index, visible = _with_ancestors(forest, queries, window)
                keys, mask = torch.from_numpy(index.reshape(-1)).to(device), torch.from_numpy(visible).to(device)
            self.buckets.append(_MaskedBucket(queries, keys, mask))
        self.place = _places(layout, [bucket.queries for bucket in self.buckets])

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        outputs = []
        for bucket in self.buckets:
            queries = bucket.queries.gather(q)
            keys, values = (_gathered(x, bucket.keys, bucket.queries.size) for x in (k, v))
            if cap is None and sinks is None:
                out = _scaled_dot_product(queries, keys, values, bucket.mask)
            else:
                out = _with_own_softmax(queries, keys, values, bucket.mask, cap, sinks)
            outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
        return torch.cat(outputs).index_select(0, self.place)


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend by torch's function: q [B, heads, n, size], k and v [B, kv_heads, m, size]. `mask` None: causal."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1 and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # On CUDA only kernels without a mask and below float32 share key-value heads; otherwise torch would fall back
        # to a kernel that keeps all [n, m] scores.
        k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
        repeat = 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=repeat > 1)


def _with_own_softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend with capped scores and sinks, which torch's function does not know. Arguments as above."""
    groups = q.unflatten(1, (k.shape[1], -1))  # [B, kv_heads, heads of each, n, size]
    scores = groups @ k.unsqueeze(2).transpose(-1, -2) * q.shape[-1] ** -0.5
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()[None, None]
    scores = scores.masked_fill(~mask.unsqueeze(2), -torch.inf)
    if sinks is None:
        return (scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)
    score = sinks.to(scores.dtype).view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    return (torch.cat((scores, score), -1).softmax(-1)[..., :-1] @ v.unsqueeze(2)).flatten(1, 2)


def _with_ancestors(forest: Forest, queries: _Bucket, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (keys [B, p + n], with the ancestors' tokens directly before the segments' own; mask [B, 1, n, p + n])."""
    paths = [forest.path(k, None if window is None else window - 1) for k in queries.segments]
    p, n = max(map(len, paths)), queries.index.shape[1]
    keys = np.concatenate([np.repeat(queries.index[:, :1], p, 1), queries.index], axis=1)  # padding: not attended to
    mask = np.zeros((queries.size, 1, n, p + n), dtype=bool)
    mask[:, 0, :, p:] = np.tril(np.ones((n, n), dtype=bool))
    for row, path in enumerate(paths):
        keys[row, p - len(path) : p] = path
        mask[row, 0, :, p - len(path) : p] = True
    if window is not None:
        mask &= np.arange(p, p + n)[:, None] - np.arange(p + n) < window
    return keys, mask


def each_alone(layout: Layout, count: int) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Return an attention function that computes each of the first `count` segments as if it were alone with its
    ancestors.

    Compiled code processes segments one by one anyway. Otherwise torch's operations are called once per segment, and
    later segments, which are padding, give zeros. There are no gradients.
    """
    together, forest = SegmentAttention(layout), Forest(layout)
    device = layout.tokens.device
    segments = [
        (slice(layout.start[k], layout.start[k] + layout.length[k]), torch.from_numpy(forest.path(k)).to(device))
        for k in range(count)
    ]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if compiled_covers(1, k.shape[1], q.dtype):
            return together(layer, q, k, v)
        given, out = q.dtype, torch.zeros_like(q)
        q, k, v = map(at_least_float32, (q, k, v))
        for own, before in segments:
            found, logsumexp = fused(_one(q[own]), _one(k[own]), _one(v[own]), causal=True)
            if len(before):
                found = merged(found, logsumexp, *fused(_one(q[own]), _one(k[before]), _one(v[before])))
            out[own] = _many(found).to(given)
        return out

    return attend
