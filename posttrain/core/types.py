"""The nouns that no tensor is needed for: tasks, turns, replies, transcripts, rollouts.

Batches of them are in `posttrain.core.batch`, and the protocols that take them in `posttrain.core.protocols`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeVar, dataclass_transform

if TYPE_CHECKING:  # numpy is imported where an array is made: commands that make none start sooner
    import numpy as np
    from numpy.typing import NDArray

Task = dict[str, Any]
"""One dataset row. `task["id"]` names its group: all rollouts of one id are compared with each other.

Real example: {"id": "multiarith-1", "prompt": "Debby had 32 pieces ...", "answer": "39"}
"""
VERIFIER_PREFIX = "verify:"
"""Of the name of a verifier as a reward: `--env verify:math`."""


_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True)
def value_type(cls: type[_Class]) -> type[_Class]:
    """A dataclass whose objects are not changed once made, for what each rollout has several of.

    The type checker alone sees to that: where Python does (`frozen=True`), one takes five times as long to make.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class UserError(ValueError):
    """A mistake of the user's. The message is one line with the fix; the command line prints it and exits with 2."""

    code = 2  # of the command's exit


class StopRun(Exception):
    """Raised by a hook to end the run after this step, with a checkpoint. The message is the reason that is shown."""


def succeeds(reward: Any, threshold: float) -> Any:
    """Whether a reward (a number, an array, a tensor) counts as a success: it may be a sum of parts, up to rounding."""
    return reward >= threshold - 1e-6


PART_SEPARATOR = "/"
"""Character between the name of a part of a mixture and the id of a task."""


# -- messages between an environment and the policy --------------------------------------------------------------------


class StopReason(StrEnum):
    """The reason why a completion or an episode ended, as observed; never guessed afterwards from the last token."""

    EOS = "eos"  # sampled one of the model's end-of-sequence ids (which stays part of the sampled tokens)
    STOP = "stop"  # its text reached one of the stop strings of the request
    LENGTH = "length"  # spent its token budget, or the episode's: truncated
    CONTEXT = "context"  # filled the model's context window: truncated
    TURNS = "turns"  # the episode had as many turns as a run allows: truncated
    CALLS = "calls"  # its tools gave as many answers as a run allows: truncated
    TIME = "time"  # the episode took longer than a run allows: truncated

    @property
    def truncated(self) -> bool:
        return self is not StopReason.EOS and self is not StopReason.STOP


class InvalidKind(StrEnum):
    """The cause of an invalid reward. Metrics give the share of each kind that comes up, as `invalid/timeout`."""

    REPORTED = "reported"  # the environment reported it itself
    RAISED = "raised"  # its code raised
    UNREADABLE = "unreadable"  # its output is no turn and no reward
    TIMEOUT = "timeout"  # it took longer than a step may take
    DIED = "died"  # its process ended
    UNANSWERED = "unanswered"  # a service that was asked has no answer
    DIVERGED = "diverged"  # its replay gave other turns


@dataclass(frozen=True)
class Invalid:
    """A reward that could not be computed. It is counted and left out of its group; it is never taken for 0."""

    reason: str
    kind: InvalidKind = InvalidKind.REPORTED


ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of a chat message. A model's template defines which of them it knows."""


@value_type
class Turn:
    """The next input of the model from an environment, and how to sample the reply."""

    text: str | None = None  # appended unchanged
    messages: Sequence[Mapping[str, Any]] | None = None  # or: chat messages, rendered by the tokenizer's template
    tokens: Sequence[int] | None = None  # or: token ids, always the whole of a context
    stop: tuple[str, ...] = ()  # stop strings; the reply ends with the one that was reached
    reward: float = 0.0  # reward of the step that led here (0: none); where sides take turns, of this side's last step
    max_tokens: int | None = None  # budget of this reply; None: the run's
    tool: bool = False  # whether this is a tool's answer (messages of the role "tool" are in any case)
    fresh: bool = False  # begin a transcript of its own: nothing earlier is in the model's context
    learn: bool = True  # whether the reply to this is learned from
    whole: bool = False  # this is the policy's whole context: it continues a context of the episode, or begins one
    tools: Iterable[Any] | None = None  # with messages that begin a context: functions, or their JSON schemas
    side: str = ""  # the side to move, where the policy plays several: each has contexts and a rollout of its own


@dataclass(frozen=True)
class Ask:
    """A question of an environment to a service of the run: `score = yield Ask("reward-model", text)`.

    The result is the service's answer, plain JSON data, or an Invalid, which the environment may handle or return.
    """

    service: str  # its name, such as "reward-model" or "judge"
    content: Any  # plain JSON data: text, numbers, lists, dicts with text for keys


@dataclass(frozen=True)
class Reasoned:
    """A service's answer with the texts that it was read from, a judge's reasons: environments get the answer alone."""

    answer: Any  # plain JSON data, or Invalid
    said: tuple[str, ...]  # a call or a vote each, in their order


def bare(answer: Any) -> Any:
    """Return a service's answer in the form that an environment gets."""
    return answer.answer if isinstance(answer, Reasoned) else answer


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply."""

    name: str  # of the tool; "" where none can be read
    arguments: Mapping[str, Any]  # JSON data by name
    end: int = 0  # characters of the reply up to and with the call: where a `SpanReward` for it ends
    problem: str | None = None  # the reason why it cannot be executed, if it is malformed
    id: str = ""  # distinguishes the calls of a context; `reply.number` is the reply of the episode that has it


class Reply(str):
    """The model's reply: the text of the sampled tokens up to and with the stop string, without the end-of-sequence token.

    It is a `str` for environments that only read it; `reply.stop` is the reason why it ended. An empty reply whose stop is
    truncated was not sampled: the episode has run out of that. The environment may still
    score what there is, and gets nothing else if it goes on asking (only a fresh turn has its context to itself).
    """

    stop: StopReason
    tool_calls: tuple[ToolCall, ...]  # in order, malformed ones too, where a turn lists tools for the model
    number: int  # of the episode's replies: 0 is the first
    before_calls: int | None  # characters before the first call of a tool; None: it makes none
    sampled: Completion | None  # the same as tokens; None where nothing was
    read: int  # tokens before it

    def __new__(
        cls,
        text: str,
        stop: StopReason = StopReason.EOS,
        tool_calls: Sequence[ToolCall] = (),
        number: int = 0,
        before_calls: int | None = None,
        sampled: Completion | None = None,
        read: int = 0,
    ) -> Reply:
        reply = super().__new__(cls, text)
        reply.stop, reply.tool_calls, reply.number = stop, tuple(tool_calls), number
        reply.before_calls, reply.sampled, reply.read = before_calls, sampled, read
        return reply

    def __reduce__(self) -> tuple[Any, ...]:
        said = self.stop, self.tool_calls, self.number, self.before_calls, self.sampled, self.read
        return Reply, (str(self), *said)


@dataclass(frozen=True)
class SpanReward:
    """A reward for a part of a reply, earned by its last token. It adds to the reward of the episode."""

    end: int  # characters of the reply before the end of the part
    reward: float
    reply: int = -1  # which reply of the episode: 0 the first, -1 the last (of the side that is graded)


@dataclass(frozen=True)
class Graded:
    """A verdict that also names parts of replies: `return Graded(1.0, [SpanReward(reply.index("</think>"), 0.5)])`."""

    reward: float | Mapping[str, float]
    spans: Sequence[SpanReward] = ()


@dataclass(frozen=True)
class Sides:
    """The rewards of the sides of a game: `return Sides({"black": 1.0, "white": -1.0})`.

    Any other verdict is that of all sides.
    """

    verdicts: Mapping[str, float | Mapping[str, float] | Graded | Invalid]


Verdict = float | dict[str, float] | Graded | Sides | Invalid
"""The score of a reply. A dict names the parts of the reward: their sum is the reward, unless it has the key "reward". A
part "outcome" is what `SUCCESS` is compared with, so that other parts change no accuracy."""

OUTCOME = "outcome"
"""The part of a reward that decides whether a reply is right."""

Env = Callable[[Task], Generator["Turn | str | Ask", Any, Verdict]]
"""A generator function: yields the model's input, receives the model's reply, returns the reward.

To an `Ask` it receives the answer of a service instead of a `Reply`."""

AsyncEnv = Callable[[Task], AsyncGenerator[Any, Any]]
"""The same, written with `async def`: it yields turns and questions, and last of all the verdict."""

Reward = Callable[[Task, str], Verdict]
"""A plain function (task, reply) -> reward; it is lifted to an environment of one turn."""


@value_type
class Sampling:
    """The parameters of one completion. Its result depends on these fields, the prompt and the weights alone."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0  # token i is drawn with the uniform number (seed, i): independent of the rest of the batch
    begun: int = (
        0  # tokens at the end of the prompt with which the reply began: they are its own where it is read as text
    )


@value_type
class Completion:
    """An engine's result for one request."""

    id: int
    tokens: Sequence[int]  # [n] sampled, a final end-of-sequence token included
    logp: Sequence[float]  # [n] under the distribution that sampled them (temperature, top-p, top-k applied)
    text: str  # cut after the stop string; without the end-of-sequence token
    stop: StopReason
    version: int  # of the weights that sampled it; of the oldest ones, where there are several
    experts: NDArray[np.int16] | None = None  # [n, layers, k] where the model routes tokens: the experts that each took
    runs: tuple[tuple[int, int], ...] = ()  # (tokens, version) in order, where weights changed within it
    prompt_experts: NDArray[np.int16] | None = None  # [tokens of the prompt, layers, k]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a call: by default each field goes with its name, and is set by itself."""
        told = self.id, self.tokens, self.logp, self.text, self.stop, self.version
        return Completion, (*told, self.experts, self.runs, self.prompt_experts)

    def continued(self, more: Completion) -> Completion:
        """Return this completion and the one sampled after it, whose text is already that of both."""
        runs = tuple(run for part in (self, more) for run in part.runs or ((len(part.tokens), part.version),))
        tokens, logp = [*self.tokens, *more.tokens], [*self.logp, *more.logp]
        return Completion(more.id, tokens, logp, more.text, more.stop, self.version, None, runs)


# -- labels of replies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One response to a prompt is better than another."""

    better: int  # which of the example's responses
    worse: int
    share: float = 1.0  # its weight beside the others, such as the number of people who agree
    margin: float = 0.0  # by how much it is better


# -- tokens ------------------------------------------------------------------------------------------------------------


Mask = Literal["assistant", "last", "all"]
"""Messages of a demonstration that are trained: each one of the assistant, its last one, or every token of the text."""


class SpanKind(StrEnum):
    """The origin of the tokens of a span."""

    PROMPT = "prompt"  # the policy's first input
    SAMPLED = "sampled"  # by the policy
    IMITATED = "imitated"  # written by the author of a demonstration
    OBSERVATION = "observation"  # the environment's later text, and the chat template's between turns
    TOOL = "tool"  # a tool's answer


@value_type
class Span:
    """A run of tokens of one transcript that came at once."""

    kind: SpanKind
    start: int  # place of its first token
    length: int
    learned: bool = False  # whether its tokens are scored: they have a gradient
    version: int | None = None  # of the weights that sampled it
    experts: NDArray[np.int16] | None = field(default=None, compare=False)  # [length, layers, k]


@dataclass(frozen=True)
class Media:
    """A picture (or sound, or film) in a transcript. The tokens at its place are only placeholders."""

    start: int  # place of the first of these tokens
    length: int  # how many they are
    digest: str  # hash of the content, in hexadecimal
    grid: tuple[int, ...] = ()  # its tokens in time, height and width, for models that place them so


def positions_of(length: int, media: Sequence[Media]) -> NDArray[np.int64] | None:
    """[3, length]: places in time, height and width. None where no picture has a grid, and all tokens are in one line.

    Text advances in all three alike. A picture begins where the text has come, each of its tokens at its row and column,
    and text goes on behind the longest of its sides (M-RoPE, Wang et al. 2024, arXiv 2409.12191, section 2.1).
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

    A token becomes trainable through `sample` (the policy's own) or `imitate` (a demonstration's) and through nothing
    else: masks are by provenance, never by token id.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.spans: list[Span] = []  # of all tokens, in order
        self.logp: list[float] = []  # the engine's, of each sampled token
        self.media: list[Media] = []
        self.forks: tuple[int, ...] = ()  # numbers of tokens at which this transcript or the one before it branched off
        self.n_scored = 0  # tokens that have a gradient

    def observe(self, tokens: Iterable[int], kind: SpanKind | None = None, media: Iterable[Media] = ()) -> None:
        """Append the policy's input. Never trained on. `kind`: the prompt at first, then an observation.

        `media`: the pictures in these tokens, their places counted in the transcript.
        """
        kind = kind or (SpanKind.OBSERVATION if self.tokens else SpanKind.PROMPT)
        assert kind not in (SpanKind.SAMPLED, SpanKind.IMITATED), "use sample or imitate"
        self._append(tokens, kind)
        self.media.extend(media)

    def sample(self, completion: Completion, learn: bool = True) -> None:
        """Append the policy's sampled tokens. Without `learn`, none of it is scored."""
        assert len(completion.tokens) == len(completion.logp), "one log-probability per sampled token"
        self.logp.extend(completion.logp)
        if completion.prompt_experts is not None and len(completion.prompt_experts) == len(self.tokens):
            self._routed(completion.prompt_experts)
        if not completion.runs:
            return self._append(completion.tokens, SpanKind.SAMPLED, learn, completion.version, completion.experts)
        assert completion.experts is None, "experts are of one weights' tokens"
        start = 0
        for count, version in completion.runs:
            self._append(completion.tokens[start : start + count], SpanKind.SAMPLED, learn, version)
            start += count
        assert start == len(completion.tokens), "every token has its weights"

    def _routed(self, experts: NDArray[np.int16]) -> None:
        """Store the experts [L, layers, k] of all tokens so far; known ones stay."""
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
        """Return another transcript that begins with all tokens so far. The shared tokens are computed once."""
        other = Transcript()
        other.tokens, other.spans, other.logp = list(self.tokens), list(self.spans), list(self.logp)
        other.media, other.n_scored = list(self.media), self.n_scored
        other.forks = (*self.forks, len(self.tokens))
        return other

    def behind(self, prompt: Sequence[int]) -> Transcript:
        """Return all of this after another prompt: for a reader whose prompt differs."""
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
        """[3, L], for models that place tokens in time, height and width: see `positions_of`."""
        return positions_of(len(self), self.media)

    @property
    def scored(self) -> NDArray[np.int64]:
        """Places of the tokens that have a gradient, in order: [n]."""
        import numpy as np

        runs = [np.arange(s.start, s.start + s.length) for s in self.spans if s.learned]
        return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)

    @property
    def scored_logp(self) -> list[float] | None:
        """The engine's log-probabilities of the scored tokens, [n]; None where any of them is imitated."""
        last = self.spans[-1] if len(self.spans) == 2 else None
        if last is not None and last.kind is SpanKind.SAMPLED and self.n_scored == len(self.logp) == last.length:
            return self.logp  # a prompt and its reply, as most are
        if any(s.kind is SpanKind.IMITATED for s in self.spans):
            return None
        sampled = [s for s in self.spans if s.kind is SpanKind.SAMPLED]
        ends = list(accumulate(s.length for s in sampled))
        runs = [self.logp[end - s.length : end] for s, end in zip(sampled, ends, strict=True) if s.learned]
        return [x for run in runs for x in run]

    @property
    def sampler_logp(self) -> NDArray[np.float32] | None:
        """`scored_logp` as an array."""
        import numpy as np

        found = self.scored_logp
        return None if found is None else np.array(found, dtype=np.float32)

    @property
    def n_sampled(self) -> int:
        return len(self.logp)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON data; `from_dict` gives the same transcript again."""
        plain: dict[str, Any] = {
            "tokens": list(map(int, self.tokens)),
            "spans": [[str(s.kind), s.length, int(s.learned), s.version] for s in self.spans],
            "logp": list(self.logp),
        }
        if any(s.experts is not None for s in self.spans):
            plain["experts"] = [None if s.experts is None else s.experts.tolist() for s in self.spans]
        if self.media:
            plain["media"] = [[m.start, m.length, m.digest, list(m.grid)] for m in self.media]
        if self.forks:
            plain["forks"] = list(self.forks)
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Transcript:
        """Return the inverse of `as_dict`."""
        import numpy as np

        found = Transcript()
        found.tokens, found.logp = list(plain["tokens"]), list(plain["logp"])
        experts = plain.get("experts") or [None] * len(plain["spans"])
        start = 0
        for (kind, length, learned, version), routes in zip(plain["spans"], experts, strict=True):
            routed = None if routes is None else np.array(routes, dtype=np.int16)
            found.spans.append(Span(SpanKind(kind), start, length, bool(learned), version, routed))
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
    ) -> None:
        before = len(self.tokens)
        self.tokens.extend(tokens)
        if length := len(self.tokens) - before:
            self.spans.append(Span(kind, before, length, learned, version, experts))
            self.n_scored += length * learned


@value_type
class PlayedTurn:
    """One side's words in an episode, for readers: an entry of `Rollout.turns`."""

    kind: SpanKind  # its origin
    text: str
    transcript: int  # which of the rollout's
    start: int  # place of its first token there
    length: int  # tokens
    reward: float = 0.0  # the environment's reward of this step, before the episode's end
    seconds: float = field(default=0.0, compare=False)  # that it took: depends on the clock, and goes with the timings
    cut: int = 0  # tokens of it that did not fit the context and were left out
    calls: tuple[ToolCall, ...] = ()  # of tools, in a reply


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt with some responses and their labels: comparisons, or a label for each response.

    The responses are transcripts that begin with the same prompt, which is computed once for all of them.
    """

    responses: Sequence[Transcript]
    comparisons: Sequence[Comparison] = ()
    labels: Sequence[
        tuple[float, ...]
    ] = ()  # of each response: one a scored span (a reply has one, a solution one a step)

    @property
    def n_scored(self) -> int:
        return sum(t.n_scored for t in self.responses)


@value_type
class Piece:
    """A reply that is learned from, and whose it is: rollouts of a group that branched off share their first replies."""

    length: int  # tokens
    member: int  # of the group, for which it was sampled
    reply: int  # of that one's replies: 0 is the first


@dataclass(frozen=True)
class Branch:
    """The place where a rollout branched off another one of its group."""

    of: int  # which member of the group
    turns: int  # of its own turns, the first ones, that are the other's
    taken: tuple[int, ...]  # sampled tokens of each transcript, the first ones, that are the other's


@dataclass(slots=True)
class Rollout:
    """One episode with its reward."""

    task: Task
    group: str
    transcripts: list[Transcript]  # one, unless turns began afresh
    reward: float | Invalid
    rewards: dict[str, float] = field(default_factory=dict)  # its named parts
    steps: list[tuple[int, float]] = field(default_factory=list)  # (scored tokens up to its end, step reward)
    stop: StopReason = StopReason.EOS  # of the episode: of its last completion, or what it ran out of
    turns: list[PlayedTurn] = field(default_factory=list)
    text: str = ""  # the sampled text, turns joined; for reading only
    prompt: str = ""  # the first thing the policy saw; for reading only
    answers: list[tuple[str, Any]] = field(
        default_factory=list
    )  # of services: name, JSON, Invalid or Reasoned; for reading
    side: str = ""  # of the episode, where the policy plays several: each has a rollout, and is compared with its like
    pieces: list[Piece] = field(default_factory=list)  # all scored tokens, in order; []: its group does not branch
    branch: Branch | None = None  # where it left another one; None: it began with the prompt
    notes: dict[str, Any] = field(default_factory=dict)  # notes of its environment: JSON data; for reading only
    asked: str = (
        ""  # of a prompt of messages, its user's last message, which distinguishes it from others; for reading only
    )
    greedy: bool = False  # sampled at temperature 0 as the baseline of its group: it is not learned from
    baseline: float | None = None  # the reward of the greedy rollout of its group, if it has one
    seconds: float = field(default=0.0, compare=False)  # from its last turn to its reward: depends on the clock

    @property
    def n_scored(self) -> int:
        """Tokens that are learned from: n_i of the formulas."""
        count = 0  # a loop: it is asked for several times a step, and a comprehension takes twice as long
        for transcript in self.transcripts:
            count += transcript.n_scored
        return count

    @property
    def n_sampled(self) -> int:
        """Tokens that the policy sampled, learned from or not: what budgets count."""
        count = 0
        for transcript in self.transcripts:
            count += len(transcript.logp)
        return count

    @property
    def outcome(self) -> float:
        """The number that `success` is compared with: the part "outcome" of a valid reward, or else the whole reward."""
        assert not isinstance(self.reward, Invalid), "an invalid reward has no outcome"
        return self.rewards.get(OUTCOME, self.reward)

    @property
    def compared(self) -> tuple[str, str]:
        """The rollouts that it is compared with: those of its group with the same side."""
        return self.group, self.side

    @property
    def n_own(self) -> int:
        """Tokens that were sampled for it alone: without those of the rollout that it branched off."""
        return self.n_sampled - (sum(self.branch.taken) if self.branch else 0)

    @property
    def version(self) -> int:
        """The version of the oldest weights that sampled any of it; 0 if none did."""
        found = [s.version for t in self.transcripts for s in t.spans if s.version is not None]
        return min(found, default=0)


class Fate(StrEnum):
    """The fate of a rollout in a step: exactly one of these."""

    TRAINED = "trained"  # an update of the step was given it
    EQUAL = "equal group"  # all rewards of its group are equal, and nothing but the advantage would move its tokens
    INVALID = "invalid"  # its reward is none, or the policy wrote nothing
    SMALL = "group too small"  # it is valid, and too few others of its group are
    REPLACED = "replaced"  # dynamic sampling left its group out, and sampled another one if its budget allowed
    FILTERED = "filtered"  # a filter of the row left it out, or its teacher cannot read it
    BASELINE = "baseline"  # a greedy reply, whose reward is the baseline of its group
    UNSELECTED = "not selected"  # no update was given it, though its group has a signal: see `Outcome.why`


@value_type
class Outcome:
    """A rollout of a step and its use in the step, for the record."""

    rollout: Rollout
    advantage: float | None = None  # mean over its scored tokens; None: nothing was credited to it
    fate: Fate = Fate.TRAINED
    why: str = ""  # of the fate, in words, such as "cut off after 512 tokens"
    flags: tuple[str, ...] = ()  # further remarks: see `posttrain.training.sources.ledger`
    shaping: float = 0.0  # the addition of shaping to its reward
    penalty: float = 0.0  # the deduction of a KL in the reward, over all its tokens
    replayed: bool = False  # whether an earlier step sampled it, and this one learned from it again
    member: int | None = None  # which response of its preference example; None: of none
    label: Any = None  # JSON data of a response's labels: see `posttrain.training.sources.example_recording`
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)  # column -> [n_i], of each scored token
