"""The embedded engine of models that transformers backs: their own cache, our sampler.

Requests that begin together form a cohort, whose rows are one tensor from then on: each distinct prompt is computed once,
and its keys, values and states are copied for the replies of its group. Prompts of different lengths are filled up to the
left where that changes nothing, which is tried on the model itself; else each length is a cohort of its own.

    B    rows of a cohort    P    its distinct prompts    L    tokens of the longest
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.engines.uncached import Running, UncachedEngine
from posttrain.models.backed import Backed
from posttrain.models.tokenizer import Tokenizer
from posttrain.types import Completion

PREFILL = 16_384  # tokens of prompts that are computed at once
SPARSE = 0.75  # rows of a cohort are moved together when fewer than this share of them still run
TOLERANCE = 1e-3  # nats, of padded rows beside unpadded ones


@dataclass
class _Cohort:
    """Requests that began together."""

    cache: Any
    rows: list[Running | None]  # [B]; None: it has ended, and its row is computed for nothing until it is removed
    padding: Tensor  # int64 [B], tokens to the left that stand for nothing
    length: int  # of every row, with its padding

    @property
    def alive(self) -> list[int]:
        return [row for row, running in enumerate(self.rows) if running is not None]


class BackedEngine(UncachedEngine):
    """See `posttrain.protocols.Engine`."""

    model: Backed

    def __init__(
        self, model: Backed, tokenizer: Tokenizer, slots: int = 256, precision: str = "float32", own: bool = False
    ) -> None:
        super().__init__(model, tokenizer, slots, precision, own)
        self._cohorts: list[_Cohort] = []
        known = inspect.signature(model.inner.base_model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in known else "past_key_values"
        self._positions = "position_ids" in known
        with torch.no_grad():
            self._pads = self._padding_is_free()

    @property
    def backend(self) -> str:
        """What computes, in words."""
        return f"{type(self.model.inner).__name__} of transformers, with its cache"

    def poll(self) -> list[Completion]:
        done = super().poll()
        if not self._running:
            self._cohorts.clear()  # an update comes next, which needs the memory
        return done

    def close(self) -> None:
        super().close()
        self._cohorts.clear()

    def _admits(self) -> bool:
        """Not one by one: each would be a cohort of its own."""
        return self.slots - len(self._running) >= max(1, self.slots // 4)

    def _logits(self) -> Tensor:
        running = {id(r) for r in self._running}
        for cohort in self._cohorts:
            cohort.rows = [r if r is not None and id(r) in running else None for r in cohort.rows]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.alive]
        place: dict[int, int] = {}
        found: list[Tensor] = []
        with self.model.decoding():
            for cohort in self._cohorts:
                self._note(found, place, cohort, self._decoded(cohort))
            for some in self._beginning([r for r in self._running if id(r) not in place]):
                cohort, states = self._prefilled(some)
                self._cohorts.append(cohort)
                self._note(found, place, cohort, states)
        order = torch.tensor([place[id(r)] for r in self._running], device=found[0].device)
        return self.model.head.logits(torch.cat(found).index_select(0, order))

    def _note(self, found: list[Tensor], place: dict[int, int], cohort: _Cohort, states: Tensor) -> None:
        before = sum(len(x) for x in found)
        place.update({id(r): before + row for row, r in enumerate(cohort.rows) if r is not None})
        found.append(states)

    def _beginning(self, new: Sequence[Running]) -> list[list[Running]]:
        """New requests, dealt to cohorts."""
        if self._pads or not new:
            return [list(new)] if new else []
        by_length: dict[int, list[Running]] = {}
        for running in new:
            by_length.setdefault(len(running.request.prompt), []).append(running)
        return list(by_length.values())

    def _prefilled(self, some: list[Running]) -> tuple[_Cohort, Tensor]:
        """A cohort of these, and the hidden states [B, D] of which their first tokens are sampled."""
        prompts = list(dict.fromkeys(r.request.prompt for r in some))
        longest, device = max(map(len, prompts)), self.model.head.device
        padding = torch.tensor([longest - len(p) for p in prompts], device=device)
        tokens = torch.tensor([[p[0]] * (longest - len(p)) + list(p) for p in prompts], device=device)
        many = max(1, PREFILL // longest)
        parts = [
            self._computed(tokens[k : k + many], None, padding[k : k + many], longest)
            for k in range(0, len(prompts), many)
        ]
        cache, states = parts[0][1], torch.cat([states for states, _ in parts])
        if len(parts) > 1:
            cache = _joined([cache for _, cache in parts])
        number = {prompt: k for k, prompt in enumerate(prompts)}
        row = torch.tensor([number[r.request.prompt] for r in some], device=device)
        cache.reorder_cache(row)
        return _Cohort(cache, list(some), padding[row], longest), states[row]

    def _decoded(self, cohort: _Cohort) -> Tensor:
        """The hidden states [B, D] behind the last token of each row."""
        alive = cohort.alive
        if len(alive) < SPARSE * len(cohort.rows):
            index = torch.tensor(alive, device=cohort.padding.device)
            cohort.cache.reorder_cache(index)
            cohort.rows, cohort.padding = [cohort.rows[row] for row in alive], cohort.padding[index]
        last = [0 if r is None else r.tokens[-1] for r in cohort.rows]
        tokens = torch.tensor(last, device=cohort.padding.device)[:, None]
        cohort.length += 1
        states, cohort.cache = self._computed(tokens, cohort.cache, cohort.padding, cohort.length)
        return states

    def _computed(self, tokens: Tensor, cache: Any, padding: Tensor, length: int) -> tuple[Tensor, Any]:
        """(hidden states [B, D] of the last of tokens [B, n], the cache): rows are `length` long with these tokens."""
        cache = self.model.new_cache() if cache is None else cache
        more: dict[str, Any] = {self._cache_name: cache}
        place = torch.arange(length, device=tokens.device)
        if padding.any():
            more["attention_mask"] = (place[None, :] >= padding[:, None]).long()
        if self._positions:
            more["position_ids"] = (place[None, -tokens.shape[1] :] - padding[:, None]).clamp_min(0)
        out = self.model.inner.base_model(input_ids=tokens, use_cache=True, **more)
        return out.last_hidden_state[:, -1], cache

    def _padding_is_free(self) -> bool:
        """Whether padded rows give the states of unpadded ones, for a prompt and for a token behind it."""
        device, vocab = self.model.head.device, self.model.config.vocab
        short = [(37 * n + 11) % vocab for n in range(5)]
        zero, four = (torch.tensor(p, device=device) for p in ([0], [4]))
        next_token = torch.tensor([[3 % vocab]], device=device)
        with self.model.decoding():
            found = []
            for tokens, padding in ((short, zero), ([short[0]] * 4 + short, four)):
                states, cache = self._computed(torch.tensor([tokens], device=device), None, padding, len(tokens))
                more, _ = self._computed(next_token, cache, padding, len(tokens) + 1)
                found.append(self.model.head.logits(torch.cat([states, more])).log_softmax(-1))
        apart = (found[0] - found[1]).abs().max()
        return bool(apart <= TOLERANCE)


def _joined(caches: Sequence[Any]) -> Any:
    """One cache of several, their rows one after the other."""
    first = caches[0]
    for number, layer in enumerate(first.layers):
        others = [cache.layers[number] for cache in caches[1:]]
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.ndim:  # a number is what rows have in common
                setattr(layer, name, torch.cat([value, *(getattr(o, name) for o in others)]))
            elif isinstance(value, dict) and value and all(isinstance(v, Tensor) for v in value.values()):
                setattr(
                    layer, name, {k: torch.cat([v, *(getattr(o, name)[k] for o in others)]) for k, v in value.items()}
                )
    return first
