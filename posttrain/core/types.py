"""The types between an environment and the policy: tasks, turns, replies, verdicts, completions.

Their tokens are in `posttrain.core.transcripts`, rollouts in `posttrain.core.rollouts`, batches of rollouts in
`posttrain.core.batch`, and the protocols in `posttrain.core.protocols`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

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
    unheard = False  # of one of several processes: whether the first, which prints for all, may not know of it


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
    TOO_LONG = "too_long"  # the question is longer than what the service's model reads
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
    # of this reply; None: its task's, or the run's. Where the run has 0, all are greedy
    temperature: float | None = None
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
    # tokens at the end of the prompt that begin the reply: they belong to the reply where it is read as text
    begun: int = 0
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
