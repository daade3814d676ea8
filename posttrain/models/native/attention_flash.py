"""Attention over a layout through flash kernels for ragged sequences: on a GPU, in bfloat16 or float16.

Nothing is padded or repeated: the kernel shares key heads between query heads. One call computes the attention of all
segments to their own tokens. One further call per depth of the trees computes the attention of all tokens to their
ancestors of that depth. The results are merged by their normalisers, as in `JoinedAttention`.

With a window one call is enough: the keys of a segment are the tokens of its ancestors that the window reaches, at most
a window of them, and its own. Sinks are a further key with value 0, so they change the normaliser alone.

T    tokens of a micro-batch
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.core.batch import Layout
from posttrain.models.native.attention_compiled import at_least_float32
from posttrain.models.native.segments import Forest

LARGEST_HEAD = 256


@dataclass(frozen=True)
class Ragged:
    """Pairs of concatenated (queries, keys) sequences; the queries of a pair attend to its keys."""

    ends: Tensor  # int32 [pairs + 1], the start of each sequence of queries, and the end of the last
    key_ends: Tensor  # the same for the keys
    longest: int
    longest_keys: int
    causal: bool  # the last query attends to all keys, and each one before it to one less
    left: int = -1  # keys before its own to which a query attends; -1: all

    @classmethod
    def of(cls, lengths: list[int], keys: list[int], causal: bool, device: torch.device, left: int = -1) -> Ragged:
        def ends(counts: list[int]) -> Tensor:
            return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32)).to(device)

        return cls(ends(lengths), ends(keys), max(lengths), max(keys), causal, left)

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """The kernels' arguments about lengths."""
        return self.ends, self.key_ends, self.longest, self.longest_keys

    @property
    def window(self) -> dict[str, int]:
        """The kernels' arguments about a window, within which they want no other flag for causal attention."""
        return {"window_size_left": self.left, "window_size_right": 0} if self.left >= 0 else {}


Forward = Callable[[Tensor, Tensor, Tensor, Ragged], tuple[Tensor, ...]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def flash(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> tuple[Tensor, ...]:
    """Return attention [n, heads, size] of q to k and v [m, kv_heads, size], its normaliser float32 [heads, n], and two
    states of a random generator, which the kernel's backward pass requires.
    """
    out, logsumexp, state, offset, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *ragged.lengths, 0.0, ragged.causal and not ragged.window, False, **ragged.window
    )
    return out, logsumexp, state, offset


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, ragged: Ragged, *states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    causal = ragged.causal and not ragged.window
    found = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, logsumexp, *ragged.lengths, 0.0, causal, *states, **ragged.window
    )
    grad_q, grad_k, grad_v = found
    return grad_q, grad_k, grad_v


def flash_covers(q: Tensor) -> bool:
    """Return whether the kernels support the type, head size and device of q [T, heads, size]."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= LARGEST_HEAD
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


@dataclass(frozen=True)
class _Ancestors:
    """Attention of tokens to their ancestors of one depth."""

    tokens: Tensor  # int64, the tokens of the descendants, grouped by ancestor
    keys: Tensor  # int64, the ancestors' tokens
    ragged: Ragged


class FlashAttention:
    """Attention over one layout. Differentiable once. `window`: tokens that a query sees, itself included; None: all."""

    def __init__(
        self,
        layout: Layout,
        forest: Forest,
        window: int | None = None,
        kernels: tuple[Forward, Backward] = (flash, flash_backward),
    ) -> None:
        self.forward, self.backward = kernels
        device, lengths = layout.tokens.device, list(layout.length)
        assert sum(lengths) == layout.tokens.shape[0], "segments follow each other"
        self.keys: Tensor | None = None  # int64, the tokens whose keys the first call gets; None: all in order
        self.ancestors: list[_Ancestors] = []
        if window is not None:
            keys = [np.concatenate((forest.path(k, window - 1), forest.tokens([k]))) for k in range(len(lengths))]
            self.own = Ragged.of(lengths, list(map(len, keys)), True, device, window - 1)
            if forest.prefixes:
                self.keys = torch.from_numpy(np.concatenate(keys)).to(device)
            return
        self.own = Ragged.of(lengths, lengths, True, device)
        depth: dict[int, list[int]] = defaultdict(list)
        for k in forest.prefixes:
            depth[forest.depth[k]].append(k)
        self.ancestors = [self._of_depth(layout, forest, prefixes) for _, prefixes in sorted(depth.items())]

    @staticmethod
    def _of_depth(layout: Layout, forest: Forest, prefixes: list[int]) -> _Ancestors:
        device = layout.tokens.device
        descendants = [forest.tokens(forest.subtree(k)[1:]) for k in prefixes]
        tokens, keys = (torch.from_numpy(x).to(device) for x in (np.concatenate(descendants), forest.tokens(prefixes)))
        lengths = [len(x) for x in descendants]
        return _Ancestors(tokens, keys, Ragged.of(lengths, [layout.length[k] for k in prefixes], False, device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend: q [T, heads, size], k and v [T, kv_heads, size] -> [T, heads, size]. `sinks`: the score of a further
        key of each head, [heads].
        """
        attended: Tensor = _FlashAttention.apply(q, k, v, sinks, self)
        return attended

    def seen(self, x: Tensor) -> Tensor:
        """Return keys or values for the first call."""
        return x if self.keys is None else x.index_select(0, self.keys)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, parts: FlashAttention) -> Tensor:
        out, logsumexp, *states = parts.forward(q, parts.seen(k), parts.seen(v), parts.own)
        ctx.states = [states]
        for one in parts.ancestors:
            picked = q.index_select(0, one.tokens), k.index_select(0, one.keys), v.index_select(0, one.keys)
            before, its_logsumexp, *states = parts.forward(*picked, one.ragged)
            ctx.states.append(states)
            so_far, so_far_logsumexp = out.index_select(0, one.tokens), logsumexp.index_select(1, one.tokens)
            share = torch.sigmoid(so_far_logsumexp - its_logsumexp).t().unsqueeze(-1)  # [n, heads, 1]
            both = torch.lerp(at_least_float32(before), at_least_float32(so_far), share)
            out.index_copy_(0, one.tokens, both.to(out.dtype))
            logsumexp.index_copy_(1, one.tokens, torch.logaddexp(so_far_logsumexp, its_logsumexp))
        if sinks is not None:
            score = sinks.to(logsumexp.dtype)[:, None]
            share = torch.sigmoid(logsumexp - score).t().unsqueeze(-1)
            out, logsumexp = (at_least_float32(out) * share).to(out.dtype), torch.logaddexp(logsumexp, score)
        ctx.save_for_backward(q, k, v, sinks, out, logsumexp)
        ctx.parts = parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, logsumexp = ctx.saved_tensors
        parts: FlashAttention = ctx.parts
        own, *others = ctx.states
        grad, to_sinks = grad.to(q.dtype).contiguous(), None
        if sinks is not None:
            share = torch.exp(sinks.to(logsumexp.dtype)[:, None] - logsumexp)
            along = (at_least_float32(grad) * at_least_float32(out)).sum(-1).t()
            to_sinks = -(share * along).sum(1).to(sinks.dtype)
        found = parts.backward(grad, q, parts.seen(k), parts.seen(v), out, logsumexp, parts.own, *own)
        if parts.keys is None and not parts.ancestors:
            return (*found, to_sinks, None)
        # float32, since all descendants of a prefix add to its gradient
        sums = [at_least_float32(found[0])]
        for part, whole in zip(found[1:], (k, v), strict=True):
            wide = at_least_float32(part)
            sums.append(wide if parts.keys is None else _added(wide, parts.keys, len(whole)))
        for one, states in zip(parts.ancestors, others, strict=True):
            grads, queries, outs = (x.index_select(0, one.tokens) for x in (grad, q, out))
            keys, values = k.index_select(0, one.keys), v.index_select(0, one.keys)
            normaliser = logsumexp.index_select(1, one.tokens)
            more = parts.backward(grads, queries, keys, values, outs, normaliser, one.ragged, *states)
            for total, part, place in zip(sums, more, (one.tokens, one.keys, one.keys), strict=True):
                total.index_add_(0, place, part.to(total.dtype))
        return (*(x.to(q.dtype) for x in sums), to_sinks, None)


def _added(x: Tensor, place: Tensor, count: int) -> Tensor:
    """Return zeros [count, ...] to which x is added at `place`."""
    return x.new_zeros(count, *x.shape[1:]).index_add_(0, place, x)
