"""Samples the next tokens with one uniform number per row, and returns the log-probability under the sampled
distribution.

B    rows (one per running request)    V    vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from posttrain.models.tokenizer.tokenizer import Tokenizer

_LOW32 = 0xFFFFFFFF
BLOCK = 64  # entries of the vocabulary that are summed before the running sum


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """Return uniform numbers in (0, 1]: float32 [B] from int64 seeds [B] and counters [B], the same on every device.

    Counter-based: a draw depends only on (seed, index), not on earlier draws. The mixing function is the finaliser of
    SplitMix64 (Steele, Lea, Flood 2014), applied to the seed and again to seed and counter.
    """
    x = _mix(_mix(seed) + index * -7046029254386353131)  # 0x9E3779B97F4A7C15 as a signed number
    return (((x >> 40) & 0xFFFFFF).to(torch.float32) + 0.5) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & (_LOW32 << 2 | 3))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & (_LOW32 << 5 | 31))) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & (_LOW32 << 1 | 1))


class UniformTokens(NamedTuple):
    """The tokens among which epsilon-greedy sampling draws uniformly."""

    ids: Tensor  # int64 [A]
    inside: Tensor  # bool [V], whether an id is one of them

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, ends: Iterable[int], vocab: int, device: torch.device, never: Iterable[int] = ()
    ) -> Self:
        """Return the tokens of text and the ends of a reply: no padding of the vocabulary, and no other special token.

        `ends`: ids that end a reply; `vocab`: V; `never`: further ids to leave out.
        """
        ids = {id for id in tokenizer.vocabulary.values() if id < vocab} - tokenizer.special_ids - set(never)
        found = torch.tensor(sorted(ids | {id for id in ends if id < vocab}), dtype=torch.int64)
        inside = torch.zeros(vocab, dtype=torch.bool)
        inside[found] = True
        return cls(found.to(device), inside.to(device))


class Exploration(NamedTuple):
    """Draws of epsilon-greedy sampling, for each row: with probability epsilon the token is drawn uniformly."""

    epsilon: Tensor  # float32 [B], below 1
    whether: Tensor  # [B] in (0, 1]: uniformly where it is below epsilon
    which: Tensor  # [B] in (0, 1]: the token then drawn
    among: UniformTokens

    @classmethod
    def drawn(cls, epsilon: Tensor, seed: Tensor, index: Tensor, among: UniformTokens) -> Self:
        """Return the draws of (seed, counter), int64 [B] each: independent of those of `uniform` for the same pair."""
        return cls(epsilon, uniform(seed, index + (1 << 40)), uniform(seed, index + (2 << 40)), among)

    def token(self, policy: Tensor) -> Tensor:
        """Return the token of each row, given that of the policy, [B]."""
        count = len(self.among.ids)
        place = (self.which * count).to(torch.int64).clamp_max(count - 1)
        return torch.where(self.whether < self.epsilon, self.among.ids[place], policy)

    def logp(self, token: Tensor, policy: Tensor) -> Tensor:
        """Return log((1 - epsilon) pi(a) + epsilon [a in A] / |A|), [B], given log pi(a)."""
        share = (self.epsilon / len(self.among.ids)).log().masked_fill(~self.among.inside[token], float("-inf"))
        return torch.logaddexp(policy + torch.log1p(-self.epsilon), share)


def sample(
    logits: Tensor,
    draw: Tensor,
    temperature: Tensor | None = None,
    top_p: Tensor | None = None,
    top_k: Tensor | None = None,
    greedy: Tensor | None = None,
    explore: Exploration | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution. logits [B, V], draw [B] -> token, logp [B].

    `temperature`, `top_p`, `top_k` and `greedy` [B] are None if no request uses them; temperature = 1, top_p = 1 and
    top_k = 0 do not change a row. A greedy row is a point distribution: its log-probability is 0, and its epsilon too.
    """
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature.clamp_min(1e-6)[:, None]
    if top_k is not None or top_p is not None:
        logits = _truncate(logits, top_p, top_k)
    top = logits.amax(-1)
    # Two levels: first the block of the vocabulary, then the token in it. One running sum over all of it is slower.
    mass = _blocks((logits - top[:, None]).exp_())  # [B, blocks, BLOCK]
    each = mass.sum(-1)
    total = each.sum(-1)
    block, before = _invert(each, draw * total)
    token, _ = _invert(mass[torch.arange(len(block), device=block.device), block], draw * total - before)
    token = (block * BLOCK + token).clamp_max_(logits.shape[-1] - 1)  # out of range only for NaN
    if greedy is not None:
        token = torch.where(greedy, logits.argmax(-1), token)
    if explore is not None:
        token = explore.token(token)
    logp = logits.gather(-1, token[:, None]).squeeze(-1) - top - total.log()
    if explore is not None:
        logp = explore.logp(token, logp)
    return token, logp if greedy is None else logp.masked_fill(greedy, 0.0)


def _invert(mass: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first entry of mass [B, n] at which the running sum exceeds draw [B], and the sum before it.

    If rounding makes the draw reach the total, return the last entry with mass.
    """
    running = mass.cumsum(-1)
    found = torch.searchsorted(running, draw[:, None], right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous()).clamp_max_(mass.shape[-1] - 1)  # NaN: out of range
    found = torch.minimum(found, last)
    # the sum that the search compared with, so that the remaining draw is never negative
    before = running.gather(-1, (found - 1).clamp_min_(0)).masked_fill_(found == 0, 0.0)
    return found.squeeze(-1), before.squeeze(-1)


def _blocks(mass: Tensor) -> Tensor:
    """Split [B, V] into [B, blocks, BLOCK], padded with zeros."""
    if missing := -mass.shape[-1] % BLOCK:
        mass = torch.nn.functional.pad(mass, (0, missing))
    return mass.unflatten(-1, (-1, BLOCK))


def _truncate(logits: Tensor, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    """Set logits to -inf except for the kept tokens: of the top_k most likely ones, the smallest set with mass >=
    top_p.
    """
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
