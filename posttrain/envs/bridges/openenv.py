"""Environments behind an OpenEnv server: an observation is a turn, a reply the action.

    # my.py                                                          posttrain rl --env my.py:echo ...
    echo = environment("http://127.0.0.1:8000", action="message", observe="echoed_message")

This module speaks the protocol of `openenv-core` 0.3 over a WebSocket: one session is one episode. The library's own
client would bring a web framework and a user interface, and distinguishes a bad action from a broken server only by a
text.

The first message holds the task's "seed" and its column "reset". All settings that are data may be columns of the task;
`--env openenv` takes the address from the column "url". The server must allow as many sessions at once as a run has
slots (`max_concurrent_envs`): if all are taken, an episode waits for a free one as long as for an answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.messages import inline, short
from posttrain.core.types import Reply, Task, UserError
from posttrain.envs.bridges.bridge import (
    BridgeError,
    GameStep,
    Manner,
    NotAnAction,
    begun,
    made,
    need,
    number_of,
    ran_out,
    task_seed,
)

need("websockets", "openenv")

LARGEST = 1 << 22  # most bytes of a message
OPENING = 10.0  # least timeout of a connection, in seconds: a busy server answers its first call late
PAUSE = 0.2  # seconds before another try at a full server


@dataclass(frozen=True)
class OpenEnv(Manner):
    """An environment behind an OpenEnv server."""

    url: str = ""  # http:// or ws://
    action: str | Callable[[str], Mapping[str, Any] | None] = "message"
    """The field of an action that the reply fills, or a function from reply to action; None: it is not an action."""
    observe: str | Callable[[Mapping[str, Any]], str] = ""
    """The field of an observation that is shown, or a function; default: its only text, or all of it as JSON."""
    reset: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the first message, besides the seed
    timeout: float = 8.0  # seconds for an answer

    async def __call__(self, task: Task) -> AsyncGenerator[Any, Any]:
        how: OpenEnv = self.told_by(task)
        session = _Session(how)
        try:
            step = begun(await session.begin(task))
            for number in range(how.turns):
                if step.done:
                    break
                reply: Reply = yield how.turn(step, not number)
                if ran_out(reply):
                    step = GameStep("")
                    break
                try:
                    step = await session.act(reply)
                except NotAnAction as problem:
                    step = how.refused(problem)
                except Exception as error:
                    step = how.failed(error)
            earned = step.reward
        finally:
            await session.close()
        yield earned


def environment(url: str, **settings: Any) -> OpenEnv:
    """Return the environment of this server. `settings`: fields of `OpenEnv`."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise UserError(f"the address of an OpenEnv server must be such as http://127.0.0.1:8000, not {short(url)}")
    return made(OpenEnv, repr(url), url=url, **settings)


play = OpenEnv()
"""An environment of any server. The task's column "url" is the server's address."""


class _Session:
    """A connection to a server, which is one episode there."""

    def __init__(self, how: OpenEnv) -> None:
        self.how = how
        self._socket: Any = None

    async def begin(self, task: Task) -> GameStep:
        """Connect and begin.

        Raises BridgeError without a server, without a free session in time, or for invalid messages.
        """
        if not self.how.url:
            raise UserError('the task has no column "url": give the address of an OpenEnv server')
        if not isinstance(self.how.reset, Mapping):
            raise UserError(f"reset is {short(self.how.reset)}: give an object of arguments")
        arguments = {"seed": task_seed(task), **self.how.reset}
        end = asyncio.get_running_loop().time() + self.how.timeout
        while True:
            await self._connect()
            found = await self._ask("reset", arguments)
            if found["type"] == "observation":
                return replace(self._read(found["data"]), reward=0.0)  # no action has been taken yet
            if _code(found) != "CAPACITY_REACHED" or asyncio.get_running_loop().time() > end:
                raise BridgeError(f"{self.how.url} refused the reset: {_message(found)}")
            await self.close()
            await asyncio.sleep(PAUSE)

    async def act(self, reply: str) -> GameStep:
        """Send an action and return the next step. Raises NotAnAction, or BridgeError if the server fails."""
        action = {self.how.action: reply} if isinstance(self.how.action, str) else self.how.action(reply)
        if action is None:
            raise NotAnAction("That is no action.")
        found = await self._ask("step", dict(action))
        if found["type"] == "observation":
            return self._read(found["data"])
        if _code(found) == "VALIDATION_ERROR":
            raise NotAnAction(f"That is no action: {_message(found)}.")
        raise BridgeError(f"{self.how.url} failed: {_message(found)}")

    async def close(self) -> None:
        from websockets.exceptions import ConnectionClosed

        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(ConnectionClosed):
                await socket.send(json.dumps({"type": "close"}))
            await socket.close()

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidURI

        kind, _, place = self.how.url.rstrip("/").partition("://")
        address = f"{ {'http': 'ws', 'https': 'wss'}.get(kind, kind) }://{place}/ws"
        try:
            self._socket = await connect(
                address, open_timeout=max(OPENING, self.how.timeout), close_timeout=1.0, max_size=LARGEST, proxy=None
            )
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
            raise BridgeError(f"there is no OpenEnv server at {self.how.url}: {inline(str(error))}") from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer: an observation, or an error. Raises BridgeError."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self.how.timeout):
                with suppress(ConnectionClosed):  # its last message is still to be read: it may be full
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = await self._socket.recv()
        except TimeoutError as error:
            raise BridgeError(f"{self.how.url} did not answer within {self.how.timeout:g} s") from error
        except ConnectionClosed as error:
            raise BridgeError(f"{self.how.url} closed the connection: {inline(str(error))}") from error
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            found = None
        known = isinstance(found, dict) and found.get("type") in ("observation", "error")
        if not known or not isinstance(found.get("data"), dict):
            raise BridgeError(f"{self.how.url} answers {answer[:60]!r}, which is not a message of OpenEnv")
        return found

    def _read(self, data: Mapping[str, Any]) -> GameStep:
        """Convert an observation's message to a step."""
        observation, done = data.get("observation"), data.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise BridgeError(f"{self.how.url} sent a malformed observation: {json.dumps(data)[:100]}")
        return GameStep(self._text(observation), number_of(data.get("reward"), "the server's reward"), done)

    def _text(self, observation: Mapping[str, Any]) -> str:
        observe = self.how.observe
        if callable(observe):
            return observe(observation)
        texts = [value for value in observation.values() if isinstance(value, str)]
        if observe:
            if observe not in observation:
                raise UserError(f"an observation has no {observe!r}; it has {', '.join(observation)}")
            value = observation[observe]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return texts[0] if len(texts) == len(observation) == 1 else json.dumps(observation, ensure_ascii=False)


def _code(error: Mapping[str, Any]) -> Any:
    return error["data"].get("code")


def _message(error: Mapping[str, Any]) -> str:
    """Return an error's message on one line."""
    data = error["data"]
    wrong = [e.get("msg") for e in data.get("errors") or () if isinstance(e, dict)] if _code(error) else []
    return inline("; ".join(map(str, [data.get("message", "no reason"), *wrong])))
