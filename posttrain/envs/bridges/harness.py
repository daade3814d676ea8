"""Agent programs that speak OpenAI's or Anthropic's API, or vLLM's token ids, as environments. They run unchanged.

Each episode gets its own address at a server in its worker. Each request to it becomes a turn, and the reply the
response. So everything else is as in any environment: the engine samples, transcripts grow where they always do, and
limits, records, replays and weight versions work. A request holds its whole conversation;
`posttrain.envs.play.contexts` finds the new part, where the transcripts are.

    @harness
    async def agent(task, endpoint):
        client = AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key)
        ...
        return reward

The run decides how replies are sampled. Of a request, its stop strings and its token budget count. A penalty or top-p
would mean another distribution than the one that the learner assumes, and programs send temperatures that were chosen
for deployment. So such a request is refused, unless the harness sets them to be ignored.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import os
import secrets
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakKeyDictionary

from posttrain.core.types import Ask, AsyncEnv, Completion, Invalid, Reply, StopReason, Task, Turn, Verdict
from posttrain.engines.serving.policy_responses import PolicyResponse
from posttrain.engines.serving.policy_server import Policy, PolicyHandlers, ServerLimits, serving
from posttrain.engines.serving.requests import PolicyRequest, Prompt, RequestRefused
from posttrain.engines.serving.stored_conversations import StoredConversations
from posttrain.engines.serving.task_group import together
from posttrain.envs.play.prompt_tokens import PROMPT_TOKENS
from posttrain.system.http_front import HOST

MODEL = "policy"
OVER = "there is no such episode, or it has ended"
KEY_BYTES = 16
MOST_THREADS = 1024  # most episodes of synchronous harnesses in one worker

OF_THE_RUN: Mapping[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (1,),
    "top_k": (0, -1),
    "seed": (),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}
"""Sampling fields of a request -> values that change nothing, whatever the run's setting (null never does)."""

Harness = Callable[[Task, "PolicyEndpoint"], Verdict | Awaitable[Verdict]]
"""Runs a task through an endpoint and returns the reward; async, or synchronous in a thread of its own."""


@dataclass(frozen=True)
class Ran:
    """Result of a program that ended."""

    code: int
    output: str
    errors: str


@dataclass(frozen=True)
class PolicyEndpoint:
    """Address of the policy for one episode."""

    url: str  # OpenAI's base URL, which ends in /v1 (Anthropic's: `anthropic_url`)
    key: str = "posttrain"  # the address is the secret: any key will do
    model: str = MODEL  # any name will do

    @property
    def anthropic_url(self) -> str:
        """Return Anthropic's base URL, to which its clients add /v1."""
        return self.url.removesuffix("/v1")

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment variables that most programs read."""
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), HOST)))
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_BASE": self.url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }

    async def run(self, *command: str, given: str | None = None, folder: str | None = None) -> Ran:
        """Run a program with these variables to its end. It and its process group are killed if the episode ends
        before.

        `given`: its standard input.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **self.environment},
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await process.communicate(None if given is None else given.encode())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all processes that it left behind
        return Ran(process.returncode or 0, output.decode(errors="replace"), errors.decode(errors="replace"))


@overload
def harness(function: Harness) -> AsyncEnv: ...
@overload
def harness(
    *,
    unfinished: float = 0.0,
    overflow: Literal["reply", "error"] = "reply",
    sampling: Literal["refuse", "ignore"] = "refuse",
) -> Callable[[Harness], AsyncEnv]: ...
def harness(
    function: Harness | None = None,
    *,
    unfinished: float = 0.0,
    overflow: Literal["reply", "error"] = "reply",
    sampling: Literal["refuse", "ignore"] = "refuse",
) -> AsyncEnv | Callable[[Harness], AsyncEnv]:
    """Turn a harness into an environment.

    Once an episode has run out of turns, tokens or time, requests get an empty reply that was cut off ("length").
    `overflow`: "error" refuses requests that do not fit the context, as servers do, so that a harness may shorten its
    conversation and go on. `unfinished`: the reward if a harness then fails. `sampling`: whether a request with
    sampling fields of its own (`OF_THE_RUN`) is refused, or these fields are ignored.
    """
    if function is None:
        return lambda function: _environment(function, unfinished, overflow, sampling)
    return _environment(function, unfinished, overflow, sampling)


def _environment(function: Harness, unfinished: float, overflow: str, sampling: str) -> AsyncEnv:
    async def environment(task: Task) -> AsyncGenerator[Any, Any]:
        async with _opened(overflow, sampling) as session:
            running = asyncio.ensure_future(_called(function, task, session.endpoint))
            try:
                while (request := await session.next(running)) is not None:
                    reply = yield request.turn
                    session.answer(request, reply)
                if session.told and running.exception() is not None:
                    yield unfinished
                yield running.result()
            finally:
                if not running.done():
                    running.cancel()
                    with suppress(Exception, asyncio.CancelledError):
                        await running

    functools.update_wrapper(environment, function)
    vars(environment)["stands_for"] = vars(environment).pop("__wrapped__")  # not a generator, unlike `environment`
    return environment


_threads = ThreadPoolExecutor(MOST_THREADS, "harness")


async def _called(function: Harness, task: Task, endpoint: PolicyEndpoint) -> Verdict:
    """Run the harness and return its reward."""
    if inspect.iscoroutinefunction(function):
        return await function(task, endpoint)
    found = await asyncio.get_running_loop().run_in_executor(_threads, function, task, endpoint)
    return await found if inspect.isawaitable(found) else found


@dataclass(eq=False)
class _Request:
    turn: Turn | Ask  # Ask: a request that counts prompt tokens
    said: asyncio.Future[Any]
    asked: PolicyRequest


@dataclass(eq=False)
class _Session:
    """Requests of an episode: the policy, as the server's handlers see it."""

    endpoint: PolicyEndpoint
    overflow: str
    sampling: str
    told: bool = False  # whether a reply reported that the episode ran out of turns, tokens or time
    conversations: StoredConversations = field(default_factory=StoredConversations)
    _closed: bool = False
    _asked: asyncio.Queue[_Request] = field(default_factory=asyncio.Queue)
    _waiting: set[asyncio.Future[Any]] = field(default_factory=set)
    _unread: dict[bytes, asyncio.Future[PolicyResponse]] = field(default_factory=dict)  # client disconnected

    def describe(self) -> dict[str, Any]:
        return {"id": MODEL}

    def check(self, model: str | None) -> None:
        pass

    def select(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body.get("sampling_params")
        if isinstance(params, dict):
            body = {**body, "sampling_params": self._without(params, "sampling_params.")}
        return self._without(body)

    def _without(self, fields: dict[str, Any], path: str = "") -> dict[str, Any]:
        """Return the fields without sampling fields. Raises RequestRefused for those, unless they are ignored."""
        if self.sampling == "refuse":
            for name, neutral in OF_THE_RUN.items():
                if (value := fields.get(name)) is not None and value not in neutral:
                    raise RequestRefused(
                        f"{path}{name}: the run sets the sampling of replies (--temperature), as training needs one "
                        "distribution: leave it out, or ignore it with @harness(sampling='ignore')",
                        parameter=f"{path}{name}",
                    )
        return {name: value for name, value in fields.items() if name not in OF_THE_RUN}

    async def replies(self, prompt: Prompt, asked: PolicyRequest) -> Sequence[PolicyResponse]:
        return await together(self._reply(prompt, asked, number) for number in range(asked.count))

    async def count(self, prompt: Prompt, asked: PolicyRequest) -> int:
        if self._closed:
            raise RequestRefused(OVER, 410)
        counted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        question = Ask(PROMPT_TOKENS, {"messages": prompt, "tools": list(asked.tools)})
        self._waiting.add(counted)
        self._asked.put_nowait(_Request(question, counted, asked))
        return await asyncio.shield(counted)

    async def _reply(self, prompt: Prompt, asked: PolicyRequest, number: int) -> PolicyResponse:
        """Return the reply. A client that lost its connection and repeats a request gets the same reply."""
        if self._closed:
            raise RequestRefused(OVER, 410)
        request = _Request(_turn(prompt, asked), asyncio.get_running_loop().create_future(), asked)
        same = _digest(prompt, asked, number)
        said = self._unread.pop(same, None)
        if said is None:
            said = request.said
            self._waiting.add(said)
            self._asked.put_nowait(request)
        try:
            return await asyncio.shield(said)
        except asyncio.CancelledError:
            self._unread[same] = said
            raise

    async def next(self, running: asyncio.Future[Any]) -> _Request | None:
        """Return the next request; None when the harness has ended."""
        asking = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait((asking, running), return_when=asyncio.FIRST_COMPLETED)
            return None if running.done() else asking.result()
        finally:
            asking.cancel()

    def answer(self, request: _Request, reply: Any) -> None:
        """Resolve a request with the reply to its turn, or with the number of tokens that it asked for."""
        self._waiting.discard(request.said)
        if isinstance(request.turn, Ask):
            if isinstance(reply, Invalid):
                request.said.set_exception(RequestRefused(f"tokens cannot be counted: {reply.reason}"))
                request.said.exception()
            else:
                request.said.set_result(reply)
            return
        over = reply.sampled is None and reply.stop.truncated
        self.told = self.told or over
        if over and reply.stop is StopReason.CONTEXT and self.overflow == "error":
            told = "the maximum context length of this model is exceeded: shorten the conversation"
            request.said.set_exception(
                RequestRefused(told, code="context_length_exceeded", parameter=request.asked.prompt_field)
            )
            request.said.exception()  # marks it as retrieved, in case no client waits
        else:
            request.said.set_result(_said(reply, request.asked, request.turn))

    def close(self) -> None:
        """Refuse all further requests."""
        self._closed = True
        for said in self._waiting:
            said.set_exception(RequestRefused(OVER, 410))
            said.exception()


def _turn(prompt: Prompt, asked: PolicyRequest) -> Turn:
    how: dict[str, Any] = {"stop": asked.stop, "max_tokens": asked.max_tokens, "whole": True}
    if isinstance(prompt, str):
        return Turn(text=prompt, **how)
    if isinstance(prompt, tuple):
        return Turn(tokens=prompt, **how)
    return Turn(messages=prompt, tools=asked.tools or None, **how)


def _said(reply: Reply, asked: PolicyRequest, turn: Turn) -> PolicyResponse:
    completion = reply.sampled or Completion(0, (), (), str(reply), reply.stop, 0)
    ending = next((s for s in asked.stop if reply.stop is StopReason.STOP and reply.endswith(s)), None)
    calls = tuple(call for call in reply.tool_calls if call.problem is None) if asked.tools else ()
    read = reply.read or len(turn.tokens or ())
    return PolicyResponse(completion, read, turn.tokens, ending, ending or "", None, calls, reply.before_calls)


def _digest(prompt: Prompt, asked: PolicyRequest, number: int) -> bytes:
    return hashlib.blake2b(repr((prompt, replace(asked, id=None), number)).encode("utf-8", "replace")).digest()


# -- the server of a worker --------------------------------------------------------------------------------------------


class _SharedServer:
    """A server in an event loop, open while any episode needs it."""

    def __init__(self) -> None:
        self.sessions: dict[str, _Session] = {}
        self._lock = asyncio.Lock()
        self._open = AsyncExitStack()
        self._port = 0
        self._guests = 0

    async def enter(self, overflow: str, sampling: str) -> tuple[str, _Session]:
        async with self._lock:
            if not self._guests:
                self._port = await self._open.enter_async_context(self._serving())
            self._guests += 1
        key = secrets.token_urlsafe(KEY_BYTES)
        self.sessions[key] = _Session(PolicyEndpoint(f"http://{HOST}:{self._port}/{key}/v1"), overflow, sampling)
        return key, self.sessions[key]

    async def leave(self, key: str) -> None:
        self.sessions.pop(key).close()
        async with self._lock:
            self._guests -= 1
            if not self._guests:
                await self._open.aclose()

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[int]:
        def find(request: Any) -> _Session:
            session = self.sessions.get(request.match_info["key"])
            if session is None:
                raise RequestRefused(OVER, 410)
            return session

        async with serving(PolicyHandlers(find, ServerLimits()).application("/{key}")) as port:
            yield port


_shared_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedServer] = WeakKeyDictionary()


@asynccontextmanager
async def _opened(overflow: str, sampling: str) -> AsyncIterator[_Session]:
    server = _shared_servers.setdefault(asyncio.get_running_loop(), _SharedServer())
    key, session = await server.enter(overflow, sampling)
    try:
        yield session
    finally:
        await server.leave(key)


if TYPE_CHECKING:
    _proof: Callable[..., Policy] = _Session
