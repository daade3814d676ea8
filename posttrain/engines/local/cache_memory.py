"""Memory of the embedded engine's key-value cache: its limit, which requests fit, and what is dropped to make room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch

from posttrain.core.types import UserError
from posttrain.engines.local.kv_cache import FIRST_TOKENS, KVCache, Prompt
from posttrain.engines.local.paged_cache import PagedCache
from posttrain.engines.local.prefix_cache import CachedPrefixes, PrefixCache
from posttrain.engines.local.waiting_requests import WaitingRequests
from posttrain.engines.request import Request
from posttrain.models.free_memory import free_memory

CACHE_SHARE = 0.7
"""Default limit, as a share of the memory that is free without the cache when sampling begins."""


class CacheMemory:
    """Memory of slots and of the prefixes outside of them. `given`: limit in bytes; None: see `CACHE_SHARE`."""

    def __init__(
        self,
        cache: KVCache | PagedCache,
        kept: PrefixCache,
        waiting: WaitingRequests,
        context: int,
        device: torch.device,
        given: int | None,
    ) -> None:
        self.cache, self.kept, self.waiting = cache, kept, waiting
        self.context, self.device = context, device
        self.given = given
        self.sharers = 1  # engines in processes of their own that take their caches from the same memory
        self.limit: float = math.inf  # bytes

    @property
    def occupied(self) -> int:
        """Bytes of the cache, with those of prefixes outside of slots."""
        if isinstance(self.cache, PagedCache):
            return self.cache.bytes  # all prefixes are pages
        waiting = (CachedPrefixes((), (), prefix) for prefix in self.waiting.prefixes.values())
        held = {id(x): x.nbytes for kept in (*self.waiting.resumed.values(), *waiting) for x in kept.parts}
        return self.cache.bytes + self.kept.bytes + sum(held.values())

    def check(self, request: Request) -> None:
        """Raise UserError if a request would not fit the given limit even if it ran alone."""
        if self.given is None:
            return
        needed = self.cache.size(len(request.own) + request.budget(self.context), len(request.prompt))
        if needed > self.given:
            raise UserError(
                f"a prompt of {request.given} tokens with a reply of up to {request.budget(self.context)} needs "
                f"{needed / 2**30:.3g} GiB of KV cache, and --engine-cache is {self.given / 2**30:.3g}: raise it, or "
                "lower --max-tokens"
            )

    # -- admission ----------------------------------------------------------------------------------------------------

    def set_limit(self) -> None:
        """Set the limit, when nothing runs."""
        if self.given is None:
            held = self.cache.held if isinstance(self.cache, PagedCache) else self.occupied
            self.limit = CACHE_SHARE / self.sharers * (free_memory(self.device) + held)
        else:
            self.limit = self.given

    def first_tokens(self, request: Request) -> int:
        """Return the own tokens of a request for which the cache makes room when it is admitted."""
        return max(self.waiting.given(request) + 1, min(len(request.own) + request.budget(self.context), FIRST_TOKENS))

    def next_requests(self, free: int, least: int) -> list[Request]:
        """Take requests from the queue: as many as fit into `free` slots and the limit, but at least `least`. Prefixes of
        other requests are dropped for them.
        """
        taken: list[Request] = []
        own: list[int] = []
        new: dict[Prompt, int] = {}  # prompt that needs memory -> its tokens
        occupied = self.occupied
        for request in islice(self.waiting, free):
            taken.append(request)
            own.append(self._new_tokens(request))
            if self._is_new(request.prompt):
                new[request.prompt] = len(request.prompt)
            while (full := occupied + self.cache.added(own, [*new.values()]) > self.limit) and self.reclaim(taken):
                occupied = self.occupied
            if full:
                taken.pop()
                break
        return [self.waiting.take() for _ in range(max(len(taken), least))]

    def _new_tokens(self, request: Request) -> int:
        """Return the own tokens for which a waiting request needs memory when it is admitted."""
        if not isinstance(self.cache, PagedCache):
            return self.first_tokens(request)
        kept, page = self.waiting.resumed.get(request.id), self.cache.page
        shared = 0 if kept is None or kept.states is None else (len(kept.own) - 1) // page * page
        return self.waiting.given(request) + 1 - shared

    def _is_new(self, prompt: Prompt) -> bool:
        """Return whether a prompt needs memory when it is admitted. A slot has its own copy, pages are shared."""
        computed = isinstance(self.cache, PagedCache) and prompt in self.waiting.prefixes
        return prompt not in self.cache and not computed

    # -- running requests ---------------------------------------------------------------------------------------------

    def room_limit(self, running: int) -> float:
        """Return the limit of the memory of slots, in bytes. A request that runs alone has none once nothing else can be
        dropped, see `check`.
        """
        if running == 1 and not self.kept.bytes and not self._resumed() and not self._unused_prompts():
            return math.inf
        return self.limit - (self.occupied - self.cache.bytes)

    def reclaim(self, besides: Sequence[Request] = ()) -> bool:
        """Drop a prefix that neither a running request nor one of `besides` uses; it is computed again if needed. Return
        False if there is none.
        """
        if self.kept.bytes:
            self.kept.trim(self.kept.bytes - 1)
        elif resumed := self._resumed(besides):
            self.waiting.resumed[resumed[-1]] = replace(self.waiting.resumed[resumed[-1]], prefix=None, states=None)
        elif unused := self._unused_prompts(besides):
            del self.waiting.prefixes[unused[-1]]
        else:
            return False
        return True

    def _resumed(self, besides: Sequence[Request] = ()) -> list[int]:
        needed = {request.id for request in besides}
        return [id for id, kept in self.waiting.resumed.items() if kept.parts and id not in needed]

    def _unused_prompts(self, besides: Sequence[Request] = ()) -> list[Prompt]:
        needed = {request.prompt for request in besides}
        return [prompt for prompt in self.waiting.prefixes if prompt not in self.cache and prompt not in needed]
