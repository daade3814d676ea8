"""Decides how log-probabilities, entropies and the like come out of hidden states: at scored tokens only, in chunks.

No [N, vocabulary] tensor is kept: a chunk's logits are made, used and dropped, and made again in the backward pass.

    N    scored tokens    n    those of one chunk    D    hidden size    V    vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 22  # logits alive at once (16 MiB in float32) ...
CHUNK_ROWS = 512  # ... but never fewer rows: each chunk of the backward pass adds to a [V, D] gradient


@dataclass(frozen=True)
class Hidden:
    """Hidden states at scored tokens, and the head that makes logits of them."""

    states: Tensor  # [N, D]
    head: Tensor  # [V, D]

    def logits(self, rows: slice, temperature: float = 1.0) -> Tensor:
        """[n, V], in float32 at least."""
        logits = output_logits(self.states[rows], self.head)
        return logits if temperature == 1.0 else logits / temperature


def token_logp(hidden: Tensor, head: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(hidden head^T / temperature) at `target`, in nats.

    hidden [N, D], head [V, D], target int64 [N] -> [N], float32 or wider.
    """
    policy = Hidden(hidden, head)

    def logp(rows: slice) -> tuple[Tensor]:
        logits = policy.logits(rows, temperature)
        return (_at(logits, target[rows]) - logits.logsumexp(-1),)

    return in_chunks(logp, hidden.shape[0], head.shape[0])[0]


def token_logp_entropy(hidden: Tensor, head: Tensor, target: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """As `token_logp`, and the entropy of the whole distribution at each token, both [N]."""
    policy = Hidden(hidden, head)

    def both(rows: slice) -> tuple[Tensor, Tensor]:
        logs = policy.logits(rows, temperature).log_softmax(-1)
        return _at(logs, target[rows]), -(logs.exp() * logs).sum(-1)

    logp, entropy = in_chunks(both, hidden.shape[0], head.shape[0])
    return logp, entropy


def exact_kl(policy: Hidden, other: Hidden, temperature: float = 1.0) -> Tensor:
    """KL(policy || other) at each token, summed over the vocabulary, [N] in nats. Both sides may have a gradient."""

    def kl(rows: slice) -> tuple[Tensor]:
        own, theirs = (h.logits(rows, temperature).log_softmax(-1) for h in (policy, other))
        return ((own.exp() * (own - theirs)).sum(-1),)

    return in_chunks(kl, policy.states.shape[0], policy.head.shape[0])[0]


def soft_values(
    policy: Hidden, twins: tuple[Hidden, Hidden], slow: tuple[Hidden, Hidden], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(sum_a pi(a) min_k Q_k(a), the same of the slow copies), each [N].

    The first has a gradient into the policy alone, the second none.
    """

    def expected(rows: slice) -> tuple[Tensor, Tensor]:
        probability = policy.logits(rows, temperature).softmax(-1)
        with torch.no_grad():
            least = torch.minimum(*(q.logits(rows) for q in twins))
            target = (probability * torch.minimum(*(q.logits(rows) for q in slow))).sum(-1)
        return (probability * least).sum(-1), target

    expected_q, target_q = in_chunks(expected, policy.states.shape[0], policy.head.shape[0])
    return expected_q, target_q


def in_chunks(function: Callable[[slice], tuple[Tensor, ...]], rows: int, vocabulary: int) -> tuple[Tensor, ...]:
    """What `function` says of the rows 0 ... `rows`, a slice at a time, joined along the first dimension."""
    chunk = max(CHUNK_ROWS, CHUNK_LOGITS // vocabulary)
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


def output_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """hidden head^T, [N, V], in float32 at least, also under autocast.

    Logits rounded to bfloat16 move log-probabilities by more than GSPO's clip is wide (3e-4).
    """
    with torch.autocast(hidden.device.type, enabled=False):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return functional.linear(hidden.to(wide), head.to(wide))


def _at(x: Tensor, target: Tensor) -> Tensor:
    return x.gather(-1, target[:, None]).squeeze(-1)
