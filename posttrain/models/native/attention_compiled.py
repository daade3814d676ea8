"""Converts layouts to the form that compiled attention reads: trees depth first, divided among threads.

T    tokens of a micro-batch
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from posttrain.core.batch import Layout
from posttrain.models.native.kernels import binder
from posttrain.models.native.segments import Forest


def compiled_covers(trees: int, kv_heads: int, dtype: torch.dtype) -> bool:
    """Return whether compiled code supports this type, and this many trees give work to every thread."""
    return (
        binder.attention() is not None
        and torch.promote_types(dtype, torch.float32) == torch.float32
        and trees * kv_heads >= torch.get_num_threads()
    )


class CompiledAttention:
    """Attention over a layout by `attention.c`, differentiable once."""

    def __init__(self, layout: Layout, forest: Forest) -> None:
        self._layout, self._forest = layout, forest

    def covers(self, kv_heads: int, dtype: torch.dtype = torch.float32) -> bool:
        """Return whether compiled code supports this type, and the layout's trees give work to every thread."""
        return compiled_covers(len(self._forest.trees), kv_heads, dtype)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q [T, heads, size], k and v [T, kv_heads, size] -> [T, heads, size]."""
        library, size = binder.attention(), q.shape[-1]
        assert library is not None
        attended: Tensor
        if missing := -size % library.panel:  # zeros do not change scores, and the padded part of the output is dropped
            q, k, v = (functional.pad(x, (0, missing)) for x in (q, k, v))
            attended = _CompiledAttention.apply(q, k, v, self._segments, size**-0.5)
            return attended[..., :size]
        attended = _CompiledAttention.apply(q, k, v, self._segments, size**-0.5)
        return attended

    @cached_property
    def _segments(self) -> _Segments:
        return _Segments(self._layout, self._forest)


class _Segments:
    """A forest as attention.c reads it: depth first, the tree with the most work first, to balance the threads."""

    def __init__(self, layout: Layout, forest: Forest) -> None:
        seen = [before + own for before, own in zip(forest.before, layout.length, strict=True)]
        trees = sorted(forest.trees, key=lambda tree: -sum(layout.length[k] * seen[k] for k in tree))
        order = [k for tree in trees for k in tree]
        place = {k: number for number, k in enumerate(order)} | {-1: -1}
        self.trees, self.widest = len(trees), max(seen)
        self.root = torch.tensor([0, *accumulate(map(len, trees))])
        self.start = torch.tensor([layout.start[k] for k in order])
        self.length = torch.tensor([layout.length[k] for k in order])
        self.before = torch.tensor([forest.before[k] for k in order])
        self.parent = torch.tensor([place[forest.parent[k]] for k in order])

    def run(
        self, scale: float, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, *grads: Tensor
    ) -> None:
        """Fill `out` and `logsumexp` [T, heads]; or, given `grads` (of out, q, k, v), fill the gradients of q, k, v.

        q, k and v are float32 [T, heads, size], contiguous within a token; all other tensors are contiguous.
        """
        library, threads, backward = binder.attention(), torch.get_num_threads(), bool(grads)
        assert library is not None and all(x.is_contiguous() for x in (out, logsumexp, *grads))
        assert all(x.dtype == torch.float32 for x in (q, k, v, out, logsumexp, *grads))
        heads, size = q.shape[1:]
        columns = -(-self.widest // library.panel) * library.panel
        scratch = torch.empty(threads, library.scratch(size, columns, backward))
        grad_out, grad_q, grad_k, grad_v = (x.data_ptr() for x in grads) if grads else (None,) * 4
        arguments = binder.Attention(
            trees=self.trees,
            heads=heads,
            kv_heads=k.shape[1],
            head_size=size,
            threads=threads,
            scale=scale,
            root=self.root.data_ptr(),
            start=self.start.data_ptr(),
            length=self.length.data_ptr(),
            before=self.before.data_ptr(),
            parent=self.parent.data_ptr(),
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            out=out.data_ptr(),
            logsumexp=logsumexp.data_ptr(),
            grad_out=grad_out,
            grad_q=grad_q,
            grad_k=grad_k,
            grad_v=grad_v,
            scratch=scratch.data_ptr(),
            scratch_size=scratch.shape[1],
            columns=columns,
        )
        library.run(arguments, backward)


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: _Segments, scale: float) -> Tensor:
        given = q, k, v
        q, k, v = (_side_by_side(at_least_float32(x)) for x in given)
        out, logsumexp = torch.empty(q.shape), torch.empty(q.shape[:2])
        segments.run(scale, q, k, v, out, logsumexp)
        out = out.to(given[0].dtype)
        ctx.save_for_backward(*given, out, logsumexp)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, logsumexp = ctx.saved_tensors
        q, k, v, out = (_side_by_side(at_least_float32(x)) for x in tensors)
        grads = [torch.empty(x.shape) for x in (q, k, v)]
        ctx.segments.run(ctx.scale, q, k, v, out, logsumexp, at_least_float32(grad).contiguous(), *grads)
        return (*(x.to(grad.dtype) for x in grads), None, None)


def _side_by_side(x: Tensor) -> Tensor:
    """Return x [T, heads, size] with the heads of a token contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def at_least_float32(x: Tensor) -> Tensor:
    """Convert bfloat16 to float32. On a processor bfloat16 attention is not faster, its backward pass is slower, and
    its kernels are compiled for each new length.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
