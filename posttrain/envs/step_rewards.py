"""Rewards for the steps of replies, from a process reward model. They are added to any environment's reward.

A reply is split into steps, and a reward model scores all steps in one pass. Each step's last token earns its reward,
or the reply earns their sum, mean, minimum, product or last one. So algorithms learn from them that use step rewards
(grpo-process, rewards to go, GAE) or parts of a reward (decoupled).
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.reply_steps import LINE, REPLY, SCORED_STEPS, SPANS, Aggregate, places
from posttrain.core.types import OUTCOME, Ask, Graded, Invalid, Reply, SpanReward, Task, Turn, UserError, succeeds
from posttrain.envs.play.call_recording import note
from posttrain.envs.play.env_outputs import MOST_SPANS, Done, read_verdict
from posttrain.envs.play.group_rewards import scores_groups
from posttrain.envs.play.load_env import is_async, is_generator_env, lift, lift_async, load_env, pack_env, unpack_env
from posttrain.envs.play.service_client import Services
from posttrain.system.bounded_places import bounded_places

PROCESS = "process"
"""The name of the reward's part from a process reward model."""

_AGGREGATES: dict[Aggregate, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "last": lambda values: values[-1],
    "product": math.prod,
}


@dataclass(frozen=True)
class StepScoring:
    """Settings of the split into steps, and of their rewards.

    delimiter    "line", "reply" or "spans"; a regular expression between slashes; or the text between steps
    probability  the value of a step is the sigmoid of its score, else the score itself
    weight       reward of a value of 1
    aggregate    None: each step earns its own value; else the reply earns one value computed from all
    success      steps earn nothing unless the outcome is at least this (P-GRPO, arXiv 2508.05170, eq. 5); None: always
    """

    service: str
    delimiter: str = LINE
    probability: bool = True
    weight: float = 1.0
    aggregate: Aggregate | None = None
    success: float | None = None


@dataclass(frozen=True)
class Step:
    """A step of a reply."""

    end: int  # characters of the reply up to the step's end, its delimiter included
    text: str


Places = Callable[[str, str], Sequence[tuple[int, int]]]
"""Finds a delimiter in a text: (delimiter, text) -> start and end of each match."""


def split_steps(reply: str, delimiter: str, cut: bool = False, find: Places = places) -> list[Step]:
    """Return the steps of a reply, without blank ones and, if the reply was cut off, without the last one.

    The default of `find` is for processes with a time limit of their own, such as the workers of environments.

    >>> split_steps("1+1=2\\n\\n2+2=4", "line")
    [Step(end=6, text='1+1=2'), Step(end=12, text='2+2=4')]
    """
    found, start = [], 0
    for begin, end in find(delimiter, reply):
        if (text := reply[start:begin]).strip():
            found.append(Step(end, text))
        start = max(start, end)
    if reply[start:].strip() and not (cut and delimiter != REPLY):
        found.append(Step(len(reply), reply[start:]))
    return found


def split_at(reply: str, ends: Sequence[int]) -> list[Step]:
    """Return the steps of a reply that end after these numbers of characters."""
    places = sorted({end for end in ends if 0 < end <= len(reply)})
    steps = [Step(end, reply[start:end]) for start, end in zip([0, *places], places, strict=False)]
    return [step for step in steps if step.text.strip()]


def with_step_rewards(env: str | Callable[..., Any], how: StepScoring) -> Callable[..., Any]:
    """Return the environment with rewards for the steps of its replies. Raises UserError for a reward of whole groups."""
    function = load_env(env)
    if scores_groups(function):
        raise UserError(
            "--step-delimiter does not go with an --env that scores whole groups: give a reward of one reply, def "
            "reward(task, reply)"
        )
    return (_AsyncStepped if is_async(function) else _Stepped)(env, how)


def may_ask(env: str | Callable[..., Any], service: str) -> bool:
    """Return whether an environment may ask the service of this name. A plain reward cannot, and step rewards ask one."""
    if isinstance(env, _Wrapped):
        return service == env.how.service or may_ask(env.env, service)
    return is_generator_env(load_env(env))


@dataclass
class _Context:
    """The prompt and the replies so far, in the form for the reward model."""

    messages: list[Mapping[str, Any]] | None = None
    text: str = ""  # the whole context; with messages, the text after them
    readable: bool = True  # False if an environment shows token ids

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
    """The trained replies of an episode, each with the context that it was sampled in."""

    context: _Context = field(default_factory=_Context)
    replies: list[tuple[Reply, Callable[[Sequence[Step]], dict[str, Any]] | None]] = field(default_factory=list)
    earned: float = 0.0  # sum of the turns' rewards

    def note(self, event: Any, said: Any) -> None:
        """Record a turn and its reply."""
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
    """An environment around another one. It is sent to workers as the inner one's name, and is loaded there."""

    def __init__(self, env: str | Callable[..., Any], how: StepScoring) -> None:
        self.env, self.how = env, how
        function = load_env(env)
        self.stands_for = function  # error messages name its file
        self.__qualname__ = env if isinstance(env, str) else getattr(env, "__qualname__", type(env).__name__)
        lifted = lift_async if is_async(function) else lift
        self.inner: Any = function if is_generator_env(function) else lifted(function)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (type(self), pack_env(self.env), self.how)

    def rewarded(self, verdict: Any, played: _Played) -> Generator[Ask, Any, Any]:
        """Request the scores of the steps of all replies, and return the verdict with their rewards."""
        done = read_verdict(verdict)
        if isinstance(done.reward, Invalid):
            return done.reward
        if done.sides:
            return Invalid("--step-delimiter does not go with a game of several sides: leave it out")
        outcome = done.rewards.get(OUTCOME)
        if outcome is None:
            outcome = done.reward + played.earned + math.fsum(span.reward for span in done.spans)
        worth = self._worth(outcome)
        spans, values, seen = list(done.spans), list[float](), list[dict[str, Any]]()
        for reply, question in played.replies:
            steps = self._steps(reply, done)
            if not steps:
                continue
            if question is None:
                return Invalid(
                    "--step-delimiter does not go with this environment, as a reward model cannot read token ids, or "
                    "messages after text: leave it out"
                )
            scores = yield Ask(self.how.service, question(steps))
            if isinstance(scores, Invalid):
                return scores
            for step, score in zip(steps, scores, strict=True):
                value = _sigmoid(score) if self.how.probability else score
                values.append(value)
                seen.append({"text": step.text, "probability" if self.how.probability else "score": value})
                if self.how.aggregate is None:
                    spans.append(SpanReward(step.end, worth * value, reply.number))
                    seen[-1]["reward"] = worth * value
        if seen:
            note(**{SCORED_STEPS: seen})
        if self.how.aggregate is None:
            return self._of_steps(done, outcome, spans)
        whole = worth * _AGGREGATES[self.how.aggregate](values) if values else 0.0
        return self._of_reply(done, outcome, spans, whole)

    def _steps(self, reply: Reply, done: Done) -> list[Step]:
        if self.how.delimiter != SPANS:
            return split_steps(reply, self.how.delimiter, reply.stop.truncated)
        return split_at(reply, [span.end for span in done.spans if span.reply in (reply.number, -1)])

    def _worth(self, outcome: float) -> float:
        """Return the reward of a value of 1, given the episode's outcome."""
        right = self.how.success is None or succeeds(outcome, self.how.success)
        return self.how.weight if right else 0.0

    def _of_steps(self, done: Done, outcome: float, spans: Sequence[SpanReward]) -> Graded | Invalid:
        """Return the verdict with a reward for each step."""
        if len(spans) > MOST_SPANS:
            return Invalid(
                f"--step-delimiter: an episode has {len(spans)} step rewards, and may have at most {MOST_SPANS}: give "
                "longer steps, or --step-aggregate"
            )
        assert not isinstance(done.reward, Invalid), "an invalid reward has been returned"
        return Graded({OUTCOME: outcome, **done.rewards, "reward": done.reward}, spans)

    def _of_reply(self, done: Done, outcome: float, spans: Sequence[SpanReward], whole: float) -> Graded | Invalid:
        """Return the verdict with one reward for all steps."""
        if PROCESS in done.rewards:
            return Invalid(f"the reward has a part {PROCESS!r}, the name of the step rewards' part: rename it")
        assert not isinstance(done.reward, Invalid), "an invalid reward has been returned"
        parts = {OUTCOME: outcome, **done.rewards, PROCESS: whole}
        return Graded({**parts, "reward": done.reward + whole}, spans)


class _Stepped(_Wrapped):
    """An environment around one that is written with `def`."""

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
    """An environment around one that is written with `async def`."""

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


@dataclass(frozen=True)
class StepScorer:
    """The value of a partial reply: an aggregate of its steps' probabilities, from a process reward model."""

    services: Services
    service: str
    delimiter: str
    aggregate: Aggregate

    def __call__(self, context: Mapping[str, Any], reply: str, tell: Callable[[float | Invalid], None]) -> None:
        """Request the value of a reply so far, and pass it to `tell`. A reply without a step has the value 0.

        Raises UserError for a delimiter that takes too long.
        """
        steps = [step.text for step in split_steps(reply, self.delimiter, find=bounded_places)]
        if not steps:
            tell(0.0)
            return

        def hear(scores: Any) -> None:
            if isinstance(scores, Invalid):
                tell(scores)
            else:
                tell(_AGGREGATES[self.aggregate]([_sigmoid(score) for score in scores]))

        self.services.ask(hear, Ask(self.service, {**context, "steps": steps}))


def _unpacked(kind: type[_Wrapped], packed: str | bytes, how: StepScoring) -> _Wrapped:
    return kind(packed if isinstance(packed, str) else unpack_env(packed), how)


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
