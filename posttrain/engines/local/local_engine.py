"""The embedded rollout engine: continuous batching over a key-value cache, with the learner's own weights.

Requests wait in a queue until a slot of the cache is free. The prompt of a group is computed and stored once, and the
common prefix of different prompts is computed once. Running requests occupy the first slots, so one decoding step is
one dense forward over them.

The cache takes memory as tokens are sampled. If its limit is reached, cached prefixes are dropped first; then the request
that was submitted last waits again (preemption). It continues later with the same tokens, which are computed again.

With compiled decoding the engine is batch-invariant: the bits of a request depend neither on the other requests nor on
the time of its arrival. Compiled code sums each row in its own order. Prompts and output heads are computed to match:
prompts go through the model together, but with products in blocks of one size and a separate attention call each.

    B    running requests (slots in use)
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import count as counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.core.protocols import Engine, Paced
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.local.cache_memory import CacheMemory
from posttrain.engines.local.compiled_step import CompiledStep, Given, supported
from posttrain.engines.local.cuda_step import CudaStep, decodes_in_graphs
from posttrain.engines.local.engine_weights import copy_weights
from posttrain.engines.local.kv_cache import KVCache, PromptPrefix, States
from posttrain.engines.local.paged_cache import PagedCache
from posttrain.engines.local.prefill import prefilled
from posttrain.engines.local.prefix_cache import KEPT_BYTES, CachedPrefixes, PrefixCache
from posttrain.engines.local.running_batch import BegunReply, RunningBatch
from posttrain.engines.local.sampler import UniformTokens
from posttrain.engines.local.step_cache import StepCache, token_bucket
from posttrain.engines.local.waiting_requests import WaitingRequests
from posttrain.engines.request import Request, complete, end_ids, reached_stop, stop_window
from posttrain.engines.throughput import Throughput
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.fused import compiles
from posttrain.models.native.kernels import build
from posttrain.models.native.linear import ROUND, rounds
from posttrain.models.tokenizer.tokenizer import Tokenizer

POLL_STEPS = 4  # decoding steps after which the caller may handle other events
LOOK_STEPS = 8
"""Decoding steps on CUDA between two checks for ended requests: each check waits for the card, which then waits for the next
launch.
"""


class LocalEngine:
    """Embedded engine of the decoder; implements `posttrain.core.protocols.Engine`. One per learner; not thread-safe.

    `slots`: maximum of concurrent requests. `context`: maximum of tokens of prompt and reply, at most the model's.
    `kept_bytes`: limit of the prefix cache. `cache_bytes`: limit of the whole KV cache; None: see `CacheMemory`.
    `rests`: whether memory is freed for the update when nothing runs; the next start then takes longer. `own`: the
    model belongs to the engine, and a weight sync overwrites its weights; otherwise it is the learner's.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        slots: int = 256,
        precision: str = "float32",
        kept_bytes: int = KEPT_BYTES,
        rests: bool = True,
        own: bool = False,
        cache_bytes: int | None = None,
    ) -> None:
        self.model, self.own = model, own
        self.tokenizer = tokenizer
        self.slots, self.rests = slots, rests
        self.context = model.config.context
        self.version = 0
        self.device = model.head.device
        self.precision = precision
        self.eos_ids = end_ids(model, tokenizer)
        self.eos = torch.tensor(self.eos_ids, dtype=torch.int64, device=self.device)
        self.waiting = WaitingRequests()
        self.running: list[Request] = []  # [B], the request of each slot
        self.kept = PrefixCache(kept_bytes)
        self.computed = 0  # tokens that the model has processed
        self.preempted = 0  # number of times that a running request had to wait again
        self._numbers = counter()
        self._submitted: dict[int, int] = {}  # id of a waiting or running request -> its number
        self._pace = Throughput()
        self._prefix_of: dict[int, PromptPrefix] = {}  # id of a running request with `keep` -> its prompt's prefix
        self._rows = RunningBatch(self.device)
        self.dtype = torch.bfloat16 if precision == "bfloat16" else model.dtype
        self._compiled = CompiledStep(model, self.dtype, self.eos) if supported(model, self.dtype) else None
        graphs = decodes_in_graphs(model, self.dtype)
        self._cuda = CudaStep(model, self.dtype, self.eos, lambda: self.uniform_tokens) if graphs else None
        self.batch_invariant = self._compiled is not None and compiles()
        self._cache = self._new_cache()
        self.memory = CacheMemory(self._cache, self.kept, self.waiting, self.context, self.device, cache_bytes)

    @property
    def backend(self) -> str:
        """Return a description of the implementation of decoding steps."""
        return build.backend(self._compiled is not None)

    def load(self, weights: Any, version: int) -> None:
        """Load weights of a version. If the weights are shared with the learner, only set the version."""
        assert not self.running and not self.waiting, "weights change between batches of rollouts, not within one"
        assert self.own or weights is self.model, "this engine shares the learner's weights"
        if self.own:
            copy_weights(self.model, weights)
        self.version = version
        self.waiting.prefixes.clear()
        self.kept.clear()
        self._forget_copies()

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Queue one request. Raises UserError if the prompt leaves no room for a reply."""
        tokens = tuple(prompt)
        kept = self.kept.continued(id, tokens)
        if kept is None:
            request = Request(id, tokens, sampling, keep=keep)
        else:
            request = Request(id, kept.prompt, sampling, tokens[len(kept.prompt) :], keep)
        request.check(self.context, self.model.config.vocab)
        self.memory.check(request)
        if kept is not None:
            self.waiting.resumed[id] = kept
            if kept.prefix is not None:
                self.waiting.prefixes[kept.prompt] = kept.prefix
        self.waiting.append(request)
        self._submitted[id] = next(self._numbers)

    def take_over(self, id: int, prompt: Sequence[int]) -> None:
        """Note the first prompt of an episode that another engine has begun. Its next request is then computed in the
        parts in which that engine computed it, which gives the same bits. Has no effect if this engine began it itself.
        """
        if id not in self.kept:
            self.kept.put(id, CachedPrefixes(tuple(prompt), ()))

    def forget(self, id: int) -> None:
        self.kept.take(id)

    def cancel(self, id: int) -> None:
        self.waiting.cancel(id)
        self._prefix_of.pop(id, None)
        self._submitted.pop(id, None)
        if slots := [slot for slot, request in enumerate(self.running) if request.id == id]:
            self._leave(slots)
        if self.rests and not self.running and not self.waiting:
            self._rest()

    def copy(self, id: int, to: int, tokens: int) -> None:
        self.kept.copy(id, to, tokens, self._cache.cut)

    def poll(self) -> list[Completion]:
        """Decode until a request has finished, for at most a few steps. Return the completions."""
        # Not inference_mode, under which autocast would cast every weight again for every token.
        with torch.no_grad(), self._autocast():
            for _ in range(POLL_STEPS):
                if not self.running and not self.waiting:
                    break
                began, count, computed = time.perf_counter(), len(self.running), self.computed
                free = self.slots - count
                # Admitting few requests at a time would interrupt decoding often; wait for a batch of free slots.
                admitting = bool(self.waiting) and (not count or free >= max(1, self.slots // 8))
                admitting = admitting and self._admit(free)
                steps = 0 if admitting else self._decode()
                done = self._finished()  # synchronises with the device, as reading the clock requires
                seconds = time.perf_counter() - began
                if admitting:
                    self._pace.read(self.computed - computed, seconds)
                else:
                    self._pace.decoded(count, seconds, steps)
                if done:
                    if self.rests and not self.running and not self.waiting:
                        self._rest()
                    return done
        return []

    def so_far(self, ids: Collection[int]) -> dict[int, tuple[list[int], list[float]]]:
        slots = [slot for slot, request in enumerate(self.running) if request.id in ids]
        counts = self._rows.count[slots].tolist() if slots else []
        longest = max(counts, default=0)
        tokens, logps = (
            ([c[slots, :longest].tolist() for c in (self._rows.tokens, self._rows.logp)]) if slots else ([], [])
        )
        each = zip(slots, tokens, logps, counts, strict=True)
        return self.waiting.replies(ids) | {
            self.running[slot].id: (own[:count], logp[:count]) for slot, own, logp, count in each
        }

    def pace(self) -> dict[str, float]:
        return {**self._pace.counts(), "decoding/preempted": self.preempted}

    def close(self) -> None:
        self.waiting.clear()
        self.kept.clear()
        self._prefix_of.clear()
        self._submitted.clear()
        self.running.clear()
        self._free()

    def _rest(self) -> None:
        """Free memory for the update, since nothing runs."""
        if self._cuda is not None and isinstance(self._cache, StepCache) and self._cuda.may_rest(self._cache):
            return
        self._free()

    def _free(self) -> None:
        self._cache.clear()
        self._forget_copies()
        if self._cuda is not None:
            self._cuda.free()

    def _forget_copies(self) -> None:
        """Drop copies of the weights, since the weights may have changed, or nothing runs."""
        if self._compiled is not None:
            self._compiled.forget()
        if self._cuda is not None:
            self._cuda.changed()

    def _new_cache(self) -> KVCache | PagedCache:
        if self._compiled is not None:
            return PagedCache(self.model.config, self.dtype)
        if self._cuda is not None:
            return StepCache(self.model.config, self.dtype, self.device, self.slots)
        # on a processor, attention with few queries is faster in float32, although it reads more memory
        return KVCache(
            self.model.config,
            self.dtype if self.device.type == "cuda" else torch.promote_types(self.dtype, torch.float32),
            self.device,
        )

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self, free: int) -> bool:
        """Move waiting requests into free slots and sample their first token. Return False if none fits the memory."""
        if not self.running:
            self.memory.set_limit()
        if not (requests := self.memory.next_requests(free, least=0 if self.running else 1)):
            return False
        waiting = self.waiting
        requests.sort(key=lambda r: not waiting.given(r))  # requests that continue an earlier one come first
        asked = dict.fromkeys(r.prompt for r in requests)
        fresh = {r.prompt for r in requests if not waiting.given(r)}
        needed = (prompt for prompt in asked if prompt in fresh or prompt not in self._cache)
        missing = [prompt for prompt in needed if prompt not in waiting.prefixes]
        found, computed = prefilled(self.model, missing, self._cache, self.batch_invariant)
        waiting.prefixes |= found
        self.computed += computed
        self._cache.reserve(
            len(self.running) + len(requests),
            max(self.memory.first_tokens(r) for r in requests),
            len(asked),
            max(map(len, asked)),
        )
        if isinstance(self._cache, StepCache):  # sizes in large steps, so that graphs remain valid
            self._rows.reserve(self._cache.own.shape[2], token_bucket(max(r.budget(self.context) for r in requests)))
        self._cache.admit([r.prompt for r in requests], waiting.prefixes)
        first = len(self.running)
        self.running.extend(requests)
        self._rows.append(requests, self.context, waiting.begun)
        for request in requests:
            if request.keep and request.prompt in waiting.prefixes:
                self._prefix_of[request.id] = waiting.prefixes[request.prompt]
        begun = first + sum(bool(waiting.given(r)) for r in requests)
        self._go_on(range(first, begun))
        if begun < len(self.running):
            logits = torch.stack([waiting.prefixes[r.prompt].logits for r in self.running[begun:]])
            self._choose(logits, slice(begun, len(self.running)))
        waiting.release(requests)
        return True

    def _go_on(self, slots: range) -> None:
        """Prefill the given tokens of these slots behind their cached prefixes, except for the last token, which is
        decoded. Requests with the same tokens, such as a group's rollouts that search for the same words, are computed
        once and copied.
        """
        given, copies = [], []
        known: dict[tuple[int, int], list[int]] = defaultdict(list)  # numbers of tokens: prompt, own -> slots
        for slot, request in enumerate(self.running[: slots.start]):
            known[len(request.prompt), len(request.own)].append(slot)
        for slot in slots:
            request = self.running[slot]
            kept, place = self.waiting.resumed.pop(request.id, None), 0
            alike = known[len(request.prompt), len(request.own)]
            replied = self.waiting.begun.pop(request.id, None)
            source = next((other for other in alike if self._same_tokens(other, slot)), None) if not replied else None
            if source is not None:
                copies.append((source, slot))
                continue
            alike.append(slot)
            if kept is not None and kept.states is not None:
                place = len(kept.own) - 1
                self._cache.restore(slot, kept.states, place)
            own = (*request.own, *replied.tokens) if replied else request.own
            if tokens := own[place:-1]:
                self._cache.cover(slot, len(own) - 1)
                given.append(Given(slot, place, tokens))
        self.computed += sum(len(one.tokens) for one in given)
        if self._compiled is not None and given:
            assert isinstance(self._cache, PagedCache)
            self._compiled.feed(self._cache, given)
        for one in given if self._compiled is None else ():
            self._extend(one)
        for source, slot in copies:
            copied = len(self.running[slot].own) - 1
            states: States = self._cache.states(source, copied)
            self._cache.restore(slot, states, copied)

    def _same_tokens(self, slot: int, other: int) -> bool:
        one, two = self.running[slot], self.running[other]
        return one.own == two.own and one.prompt == two.prompt

    def _extend(self, given: Given) -> None:
        """Prefill the given tokens of one request with torch's operations."""
        count, first = len(given.tokens), len(self.running[given.slot].prompt) + given.place
        total = -(-count // ROUND) * ROUND if rounds(self.device) else count
        tokens = torch.zeros(total, dtype=torch.int64, device=self.device)
        tokens[:count] = torch.tensor(given.tokens, device=self.device)
        position = torch.arange(first, first + total, device=self.device)
        assert isinstance(self._cache, KVCache)
        attend = self._cache.extend(given.slot, given.place, count)
        self.model(tokens, position, attend, tokens[:1] * 0)

    def _make_room(self, steps: int) -> None:
        """Make room for the next `steps` tokens of the running requests, of which some may have to wait again."""
        cache, memory = self._cache, self.memory
        while not cache.room(
            self._rows,
            steps,
            min(self.slots, len(self.running) + len(self.waiting)),
            lambda: memory.room_limit(len(self.running)),
        ):
            if not memory.reclaim():
                self._preempt(max(range(len(self.running)), key=lambda slot: self._submitted[self.running[slot].id]))

    def _preempt(self, slot: int) -> None:
        """Let a running request wait again."""
        request, count = self.running[slot], int(self._rows.count[slot])
        reply = (table[slot, :count].tolist() for table in (self._rows.tokens, self._rows.logp))
        self.waiting.put_back(request, BegunReply(*map(tuple, reply)))
        self._prefix_of.pop(request.id, None)
        self.preempted += 1
        self._leave([slot])

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _decode(self) -> int:
        """Decode one token of every running request, or several on CUDA. Return the number of steps."""
        rows = self._rows
        if self._cuda is not None:
            assert isinstance(self._cache, StepCache)
            # stop strings have to be searched for on the host after every token
            steps = 1 if rows.needs.stop else min(LOOK_STEPS, rows.left(len(self.running)))
            self._make_room(steps)
            count = len(self.running)
            self.computed += steps * count
            self._cuda(self._cache, rows, count, steps)
            return steps
        self._make_room(1)
        count = len(self.running)
        self.computed += count
        if self._compiled is not None:
            assert isinstance(self._cache, PagedCache)
            left = self._compiled(self._cache, rows, count)
            rows.longest += 1
            if left is not None:
                self._choose(*left)
            return 1
        assert isinstance(self._cache, KVCache)
        attend = self._cache.step((rows.before + rows.count)[:count] - 1, rows.longest)
        hidden = self.model(rows.token[:count], rows.length[:count], attend)
        rows.advance(count)
        self._choose(self.model.logits(hidden), slice(0, count))
        return 1

    def _choose(self, logits: Tensor, rows: slice | Tensor) -> None:
        """Sample the next token of these slots from logits [rows, V] and note which requests are finished."""
        token, logp = self._rows.sampled(logits, rows, lambda: self.uniform_tokens)
        self._rows.record(rows, token, logp, torch.isin(token, self.eos))

    @cached_property
    def uniform_tokens(self) -> UniformTokens:
        """The tokens among which epsilon-greedy sampling draws."""
        return UniformTokens.of(self.tokenizer, self.eos_ids, self.model.config.vocab, self.device)

    def _finished(self) -> list[Completion]:
        """Remove finished requests from their slots, move the other requests to the first slots, and return the
        completions.
        """
        state, count = self._rows, len(self.running)
        ended = state.ended[:count].tolist()
        stopped = self._reached_stop(count)
        out = [slot for slot in range(count) if ended[slot] or slot in stopped]
        if not out:
            return []
        completions = self._completions(out, stopped)
        for slot, completion in zip(out, completions, strict=True):
            self._keep(slot, completion)
            del self._submitted[completion.id]
        self._leave(out)
        return completions

    def _leave(self, out: list[int]) -> None:
        """Remove the requests in these slots; the others fill the first slots."""
        state, keep = self._rows, sorted(set(range(len(self.running))) - set(out))
        # Fill the holes among the first len(keep) slots from the slots behind them.
        holes = [slot for slot in out if slot < len(keep)]
        movers = [slot for slot in keep if slot >= len(keep)]
        self._cache.keep(len(keep), movers, holes, state.longest)
        state.keep(len(keep), movers, holes)
        for hole, mover in zip(holes, movers, strict=True):
            self.running[hole] = self.running[mover]
        del self.running[len(keep) :]

    def _reached_stop(self, count: int) -> set[int]:
        """Return the slots of requests whose text has just reached a stop string."""
        if not self._rows.needs.stop:
            return set()
        slots = [s for s in range(count) if self.running[s].sampling.stop]
        window = stop_window(s for slot in slots for s in self.running[slot].sampling.stop)
        index = torch.tensor(slots, device=self.device)
        sampled = self._rows.count[index][:, None]
        place = sampled - window + torch.arange(window, device=self.device)
        tails = self._rows.tokens[index[:, None], place.clamp_min(0)].masked_fill(place < 0, -1).tolist()
        reached = set()
        for slot, tail in zip(slots, tails, strict=True):
            request, own = self.running[slot], [t for t in tail if t >= 0]
            if reached_stop(self.tokenizer, [*request.begun, *own][-window:], request.sampling.stop):
                reached.add(slot)
        return reached

    def _completions(self, slots: list[int], stopped: set[int]) -> list[Completion]:
        state = self._rows
        counts = state.count[slots].tolist()
        longest = max(counts)
        tokens, logps = state.tokens[slots, :longest].tolist(), state.logp[slots, :longest].tolist()
        found = []
        for slot, count, sampled, logp in zip(slots, counts, tokens, logps, strict=True):
            if not math.isfinite(sum(logp[:count])):
                raise UserError(
                    "the model's probabilities are not finite: its weights are damaged, or training made them too large: "
                    "try a smaller --lr, or --max-grad-norm"
                )
            found.append(
                complete(
                    self.running[slot],
                    sampled[:count],
                    logp[:count],
                    stopped=slot in stopped,
                    eos_ids=self.eos_ids,
                    tokenizer=self.tokenizer,
                    version=self.version,
                )
            )
        return found

    def _keep(self, slot: int, completion: Completion) -> None:
        """Cache the prefix of a request if another request may continue it."""
        request = self.running[slot]
        if not request.keep:
            return
        own = (*request.own, *completion.tokens)
        prefix = self._prefix_of.pop(request.id, None)
        self.kept.put(request.id, CachedPrefixes(request.prompt, own, prefix, self._cache.states(slot, len(own) - 1)))

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")


if TYPE_CHECKING:
    _proof: Callable[..., Engine] = LocalEngine
    _paced: Callable[..., Paced] = LocalEngine
