"""Divergence of a policy from a teacher that names its likeliest tokens only.

The vocabulary is divided into cells: one for each token that the teacher names, and one for all others together, the
rest. The divergence of the probabilities of the cells is at most that of the whole distributions (data processing), equal
to it if the teacher names all tokens, and 0 for equal models. Logits are computed in blocks of the vocabulary.

N    scored tokens    V    vocabulary    K    named tokens of each    p    the policy    q    the teacher
x    logits / temperature
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.models.losses.divergence import FORWARD, REVERSE, RunningSum
from posttrain.models.losses.likelihood import Gradients, Hidden, Temperature, blocks, inside, keeps, scaled_logits
from posttrain.models.native.head import Head, narrow_type

LEAST_REST = 1e-6
"""Least probability of the teacher's rest: its named tokens may add up to 1, or by rounding to more."""


def top_divergence(
    policy: Hidden,
    ids: Tensor,
    logq: Tensor,
    target: Tensor,
    beta: float,
    temperature: Temperature = 1.0,
    measured: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log p at `target`, divergence over the cells, entropy of p), each [N] in nats.

    ids int64 [N, K], different in each row, -1 for none; logq [N, K]: their log-probabilities under the teacher. Ids that
    the policy does not have belong to the rest. target int64 [N]. beta: see `measured_divergence`. The entropy is over the
    whole vocabulary and without a gradient, and empty unless `measured`.
    """
    assert 0.0 <= beta <= 1.0, beta
    assert policy.head.shared is None, "the processes of a group hold parts of the vocabulary"
    given = policy.states, policy.head.weight, policy.head.bias, policy.head
    logp, named, rest, entropy = _Cells.apply(*given, ids, target, temperature, measured)
    known = (ids >= 0) & (ids < policy.head.vocab)
    theirs = torch.where(known, logq.to(named.dtype), -math.inf)
    own, other = torch.cat([named, rest[:, None]], -1), torch.cat([theirs, _log_rest(theirs)[:, None]], -1)
    there = torch.cat([known, rest[:, None].isfinite()], -1)
    return logp, _divergence(own.where(there, 0.0), other.where(there, 0.0), beta), entropy


def _log_rest(logq: Tensor) -> Tensor:
    """Return log(1 - sum q), at least log LEAST_REST: [N, K] -> [N]."""
    taken = logq.double().logsumexp(-1).clamp(max=math.log1p(-LEAST_REST))
    return torch.log(-torch.expm1(taken)).to(logq.dtype)


def _divergence(own: Tensor, other: Tensor, beta: float) -> Tensor:
    """Return the divergence over cells with these log-probabilities: [N, C] -> [N]. A cell with (0, 0) adds nothing."""
    if beta == REVERSE:
        return (own.exp() * (own - other)).sum(-1)
    if beta == FORWARD:
        return (other.exp() * (other - own)).sum(-1)
    mixed = torch.logaddexp(own + math.log1p(-beta), other + math.log(beta))
    return ((1 - beta) * own.exp() * (own - mixed) + beta * other.exp() * (other - mixed)).sum(-1)


class _Cells(torch.autograd.Function):
    """(log p of the target [N], of each id [N, K], of all other tokens [N], entropy [N]); differentiable once.

    An id that does not exist has 0, and a rest without tokens -inf. Where P is the probability of the rest: d log p_k / dx
    = [k] - p, and d log P / dx = [not named] p / P - p.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        ids: Tensor,
        target: Tensor,
        temperature: Temperature,
        measured: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        narrow = narrow_type(hidden)
        keep = any(ctx.needs_input_grad) and keeps(hidden, head.vocab)
        kept = list[Tensor]()
        wide = torch.promote_types(hidden.dtype, torch.float32)
        read = torch.cat([ids, target[:, None]], -1)
        at = torch.zeros(read.shape, dtype=wide, device=hidden.device)
        total = RunningSum(at[:, 0])
        rest = torch.full_like(at[:, 0], -math.inf)
        for block in blocks(hidden, head.vocab):
            x = scaled_logits(hidden, head, block, temperature, narrow)
            if keep:
                kept.append(x)
            mine, place = inside(read, block)
            at = torch.where(mine, x.gather(-1, place), at)
            total.add(x, x if measured else None)
            others = x.masked_fill(_named(ids, block), -math.inf)
            rest = torch.logaddexp(rest, others.logsumexp(-1))
        known = (read >= 0) & (read < head.vocab)
        logs = (at - total.total[:, None]).where(known, 0.0)
        ctx.save_for_backward(hidden, weight, read, total.total, rest, *kept)
        ctx.settings = head, temperature, narrow
        ctx.set_materialize_grads(False)
        entropy = total.total - total.mean if measured else at.new_zeros(0)
        ctx.mark_non_differentiable(entropy)
        return logs[:, -1].clone(), logs[:, :-1].clone(), rest - total.total, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, to_logp: Tensor | None, to_named: Tensor | None, to_rest: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, _weight, read, total, rest, *kept = ctx.saved_tensors
        head, temperature, narrow = ctx.settings
        sums = Gradients(hidden, head, temperature, total.dtype, ctx.needs_input_grad[:3], narrow)
        to_read = total.new_zeros(read.shape)
        if to_named is not None:
            to_read[:, :-1] = to_named
        if to_logp is not None:
            to_read[:, -1] = to_logp
        to_rest = torch.zeros_like(total) if to_rest is None else to_rest.where(rest.isfinite(), 0.0)
        to_read = to_read.where((read >= 0) & (read < head.vocab), 0.0)
        factor = torch.as_tensor(sums.factor, dtype=total.dtype, device=total.device)
        to_read, to_rest = to_read * factor.reshape(-1, 1), to_rest * factor
        every = to_read.sum(-1) + to_rest
        for number, block in enumerate(blocks(hidden, head.vocab)):
            x = kept[number] if kept else scaled_logits(hidden, head, block, temperature, narrow)
            grad = (x - total[:, None]).exp_().mul_(-every[:, None])
            share = (x - rest[:, None]).masked_fill_(_named(read[:, :-1], block), -math.inf).exp_()
            grad.addcmul_(share, to_rest[:, None])
            mine, place = inside(read, block)
            grad.scatter_add_(1, place, to_read.where(mine, 0.0))
            sums.add(block, grad, x)
        return (*sums.found, *(None,) * 5)


def _named(ids: Tensor, block: slice) -> Tensor:
    """Return which tokens of a block are among the ids, bool [N, width]."""
    there, place = inside(ids, block)
    width = block.stop - block.start
    found = torch.zeros(ids.shape[0], width + 1, dtype=torch.bool, device=ids.device)  # the last column is for others
    return found.scatter_(1, place.masked_fill_(~there, width), True)[:, :width]
