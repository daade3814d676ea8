"""Rewards for the steps of replies, by a process reward model. They come on top of any environment's reward.

A reply is split into steps, a reward model scores all of them in one pass, and each step's last token earns its reward, or
the reply earns their sum, mean, minimum or last one. So whatever reads step rewards (grpo-process, rewards to go, GAE) or
parts of a reward (decoupled) learns from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.core.types import OUTCOME, Ask, Graded, Invalid, Reply, SpanReward, Task, Turn, UserError, succeeds
from posttrain.envs.play.env_outputs import MOST_SPANS, Done, read_verdict
from posttrain.envs.play.group_rewards import is_group_reward
from posttrain.envs.play.load_env import is_async, is_generator_env, lift, lift_async, load_env, pack_env, unpack_env

Aggregate = Literal["none", "sum", "mean", "min", "last"]
PROCESS = "process"
"""The part of a reward that comes from a process reward model."""

LINE, REPLY, SPANS = "line", "reply", "spans"
"""Delimiters that are words: each line is a step, each reply of an episode is one, or the environment names their ends."""

_AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "last": lambda values: values[-1],
}


@dataclass(frozen=True)
class StepScoring:
    """How steps are found and what they earn.

    delimiter    "line", "reply" or "spans"; a regular expression between slashes; or the text between steps
    probability  a step earns the sigmoid of its score, else the score itself
    aggregate    "none": each step has a reward of its own; else the reply has one
    success      steps earn nothing unless the outcome is at least this (P-GRPO, arXiv 2508.05170, eq. 5); None: always
    """

    service: str
    delimiter: str = LINE
    probability: bool = True
    weight: float = 1.0
    aggregate: Aggregate = "none"
    success: float | None = None


@dataclass(frozen=True)
class Step:
    """A step of a reply."""

    end: int  # characters of the reply up to its end, its delimiter included
    text: str


def split_steps(reply: str, delimiter: str, cut: bool = False) -> list[Step]:
    """Return the steps of a reply. Blank ones are none, and neither is the last one of a reply that was cut off.

    >>> split_steps("1+1=2\\n\\n2+2=4", "line")
    [Step(end=6, text='1+1=2'), Step(end=12, text='2+2=4')]
    """
    found, start = [], 0
    for match in re.finditer(_pattern(delimiter), reply):
        if (text := reply[start : match.start()]).strip():
            found.append(Step(match.end(), text))
        start = max(start, match.end())
    if reply[start:].strip() and not (cut and delimiter != REPLY):
        found.append(Step(len(reply), reply[start:]))
    return found


def split_at(reply: str, ends: Sequence[int]) -> list[Step]:
    """Return the steps of a reply that end at these characters."""
    places = sorted({end for end in ends if 0 < end <= len(reply)})
    steps = [Step(end, reply[start:end]) for start, end in zip([0, *places], places, strict=False)]
    return [step for step in steps if step.text.strip()]


def _pattern(delimiter: str) -> str:
    if delimiter in (REPLY, SPANS):
        return r"(?!)"  # matches nowhere
    if delimiter == LINE:
        return "\n"
    if len(delimiter) > 2 and delimiter[0] == delimiter[-1] == "/":
        return delimiter[1:-1]
    return re.escape(delimiter)


def with_step_rewards(env: str | Callable[..., Any], how: StepScoring) -> Callable[..., Any]:
    """Return the environment with rewards for the steps of its replies. Raises UserError for a reward of whole groups."""
    function = load_env(env)
    if is_group_reward(function):
        raise UserError(
            "--step-delimiter: this --env scores whole groups at once, and steps are scored reply by reply: give a reward "
            "of one reply, def reward(task, reply)"
        )
    return (_AsyncStepped if is_async(function) else _Stepped)(env, how)


@dataclass
class _Context:
    """What the policy has seen and said, in the form that the reward model reads."""

    messages: list[Mapping[str, Any]] | None = None
    text: str = ""  # of a context of messages: what stands behind them in the reply
    readable: bool = True  # not where an environment shows token ids

    def show(self, turn: Turn) -> None:
        if turn.fresh or turn.whole or turn.tokens is not None:
            self.messages, self.text, self.readable = None, "", turn.tokens is None
        if turn.messages is not None:
            if self.text and self.messages is not None:
                self.messages.append({"role": "assistant", "content": self.text})
                self.text = ""
            self.readable = self.readable and not self.text
            self.messages = [*(self.messages or []), *turn.messages]
        self.text += turn.text or ""

    def question(self, steps: Sequence[Step]) -> dict[str, Any]:
        texts = [step.text for step in steps]
        if self.messages is None:
            return {"prompt": self.text, "steps": texts}
        return {"messages": list(self.messages), "begun": self.text, "steps": texts}


@dataclass
class _Played:
    """Replies of an episode that are learned from, each with the context that it was sampled in."""

    context: _Context = field(default_factory=_Context)
    replies: list[tuple[Reply, Callable[[Sequence[Step]], dict[str, Any]] | None]] = field(default_factory=list)
    earned: float = 0.0  # by turns

    def note(self, event: Any, said: Any) -> None:
        """Note a turn and its reply."""
        if not isinstance(said, Reply):
            return
        turn = Turn(text=event) if isinstance(event, str) else event
        self.earned += turn.reward
        self.context.show(turn)
        seen = _Context(None if self.context.messages is None else list(self.context.messages), self.context.text)
        if turn.learn and said:
            self.replies.append((said, seen.question if self.context.readable else None))
        self.context.text += said


class _Wrapped:
    """An environment within another: it travels to workers by what names it, and is loaded there."""

    def __init__(self, env: str | Callable[..., Any], how: StepScoring) -> None:
        self.env, self.how = env, how
        function = load_env(env)
        self.stands_for = function  # whose file reports of errors name
        self.__qualname__ = env if isinstance(env, str) else getattr(env, "__qualname__", type(env).__name__)
        lifted = lift_async if is_async(function) else lift
        self.inner: Any = function if is_generator_env(function) else lifted(function)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (type(self), pack_env(self.env), self.how)

    def rewarded(self, verdict: Any, played: _Played) -> Generator[Ask, Any, Any]:
        """Ask for the scores of the steps of all replies, and return the verdict with what they earn."""
        done = read_verdict(verdict)
        if isinstance(done.reward, Invalid):
            return done.reward
        if done.sides:
            return Invalid("--step-delimiter: a game of several sides has no step rewards")
        outcome = done.rewards.get(OUTCOME)
        if outcome is None:
            outcome = done.reward + played.earned + math.fsum(span.reward for span in done.spans)
        spans, earned = list(done.spans), []
        for reply, question in played.replies:
            steps = self._steps(reply, done)
            if not steps:
                continue
            if question is None:
                return Invalid(
                    "--step-delimiter: this environment shows token ids, or messages behind text, which a reward model "
                    "cannot read"
                )
            scores = yield Ask(self.how.service, question(steps))
            if isinstance(scores, Invalid):
                return scores
            for step, score in zip(steps, scores, strict=True):
                earned.append(self._reward(score, outcome))
                if self.how.aggregate == "none":
                    spans.append(SpanReward(step.end, earned[-1], reply.number))
        return self._graded(done, outcome, spans, earned)

    def _steps(self, reply: Reply, done: Done) -> list[Step]:
        if self.how.delimiter != SPANS:
            return split_steps(reply, self.how.delimiter, reply.stop.truncated)
        return split_at(reply, [span.end for span in done.spans if span.reply in (reply.number, -1)])

    def _reward(self, score: float, outcome: float) -> float:
        """Return what a step of this score earns."""
        if self.how.success is not None and not succeeds(outcome, self.how.success):
            return 0.0
        return self.how.weight * (_sigmoid(score) if self.how.probability else score)

    def _graded(
        self, done: Done, outcome: float, spans: Sequence[SpanReward], earned: Sequence[float]
    ) -> Graded | Invalid:
        assert not isinstance(done.reward, Invalid), "an invalid reward has been returned"
        parts = {OUTCOME: outcome, **done.rewards}
        if self.how.aggregate == "none":
            if len(spans) > MOST_SPANS:
                return Invalid(
                    f"--step-delimiter: an episode has {len(spans)} step rewards, and may have {MOST_SPANS}: "
                    "give longer steps, or --step-aggregate"
                )
            return Graded({**parts, "reward": done.reward}, spans)
        if PROCESS in parts:
            return Invalid(f"the reward has a part {PROCESS!r}, the name of the step rewards' part: rename it")
        whole = _AGGREGATES[self.how.aggregate](earned) if earned else 0.0
        return Graded({**parts, PROCESS: whole, "reward": done.reward + whole}, spans)


class _Stepped(_Wrapped):
    """The environment of one that is written with `def`."""

    def __call__(self, task: Task) -> Generator[Any, Any, Any]:
        playing, played, said = self.inner(task), _Played(), None
        try:
            while True:
                event = playing.send(said)
                said = yield event
                played.note(event, said)
        except StopIteration as end:
            return (yield from self.rewarded(end.value, played))
        finally:
            playing.close()


class _AsyncStepped(_Wrapped):
    """The same of one that is written with `async def`."""

    async def __call__(self, task: Task) -> AsyncGenerator[Any, Any]:
        playing, played, said = self.inner(task), _Played(), None
        try:
            while isinstance(event := await playing.asend(said), Turn | str | Ask):
                said = yield event
                played.note(event, said)
        finally:
            await playing.aclose()
        asking, answer = self.rewarded(event, played), None
        while True:
            try:
                question = asking.send(answer)
            except StopIteration as end:
                yield end.value
                return
            answer = yield question


def _unpacked(kind: type[_Wrapped], packed: str | bytes, how: StepScoring) -> _Wrapped:
    return kind(packed if isinstance(packed, str) else unpack_env(packed), how)


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
