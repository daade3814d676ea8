"""Holds what an engine knows of its running requests between two decoding steps."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.engines.request import Request


class RunningBatch:
    """What is known of each running request, one row per slot, on the device: a decoding step touches no Python list."""

    _COLUMNS = ("token", "length", "count", "seed", "budget", "temperature", "top_p", "top_k", "ended")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = 0
        self.any_tempered = self.any_top_p = self.any_top_k = self.any_greedy = False
        integers = torch.zeros(0, dtype=torch.int64, device=device)
        floats = torch.zeros(0, dtype=torch.float32, device=device)
        self.slot = integers  # 0, 1, 2, ...
        self.token = integers  # the last token sampled
        self.length = integers  # tokens in the cache, so also the position of the next
        self.count = integers  # tokens sampled
        self.budget = integers  # tokens that may be sampled
        self.seed = integers
        self.temperature, self.top_p, self.top_k = floats, floats, integers
        self.ended = torch.zeros(0, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)  # [slots, tokens sampled]
        self.logp = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self.longest = 0  # the greatest `count`, known without asking the device

    def append(self, requests: list[Request], context: int) -> None:
        sampling = [r.sampling for r in requests]
        budget = [r.budget(context) for r in requests]
        new = {
            "token": torch.zeros(len(requests), dtype=torch.int64),
            "length": torch.tensor([len(r.prompt) for r in requests]),
            "count": torch.zeros(len(requests), dtype=torch.int64),
            "seed": torch.tensor([s.seed for s in sampling]),
            "budget": torch.tensor(budget),
            "temperature": torch.tensor([s.temperature for s in sampling], dtype=torch.float32),
            "top_p": torch.tensor([s.top_p for s in sampling], dtype=torch.float32),
            "top_k": torch.tensor([s.top_k for s in sampling]),
            "ended": torch.zeros(len(requests), dtype=torch.bool),
        }
        for name, column in new.items():
            setattr(self, name, torch.cat([getattr(self, name)[: self.size], column.to(self.device)]))
        total, width = self.size + len(requests), max(self.tokens.shape[1], max(budget))
        for name in ("tokens", "logp"):
            table = getattr(self, name)
            grown = torch.zeros(total, width, dtype=table.dtype, device=self.device)
            grown[: self.size, : table.shape[1]] = table[: self.size]
            setattr(self, name, grown)
        self.size = total
        self.slot = torch.arange(total, device=self.device)
        self.any_tempered = self.any_tempered or any(s.temperature != 1 for s in sampling)
        self.any_greedy = self.any_greedy or any(s.temperature == 0 for s in sampling)
        self.any_top_p = self.any_top_p or any(s.top_p < 1 for s in sampling)
        self.any_top_k = self.any_top_k or any(s.top_k > 0 for s in sampling)
        self.longest = max(self.longest, 1)  # what is new samples its first token before anything is decoded

    def record(self, rows: slice, token: Tensor, logp: Tensor, eos: Tensor) -> None:
        count = self.count[rows]
        self.token[rows] = token
        self.tokens[self.slot[rows], count] = token
        self.logp[self.slot[rows], count] = logp
        sampled = count + 1  # a new tensor: `count` is a view of what is written next
        self.count[rows] = sampled
        self.ended[rows] = eos | (sampled >= self.budget[rows])

    def advance(self, count: int) -> None:
        """The last token of the first `count` requests went into the cache; the next one is about to be sampled."""
        self.length[:count] += 1
        self.longest += 1

    def move(self, source: Tensor, to: Tensor) -> None:
        for name in (*self._COLUMNS, "tokens", "logp"):
            column = getattr(self, name)
            column[to] = column[source]
