"""Prefix cache: keys and values of requests that may be continued, within a budget of bytes.

The least recently used prefix is dropped first. If needed, it is computed again, with the same bits, so the budget
affects only the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from posttrain.engines.local.kv_cache import Prompt, PromptPrefix, States, pieces

KEPT_BYTES = 4 << 30  # default of the budget in bytes


@dataclass(frozen=True)
class CachedPrefixes:
    """Cached prefix of a finished request."""

    prompt: Prompt  # the shared prompt; None: not cached
    own: tuple[int, ...]  # the tokens behind the prompt; the last one was sampled and is not computed yet
    prefix: PromptPrefix | None = None  # the computed prompt; None: dropped
    states: States | None = None  # of all own tokens but the last, as returned by `KVCache.states`; None: dropped

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.own)

    @property
    def parts(self) -> list[Any]:
        """The tensors and pages that it holds."""
        found = [] if self.prefix is None else [self.prefix.logits, *pieces(self.prefix.states)]
        return found if self.states is None else [*found, *pieces(self.states)]


class PrefixCache:
    """Prefixes by the ids of their requests. Memory that several prefixes share is counted once."""

    def __init__(self, budget: int) -> None:
        """Create an empty cache. `budget`: maximum of bytes."""
        self.budget = budget
        self.bytes = 0  # size of all cached keys and values
        self._kept: dict[int, CachedPrefixes] = {}  # by id, in the order in which the requests finished
        self._holders: dict[int, int] = {}  # id() of a tensor or page -> number of prefixes that use it

    def __contains__(self, id: int) -> bool:
        return id in self._kept

    def put(self, id: int, kept: CachedPrefixes) -> None:
        self._kept[id] = kept
        self._hold(kept)
        self.trim(self.budget)

    def trim(self, budget: int) -> None:
        """Drop keys and values of the oldest prefixes, until at most `budget` bytes are cached."""
        if self.bytes <= budget:
            return  # a tree search caches thousands of prefixes: iterate over them only to drop some
        for oldest, other in list(self._kept.items()):
            if self.bytes <= budget:
                break
            self._let_go(other)
            self._kept[oldest] = replace(other, prefix=None, states=None)

    def take(self, id: int) -> CachedPrefixes | None:
        """Remove and return the prefix of a request, if there is one."""
        kept = self._kept.pop(id, None)
        if kept is not None:
            self._let_go(kept)
        return kept

    def continued(self, id: int, tokens: tuple[int, ...]) -> CachedPrefixes | None:
        """Remove the prefix of a request, and return it if these tokens begin with it."""
        kept = self.take(id)
        return kept if kept is not None and tokens[: len(kept.tokens)] == kept.tokens else None

    def copy(self, id: int, to: int, tokens: int, cut: Callable[[Any, int], Any] = lambda states, _: states) -> None:
        """Cache the first `tokens` tokens of a prefix, prompt included, under another id `to` too. `cut`: see
        `KVCache.cut`.
        """
        kept = self._kept.get(id)
        own = tokens - len(kept.prompt) if kept else 0
        if kept is None or not 0 < own <= len(kept.own):
            return
        if own < len(kept.own):
            states = None if kept.states is None else cut(kept.states, own - 1)
            kept = replace(kept, own=kept.own[:own], states=states)
        self.put(to, kept)

    def clear(self) -> None:
        self._kept.clear()
        self._holders.clear()
        self.bytes = 0

    @property
    def tokens(self) -> int:
        """Number of tokens whose keys and values are cached."""
        prompts = {id(kept.prefix): len(kept.prompt) for kept in self._kept.values() if kept.prefix is not None}
        states = {_ids(kept.states): len(kept.own) - 1 for kept in self._kept.values() if kept.states is not None}
        return sum(prompts.values()) + sum(states.values())

    def _hold(self, kept: CachedPrefixes) -> None:
        for x in kept.parts:
            self._holders[id(x)] = self._holders.get(id(x), 0) + 1
            if self._holders[id(x)] == 1:
                self.bytes += x.nbytes

    def _let_go(self, kept: CachedPrefixes) -> None:
        for x in kept.parts:
            self._holders[id(x)] -= 1
            if not self._holders[id(x)]:
                del self._holders[id(x)]
                self.bytes -= x.nbytes


def _ids(states: States) -> tuple[int, ...]:
    return tuple(map(id, pieces(states)))
