"""Divergence of a policy from a teacher at each scored token, summed over the vocabulary in blocks.

The [N, V] logits of the models are kept only if they are small. Otherwise they are computed block by block: once for a
Kullback-Leibler divergence, twice for a Jensen-Shannon divergence, and again in the backward pass. Only the policy gets
a gradient.

N    scored tokens    V    vocabulary    p    the policy    q    the teacher    x    logits / temperature
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.models.losses.likelihood import (
    Gradients,
    Hidden,
    Temperature,
    blocks,
    inside,
    keeps,
    scaled_logits,
    token_logp,
)
from posttrain.models.native.head import Head, narrow_type

FORWARD, REVERSE = 0.0, 1.0


def measured_divergence(
    policy: Hidden,
    teacher: Hidden,
    target: Tensor,
    beta: float,
    temperatures: tuple[Temperature, Temperature],
    measured: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log p at `target`, divergence, log q at `target`, entropy of p), the last two only if `measured`.

    All are [N] in nats, the last two without a gradient. The logits are computed once for all of them, and the bits of
    the first two do not depend on `measured`.

    beta 1   KL(p || q), the reverse one: the policy gives up tokens to which the teacher gives no probability
    beta 0   KL(q || p), the forward one: the policy covers all tokens that the teacher covers
    between  (1 - beta) KL(p || m) + beta KL(q || m), m = (1 - beta) p + beta q: generalised Jensen-Shannon (GKD, arXiv
             2306.13649, eq. 1). Divided by beta or by 1 - beta it tends to the forward or to the reverse one at the ends.

    target int64 [N]. `temperatures`: of the policy and of the teacher, each one number or [N]. The hidden sizes may
    differ. If one head has more rows than the other, the additional rows are padding that occurs in no text: the
    divergence is over the ids that both have. log p is always normalised over all ids of the policy.
    """
    assert 0.0 <= beta <= 1.0, beta
    common = min(policy.head.vocab, teacher.head.vocab)
    own, theirs = policy.head.first(common), Hidden(teacher.states.detach(), teacher.head.first(common).detach())
    given = policy.states, own.weight, own.bias, own, theirs
    logp, divergence, said, entropy = _Divergence.apply(*given, target, beta, *temperatures, measured)
    if policy.head.vocab > common:
        logp = token_logp(policy.states, policy.head, target, temperatures[0])
    return logp, divergence, said, entropy


@dataclass(frozen=True)
class _Pairs:
    """Iterable of (block, policy's logits, teacher's logits), which are kept or recomputed at every pass."""

    policy: Hidden
    teacher: Hidden
    temperatures: tuple[Temperature, Temperature]
    narrow: torch.dtype | None
    kept: Sequence[Tensor] = ()

    @property
    def blocks(self) -> list[slice]:
        return blocks(self.policy.states, self.policy.head.vocab, models=2)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for number, block in enumerate(self.blocks):
            if self.kept:
                yield block, self.kept[2 * number], self.kept[2 * number + 1]
            else:
                models = zip((self.policy, self.teacher), self.temperatures, strict=True)
                x, y = (scaled_logits(m.states, m.head, block, temperature, self.narrow) for m, temperature in models)
                yield block, x, y


class RunningSum:
    """Running log sum exp(x) over the blocks added so far, and the mean of another quantity under the softmax of x."""

    def __init__(self, like: Tensor) -> None:
        self.total, self.mean = torch.full_like(like, -math.inf), torch.zeros_like(like)

    def add(self, logits: Tensor, gap: Tensor | None = None) -> None:
        """Add a block of x and of the other quantity, both [N, width]; `gap` None: no mean is computed."""
        top = logits.amax(-1)
        mass = (logits - top[:, None]).exp_()
        here = mass.sum(-1).log_().add_(top)
        joined = torch.logaddexp(self.total, here)
        if gap is not None:
            own = mass.mul_(gap).sum(-1) * (top - joined).exp()
            self.mean = self.mean * (self.total - joined).exp() + own
        self.total = joined


class _Divergence(torch.autograd.Function):
    """The divergence, differentiable once. Its gradient with respect to the policy's x, where D is the divergence:

    reverse p (log p - log q - D), forward p - q, Jensen-Shannon (1 - beta) p (log p - log m - KL(p || m)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        teacher: Hidden,
        target: Tensor,
        beta: float,
        temperature: Temperature,
        teacher_temperature: Temperature,
        measured: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        temperatures, narrow = (temperature, teacher_temperature), narrow_type(hidden)
        pairs = _Pairs(Hidden(hidden, head), teacher, temperatures, narrow)
        if keeps(hidden, head.vocab, models=2):
            pairs = replace(pairs, kept=[logits for _, *both in pairs for logits in both])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        at = torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device)
        own, other = RunningSum(at), RunningSum(at)
        # the policy's mean logit; the teacher's logit at the target
        level, theirs = RunningSum(at), torch.zeros_like(at)
        for block, x, y in pairs:
            mine, place = inside(target, block)
            at = torch.where(mine, x.gather(-1, place[:, None]).squeeze(-1), at)
            if measured:
                theirs = torch.where(mine, y.gather(-1, place[:, None]).squeeze(-1), theirs)
                level.add(x, x)
            gap = x - y if beta in (FORWARD, REVERSE) else None
            own.add(x, gap if beta == REVERSE else None)
            other.add(y, gap if beta == FORWARD else None)
        apart = own.total - other.total
        if beta == REVERSE:
            divergence = inner = own.mean - apart
        elif beta == FORWARD:
            divergence = inner = apart - other.mean
        else:
            divergence, inner = _jensen_shannon(pairs, own.total, other.total, beta)
        saved = pairs.kept if any(ctx.needs_input_grad) else ()
        ctx.save_for_backward(hidden, weight, teacher.states, target, own.total, other.total, inner, *saved)
        ctx.settings = head, teacher.head, beta, temperatures, narrow
        ctx.set_materialize_grads(False)
        told = (theirs - other.total, level.total - level.mean) if measured else (at.new_zeros(0), at.new_zeros(0))
        ctx.mark_non_differentiable(*told)
        return at - own.total, divergence, *told

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logp: Tensor | None, to_divergence: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        hidden, _, teacher_states, target, total, other_total, inner, *kept = ctx.saved_tensors
        head, teacher_head, beta, temperatures, narrow = ctx.settings
        pairs = _Pairs(Hidden(hidden, head), Hidden(teacher_states, teacher_head), temperatures, narrow, kept)
        sums = Gradients(hidden, head, temperatures[0], total.dtype, ctx.needs_input_grad[:3], narrow)
        to_logp, to_divergence = (None if to is None else to * sums.factor for to in (to_logp, to_divergence))
        for block, x, y in pairs:
            logs = x - total[:, None]
            grad = torch.zeros_like(logs)
            if to_divergence is not None:
                slope = _slope(logs, y - other_total[:, None], inner, beta)
                grad = slope.mul_(to_divergence[:, None])
            if to_logp is not None:
                mine, place = inside(target, block)
                grad = grad.addcmul_(logs.exp(), -to_logp[:, None])
                grad.scatter_add_(1, place[:, None], torch.where(mine, to_logp, 0.0)[:, None])
            sums.add(block, grad, x)
        return (*sums.found, *(None,) * 7)


def _jensen_shannon(pairs: _Pairs, total: Tensor, other_total: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return (the divergence, KL(p || m)), each [N]."""
    divergence, inner = torch.zeros_like(total), torch.zeros_like(total)
    for _, x, y in pairs:
        logs, others = x - total[:, None], y - other_total[:, None]
        mixed = _mixed(logs, others, beta)
        own = (logs.exp() * (logs - mixed)).sum(-1)
        inner += own
        divergence += (1 - beta) * own + beta * (others.exp() * (others - mixed)).sum(-1)
    return divergence, inner


def _mixed(logs: Tensor, others: Tensor, beta: float) -> Tensor:
    """Return log ((1 - beta) p + beta q)."""
    return torch.logaddexp(logs + math.log1p(-beta), others + math.log(beta))


def _slope(logs: Tensor, others: Tensor, inner: Tensor, beta: float) -> Tensor:
    """Return the derivative of the divergence with respect to x, [N, width]; `inner` is KL(p || q), or KL(p || m)."""
    if beta == FORWARD:
        return logs.exp() - others.exp()
    if beta == REVERSE:
        return logs.exp() * (logs - others - inner[:, None])
    return logs.exp().mul_(1 - beta) * (logs - _mixed(logs, others, beta) - inner[:, None])
