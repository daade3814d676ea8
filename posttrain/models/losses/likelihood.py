"""Computes log-probabilities, entropies and similar quantities from hidden states, at scored tokens only, in chunks.

[N, V] logits are kept only if they are small. Otherwise the logits of a chunk are computed, used and dropped, and
recomputed in the backward pass.

N    scored tokens    n    scored tokens of one chunk    D    hidden size    V    vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from posttrain.models.native.head import Head, narrow_type
from posttrain.models.native.kernels.gpu_layer import fused
from posttrain.models.native.linear import add_product, collected, narrowed_rows, wide_product

BLOCK_LOGITS = 1 << 20  # logits of one block: they fit into the processor's cache
KEPT_LOGITS = 1 << 25  # up to this many (128 MiB in float32) are kept for the backward pass instead of recomputed
CHUNK_LOGITS = 1 << 22  # logits alive at once (16 MiB in float32) ...
GPU_LOGITS = 1 << 27  # all three limits on a GPU, where fast products need many columns: 512 MiB
GPU_COLUMNS = 512  # on a GPU the columns of a block are a multiple of this
CHUNK_ROWS = 512  # ... but never fewer rows: each chunk of the backward pass adds to a [V, D] gradient


Temperature = float | Tensor
"""Divides logits: one number for all rows, or one for each, [N]."""


@dataclass(frozen=True)
class Hidden:
    """Hidden states at scored tokens, and the head that turns them into logits."""

    states: Tensor  # [N, D]
    head: Head

    def logits(self, rows: slice, temperature: Temperature = 1.0) -> Tensor:
        """Compute logits [n, V] of some rows, divided by the temperature, in float32 at least."""
        logits = self.head.logits(self.states[rows])
        if isinstance(temperature, Tensor):
            return logits / temperature[rows, None].to(logits.dtype)
        return logits if temperature == 1.0 else logits / temperature


def token_logp(hidden: Tensor, head: Head, target: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) at `target`, in nats.

    hidden [N, D], target int64 [N] -> [N], float32 or wider.
    """
    logp: Tensor = _Likelihood.apply(hidden, head.weight, head.bias, head, target, temperature, "none")[0]
    return logp


def token_logp_entropy(
    hidden: Tensor, head: Head, target: Tensor, temperature: Temperature = 1.0, constant: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `token_logp`, and the entropy of the whole distribution at each token, both [N] in nats.

    `constant`: the entropy has no gradient. Log-probabilities and gradients are then bit-identical to `token_logp`'s.
    """
    kind = "constant" if constant else "learned"
    logp, entropy, _ = _Likelihood.apply(hidden, head.weight, head.bias, head, target, temperature, kind)
    return logp, entropy


Entropies = Literal["none", "constant", "learned"]
"""Whether entropies are computed, and whether they have a gradient."""


def token_logp_top(
    hidden: Tensor, head: Head, target: Tensor, temperature: Temperature = 1.0, entropies: Entropies = "none"
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return `token_logp`, the entropy (None if none is computed), and the probability of the most likely token at each
    position, without a gradient: all [N]. The last costs no product, as its logit is needed for the sum of the others.
    """
    logp, entropy, top = _Likelihood.apply(hidden, head.weight, head.bias, head, target, temperature, entropies)
    return logp, None if entropies == "none" else entropy, top


class _Likelihood(torch.autograd.Function):
    """`token_logp`, the entropy and the mass of the most likely token by blocks of the vocabulary, so memory does not
    grow with V. Differentiable once.

    With x = logits / temperature and p = softmax(x): d logp / dx = [target] - p and d entropy / dx = -p (log p + entropy).
    `weight` and `bias` are the head's, passed separately because autograd differentiates arguments only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        target: Tensor,
        temperature: Temperature,
        entropies: Entropies,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with_entropy = entropies != "none"
        rows, vocabulary, shared = hidden.shape[0], head.rows, head.shared
        place = target if shared is None else target - shared.first
        keep = any(ctx.needs_input_grad) and keeps(hidden, vocabulary)
        kept, narrow = list[Tensor](), narrow_type(hidden)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        at = torch.zeros(rows, dtype=wide, device=hidden.device)
        total, mean, top = torch.full_like(at, -math.inf), torch.zeros_like(at), torch.full_like(at, -math.inf)
        for block in blocks(hidden, vocabulary):
            logits = scaled_logits(hidden, head, block, temperature, narrow)
            if keep:
                kept.append(logits)
            spare = not (keep or with_entropy or hidden.is_cuda)  # the logits may be overwritten
            add = fused(_added, logits)
            at, total, mean, top = add(logits, place - block.start, at, total, mean, top, with_entropy, spare)
        if shared is not None:
            at, total, mean, top = shared.over_all(at, total, mean, top)
        logp, entropy = at - total, total - mean
        # the weight is saved so that torch detects changes in place
        ctx.save_for_backward(hidden, weight, place, total, entropy, *kept)
        ctx.head, ctx.temperature, ctx.with_entropy, ctx.narrow = head, temperature, entropies == "learned", narrow
        mass = top.sub_(total).exp_()
        ctx.mark_non_differentiable(mass, *([entropy] if entropies == "constant" else []))
        return logp, entropy, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logp: Tensor, to_entropy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, _, place, total, entropy, *kept = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        sums = Gradients(hidden, head, temperature, total.dtype, ctx.needs_input_grad[:3], ctx.narrow)
        to_logp, to_entropy = to_logp * sums.factor, to_entropy * sums.factor
        for number, block in enumerate(blocks(hidden, head.rows)):
            logits = kept[number] if kept else scaled_logits(hidden, head, block, temperature, ctx.narrow)
            of_entropy = (entropy, to_entropy) if ctx.with_entropy else None
            slope = fused(_slope, logits)
            grad = slope(logits, place - block.start, total, to_logp, of_entropy, sums.rounded)
            sums.add(block, grad, logits)
        return (*sums.found, None, None, None, None)


def _added(
    logits: Tensor,
    place: Tensor,
    at: Tensor,
    total: Tensor,
    mean: Tensor,
    highest: Tensor,
    with_entropy: bool,
    spare: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (logit at the target, logsumexp, mean logit, highest logit) of the blocks so far and this one, each [N].

    logits [N, width]; place int64 [N], the target's column in the block, out of range if it is in another block.
    `spare`: the logits may be overwritten.
    """
    mine = (place >= 0) & (place < logits.shape[-1])
    at = torch.where(mine, _at(logits, place.masked_fill(~mine, 0)), at)
    top = logits.amax(-1)
    mass = logits.sub_(top[:, None]).exp_() if spare else (logits - top[:, None]).exp_()
    here = mass.sum(-1).log_().add_(top)
    joined = torch.logaddexp(total, here)
    if with_entropy:
        own = mass.mul_(logits).sum(-1) * (top - here).exp()
        mean = mean * (total - joined).exp() + own * (here - joined).exp()
    return at, joined, mean, torch.maximum(highest, top)


def _slope(
    logits: Tensor,
    place: Tensor,
    total: Tensor,
    to_logp: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    rounded: torch.dtype | None,
) -> Tensor:
    """Return the gradient of a block's logits, [N, width]. `of_entropy`: the entropy, and its gradient. `rounded`: the
    type of the result; None: the type of the logits.
    """
    if of_entropy is not None:
        entropy, to_entropy = of_entropy
        logs = logits - total[:, None]
        share = (logs + entropy[:, None]).mul_(-to_entropy[:, None]).sub_(to_logp[:, None])
        grad = logs.exp_().mul_(share)
    else:
        grad = (logits - total[:, None]).exp_().mul_(-to_logp[:, None])
    if rounded is not None:  # fuses with the operations above, unlike a scattered sum
        column = torch.arange(logits.shape[-1], device=logits.device)
        return torch.where(column == place[:, None], grad + to_logp[:, None], grad).to(rounded)
    mine = (place >= 0) & (place < logits.shape[-1])
    return grad.scatter_add_(1, place.masked_fill(~mine, 0)[:, None], torch.where(mine, to_logp, 0.0)[:, None])


class Gradients:
    """Gradients of hidden states and head, accumulated block by block of the vocabulary."""

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        temperature: Temperature,
        wide: torch.dtype,
        needed: Sequence[bool],
        narrow: torch.dtype | None,
    ) -> None:
        """Allocate the gradients. `needed`: whether hidden states, the head's weight, its bias need one. `narrow`: type
        of the factors of products; None: the accumulators' type, `wide`.
        """
        self.hidden, self.head, self.states = hidden, head, hidden.to(narrow or wide)
        self.narrow = narrow
        self.rounded = narrow if head.cap is None else None
        """Type in which `add` takes gradients of logits; None: theirs."""
        self.temperature = temperature.to(wide) if isinstance(temperature, Tensor) else temperature
        self.factor = head.scale / self.temperature  # d x / d (hidden W^T + b) without the cap
        self.to_hidden = torch.zeros_like(hidden, dtype=wide) if needed[0] else None
        self.sum_of_weight = collected(head.weight) if needed[1] else None
        own = needed[1] and self.sum_of_weight is None
        self.to_weight = torch.empty_like(head.weight, dtype=wide) if own else None
        self.to_bias = torch.empty_like(head.bias, dtype=wide) if needed[2] and head.bias is not None else None

    def add(self, block: slice, grad: Tensor, x: Tensor) -> None:
        """Add a block. `x` [N, width]: logits / temperature. `grad` [N, width]: gradient of x times `factor`, may be
        overwritten.
        """
        if self.head.cap is not None:  # d cap tanh(y / cap) / dy = 1 - (logit / cap)^2
            share = self.temperature / self.head.cap
            grad.mul_(1.0 - (x * (share[:, None] if isinstance(share, Tensor) else share)).square_())
        with torch.autocast(self.hidden.device.type, enabled=False):
            if self.to_bias is not None:
                torch.sum(grad, 0, out=self.to_bias[block])
            if self.narrow is not None:
                grad = grad.to(self.narrow)
            if self.to_hidden is not None:
                add_product(self.to_hidden, grad, narrowed_rows(self.head.weight, block, grad.dtype))
            if self.to_weight is not None and self.narrow is None:
                torch.mm(grad.t(), self.states, out=self.to_weight[block])
            elif self.to_weight is not None:
                self.to_weight[block] = wide_product(grad.t(), self.states)
            elif self.sum_of_weight is not None:
                add_product(self.sum_of_weight[block], grad.t(), self.states)

    @property
    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias; None for one that is not needed, or was accumulated
        in place.
        """
        given, shared = (self.hidden, self.head.weight, self.head.weight), self.head.shared
        to_hidden = self.to_hidden
        if shared is not None and to_hidden is not None and to_hidden.numel():
            to_hidden = shared.peers.total(to_hidden)
        sums = to_hidden, self.to_weight, self.to_bias
        hidden, weight, bias = (None if s is None else s.to(g.dtype) for s, g in zip(sums, given, strict=True))
        return hidden, weight, bias


def keeps(hidden: Tensor, vocabulary: int, models: int = 1) -> bool:
    """Return whether the logits of `models` models are few enough to be kept for the backward pass."""
    limit = GPU_LOGITS if hidden.is_cuda else KEPT_LOGITS
    return models * hidden.shape[0] * vocabulary <= limit


def blocks(hidden: Tensor, vocabulary: int, models: int = 1) -> list[slice]:
    """Split the vocabulary into blocks of at most BLOCK_LOGITS logits each, counted over all `models`."""
    limit = GPU_LOGITS if hidden.is_cuda else BLOCK_LOGITS
    width = max(64, limit // max(1, models * hidden.shape[0]))
    if hidden.is_cuda:  # the kernel is slower if rows do not begin at multiples of 16 bytes
        width = max(GPU_COLUMNS, width // GPU_COLUMNS * GPU_COLUMNS)
    return [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]


def scaled_logits(
    hidden: Tensor, head: Head, block: slice, temperature: Temperature, narrow: torch.dtype | None
) -> Tensor:
    """Compute the logits of a block of the vocabulary, divided by the temperature. `narrow`: see `Head.logits`."""
    logits = head.logits(hidden, block, narrow)
    if isinstance(temperature, Tensor):
        return logits.div_(temperature[:, None].to(logits.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def inside(ids: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return (whether each id is in the block, its index in the block, else 0), in the shape of `ids`."""
    there = (ids >= block.start) & (ids < block.stop)
    return there, (ids - block.start).masked_fill_(~there, 0)


def exact_kl(policy: Hidden, other: Hidden, temperature: Temperature = 1.0) -> Tensor:
    """Return KL(policy || other) at each token, summed over the vocabulary, [N] in nats; differentiable in both."""

    def kl(rows: slice) -> tuple[Tensor]:
        own, theirs = (h.logits(rows, temperature).log_softmax(-1) for h in (policy, other))
        return ((own.exp() * (own - theirs)).sum(-1),)

    return in_chunks(kl, policy)[0]


def log_collision(policy: Hidden, temperature: Temperature = 1.0) -> Tensor:
    """Return log sum_v p(v)^2 at each token, [N]: the log-probability that two draws from the distribution are
    equal.
    """

    def collision(rows: slice) -> tuple[Tensor]:
        return ((2 * policy.logits(rows, temperature).log_softmax(-1)).logsumexp(-1),)

    return in_chunks(collision, policy)[0]


def soft_values(
    policy: Hidden,
    twins: tuple[Hidden, Hidden],
    slow: tuple[Hidden, Hidden] | None,
    temperature: Temperature = 1.0,
) -> tuple[Tensor, ...]:
    """Return (sum_a pi(a) min_k Q_k(a), the same for the target copies `slow`), each [N]; without copies the first alone.

    The first has a gradient into the policy alone, the second has none.
    """

    def expected(rows: slice) -> tuple[Tensor, ...]:
        probability = policy.logits(rows, temperature).softmax(-1)
        with torch.no_grad():
            least = torch.minimum(*(q.logits(rows) for q in twins))
            targets = [(probability * torch.minimum(*(q.logits(rows) for q in slow))).sum(-1)] if slow else []
        return (probability * least).sum(-1), *targets

    return in_chunks(expected, policy)


def in_chunks(function: Callable[[slice], tuple[Tensor, ...]], like: Hidden) -> tuple[Tensor, ...]:
    """Apply `function` to slices of the rows of `like`, and concatenate along the first dimension."""
    rows, limit = like.states.shape[0], GPU_LOGITS if like.states.is_cuda else CHUNK_LOGITS
    chunk = max(CHUNK_ROWS, limit // like.head.vocab)
    if rows <= chunk:
        return function(slice(0, rows))
    parts = []
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        if torch.is_grad_enabled():
            parts.append(checkpoint(function, part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(function(part))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _at(x: Tensor, target: Tensor) -> Tensor:
    return x.gather(-1, target[:, None]).squeeze(-1)
