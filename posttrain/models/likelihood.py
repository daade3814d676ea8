"""Decides how log-probabilities and entropies come out of hidden states: at scored tokens only, a chunk at a time.

No [N, vocabulary] tensor is kept: a chunk's logits are made, used and dropped, and made again in the backward pass.

    N    scored tokens    D    hidden size    V    vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 22  # logits alive at once (16 MiB in float32)


def token_logp(
    hidden: Tensor, head: Tensor, target: Tensor, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and, if asked for, the entropy of p, where p = softmax(hidden head^T / temperature).

    hidden [N, D], head [V, D], target int64 [N] -> logp [N], entropy [N] or None, in nats. The entropy is a measurement:
    it carries no gradient.
    """
    chunk = max(1, CHUNK_LOGITS // head.shape[0])
    logps, entropies = [], []
    for start in range(0, max(1, hidden.shape[0]), chunk):
        rows = slice(start, start + chunk)
        arguments = hidden[rows], head, target[rows], temperature, entropy
        if torch.is_grad_enabled() and hidden.shape[0] > chunk:
            logp, h = checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            logp, h = _chunk(*arguments)
        logps.append(logp)
        entropies.append(h)
    return torch.cat(logps), torch.cat(entropies) if entropy else None


def _chunk(hidden: Tensor, head: Tensor, target: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.T
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    total = logits.logsumexp(-1)
    logp = logits.gather(-1, target[:, None]).squeeze(-1) - total
    if not entropy:
        return logp, logp
    with torch.no_grad():
        return logp, total - ((logits - total[:, None]).exp_() * logits).sum(-1)
