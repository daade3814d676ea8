"""Episodes with scripted replies: what every environment shows and earns, without a model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from posttrain.core.types import Invalid, Reply, StopReason, Task, Turn
from posttrain.envs.play.env_outputs import AwaitsGroup, Done, Event
from posttrain.envs.play.env_runner import AsyncEnvRunner, EnvRunner
from posttrain.envs.play.load_env import is_async
from posttrain.models.tokenizer.tool_parser import HERMES


@dataclass
class Scripted:
    """What came of an episode."""

    shown: list[Turn] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    done: Done | None = None  # None: it still asked after all replies

    @property
    def texts(self) -> list[str]:
        return [turn.text or "" if turn.messages is None else turn.messages[-1]["content"] for turn in self.shown]

    @property
    def reward(self) -> float | Invalid:
        """With the rewards of its steps."""
        assert self.done is not None, "it has not ended"
        if isinstance(self.done.reward, Invalid):
            return self.done.reward
        return math.fsum([self.done.reward, *(turn.reward for turn in self.shown)])

    @property
    def reason(self) -> str:
        """Why its reward is invalid."""
        assert isinstance(self.reward, Invalid), self.reward
        return self.reward.reason

    def script(self) -> str:
        """As a document shows it: what the policy says stands between angle quotes."""
        parts = [f"{text}\u00ab{reply}\u00bb" for text, reply in zip_longest(self.texts, self.said, fillvalue="")]
        return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def scripted(
    env: Callable[..., Any], task: Task, replies: Iterable[str], then: str | None = "", most: int = 100
) -> Scripted:
    """Play these replies, and behind them `then` (None: nothing) until the episode ends, at most `most` replies.

    A reply that is no `Reply` ended by itself.
    """
    if is_async(env):
        return asyncio.run(scripted_async(env, task, replies, then, most))
    stage, found = EnvRunner(env), Scripted()
    said = _replies(replies, then, most)
    event = stage.start(0, task)
    while _goes_on(found, event, reply := next(said, None)):
        event = stage.send(0, _calling(found, reply))
    if isinstance(event, AwaitsGroup):  # a group of one
        found.done = _alone(stage.score(1, [0]))
    return found


async def scripted_async(
    env: Callable[..., Any], task: Task, replies: Iterable[str], then: str | None = "", most: int = 100
) -> Scripted:
    """The same within an event loop."""
    stage, found = AsyncEnvRunner(env, seconds=60), Scripted()
    said = _replies(replies, then, most)
    event = await stage.start(0, task)
    while _goes_on(found, event, reply := next(said, None)):
        event = await stage.send(0, _calling(found, reply))
    if isinstance(event, AwaitsGroup):
        found.done = _alone(await stage.score(1, [0]))
    return found


def _alone(event: Event) -> Done:
    assert isinstance(event, Done)
    [done] = event.group
    return done


def _replies(replies: Iterable[str], then: str | None, most: int) -> Iterable[Any]:
    given = [*replies]
    given += [] if then is None else [then] * (most - len(given))
    return iter([reply if isinstance(reply, Reply) else Reply(reply, StopReason.EOS) for reply in given])


def _calling(found: Scripted, reply: Reply | None) -> Any:
    """The reply with its calls of tools, if the model was told of any; they are written as Hermes models do."""
    tools = next((turn.tools for turn in found.shown if turn.tools), None)
    if reply is None or not tools or reply.tool_calls:
        return reply
    return Reply(reply, reply.stop, HERMES.read(reply, list(tools)), number=len(found.shown) - 1)


def _goes_on(found: Scripted, event: Event, reply: Reply | None) -> bool:
    if isinstance(event, Done):
        found.done = event
    if isinstance(event, Done | AwaitsGroup):
        return False
    assert isinstance(event, Turn)
    found.shown.append(event)
    if reply is None:
        return False
    found.said.append(str(reply))
    return True
