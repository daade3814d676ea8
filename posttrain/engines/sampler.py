"""Decides which token comes next: one uniform number per row, and the log-probability under what was sampled from.

B    rows (one per running request)    V    vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW32 = 0xFFFFFFFF


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """Uniform numbers in (0, 1]: float32 [B] from int64 seeds [B] and counters [B], the same on every device.

    Counter-based, so a draw depends on (seed, index) and on nothing that happened before. The mixing function is
    the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to the seed and again to seed and counter.
    """
    x = _mix(_mix(seed) + index * -7046029254386353131)  # 0x9E3779B97F4A7C15 as a signed number
    return (((x >> 40) & 0xFFFFFF).to(torch.float32) + 0.5) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & (_LOW32 << 2 | 3))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & (_LOW32 << 5 | 31))) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & (_LOW32 << 1 | 1))


def sample(
    logits: Tensor, draw: Tensor, temperature: Tensor, top_p: Tensor | None, top_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Draw by inverting the cumulative distribution. logits [B, V], draw and temperature [B] -> token, logp [B].

    Temperature 0 is greedy: its distribution is a point, so the log-probability is 0. `top_p` and `top_k` [B] are None
    where no request uses them; a row with top_p = 1 or top_k = 0 is left whole.
    """
    logits = logits.float() / temperature.clamp_min(1e-6)[:, None]
    if top_k is not None or top_p is not None:
        logits = _truncate(logits, top_p, top_k)
    top, best = logits.max(-1)
    mass = (logits - top[:, None]).exp_()
    cumulative = mass.cumsum(-1)
    total = cumulative[:, -1].contiguous()
    # The first entry whose cumulative mass exceeds the draw. A draw may round up to the total: the last entry with mass.
    token = torch.searchsorted(cumulative, (draw * total)[:, None], right=True).squeeze(-1)
    last = torch.searchsorted(cumulative, total[:, None]).squeeze(-1)
    token = torch.minimum(token, last)
    logp = logits.gather(-1, token[:, None]).squeeze(-1) - top - total.log()
    greedy = temperature == 0
    return torch.where(greedy, best, token), torch.where(greedy, torch.zeros_like(logp), logp)


def _truncate(logits: Tensor, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    """-inf outside the kept set: the top_k likeliest tokens, then the smallest set of those with mass >= top_p."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)[None, :]
    if top_k is not None:
        ordered = ordered.masked_fill((top_k > 0)[:, None] & (rank >= top_k[:, None]), float("-inf"))
    if top_p is not None:
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability
        cut = (top_p < 1)[:, None] & (before >= top_p[:, None]) & (rank > 0)
        ordered = ordered.masked_fill(cut, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)
