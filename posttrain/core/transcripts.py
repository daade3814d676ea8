"""The tokens of an episode: who wrote them, and which are trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from posttrain.core.types import Completion, value_type

if TYPE_CHECKING:  # numpy is imported where an array is made: commands that make none start sooner
    import numpy as np
    from numpy.typing import NDArray

Mask = Literal["assistant", "last", "all"]
"""The trained parts of a demonstration: all messages of the assistant, its last one, or every token of the text."""


class SpanKind(StrEnum):
    """The origin of the tokens of a span."""

    PROMPT = "prompt"  # the policy's first input
    SAMPLED = "sampled"  # by the policy
    IMITATED = "imitated"  # written by the author of a demonstration
    OBSERVATION = "observation"  # the environment's later text, and the chat template's between turns
    TOOL = "tool"  # a tool's answer


@value_type
class Span:
    """A run of tokens of one transcript that was added at once."""

    kind: SpanKind
    start: int  # index of its first token in the transcript
    length: int
    learned: bool = False  # whether its tokens are scored, and so have a gradient
    version: int | None = None  # version of the weights that sampled it
    experts: NDArray[np.int16] | None = field(default=None, compare=False)  # [length, layers, k]
    temperature: float | None = None  # of sampling; None: the run's


@dataclass(frozen=True)
class Media:
    """A picture (or sound, or film) in a transcript. The tokens at its place are placeholders."""

    start: int  # place of the first of these tokens
    length: int  # number of these tokens
    digest: str  # hash of the content, in hexadecimal
    grid: tuple[int, ...] = ()  # its tokens in time, height and width, for models that use these as positions


def positions_of(length: int, media: Sequence[Media]) -> NDArray[np.int64] | None:
    """Return the positions [3, length] in time, height and width. None if no picture has a grid: all tokens are in one
    line.

    Text advances in all three alike. A picture begins at the next position of the text, each of its tokens is at its
    row and column, and the text continues after its longest side (M-RoPE, Wang et al. 2024, arXiv 2409.12191, section
    2.1).
    """
    gridded = sorted((m for m in media if m.grid), key=lambda m: m.start) if media else ()
    if not gridded:
        return None
    import numpy as np

    found = np.empty((3, length), dtype=np.int64)
    done, place = 0, 0
    for m in gridded:
        assert m.start >= done and np.prod(m.grid) == m.length, "a picture's tokens fill its grid"
        found[:, done : m.start] = place + np.arange(m.start - done)
        place += m.start - done
        end = min(m.start + m.length, length)
        found[:, m.start : end] = (place + np.indices(m.grid).reshape(3, -1))[:, : end - m.start]
        place, done = place + max(m.grid), end
    found[:, done:] = place + np.arange(length - done)
    return found


class Transcript:
    """The token sequence of one context: append-only.

    A token becomes trainable only through `sample` (the policy's own) or `imitate` (a demonstration's): masks follow
    from the origin of a token, never from its id.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.spans: list[Span] = []  # the spans of all tokens, in order
        self.logp: list[float] = []  # the engine's log-probability of each sampled token
        self.media: list[Media] = []
        self.forks: tuple[int, ...] = ()  # token counts at which this transcript or one that it continues branched off
        self.n_scored = 0  # tokens that have a gradient

    def observe(self, tokens: Iterable[int], kind: SpanKind | None = None, media: Iterable[Media] = ()) -> None:
        """Append tokens of the policy's input, which are never trained. `kind`: by default the prompt at first, then an
        observation.

        `media`: the pictures in these tokens, with positions in the transcript.
        """
        kind = kind or (SpanKind.OBSERVATION if self.tokens else SpanKind.PROMPT)
        assert kind not in (SpanKind.SAMPLED, SpanKind.IMITATED), "use sample or imitate"
        self._append(tokens, kind)
        self.media.extend(media)

    def sample(self, completion: Completion, learn: bool = True, temperature: float | None = None) -> None:
        """Append the policy's sampled tokens. Without `learn`, none of them is scored. `temperature`: None: the run's."""
        assert len(completion.tokens) == len(completion.logp), "one log-probability per sampled token"
        self.logp.extend(completion.logp)
        if completion.prompt_experts is not None and len(completion.prompt_experts) == len(self.tokens):
            self._routed(completion.prompt_experts)
        if not completion.runs:
            version, experts = completion.version, completion.experts
            return self._append(completion.tokens, SpanKind.SAMPLED, learn, version, experts, temperature)
        assert completion.experts is None, "experts are of one weights' tokens"
        start = 0
        for count, version in completion.runs:
            own = completion.tokens[start : start + count]
            self._append(own, SpanKind.SAMPLED, learn, version, temperature=temperature)
            start += count
        assert start == len(completion.tokens), "every token has its weights"

    def _routed(self, experts: NDArray[np.int16]) -> None:
        """Store the experts [L, layers, k] of all tokens so far, except known ones."""
        import numpy as np

        for place, span in enumerate(self.spans):
            told = experts[span.start : span.start + span.length]
            if span.experts is not None:
                told = np.where(span.experts < 0, told, span.experts)
            self.spans[place] = replace(span, experts=told)

    def imitate(self, tokens: Iterable[int]) -> None:
        """Append tokens for the policy to imitate."""
        self._append(tokens, SpanKind.IMITATED, True)

    def branch(self) -> Transcript:
        """Return another transcript that begins with all tokens so far. These shared tokens are computed once."""
        other = Transcript()
        other.tokens, other.spans, other.logp = list(self.tokens), list(self.spans), list(self.logp)
        other.media, other.n_scored = list(self.media), self.n_scored
        other.forks = (*self.forks, len(self.tokens))
        return other

    def with_prompt(self, prompt: Sequence[int]) -> Transcript:
        """Return this transcript with another prompt, for a model whose prompt differs."""
        first, *others = self.spans
        assert first.kind is SpanKind.PROMPT, "the first prompt is replaced"
        moved, other = len(prompt) - first.length, Transcript()
        other.observe(prompt, SpanKind.PROMPT)
        other.tokens += self.tokens[first.length :]
        other.spans += [replace(s, start=s.start + moved) for s in others]
        other.logp, other.n_scored = list(self.logp), self.n_scored
        other.media = [replace(m, start=m.start + moved) for m in self.media if m.start >= first.length]
        other.forks = tuple(fork + moved for fork in self.forks)
        return other

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> NDArray[np.int64] | None:
        """[3, L], for models that place tokens in time, height and width; else None: see `positions_of`."""
        return positions_of(len(self), self.media)

    @property
    def scored(self) -> NDArray[np.int64]:
        """Return the indices [n] of the scored tokens, in order."""
        import numpy as np

        runs = [np.arange(s.start, s.start + s.length) for s in self.spans if s.learned]
        return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)

    @property
    def scored_logp(self) -> list[float] | None:
        """The engine's log-probabilities of the scored tokens, [n]; None if any of them is imitated."""
        last = self.spans[-1] if len(self.spans) == 2 else None
        if last is not None and last.kind is SpanKind.SAMPLED and self.n_scored == len(self.logp) == last.length:
            return self.logp  # a prompt and its reply: the usual case
        if any(s.kind is SpanKind.IMITATED for s in self.spans):
            return None
        sampled = [s for s in self.spans if s.kind is SpanKind.SAMPLED]
        ends = list(accumulate(s.length for s in sampled))
        runs = [self.logp[end - s.length : end] for s, end in zip(sampled, ends, strict=True) if s.learned]
        return [x for run in runs for x in run]

    @property
    def sampler_logp(self) -> NDArray[np.float32] | None:
        """Return `scored_logp` as an array."""
        import numpy as np

        found = self.scored_logp
        return None if found is None else np.array(found, dtype=np.float32)

    @property
    def n_sampled(self) -> int:
        return len(self.logp)

    def as_dict(self) -> dict[str, Any]:
        """Return the transcript as JSON data, from which `from_dict` restores it."""
        plain: dict[str, Any] = {
            "tokens": list(map(int, self.tokens)),
            "spans": [[str(s.kind), s.length, int(s.learned), s.version] for s in self.spans],
            "logp": list(self.logp),
        }
        if any(s.experts is not None for s in self.spans):
            plain["experts"] = [None if s.experts is None else s.experts.tolist() for s in self.spans]
        if any(s.temperature is not None for s in self.spans):
            plain["temperature"] = [s.temperature for s in self.spans]
        if self.media:
            plain["media"] = [[m.start, m.length, m.digest, list(m.grid)] for m in self.media]
        if self.forks:
            plain["forks"] = list(self.forks)
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Transcript:
        """Return the transcript of such data."""
        import numpy as np

        found = Transcript()
        found.tokens, found.logp = list(plain["tokens"]), list(plain["logp"])
        nothing = [None] * len(plain["spans"])
        experts, temperatures = plain.get("experts") or nothing, plain.get("temperature") or nothing
        start = 0
        for (kind, length, learned, version), routes, temperature in zip(
            plain["spans"], experts, temperatures, strict=True
        ):
            routed = None if routes is None else np.array(routes, dtype=np.int16)
            temperature = None if temperature is None else float(temperature)
            found.spans.append(Span(SpanKind(kind), start, length, bool(learned), version, routed, temperature))
            found.n_scored += length * bool(learned)
            start += length
        found.media = [
            Media(start, length, digest, tuple(grid)) for start, length, digest, grid in plain.get("media", ())
        ]
        found.forks = tuple(plain.get("forks", ()))
        return found

    def _append(
        self,
        tokens: Iterable[int],
        kind: SpanKind,
        learned: bool = False,
        version: int | None = None,
        experts: NDArray[np.int16] | None = None,
        temperature: float | None = None,
    ) -> None:
        before = len(self.tokens)
        self.tokens.extend(tokens)
        if length := len(self.tokens) - before:
            self.spans.append(Span(kind, before, length, learned, version, experts, temperature))
            self.n_scored += length * learned
