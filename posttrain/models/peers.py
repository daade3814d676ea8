"""Processes that compute together, each with a part of the weights (tensor parallelism), of the tokens (context
parallelism) or with some of the experts (expert parallelism), and the operations between them that autograd knows.

Plain functions instead of torch's DTensor: compiled code and backward passes that add in place read a process's own
numbers, and one tensor holds query, key and value, of which each process has its heads.

P    peers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Peers(Protocol):
    """The processes that compute together. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the peers, the same bits in each. x itself is not changed."""
        ...

    def stacked(self, x: Tensor) -> Tensor:
        """Return the tensors of all peers, which have one shape, [P, ...] by rank."""
        ...

    def exchanged(self, x: Tensor) -> Tensor:
        """Send x[p] to peer p, and return what the peers have sent here, [P, ...] by rank."""
        ...

    def dealt(self, x: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        """Send the next `sent[p]` rows of x to each peer p, and return the `got[p]` rows that each has sent here."""
        ...

    def meeting(self) -> AbstractContextManager[None]:
        """Context for calls of all peers; it begins when all have reached it. Raises UserError if one is lost."""
        ...


def copied(x: Tensor, peers: Peers | None) -> Tensor:
    """Return x, which all peers have, for operations of which each peer does a part: its gradients are summed."""
    out: Tensor = x if peers is None else _Copied.apply(x, peers)
    return out


def summed(x: Tensor, peers: Peers | None) -> Tensor:
    """Return the sum of the peers' parts. Its gradient is the same in all of them.

    Narrow parts are summed in float32, so that a product is rounded once for each part and not once for each sum.
    """
    if peers is None:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    return cast(Tensor, _Summed.apply(x.to(wide), peers)).to(x.dtype)


def joined(x: Tensor, sizes: list[int], peers: Peers) -> Tensor:
    """Join the last dimension of the peers' parts, which has `sizes` [P]: [..., sizes[rank]] -> [..., sum(sizes)].

    All peers compute the rest alike, so a part gets its own share of the gradient.
    """
    found: Tensor = _Joined.apply(x, sizes, peers)
    return found


def to_heads(x: Tensor, peers: Peers) -> Tensor:
    """Exchange tokens for heads: [T / P, heads, size], this peer's tokens -> [T, heads / P, size], its heads."""
    found: Tensor = _Exchanged.apply(x, peers, _heads, _tokens)
    return found


def to_tokens(x: Tensor, peers: Peers) -> Tensor:
    """Exchange heads for tokens, the inverse of `to_heads`."""
    found: Tensor = _Exchanged.apply(x, peers, _tokens, _heads)
    return found


def dealt(x: Tensor, peers: Peers, sent: Sequence[int], got: Sequence[int]) -> Tensor:
    """Exchange rows, see `Peers.dealt`: [sum(sent), ...] -> [sum(got), ...]. Their gradients go back the same way."""
    found: Tensor = _Dealt.apply(x, peers, sent, got)
    return found


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.total(grads[0]), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return peers.total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], peers: Peers) -> Tensor:
        first = sum(sizes[: peers.rank])
        ctx.own = first, sizes[peers.rank]
        widest = max(sizes)
        if not widest:
            return x
        padded = x.new_zeros((*x.shape[:-1], widest))
        padded[..., : x.shape[-1]] = x
        parts = peers.stacked(padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(-1, *ctx.own).contiguous(), None, None


Exchange = Callable[[Tensor, Peers], Tensor]


class _Exchanged(torch.autograd.Function):
    """An exchange, `there`, whose gradients go the other way, `back`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, there: Exchange, back: Exchange) -> Tensor:
        ctx.peers, ctx.back = peers, back
        return there(x, peers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.peers), None, None, None


class _Dealt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        ctx.peers, ctx.sent, ctx.got = peers, sent, got
        return peers.dealt(x, sent, got)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.dealt(grads[0], ctx.got, ctx.sent), None, None, None


def _heads(x: Tensor, peers: Peers) -> Tensor:
    parts = x.unflatten(1, (peers.size, -1)).transpose(0, 1)  # [P, T / P, heads / P, size]: the heads of each peer
    return peers.exchanged(parts.contiguous()).flatten(0, 1)


def _tokens(x: Tensor, peers: Peers) -> Tensor:
    parts = x.unflatten(0, (peers.size, -1))  # [P, T / P, heads / P, size]: the tokens of each peer
    return peers.exchanged(parts.contiguous()).transpose(0, 1).flatten(1, 2)
