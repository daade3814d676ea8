"""Key-value cache for torch's operations: a prompt is stored once for all of its requests, their own tokens separately.

torch's products need keys that are contiguous, so a request has a slot, not pages as in `paged_cache.py`. All slots have
the same number of tokens, which grows as tokens are sampled.

The attention of a request to its prompt and to its own tokens is computed separately, and merged by the normalisers. So
the prompt of a group takes memory and bandwidth once for all of its rollouts.

B    running requests    G    prompts in use    W    requests of the most used prompt    R    query heads per key head
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.engines.local.running_batch import RunningBatch
from posttrain.models.native.attention import fused, merged
from posttrain.models.native.decoder_shape import DecoderConfig

FIRST_TOKENS = 512
"""Own tokens of a slot before it grows, if replies may be so long."""

Prompt = tuple[int, ...]
States = Any
"""Keys and values outside of slots: a tensor [2, layers, kv_heads, tokens, size], or a tuple of pages (`paged_cache.py`)."""


def pieces(states: States) -> tuple[Any, ...]:
    """Return the tensors or pages of states."""
    return states if isinstance(states, tuple) else (states,)


@dataclass(frozen=True)
class PromptPrefix:
    """A computed prompt, kept while requests with this prompt wait."""

    states: States
    logits: Tensor  # [V], of the first token of a reply


@dataclass(frozen=True)
class _Groups:
    """Assignment of requests to rows of prompts. Padding repeats the first request of a row."""

    members: Tensor  # int64 [G * kv_heads * W], index into queries ordered as [B * kv_heads]
    place: Tensor  # int64 [B * kv_heads], index of a request's output in [G * kv_heads * W]
    mask: Tensor  # [G, 1, 1, P], added to the scores


class KVCache:
    """Key-value cache in which running requests occupy the first slots, and their prompts the first rows, so that a
    step is a few dense products.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.clear()

    def clear(self) -> None:
        """Free all memory."""
        self.own = self._empty(0, 0)
        self.shared = self._empty(0, 0)
        self.row: dict[Prompt, int] = {}  # prompt in use -> its row, in the order of the rows
        self.prompt: list[Prompt] = []  # [B], prompt of each slot
        self._groups: _Groups | None = None

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt in self.row

    @property
    def positions(self) -> int:
        """Maximum of positions of a request."""
        return min(self.config.context, self.own.shape[4] + self.shared.shape[4])

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        return self.own.nbytes + self.shared.nbytes

    def size(self, own: int, prompt: int) -> int:
        """Return the bytes of a request with so many tokens of its own and of its prompt."""
        return self._bytes(1, own) + self._bytes(1, prompt)

    def added(self, own: Sequence[int], prompts: Sequence[int]) -> int:
        """Return the bytes that requests with so many own tokens, and so many of new prompts, would add."""
        slots = self._grown_size(self.own, len(self.prompt) + len(own), max(own))
        longest = max((*map(len, self.row), *prompts))
        shared = self._grown_size(self.shared, len(self.row) + len(prompts), longest)
        return self._bytes(*slots) + self._bytes(*shared) - self.bytes

    def reserve(self, slots: int, own: int, prompts: int, prompt: int) -> None:
        """Make room for `slots` requests with `own` tokens, and `prompts` more prompts of at most `prompt` tokens."""
        self.own = self._grown(self.own, slots, own)
        self.shared = self._grown(self.shared, len(self.row) + prompts, prompt)

    def room(self, rows: RunningBatch, steps: int, slots: int, limit: Callable[[], float]) -> bool:
        """Make room for the next `steps` tokens of every request, of `slots` ones if possible. Return False if they do not
        fit `limit()` bytes. A cache that grows also loses the slots that it does not need any more.
        """
        have, count, needed = self.own.shape[4], len(self.prompt), rows.longest + steps - 1
        if needed <= have:
            return True
        most, twice = limit(), max(needed, min(2 * have, rows.longest_end))
        for size in ((slots, twice), (count, twice), (count, needed)):
            if self._bytes(*size) + self.shared.nbytes <= most:
                old, self.own = self.own, self._empty(0, 0)
                if old.nbytes + self._bytes(*size) + self.shared.nbytes > most:
                    old = old.cpu()  # both at once would not fit
                self.own = self._empty(*self._rounded(*size))
                self.own[:, :, :count, :, :have] = old[:, :, :count]
                return True
        return False

    def cover(self, slot: int, tokens: int) -> None:
        """Do nothing: `reserve` made room for the given tokens of all requests."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def store(
        self, prompt: Prompt, k: Tensor, v: Tensor, places: slice | Tensor, path: Sequence[int], made: dict[int, Any]
    ) -> Tensor:
        """Return the keys and values of a computed prompt: of k, v [layers, kv_heads, T, size] those at `places`."""
        return torch.stack((k[:, :, places], v[:, :, places]))

    def admit(self, prompts: Sequence[Prompt], computed: Mapping[Prompt, PromptPrefix]) -> None:
        """Assign these prompts to the next slots. `computed`: has those that are not in the cache yet."""
        for prompt in dict.fromkeys(prompts):
            if prompt not in self.row:
                row = self.row[prompt] = len(self.row)
                self.shared[:, :, row, :, : len(prompt)] = computed[prompt].states
        self.prompt.extend(prompts)
        self._reseated()

    def keep(self, count: int, source: Sequence[int], to: Sequence[int], filled: int) -> None:
        """Keep the first `count` slots, after moving `source` to `to`; `filled`: maximum of own tokens of a request."""
        if source:
            index, place = (torch.tensor(slots, device=self.device) for slots in (source, to))
            used = self.own[:, :, :, :, :filled]
            used.index_copy_(2, place, used.index_select(2, index))
            for old, new in zip(source, to, strict=True):
                self.prompt[new] = self.prompt[old]
        del self.prompt[count:]
        self._release(set(self.prompt))
        self._reseated()

    def states(self, slot: int, tokens: int) -> Tensor:
        """Copy a request's own keys and values, [2, layers, kv_heads, tokens, size]."""
        return self.own[:, :, slot, :, :tokens].clone()

    def cut(self, states: Tensor, tokens: int) -> Tensor:
        """Return a copy of the first `tokens` tokens of states."""
        return states[:, :, :, :tokens].clone()

    def restore(self, slot: int, states: Tensor, tokens: int) -> None:
        """Write the first `tokens` tokens of states into a slot."""
        self.own[:, :, slot, :, :tokens] = states[:, :, :, :tokens]

    def extend(self, slot: int, place: int, tokens: int) -> ExtendAttention:
        """Return the attention function for `tokens` further tokens of a request, from index `place` of its own on."""
        return ExtendAttention(self, slot, place, tokens)

    def step(self, place: Tensor, longest: int) -> DecodeAttention:
        """Return the attention function for the next token of every request, at `place`, int64 [B], below `longest`."""
        if self._groups is None:
            self._groups = self._group()
        return DecodeAttention(self, place, longest, self._groups)

    def _reseated(self) -> None:
        """Drop what depends on the running requests and their slots, which have changed."""
        self._groups = None

    def _release(self, used: set[Prompt]) -> None:
        """Free the rows of prompts that no request uses; the last rows fill the gaps."""
        rows = list(self.row)
        for hole in [row for prompt, row in self.row.items() if prompt not in used]:
            while rows and rows[-1] not in used:
                rows.pop()
            if hole < len(rows):
                rows[hole] = prompt = rows.pop()
                filled = len(prompt)
                self.shared[:, :, hole, :, :filled] = self.shared[:, :, self.row[prompt], :, :filled]
        self.row = {prompt: row for row, prompt in enumerate(rows)}

    def _group(self) -> _Groups:
        heads = self.config.kv_heads
        slots: list[list[int]] = [[] for _ in self.row]
        for slot, prompt in enumerate(self.prompt):
            slots[self.row[prompt]].append(slot)
        widest = max(map(len, slots))
        place = [0] * len(self.prompt)
        for row, members in enumerate(slots):
            for number, slot in enumerate(members):
                place[slot] = row * heads * widest + number
        padded = torch.tensor([members + [members[0]] * (widest - len(members)) for members in slots])
        head = torch.arange(heads)
        length = torch.tensor([len(prompt) for prompt in self.row])
        visible = torch.arange(int(length.max()))[None, :] < length[:, None]
        return _Groups(
            (padded[:, None, :] * heads + head[None, :, None]).reshape(-1).to(self.device),
            (torch.tensor(place)[:, None] + widest * head[None, :]).reshape(-1).to(self.device),
            _added(visible, self.dtype).to(self.device),
        )

    def _empty(self, slots: int, tokens: int) -> Tensor:
        config = self.config
        shape = (2, config.layers, slots, config.kv_heads, tokens, config.head_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _bytes(self, slots: int, tokens: int) -> int:
        """Return the bytes of a tensor with at least `slots` slots and `tokens` tokens."""
        slots, tokens = self._rounded(slots, tokens)
        return (
            2 * self.config.layers * slots * self.config.kv_heads * tokens * self.config.head_size * self.dtype.itemsize
        )

    def _rounded(self, slots: int, tokens: int) -> tuple[int, int]:
        """Round a size up to one that is allocated."""
        return slots, 64 * math.ceil(tokens / 64)

    def _grown_size(self, old: Tensor, slots: int, tokens: int) -> tuple[int, int]:
        """Return slots and tokens of a tensor with at least so many."""
        return max(slots, old.shape[2]), max(tokens, old.shape[4])

    def _grown(self, old: Tensor, slots: int, tokens: int) -> Tensor:
        """Return a tensor with at least `slots` slots and `tokens` tokens: `old` itself if it is large enough."""
        have, filled = old.shape[2], old.shape[4]
        if slots <= have and tokens <= filled:
            return old
        new = self._empty(*self._rounded(*self._grown_size(old, slots, tokens)))
        new[:, :, :have, :, :filled] = old
        return new


class DecodeAttention:
    """The `Attend` of one decoding step: one new token of each running request."""

    def __init__(self, cache: KVCache, place: Tensor, longest: int, groups: _Groups) -> None:
        self.cache, self.place, self.longest, self.groups = cache, place, longest, groups
        self.slot = torch.arange(place.shape[0], device=place.device)
        visible = torch.arange(longest, device=place.device)[None, :] <= place[:, None]
        self.mask = _added(visible, cache.dtype)  # [B, 1, 1, longest]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q [B, heads, size], k and v [B, kv_heads, size] -> [B, heads, size]."""
        cache, groups = self.cache, self.groups
        count, (heads, size) = q.shape[0], k.shape[1:]
        keys, values = cache.own[0, layer], cache.own[1, layer]
        keys[self.slot, :, self.place] = k.to(cache.dtype)
        values[self.slot, :, self.place] = v.to(cache.dtype)
        # The R query heads that share a key head become R queries of that head: nothing is repeated.
        queries = q.to(cache.dtype).reshape(count, heads, -1, size)
        own, own_mass = attention(
            queries, keys[:count, :, : self.longest], values[:count, :, : self.longest], self.mask
        )
        used, length = groups.mask.shape[0], groups.mask.shape[-1]
        together = queries.reshape(count * heads, -1).index_select(0, groups.members).view(used, heads, -1, size)
        keys, values = cache.shared[0, layer], cache.shared[1, layer]
        shared, shared_mass = attention(together, keys[:used, :, :length], values[:used, :, :length], groups.mask)
        shared = shared.reshape(groups.members.shape[0], -1).index_select(0, groups.place).view_as(own)
        shared_mass = shared_mass.reshape(groups.members.shape[0], -1).index_select(0, groups.place)
        return merged(own, own_mass, shared, shared_mass.view_as(own_mass)).reshape(q.shape)


class ExtendAttention:
    """The `Attend` of given tokens that follow one request's tokens in the cache. The output at padding is 0."""

    def __init__(self, cache: KVCache, slot: int, place: int, tokens: int) -> None:
        self.cache, self.slot, self.place, self.tokens = cache, slot, place, tokens
        prompt = cache.prompt[slot]
        self.row, self.length = cache.row[prompt], len(prompt)
        own = torch.arange(place + tokens, device=cache.device)
        repeat = cache.config.heads // cache.config.kv_heads
        visible = own[None, :] <= torch.arange(place, place + tokens, device=cache.device)[:, None]
        # [1, 1, R * tokens, place + tokens]
        self.mask = _added(visible, cache.dtype)[:, 0, 0].repeat(repeat, 1)[None, None]
        self.all = torch.zeros(1, 1, 1, self.length, dtype=cache.dtype, device=cache.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q [n, heads, size], k and v [n, kv_heads, size], n at least `tokens` -> [n, heads, size]."""
        cache, count, (heads, size) = self.cache, self.tokens, k.shape[1:]
        where = slice(self.place, self.place + count)
        keys, values = cache.own[0, layer, self.slot], cache.own[1, layer, self.slot]
        keys[:, where] = k[:count].transpose(0, 1).to(cache.dtype)
        values[:, where] = v[:count].transpose(0, 1).to(cache.dtype)
        # The R query heads that share a key head become R queries of that head.
        queries = q[:count].to(cache.dtype).unflatten(1, (heads, -1)).permute(1, 2, 0, 3).reshape(1, heads, -1, size)
        own = attention(queries, keys[None, :, : where.stop], values[None, :, : where.stop], self.mask)
        shared = attention(
            queries,
            cache.shared[0, layer, self.row, :, : self.length][None],
            cache.shared[1, layer, self.row, :, : self.length][None],
            self.all,
        )
        out = merged(*own, *shared).view(heads, -1, count, size).permute(2, 0, 1, 3).reshape(count, -1, size)
        whole = torch.zeros_like(q, dtype=cache.dtype)
        whole[:count] = out
        return whole


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention [B, heads, n, size] of q over k and v [B, heads, m, size], and the logsumexp of its scores
    [B, heads, n].

    mask [B, 1, 1 or n, m] is added to the scores.
    """
    if q.device.type == "cpu":
        return fused(q, k, v, mask)
    return plain_attention(q, k, v, mask)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `attention` by single operations, for devices whose fused kernels need another mask. Scores are at least
    float32.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5 + mask
    mass = scores.logsumexp(-1)
    return ((scores - mass.unsqueeze(-1)).exp() @ v.to(wide)).to(v.dtype), mass


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask bool [B, m] to 0 where a query may attend and -inf elsewhere, [B, 1, 1, m]."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -math.inf)[:, None, None, :]
