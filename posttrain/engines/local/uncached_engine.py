"""An engine without a cache for any `Model`: every token is computed from the whole sequence.

It serves kinds of models without a special engine, and shows the behaviour of engines in the simplest form. Its cost
grows with the square of a reply's length.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.core.batch import Layout
from posttrain.core.protocols import Engine, Model, VisionEngine
from posttrain.core.transcripts import Media, positions_of
from posttrain.core.types import Completion, Sampling
from posttrain.engines.local.engine_weights import copy_weights
from posttrain.engines.local.sampler import Exploration, UniformTokens, sample, uniform
from posttrain.engines.request import Request, complete, end_ids, reached_stop, stop_window
from posttrain.models.tokenizer.tokenizer import Tokenizer


@dataclass
class RunningReply:
    """A request, and the part of its reply that has been sampled."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.tokens)


class UncachedEngine:
    """Engine without a cache; implements `posttrain.core.protocols.Engine`. `slots`: maximum of concurrent requests.

    `own`: the model belongs to the engine, and a weight sync overwrites its weights; otherwise it is the learner's.
    """

    batch_invariant = False  # sequences are computed together

    def __init__(
        self, model: Model, tokenizer: Tokenizer, slots: int = 256, precision: str = "float32", own: bool = False
    ) -> None:
        self.model, self.tokenizer, self.slots, self.precision, self.own = model, tokenizer, slots, precision, own
        self.eos_ids = end_ids(model, tokenizer)
        self.version = 0
        self._waiting: deque[Request] = deque()
        self._running: list[RunningReply] = []

    @property
    def backend(self) -> str:
        """Return a description of the implementation: the model's class."""
        return f"{type(self.model).__name__}, whole sequence computed for each token"

    def load(self, weights: Any, version: int) -> None:
        """Load weights of a version. If the weights are shared with the learner, only set the version."""
        assert not self._running and not self._waiting, "weights change between batches of rollouts, not within one"
        assert self.own or weights is self.model, "this engine shares the learner's weights"
        if self.own:
            copy_weights(self.model, weights)
        self.version = version

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Queue one request. Raises UserError if the prompt leaves no room for a reply. `keep` has no effect without a
        cache.
        """
        self.submit_with_media(id, prompt, (), sampling)

    def submit_with_media(
        self, id: int, prompt: Sequence[int], media: Sequence[Media], sampling: Sampling, keep: bool = False
    ) -> None:
        """See `posttrain.core.protocols.VisionEngine`."""
        request = Request(id, tuple(prompt), sampling, media=tuple(media))
        self._waiting.append(request.check(self.model.config.context, self.model.config.vocab))

    def forget(self, id: int) -> None:
        pass

    def copy(self, id: int, to: int, tokens: int) -> None:
        pass

    def cancel(self, id: int) -> None:
        self._waiting = deque(request for request in self._waiting if request.id != id)
        self._running = [running for running in self._running if running.request.id != id]

    def poll(self) -> list[Completion]:
        """Sample one token of every running request. Return the replies that ended with it."""
        if self._admits():
            while self._waiting and len(self._running) < self.slots:
                self._running.append(self._began(self._waiting.popleft()))
        if not self._running:
            return []
        with torch.no_grad(), self._autocast():
            token, logp = self._next()
        for running, one, its in zip(self._running, token.tolist(), logp.tolist(), strict=True):
            running.tokens.append(one)
            running.logp.append(its)
        stopped = [self._stopped(r) for r in self._running]
        ended = [stop or self._ended(r) for r, stop in zip(self._running, stopped, strict=True)]
        done = [self._completion(r, stop) for r, stop, end in zip(self._running, stopped, ended, strict=True) if end]
        self._running = [r for r, end in zip(self._running, ended, strict=True) if not end]
        return done

    def so_far(self, ids: Collection[int]) -> dict[int, tuple[list[int], list[float]]]:
        return {r.request.id: (list(r.tokens), list(r.logp)) for r in self._running if r.request.id in ids}

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _began(self, request: Request) -> RunningReply:
        return RunningReply(request)

    def _admits(self) -> bool:
        """Return whether waiting requests may begin in free slots."""
        return True

    def _logits(self) -> Tensor:
        """Compute logits [B, V] of the next token of each running request."""
        device, sequences = self.model.head.device, [r.sequence for r in self._running]
        length = [len(s) for s in sequences]
        end = torch.tensor(length).cumsum(0)
        start = (end - torch.tensor(length)).tolist()
        seen = [r.request.media for r in self._running]
        media = [replace(m, start=m.start + at) for own, at in zip(seen, start, strict=True) for m in own]
        layout = Layout(
            torch.tensor([t for s in sequences for t in s], device=device),
            torch.cat(position_rows(length, seen), -1).to(device),
            tuple(start),
            tuple(length),
            (-1,) * len(length),
            tuple(media),
        )
        return self.model.head.logits(self.model.hidden(layout, (end - 1).to(device)))

    def _next(self) -> tuple[Tensor, Tensor]:
        """Sample the next token of each running request. Return tokens and log-probabilities, [B] each."""
        return self._drawn(self._logits())

    def _drawn(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample from logits [B, V]. Return tokens and log-probabilities, [B] each."""
        device = self.model.head.device
        asked = [r.request.sampling for r in self._running]

        def column(value: Callable[[Sampling], float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([value(s) for s in asked], dtype=dtype, device=device)

        count = torch.tensor([len(r.tokens) for r in self._running], device=device)
        seed = column(lambda s: s.seed, torch.int64)
        temperature, top_k = column(lambda s: s.temperature), column(lambda s: s.top_k, torch.int64)
        explored = None
        if any(s.epsilon for s in asked):
            explored = Exploration.drawn(column(lambda s: s.epsilon), seed, count, self.uniform_tokens)
        how = temperature, column(lambda s: s.top_p), top_k, temperature == 0, explored
        return sample(logits, uniform(seed, count), *how)

    @cached_property
    def uniform_tokens(self) -> UniformTokens:
        """The tokens among which epsilon-greedy sampling draws."""
        return UniformTokens.of(self.tokenizer, self.eos_ids, self.model.config.vocab, self.model.head.device)

    def _stopped(self, running: RunningReply) -> bool:
        stop = running.request.sampling.stop
        reply = [*running.request.begun, *running.tokens]
        return bool(stop) and reached_stop(self.tokenizer, reply[-stop_window(stop) :], stop)

    def _ended(self, running: RunningReply) -> bool:
        full = len(running.tokens) >= running.request.budget(self.model.config.context)
        return full or running.tokens[-1] in self.eos_ids

    def _completion(self, running: RunningReply, stopped: bool) -> Completion:
        assert math.isfinite(sum(running.logp)), "a log-probability is not finite: the weights hold NaN or infinities"
        return complete(
            running.request,
            running.tokens,
            running.logp,
            stopped=stopped,
            eos_ids=self.eos_ids,
            tokenizer=self.tokenizer,
            version=self.version,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        device = self.model.head.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.precision == "bfloat16")


def position_rows(lengths: Iterable[int], seen: Iterable[Sequence[Media]]) -> list[Tensor]:
    """Return the positions of several texts, [n] each; [3, n] if a picture of any has a height and a width."""
    places = [(n, positions_of(n, media)) for n, media in zip(lengths, seen, strict=True)]
    rows = [torch.arange(n) if place is None else torch.from_numpy(place) for n, place in places]
    return [row.expand(3, -1) for row in rows] if any(row.ndim == 2 for row in rows) else rows


if TYPE_CHECKING:
    _proof: Callable[..., Engine] = UncachedEngine
    _seeing: Callable[..., VisionEngine] = UncachedEngine
