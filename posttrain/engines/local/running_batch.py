"""State of the running requests between two decoding steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from posttrain.core.types import Sampling
from posttrain.engines.local.sampler import Exploration, UniformTokens, sample, uniform
from posttrain.engines.request import Request


class SamplingParts(NamedTuple):
    """The parts of sampling that a request needs, or any of several requests."""

    tempered: bool = False
    greedy: bool = False
    top_p: bool = False
    top_k: bool = False
    explores: bool = False
    stop: bool = False

    @classmethod
    def of(cls, sampling: Sampling) -> SamplingParts:
        tempered, greedy = sampling.temperature != 1, sampling.temperature == 0
        filters = sampling.top_p < 1, sampling.top_k > 0, sampling.epsilon > 0
        return cls(tempered, greedy, *filters, bool(sampling.stop))

    @property
    def filtered(self) -> bool:
        """Whether its tokens are drawn outside the compiled step, which knows a temperature alone."""
        return self.top_p or self.top_k or self.explores


class BegunReply(NamedTuple):
    """The tokens of a reply so far."""

    tokens: tuple[int, ...] = ()
    logp: tuple[float, ...] = ()


class RunningBatch:
    """State of each running request, one row per slot, on the device: a decoding step touches no Python list."""

    _COLUMNS: ClassVar[dict[torch.dtype, tuple[str, ...]]] = {
        torch.int64: ("token", "length", "before", "count", "seed", "budget", "top_k"),
        torch.float32: ("temperature", "top_p", "epsilon"),
        torch.bool: ("filtered", "ended"),
    }
    """Columns by type. Columns of one type are rows of one table, which grows, is filled and moves in one operation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = 0
        integers = torch.zeros(0, dtype=torch.int64, device=device)
        floats = torch.zeros(0, dtype=torch.float32, device=device)
        bools = torch.zeros(0, dtype=torch.bool, device=device)
        self.slot = integers  # 0, 1, 2, ...
        self.token = integers  # the last sampled token
        self.length = integers  # tokens in the cache, which is also the position of the next token
        self.before = integers  # own tokens that were given, not sampled
        self.count = integers  # sampled tokens
        self.budget = integers  # maximum of sampled tokens
        self.seed = integers
        self.temperature, self.top_p, self.top_k, self.epsilon = floats, floats, integers, floats
        self.filtered = bools  # whether top-p, top-k or epsilon is used
        self.ended = bools
        self._tables = {
            kind: torch.zeros(len(names), 0, dtype=kind, device=device) for kind, names in self._COLUMNS.items()
        }
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)  # [slots, sampled tokens]
        self.logp = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self.longest = 0  # maximum of own tokens, given or sampled, tracked on the host without synchronisation
        self.longest_end = 0  # upper bound of what `longest` may become
        self._asked: list[SamplingParts] = []  # [size]
        self._note()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, which only `reserve` replaces."""
        columns = (getattr(self, name) for names in self._COLUMNS.values() for name in names)
        return (self.slot, self.tokens, self.logp, *columns)

    def reserve(self, slots: int, tokens: int) -> None:
        """Make room for `slots` requests with `tokens` sampled tokens each. Unused slots count as ended."""
        have, width = self.tokens.shape
        if slots > have:
            for kind, names in self._COLUMNS.items():
                table = torch.zeros(len(names), slots, dtype=kind, device=self.device)
                table[:, :have] = self._tables[kind]
                self._tables[kind] = table
                for name, column in zip(names, table, strict=True):
                    setattr(self, name, column)
            self.ended[have:] = True
            self.slot = torch.arange(slots, device=self.device)
        if slots > have or tokens > width:
            for name in ("tokens", "logp"):
                table = getattr(self, name)
                grown = torch.zeros(max(slots, have), max(tokens, width), dtype=table.dtype, device=self.device)
                grown[:have, :width] = table
                setattr(self, name, grown)

    def append(self, requests: list[Request], context: int, begun: Mapping[int, BegunReply]) -> None:
        """Add requests. `begun`: replies of requests that had run before, by their ids."""
        sampling = [r.sampling for r in requests]
        asked = [SamplingParts.of(s) for s in sampling]
        budget = [r.budget(context) for r in requests]
        given = [(*r.own, *begun[r.id].tokens) if r.id in begun else r.own for r in requests]
        total = self.size + len(requests)
        self.reserve(total, max(budget))
        new: dict[str, list[Any]] = {
            "token": [own[-1] if own else 0 for own in given],
            "length": [len(r.prompt) + max(0, len(own) - 1) for r, own in zip(requests, given, strict=True)],
            "before": [len(r.own) for r in requests],
            "count": [len(own) - len(r.own) for r, own in zip(requests, given, strict=True)],
            "seed": [s.seed for s in sampling],
            "budget": budget,
            "temperature": [s.temperature for s in sampling],
            "top_p": [s.top_p for s in sampling],
            "top_k": [s.top_k for s in sampling],
            "epsilon": [s.epsilon for s in sampling],
            "filtered": [a.filtered for a in asked],
            "ended": [False] * len(requests),
        }
        for kind, names in self._COLUMNS.items():
            rows = torch.tensor([new[name] for name in names], dtype=kind)
            self._tables[kind][:, self.size : total] = rows.to(self.device)
        for row, request in enumerate(requests, self.size):
            if request.id in begun:
                for table, values in zip((self.tokens, self.logp), begun[request.id], strict=True):
                    table[row, : len(values)] = torch.tensor(values, dtype=table.dtype)
        self.size = total
        # a new request samples its first token before decoding; a continued request samples it by decoding
        self.longest = max(self.longest, *(max(1, len(own)) for own in given))
        self.longest_end = max(self.longest_end, *(len(r.own) + r.budget(context) for r in requests))
        self._asked += asked
        self._note()

    def sampled(
        self, logits: Tensor, rows: slice | Tensor, among: Callable[[], UniformTokens]
    ) -> tuple[Tensor, Tensor]:
        """Sample the next token of some slots from logits [n, V]. Return tokens and log-probabilities, [n] each.

        `among`: returns the tokens among which epsilon-greedy sampling draws.
        """
        needs, seed, count, temperature = self.needs, self.seed[rows], self.count[rows], self.temperature[rows]
        return sample(
            logits,
            uniform(seed, count),
            temperature if needs.tempered else None,
            self.top_p[rows] if needs.top_p else None,
            self.top_k[rows] if needs.top_k else None,
            temperature == 0 if needs.greedy else None,
            Exploration.drawn(self.epsilon[rows], seed, count, among()) if needs.explores else None,
        )

    def record(self, rows: slice | Tensor, token: Tensor, logp: Tensor, eos: Tensor) -> None:
        """Store the next token of some slots: a slice, or int64 [n]."""
        count = self.count[rows]
        self.token[rows] = token
        self.tokens[self.slot[rows], count] = token
        self.logp[self.slot[rows], count] = logp
        sampled = count + 1  # a new tensor, since `count` is a view of memory that is written next
        self.count[rows] = sampled
        self.ended[rows] = eos | (sampled >= self.budget[rows])

    def go_on(self, count: int, token: Tensor, logp: Tensor, eos: Tensor) -> None:
        """Do the same as `advance` and `record` for those of the first `count` requests that have not ended, without
        synchronisation. The caller updates `longest`.
        """
        ended, active = self.ended[:count], ~self.ended[:count]
        at = self.count[:count].clamp_max(self.tokens.shape[1] - 1)[:, None]
        for table, new in ((self.tokens[:count], token), (self.logp[:count], logp)):
            table.scatter_(1, at, torch.where(active[:, None], new[:, None], table.gather(1, at)))
        self.token[:count].copy_(torch.where(active, token, self.token[:count]))
        self.length[:count].add_(active)
        self.count[:count].add_(active)
        ended.logical_or_(eos & active).logical_or_(self.count[:count] >= self.budget[:count])

    def left(self, count: int) -> int:
        """Return the maximum of tokens that any of the first `count` requests may still sample."""
        return int((self.budget - self.count)[:count].masked_fill(self.ended[:count], 0).max())

    def advance(self, count: int) -> None:
        """Advance the first `count` requests, whose last tokens are now in the cache, before their next tokens are
        sampled.
        """
        self.length[:count] += 1
        self.longest += 1

    def keep(self, count: int, source: list[int], to: list[int]) -> None:
        """Keep the first `count` slots, after moving `source` to `to`."""
        if source:
            index, place = (torch.tensor(slots, device=self.device) for slots in (source, to))
            for table in self._tables.values():
                table.index_copy_(1, place, table.index_select(1, index))
            for table in (self.tokens, self.logp):
                table.index_copy_(0, place, table.index_select(0, index))
            for old, new in zip(source, to, strict=True):
                self._asked[new] = self._asked[old]
        del self._asked[count:]
        self.ended[count:] = True
        self.size = count
        self.longest = int((self.before + self.count)[:count].max()) if count else 0
        self.longest_end = self.longest_end if count else 0
        self._note()

    def _note(self) -> None:
        """Determine the parts of sampling that the running requests need; other parts are skipped."""
        self.needs = SamplingParts(*map(any, zip(*{SamplingParts(), *self._asked}, strict=True)))
        self.filtered_slots: Tensor | None = None
        """int64 [n], requests with top-p, top-k or epsilon; None: there are none."""
        if self.needs.filtered:
            slots = [slot for slot, a in enumerate(self._asked) if a.filtered]
            self.filtered_slots = torch.tensor(slots, device=self.device)
