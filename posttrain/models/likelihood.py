"""Decides how log-probabilities come out of hidden states: at scored tokens only, a chunk at a time.

No [N, vocabulary] tensor is kept: a chunk's logits are made, used and dropped, and made again in the backward pass.

    N    scored tokens    D    hidden size    V    vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 22  # logits alive at once (16 MiB in float32) ...
CHUNK_ROWS = 512  # ... but never fewer rows: each chunk of the backward pass adds to a [V, D] gradient


def token_logp(hidden: Tensor, head: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(hidden head^T / temperature) at `target`, in nats.

    hidden [N, D], head [V, D], target int64 [N] -> [N], float32 or wider.
    """
    chunk = max(CHUNK_ROWS, CHUNK_LOGITS // head.shape[0])
    if hidden.shape[0] <= chunk:
        return _chunk(hidden, head, target, temperature)
    parts = []
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        if torch.is_grad_enabled():
            part = checkpoint(
                _chunk, hidden[rows], head, target[rows], temperature, use_reentrant=False, preserve_rng_state=False
            )
        else:
            part = _chunk(hidden[rows], head, target[rows], temperature)
        parts.append(part)
    return torch.cat(parts)


def output_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """hidden head^T, [N, V], in float32 at least, also under autocast.

    Logits rounded to bfloat16 move log-probabilities by more than GSPO's clip is wide (3e-4).
    """
    with torch.autocast(hidden.device.type, enabled=False):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return functional.linear(hidden.to(wide), head.to(wide))


def _chunk(hidden: Tensor, head: Tensor, target: Tensor, temperature: float) -> Tensor:
    logits = output_logits(hidden, head)
    if temperature != 1.0:
        logits = logits / temperature
    return logits.gather(-1, target[:, None]).squeeze(-1) - logits.logsumexp(-1)
