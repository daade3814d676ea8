"""The types that need no tensor: tasks, turns, replies, transcripts, rollouts.

Batches of rollouts are in `posttrain.core.batch`, and the protocols in `posttrain.core.protocols`.
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
"""Prefix of a verifier's name where it is used as a reward: `--env verify:math`."""


_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True)
def value_type(cls: type[_Class]) -> type[_Class]:
    """Declare a dataclass for small values, several per rollout, that are never changed after construction.

    Only the type checker enforces that: with `frozen=True`, construction takes five times as long.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class UserError(ValueError):
    """A user's mistake. The message is one line with the fix; the command line prints it and exits with 2."""

    code = 2  # exit code of the command


class StopRun(Exception):
    """Raised by a hook to end the run after this step, with a checkpoint. The message is the reason that is shown."""


def succeeds(reward: Any, threshold: float) -> Any:
    """Return whether a reward (number, array or tensor) reaches the threshold, up to the rounding of a sum of parts."""
    return reward >= threshold - 1e-6


PART_SEPARATOR = "/"
"""Separates the name of a part of a mixture from the id of a task."""


# -- messages between an environment and the policy --------------------------------------------------------------------


class StopReason(StrEnum):
    """The reason why a completion or an episode ended, as observed; never inferred afterwards from the last token."""

    EOS = "eos"  # sampled one of the model's end-of-sequence ids, which is one of the sampled tokens
    STOP = "stop"  # its text reached one of the stop strings of the request
    LENGTH = "length"  # spent its token budget, or the episode's: truncated
    CONTEXT = "context"  # filled the model's context window: truncated
    TURNS = "turns"  # the episode reached the run's limit of turns: truncated
    CALLS = "calls"  # the episode reached the run's limit of tool answers: truncated
    TIME = "time"  # the episode reached the run's time limit: truncated

    @property
    def truncated(self) -> bool:
        return self is not StopReason.EOS and self is not StopReason.STOP


class InvalidKind(StrEnum):
    """The cause of an invalid reward. Metrics give the share of each kind that occurs, as `invalid/timeout`."""

    REPORTED = "reported"  # the environment reported it
    RAISED = "raised"  # the environment's code raised an exception
    UNREADABLE = "unreadable"  # the environment's output is neither a turn nor a reward
    TIMEOUT = "timeout"  # a step of the environment exceeded its time limit
    DIED = "died"  # the environment's process ended
    UNANSWERED = "unanswered"  # a service has no answer to the environment's question
    DIVERGED = "diverged"  # a replay gave other turns


@dataclass(frozen=True)
class Invalid:
    """A reward that could not be computed. It is counted and left out of its group; it never counts as 0."""

    reason: str
    kind: InvalidKind = InvalidKind.REPORTED


ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of a chat message. A model's template defines which of these it supports."""


@value_type
class Turn:
    """The environment's next input for the model, and how to sample the reply."""

    text: str | None = None  # appended unchanged
    messages: Sequence[Mapping[str, Any]] | None = None  # or: chat messages, rendered by the tokenizer's template
    tokens: Sequence[int] | None = None  # or: token ids of a whole context
    stop: tuple[str, ...] = ()  # stop strings; the reply ends with the one that was reached
    reward: float = 0.0  # reward of the previous step (0: none); where sides take turns, of this side's last step
    max_tokens: int | None = None  # budget of this reply; None: the run's
    tool: bool = False  # whether this is a tool's answer (messages of the role "tool" are in any case)
    fresh: bool = False  # begin a new transcript: the model's context holds nothing of earlier turns
    learn: bool = True  # whether the policy learns from the reply to this turn
    whole: bool = False  # this is the policy's whole context: it continues a context of the episode, or begins one
    tools: Iterable[Any] | None = None  # with messages that begin a context: functions, or their JSON schemas
    side: str = ""  # the side to move, where the policy plays several: each has its own contexts and its own rollout
    temperature: float | None = (
        None  # of this reply; None: its task's, or the run's. Where the run has 0, all are greedy
    )
    failed: int | None = None  # of a tool's answers in these messages, those that are no result; None: unknown


@dataclass(frozen=True)
class Ask:
    """A question of an environment to one of the run's services: `score = yield Ask("reward-model", text)`.

    The result is the service's answer, plain JSON data, or an Invalid, which the environment may handle or return.
    """

    service: str  # the service's name, such as "reward-model" or "judge"
    content: Any  # plain JSON data: text, numbers, lists, dicts with text for keys


@dataclass(frozen=True)
class Reasoned:
    """A service's answer with the texts from which it was parsed, such as a judge's reasons. Environments get the
    answer alone.
    """

    answer: Any  # plain JSON data, or Invalid
    said: tuple[str, ...]  # one text per call or vote, in order


def bare(answer: Any) -> Any:
    """Return a service's answer as environments get it: without the texts of a `Reasoned`."""
    return answer.answer if isinstance(answer, Reasoned) else answer


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply."""

    name: str  # of the tool; "" where none can be read
    arguments: Mapping[str, Any]  # JSON data by name
    end: int = 0  # characters of the reply up to the end of the call: the `end` of a `SpanReward` for it
    problem: str | None = None  # the reason why a malformed call cannot be executed; None for a valid one
    id: str = ""  # distinguishes the calls of a context; `reply.number` is the reply of the episode that contains it


class Reply(str):
    """The model's reply: the text of the sampled tokens, with the stop string and without the end-of-sequence token.

    It is a `str` for environments that only read it; `reply.stop` is the reason why it ended. An empty reply whose stop
    is truncated was not sampled, because the episode has reached that limit. The environment may still score what it
    has; if it yields further turns, it gets empty replies only (except for a fresh turn, which has a context of its
    own).
    """

    stop: StopReason
    tool_calls: tuple[ToolCall, ...]  # in order, with malformed ones, where a turn lists tools for the model
    number: int  # index among the episode's replies: 0 is the first
    before_calls: int | None  # characters before the first tool call; None without one
    sampled: Completion | None  # the reply as tokens; None if none were sampled
    read: int  # number of tokens before the reply

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
        """Pickle as a call of the class: a str's default would lose everything but the text."""
        attributes = self.stop, self.tool_calls, self.number, self.before_calls, self.sampled, self.read
        return Reply, (str(self), *attributes)


@dataclass(frozen=True)
class SpanReward:
    """A reward for a part of a reply, credited to the part's last token. It is added to the episode's reward."""

    end: int  # characters of the reply before the end of the part
    reward: float
    reply: int = -1  # which reply of the episode: 0 the first, -1 the last (of the side that is graded)


@dataclass(frozen=True)
class Graded:
    """A verdict with rewards for parts of replies: `return Graded(1.0, [SpanReward(reply.index("</think>"), 0.5)])`."""

    reward: float | Mapping[str, float]
    spans: Sequence[SpanReward] = ()


@dataclass(frozen=True)
class Sides:
    """The rewards of the sides of a game: `return Sides({"black": 1.0, "white": -1.0})`.

    Any other verdict applies to all sides.
    """

    verdicts: Mapping[str, float | Mapping[str, float] | Graded | Invalid]


Verdict = float | dict[str, float] | Graded | Sides | Invalid
"""The score of a reply. A dict names the parts of the reward, whose sum is the reward unless it has the key "reward".
`SUCCESS` is compared with the part "outcome" if there is one, so that other parts do not change the accuracy.
"""

OUTCOME = "outcome"
"""The part of a reward that decides whether a reply is correct."""

Env = Callable[[Task], Generator["Turn | str | Ask", Any, Verdict]]
"""A generator function that yields the model's input, receives the model's reply, and returns the reward.

Where it yields an `Ask`, it receives the service's answer instead of a `Reply`.
"""

AsyncEnv = Callable[[Task], AsyncGenerator[Any, Any]]
"""The same, written with `async def`: it yields turns and questions, and finally the verdict."""

Reward = Callable[[Task, str], Verdict]
"""A plain function (task, reply) -> reward, which becomes an environment of one turn."""


LEAST_TEMPERATURE = 1e-6
TEMPERATURES = f"0 (greedy), or a finite number of at least {LEAST_TEMPERATURE:g}"
"""The temperatures at which a reply can be sampled, for messages."""


def is_temperature(value: Any) -> bool:
    """Return whether a value is a temperature at which a reply can be sampled."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (value == 0 or LEAST_TEMPERATURE <= value < float("inf"))


@value_type
class Sampling:
    """The parameters of one completion. The completion depends on these fields, the prompt and the weights alone."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0  # token i is drawn with the uniform number (seed, i), independently of other requests of the batch
    begun: int = (
        0  # tokens at the end of the prompt that begin the reply: they belong to the reply where it is read as text
    )
    epsilon: float = 0.0  # probability of a token drawn uniformly instead; 0 where the temperature is


@value_type
class Completion:
    """The result of an engine for one request."""

    id: int
    tokens: Sequence[int]  # [n] sampled, with a final end-of-sequence token
    logp: Sequence[float]  # [n] under the distribution that sampled them (temperature, top-p, top-k, epsilon applied)
    text: str  # ends with the stop string, if one was reached; without the end-of-sequence token
    stop: StopReason
    version: int  # of the weights that sampled it; the oldest, if several did
    experts: NDArray[np.int16] | None = None  # [n, layers, k]: the experts of each token, where the model routes tokens
    runs: tuple[tuple[int, int], ...] = ()  # (tokens, version) in order, where weights changed during the reply
    prompt_experts: NDArray[np.int16] | None = None  # [tokens of the prompt, layers, k]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call of the class: the default stores each field with its name and sets it separately."""
        required = self.id, self.tokens, self.logp, self.text, self.stop, self.version
        return Completion, (*required, self.experts, self.runs, self.prompt_experts)

    def continued(self, more: Completion) -> Completion:
        """Return this completion joined with `more`, sampled after it, whose text is already that of both."""
        runs = tuple(run for part in (self, more) for run in part.runs or ((len(part.tokens), part.version),))
        tokens, logp = [*self.tokens, *more.tokens], [*self.logp, *more.logp]
        return Completion(more.id, tokens, logp, more.text, more.stop, self.version, None, runs)


# -- labels of replies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """States that one response is better than another."""

    better: int  # index of the better response in the example
    worse: int
    share: float = 1.0  # its weight relative to other comparisons, such as the number of people who agree
    margin: float = 0.0  # the difference in quality


# -- tokens ------------------------------------------------------------------------------------------------------------


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


@value_type
class PlayedTurn:
    """One contribution to an episode, by either side, for readers: an entry of `Rollout.turns`."""

    kind: SpanKind  # its origin
    text: str
    transcript: int  # index of the rollout's transcript
    start: int  # index of its first token in that transcript
    length: int  # tokens
    reward: float = 0.0  # the environment's reward of this step, before the episode's end
    seconds: float = field(default=0.0, compare=False)  # depends on the clock, and is recorded with the timings
    cut: int = 0  # tokens that did not fit the context and were left out
    calls: tuple[ToolCall, ...] = ()  # tool calls of a reply
    temperature: float | None = None  # of a reply's sampling; None: the run's
    answered: tuple[int, int] = (0, 0)  # answers of `Tools` to calls, and how many of them are no result


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt with several responses and their labels: comparisons, or a label for each response.

    The responses are transcripts that begin with the same prompt, which is computed once for all of them.
    """

    responses: Sequence[Transcript]
    comparisons: Sequence[Comparison] = ()
    labels: Sequence[
        tuple[float, ...]
    ] = ()  # labels of each response: one per scored span (a reply has one, a solution one per step)

    @property
    def n_scored(self) -> int:
        return sum(t.n_scored for t in self.responses)


@value_type
class Piece:
    """A scored reply and its owner: rollouts of a group that branched off share their first replies."""

    length: int  # tokens
    member: int  # member of the group for which it was sampled
    reply: int  # index among that member's replies: 0 is the first


@dataclass(frozen=True)
class Branch:
    """The place where a rollout branched off another rollout of its group."""

    of: int  # member of the group that it branched off
    turns: int  # number of turns that it shares with that member
    taken: tuple[int, ...]  # number of sampled tokens of each transcript that it shares with that member


@dataclass(slots=True)
class Rollout:
    """One episode with its reward."""

    task: Task
    group: str
    transcripts: list[Transcript]  # one, unless turns were fresh
    reward: float | Invalid
    rewards: dict[str, float] = field(default_factory=dict)  # its named parts
    steps: list[tuple[int, float]] = field(default_factory=list)  # (scored tokens up to the step's end, step reward)
    stop: StopReason = StopReason.EOS  # of the episode: that of its last completion, or the limit that it reached
    turns: list[PlayedTurn] = field(default_factory=list)
    text: str = ""  # the sampled text, turns joined; for reading only
    prompt: str = ""  # the first input of the policy; for reading only
    answers: list[tuple[str, Any]] = field(
        default_factory=list
    )  # services' answers: name, JSON, Invalid or Reasoned; for reading
    side: str = ""  # the side, where the policy plays several: each has its own rollout, and is compared with its like
    pieces: list[Piece] = field(default_factory=list)  # replies of all scored tokens, in order; []: no branches
    branch: Branch | None = None  # where it branched off another rollout; None: it began with the prompt
    notes: dict[str, Any] = field(default_factory=dict)  # notes of its environment: JSON data; for reading only
    asked: str = (
        ""  # the last user message of a prompt of messages, which distinguishes it from other prompts; for reading only
    )
    greedy: bool = False  # sampled at temperature 0 as the baseline of its group: not trained
    baseline: float | None = None  # the reward of the greedy rollout of its group, if it has one
    seconds: float = field(default=0.0, compare=False)  # from its last turn to its reward: depends on the clock

    @property
    def n_scored(self) -> int:
        """Number of scored tokens: n_i of the formulas."""
        count = 0  # a loop: it is called several times a step, and a comprehension takes twice as long
        for transcript in self.transcripts:
            count += transcript.n_scored
        return count

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy sampled, scored or not: the number that budgets limit."""
        count = 0
        for transcript in self.transcripts:
            count += len(transcript.logp)
        return count

    @property
    def outcome(self) -> float:
        """The number that the success threshold is compared with: the part "outcome" of the reward, or else the whole
        reward.
        """
        assert not isinstance(self.reward, Invalid), "an invalid reward has no outcome"
        return self.rewards.get(OUTCOME, self.reward)

    @property
    def group_and_side(self) -> tuple[str, str]:
        """Key of the rollouts with which this one is compared: those of its group with the same side."""
        return self.group, self.side

    @property
    def n_own(self) -> int:
        """Number of tokens sampled for this rollout alone, without those of the rollout that it branched off."""
        return self.n_sampled - (sum(self.branch.taken) if self.branch else 0)

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled any token of the rollout; 0 if none was sampled."""
        found = [s.version for t in self.transcripts for s in t.spans if s.version is not None]
        return min(found, default=0)


class Fate(StrEnum):
    """The fate of a rollout in a step: exactly one of these."""

    TRAINED = "trained"  # an update of the step learned from it
    EQUAL = "equal group"  # all rewards of its group are equal, and only the advantage would give its tokens a gradient
    INVALID = "invalid"  # it has no valid reward, or no sampled token
    SMALL = "group too small"  # it is valid, but too few other rollouts of its group are
    REPLACED = "replaced"  # dynamic sampling dropped its group, and sampled another one if the budget allowed it
    FILTERED = "filtered"  # a filter of the algorithm left it out, or its teacher cannot read it
    BASELINE = "baseline"  # a greedy reply, whose reward is the baseline of its group
    UNSELECTED = "not selected"  # no update used it, though its group has a signal: see `Outcome.why`


@value_type
class Outcome:
    """A rollout of a step and its use in the step, for the record."""

    rollout: Rollout
    advantage: float | None = None  # mean over its scored tokens; None: it has no advantage
    fate: Fate = Fate.TRAINED
    why: str = ""  # reason for the fate, in words, such as "cut off after 512 tokens"
    flags: tuple[str, ...] = ()  # further remarks: see `posttrain.training.sources.ledger`
    shaping: float = 0.0  # amount that shaping added to its reward
    penalty: float = 0.0  # KL penalty deducted from its reward, summed over its tokens
    replayed: bool = False  # whether an earlier step sampled it, and this one trained on it again
    member: int | None = None  # index of the response in its preference example; None without one
    label: Any = None  # JSON data of a response's labels: see `posttrain.training.sources.example_recording`
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)  # column -> [n_i], of each scored token
