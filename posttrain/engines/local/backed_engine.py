"""The embedded engine for models of transformers, with transformers' cache and our sampler.

Requests that begin together form a cohort, whose rows are decoded as one tensor: each distinct prompt is computed once,
and its keys, values and states are copied for the replies of its group. Prompts of different lengths are padded on the
left if a test on the model shows that padding has no effect; otherwise each length is a separate cohort.

    B    rows of a cohort            P    distinct prompts of a cohort    L    tokens of its longest prompt
    M    layers with a router        k    experts per token
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.core.transcripts import Media
from posttrain.core.types import Completion
from posttrain.engines.local.sampler import UniformTokens
from posttrain.engines.local.uncached_engine import RunningReply, UncachedEngine, position_rows
from posttrain.engines.request import Request
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.experts import UNKNOWN, Routed, calling, watching
from posttrain.models.tokenizer.tokenizer import Tokenizer

PREFILL = 16_384  # tokens of prompts that are computed at once
SPARSE = 0.75  # rows of ended replies are removed from a cohort when fewer than this share of its rows still run
TOLERANCE = 1e-3  # nats, allowed difference between padded and unpadded rows


@dataclass
class _RoutedReply(RunningReply):
    """A running request, with the experts that its tokens were routed to."""

    experts: list[NDArray[np.int16]] = field(default_factory=list)  # [prompt, M, k], then [1, M, k] of each token


@dataclass
class _Cohort:
    """Requests that began together and are decoded as one batch."""

    cache: Any
    # [B]; None: the reply has ended, and its row is computed but ignored until it is removed
    rows: list[_RoutedReply | None]
    padding: Tensor  # int64 [B], padding tokens on the left
    place: (
        Tensor  # int64 [B], position of the next token, which is below its index if tokens of pictures share positions
    )
    length: int  # tokens of every row, including padding

    @property
    def alive(self) -> list[int]:
        return [row for row, running in enumerate(self.rows) if running is not None]


class BackedEngine(UncachedEngine):
    """Embedded engine of a model of transformers; implements `posttrain.core.protocols.Engine`."""

    model: Backed

    def __init__(
        self, model: Backed, tokenizer: Tokenizer, slots: int = 256, precision: str = "float32", own: bool = False
    ) -> None:
        super().__init__(model, tokenizer, slots, precision, own)
        self._cohorts: list[_Cohort] = []
        self._placeholders = 0  # number of times that a picture's placeholder would have been sampled
        known = inspect.signature(model.inner.base_model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in known else "past_key_values"
        self._positions = "position_ids" in known
        with torch.no_grad():
            self._pads = self._padding_is_free()

    @property
    def backend(self) -> str:
        """Return a description of the implementation: the model's class."""
        return f"{type(self.model.inner).__name__} of transformers, with its cache"

    def counts(self) -> dict[str, float]:
        """See `posttrain.core.protocols.Counting`."""
        return {} if self.model.vision is None else {"placeholders": float(self._placeholders)}

    def poll(self) -> list[Completion]:
        done = super().poll()
        if not self._running:
            self._cohorts.clear()  # the next update needs the memory
        return done

    def close(self) -> None:
        super().close()
        self._cohorts.clear()

    def _began(self, request: Request) -> RunningReply:
        return _RoutedReply(request)

    def _completion(self, running: RunningReply, stopped: bool) -> Completion:
        done = super()._completion(running, stopped)
        if not isinstance(running, _RoutedReply) or not running.experts:
            return done
        prompt, *others = running.experts
        last = np.full((1, *prompt.shape[1:]), UNKNOWN, np.int16)  # nothing was sampled after it
        return replace(done, prompt_experts=prompt, experts=np.concatenate([*others, last]))

    def _admits(self) -> bool:
        """Return whether waiting requests may begin: only when many slots are free, since each admission makes a
        cohort.
        """
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
            for some in self._beginning(
                [r for r in self._running if isinstance(r, _RoutedReply) and id(r) not in place]
            ):
                cohort, states = self._prefilled(some)
                self._cohorts.append(cohort)
                self._note(found, place, cohort, states)
        order = torch.tensor([place[id(r)] for r in self._running], device=found[0].device)
        return self.model.head.logits(torch.cat(found).index_select(0, order))

    @cached_property
    def uniform_tokens(self) -> UniformTokens:
        vision, head = self.model.vision, self.model.head
        never = vision.placeholders if vision is not None else ()
        return UniformTokens.of(self.tokenizer, self.eos_ids, self.model.config.vocab, head.device, never)

    def _drawn(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample tokens, never a placeholder of pictures; count how often a placeholder would have been sampled."""
        vision = self.model.vision
        if vision is not None:
            free, _ = super()._drawn(logits - self.model.scale * vision.forbidden)
            self._placeholders += int(torch.isin(free, torch.tensor(vision.placeholders, device=free.device)).sum())
        return super()._drawn(logits)

    def _note(self, found: list[Tensor], place: dict[int, int], cohort: _Cohort, states: Tensor) -> None:
        before = sum(len(x) for x in found)
        place.update({id(r): before + row for row, r in enumerate(cohort.rows) if r is not None})
        found.append(states)

    def _beginning(self, new: Sequence[_RoutedReply]) -> list[list[_RoutedReply]]:
        """Divide new requests into cohorts."""
        if self._pads or not new:
            return [list(new)] if new else []
        by_length: dict[int, list[_RoutedReply]] = {}
        for running in new:
            by_length.setdefault(len(running.request.prompt), []).append(running)
        return list(by_length.values())

    def _prefilled(self, some: list[_RoutedReply]) -> tuple[_Cohort, Tensor]:
        """Prefill these requests. Return their cohort, and the hidden states [B, D] for sampling their first tokens."""
        asked = {_key(r): r.request for r in some}
        prompts, seen = [request.prompt for request in asked.values()], [request.media for request in asked.values()]
        longest, device = max(map(len, prompts)), self.model.head.device
        padding = torch.tensor([longest - len(p) for p in prompts], device=device)
        tokens = torch.tensor([[self.model.filler] * (longest - len(p)) + list(p) for p in prompts], device=device)
        places = _places(prompts, seen, longest).to(device)
        features = self.model.features(m for media in seen for m in media)
        parts = []
        for k in range(0, len(prompts), many := max(1, PREFILL // longest)):
            own = slice(k, k + many)
            digests = [m.digest for media in seen[own] for m in sorted(media, key=lambda m: m.start)]
            with self.model.shown(digests, features) as more:
                parts.append(self._computed(tokens[own], None, padding[own], longest, places[..., own, :], more))
        cache, states = parts[0][1], torch.cat([states for states, _, _ in parts])
        if len(parts) > 1:
            cache = _joined([cache for _, cache, _ in parts])
        number = {key: k for k, key in enumerate(asked)}
        routes = [taken for _, _, experts in parts if experts is not None for taken in experts]
        for running in some if routes else ():
            running.experts.append(routes[number[_key(running)]][longest - len(running.request.prompt) :])
        row = torch.tensor([number[_key(r)] for r in some], device=device)
        cache.reorder_cache(row)
        place = places[..., -1].reshape(-1, len(prompts))[0, row]
        return _Cohort(cache, list(some), padding[row], place, longest), states[row]

    def _decoded(self, cohort: _Cohort) -> Tensor:
        """Decode one token of each row. Return the hidden states [B, D] of the rows' last tokens."""
        alive = cohort.alive
        if len(alive) < SPARSE * len(cohort.rows):
            index = torch.tensor(alive, device=cohort.padding.device)
            cohort.cache.reorder_cache(index)
            cohort.rows = [cohort.rows[row] for row in alive]
            cohort.padding, cohort.place = cohort.padding[index], cohort.place[index]
        last = [0 if r is None else r.tokens[-1] for r in cohort.rows]
        tokens = torch.tensor(last, device=cohort.padding.device)[:, None]
        cohort.length += 1
        cohort.place = cohort.place + 1
        place = cohort.place[:, None]
        found = self._computed(tokens, cohort.cache, cohort.padding, cohort.length, place, {})
        states, cohort.cache, experts = found
        for running, own in zip(cohort.rows, experts, strict=True) if experts is not None else ():
            if running is not None:
                running.experts.append(own)
        return states

    def _computed(
        self, tokens: Tensor, cache: Any, padding: Tensor, length: int, places: Tensor, more: dict[str, Any]
    ) -> tuple[Tensor, Any, NDArray[np.int16] | None]:
        """Run the model on tokens [B, n] behind `length` tokens. Return (hidden states [B, D] of the last tokens, the
        cache, experts [B, n, M, k] if recorded).

        `places`: positions [B, n], or [3, B, n] in time, height and width; `more`: further inputs of the model.
        """
        cache = self.model.new_cache() if cache is None else cache
        more = {**more, self._cache_name: cache}
        if padding.any():
            column = torch.arange(length, device=tokens.device)
            more["attention_mask"] = (column[None, :] >= padding[:, None]).long()
        if self._positions:
            more["position_ids"] = places
        with self._recording() as (routed, every):
            out = self.model.inner.base_model(input_ids=tokens, use_cache=True, **more)
            every(torch.arange(tokens.numel(), device=tokens.device))
        experts = routed.taken[0].unflatten(0, tokens.shape).short().cpu().numpy() if routed.taken else None
        return out.last_hidden_state[:, -1], cache, experts

    @contextmanager
    def _recording(self) -> Iterator[tuple[Routed, Any]]:
        """Context that records the experts of the tokens in a call of the model, if the model is to replay them
        later.
        """
        model = self.model
        with watching(model) as routed, calling(model, model.routers if model.replays else None, None) as matter:
            yield routed, matter

    def _padding_is_free(self) -> bool:
        """Return whether padding does not change the log-probabilities after a prompt and after one more token."""
        device, vocab = self.model.head.device, self.model.config.vocab
        short = [(37 * n + 11) % vocab for n in range(5)]
        zero, four = (torch.tensor(p, device=device) for p in ([0], [4]))
        next_token = torch.tensor([[3 % vocab]], device=device)
        with self.model.decoding():
            found = []
            for tokens, padding in ((short, zero), ([short[0]] * 4 + short, four)):
                places = _places([short], [()], len(tokens)).to(device)
                states, cache, _ = self._computed(
                    torch.tensor([tokens], device=device), None, padding, len(tokens), places, {}
                )
                behind = places[:, -1:] + 1
                more, _, _ = self._computed(next_token, cache, padding, len(tokens) + 1, behind, {})
                found.append(self.model.head.logits(torch.cat([states, more])).log_softmax(-1))
        apart = (found[0] - found[1]).abs().max()
        return bool(apart <= TOLERANCE)


def _key(running: RunningReply) -> tuple[Any, ...]:
    """Return a key that is equal for equal prompts with equal pictures."""
    return running.request.prompt, running.request.media


def _places(prompts: Sequence[Sequence[int]], seen: Sequence[Sequence[Media]], longest: int) -> Tensor:
    """Return positions [B, longest], or [3, B, longest] if a picture has a height and a width; 0 at padding."""
    rows = position_rows(map(len, prompts), seen)
    return torch.stack([torch.nn.functional.pad(row, (longest - row.shape[-1], 0)) for row in rows], -2)


def _joined(caches: Sequence[Any]) -> Any:
    """Concatenate several caches along the rows."""
    first = caches[0]
    for number, layer in enumerate(first.layers):
        others = [cache.layers[number] for cache in caches[1:]]
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.ndim:  # a tensor without dimensions is common to all rows
                setattr(layer, name, torch.cat([value, *(getattr(o, name) for o in others)]))
            elif isinstance(value, dict) and value and all(isinstance(v, Tensor) for v in value.values()):
                setattr(
                    layer, name, {k: torch.cat([v, *(getattr(o, name)[k] for o in others)]) for k, v in value.items()}
                )
    return first
