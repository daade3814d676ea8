"""Access to weights of which each process of a run holds a part. Only this module gathers them or computes which part is
local.

A weight that FSDP2 shards is a DTensor of torch, with some rows in each process. It is recognised by its methods, so
that only sharded runs import that class. A weight of tensor parallelism is a plain tensor with a `WeightPart`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.models.peers import Peers

GATHER = "gathered"
"""The attribute of a parameter that gathers it from all processes. All processes must call it in the same order."""

PART = "part"
"""The attribute of a tensor that is a part of a weight: a `WeightPart`."""

MEETING = "meeting"
"""The attribute of a sharded model: a context for calls by all processes, which reports a lost process."""


@dataclass(frozen=True, eq=False)
class WeightPart:
    """Which part of a weight each of several processes holds: slices of its rows, or of its columns.

    Query, key and value are rows of one weight; a process has its heads of each, so its part has three slices.
    """

    shape: torch.Size  # of the whole weight
    dim: int  # 0: rows; 1: columns
    slices: tuple[tuple[slice, ...], ...]  # of each process, by rank
    peers: Peers

    @property
    def own(self) -> tuple[slice, ...]:
        return self.slices[self.peers.rank]

    def gathered(self, own: Tensor) -> Tensor:
        """Return the whole weight. All processes have to call this."""
        sizes = [sum(s.stop - s.start for s in slices) for slices in self.slices]
        rows = own.movedim(self.dim, 0)
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        with self.peers.meeting():
            parts = self.peers.stacked(padded)
        found = torch.empty(self.shape, dtype=own.dtype, device=own.device)
        for part, slices in zip(parts, self.slices, strict=True):
            at = 0
            for s in slices:
                found.movedim(self.dim, 0)[s] = part[at : at + s.stop - s.start]
                at += s.stop - s.start
        return found


def marked(x: Tensor, part: WeightPart | None) -> Tensor:
    """Return this tensor as a part of a weight."""
    if part is not None:
        setattr(x, PART, part)
    return x


def part_of(x: Tensor) -> WeightPart | None:
    """Return which part of a weight this tensor is; None: not a part, or one of FSDP2's."""
    found: WeightPart | None = getattr(x, PART, None)
    return found


def whole_shape(x: Tensor) -> torch.Size:
    """Return the shape of the whole weight."""
    part = part_of(x)
    return x.shape if part is None else part.shape


def asked_by_all(model: Any) -> AbstractContextManager[None]:
    """Return a context for calls of a model outside its learner. If the model is sharded, all processes have to enter
    it.
    """
    meeting: Callable[[], AbstractContextManager[None]] | None = getattr(model, MEETING, None)
    return nullcontext() if meeting is None else meeting()


def whole(parameter: Tensor) -> Tensor:
    """Return the whole parameter, without a gradient. If it is sharded, all processes have to call this."""
    if (part := part_of(parameter)) is not None:
        return part.gathered(parameter.detach())
    gather: Callable[[], Tensor] | None = getattr(parameter, GATHER, None)
    return parameter.detach() if gather is None else gather()


def is_sharded(x: Tensor) -> bool:
    """Return whether this process holds only a part of the weight."""
    return hasattr(x, "full_tensor") or part_of(x) is not None


def here(x: Tensor) -> Tensor:
    """Return this process's part of a weight: a view without a gradient."""
    own: Tensor = x.to_local() if hasattr(x, "full_tensor") else x  # type: ignore[attr-defined]
    return own.detach()


def slices_here(x: Tensor) -> tuple[int, tuple[slice, ...]]:
    """Return (dimension, slices of the whole weight along it that, one after the other, are this process's part)."""
    if (part := part_of(x)) is not None:
        return part.dim, part.own
    if not hasattr(x, "full_tensor"):
        return 0, (slice(0, x.shape[0] if x.ndim else 1),)
    mesh = x.device_mesh  # type: ignore[attr-defined]
    dim = mesh.ndim - 1  # the rows are dealt along the last one; along another there are copies of them
    share = -(-x.shape[0] // mesh.size(dim))
    first = min(share * mesh.get_local_rank(dim), x.shape[0])
    last = min(first + share, x.shape[0])
    assert len(here(x)) == last - first, "rows are dealt as by torch.chunk"
    return 0, (slice(first, last),)
