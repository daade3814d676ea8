"""HTTP server of a policy: routes, limits and errors.

    POST /inference/v1/generate    token ids in, token ids and log-probabilities out
    POST /v1/chat/completions      OpenAI's chat
    POST /v1/completions           OpenAI's completions
    POST /v1/responses             OpenAI's responses
    POST /v1/messages              Anthropic's messages
    POST /v1/messages/count_tokens the tokens of their prompt
    GET  /v1/models                the model and its limits
    GET  /health

It accepts only connections of this machine; clients on other machines need a tunnel. Access:
`posttrain.system.http_front`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from aiohttp import web

from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.engines.serving import anthropic_messages
from posttrain.engines.serving.anthropic_messages import MESSAGES_FORMAT
from posttrain.engines.serving.openai_completions import CHAT_FORMAT, COMPLETIONS_FORMAT, GENERATE_FORMAT
from posttrain.engines.serving.openai_responses import RESPONSES_FORMAT, stored_messages
from posttrain.engines.serving.policy_responses import PolicyResponse
from posttrain.engines.serving.requests import PolicyRequest, Prompt, RequestRefused, read_body
from posttrain.engines.serving.stored_conversations import StoredConversations
from posttrain.engines.serving.task_group import together
from posttrain.engines.serving.wire_format import EventStream, WireFormat, event
from posttrain.system import http_server
from posttrain.system.http_front import HOST, bound, refused

BODY_SECONDS = 60.0  # timeout for a request's body
GOODBYE_SECONDS = 1.0  # timeout for connections to end at shutdown
FORMATS = (GENERATE_FORMAT, CHAT_FORMAT, COMPLETIONS_FORMAT, RESPONSES_FORMAT, MESSAGES_FORMAT)


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server."""

    requests: int = 1024
    body: int = 8 << 20  # maximum of bytes in a body: parsing a longer one would delay other requests


class Policy(Protocol):
    """A policy that answers requests."""

    conversations: StoredConversations  # which requests may continue by the id of a response

    def describe(self) -> dict[str, Any]:
        """Return the model card in OpenAI's list of models, with `max_model_len`, the maximum of tokens of prompt and
        reply together, as in vLLM.
        """
        ...

    def check(self, model: str | None) -> None:
        """Check the model's name in a request. Raises Refused."""
        ...

    def select(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a request's body that concerns this policy. Raises Refused."""
        ...

    async def replies(self, prompt: Prompt, asked: PolicyRequest) -> Sequence[PolicyResponse]:
        """Sample the requested number of replies to a prompt. It is cancelled when the client disconnects. Raises
        Refused, UserError.
        """
        ...

    async def count(self, prompt: Prompt, asked: PolicyRequest) -> int:
        """Return the number of tokens of a prompt. Raises RequestRefused."""
        ...


Find = Callable[[web.Request], Policy]
"""Finds the policy of a request. Raises Refused."""


class PolicyHandlers:
    """HTTP handlers of all routes."""

    def __init__(self, find: Find, limits: ServerLimits, token: str | None = None) -> None:
        """Create the handlers. `token`: token that every request must have; None: no token is required."""
        self._find, self._limits, self._token = find, limits, token
        self.under_way = 0

    def application(self, prefix: str = "") -> web.Application:
        """Build the application. `prefix`: prefix of all paths, such as "/{key}"."""
        app = web.Application(middlewares=[self._answer_errors], client_max_size=self._limits.body)
        app.router.add_get(f"{prefix}/health", self.health)
        app.router.add_get(f"{prefix}/v1/models", self.models)
        for form in FORMATS:
            app.router.add_post(prefix + form.path, self._answering(form))
        app.router.add_post(prefix + anthropic_messages.COUNT_PATH, self.count_tokens)
        return app

    async def health(self, request: web.Request) -> web.Response:
        self._find(request)
        return web.json_response({"status": "ok", "requests": self.under_way})

    async def models(self, request: web.Request) -> web.Response:
        card = self._find(request).describe()
        return web.json_response({"object": "list", "data": [{"object": "model", "owned_by": "posttrain", **card}]})

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Count the tokens of a prompt, for Anthropic's API."""
        policy = self._find(request)
        asked = anthropic_messages.read_count(policy.select(read_body(await _body(request))))
        policy.check(asked.model)
        return web.json_response({"input_tokens": await policy.count(asked.prompts[0], asked)})

    def _answering(self, form: WireFormat) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            policy = self._find(request)
            asked = form.read(policy.select(read_body(await _body(request))), policy.conversations)
            policy.check(asked.model)
            if asked.stream:
                return await self._streamed(request, policy, form, asked)
            replies = await self._sampled(policy, asked)
            if asked.stored is not None and asked.id is not None:
                policy.conversations.add(asked.id, stored_messages(asked, replies[0]))
            name = str(asked.model or policy.describe()["id"])
            return web.json_response(form.write(name, asked, replies), dumps=_compact)

        return answer

    async def _streamed(
        self, request: web.Request, policy: Policy, form: WireFormat, asked: PolicyRequest
    ) -> web.StreamResponse:
        """Send each reply as it is sampled, if the policy shows it, or else at its end.

        An error before the first words is answered as one; after them it is an event.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        stream = EventStream(form, str(asked.model or policy.describe()["id"]), asked)
        newest: dict[int, PolicyResponse] = {}  # by choice: a slow client gets no older ones
        news = asyncio.Event()
        several = asked.count * len(asked.prompts) > 1  # else what ends the only one is sent once it is stored

        def show(number: int, reply: PolicyResponse) -> None:
            newest[number] = replace(reply, index=number)
            news.set()

        sampling = asyncio.ensure_future(self._sampled(policy, replace(asked, watch=show)))
        sampling.add_done_callback(lambda _: news.set())

        async def send(content: bytes) -> None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(content)

        try:
            with suppress(ConnectionResetError):  # the client has disconnected
                while not sampling.done():
                    await news.wait()
                    news.clear()
                    shown = sorted(newest.items())
                    newest.clear()
                    for _, reply in shown:
                        whole = reply.begins_thinking is None
                        content = stream.whole(reply) if whole and several else b"" if whole else stream.grown(reply)
                        if content:
                            await send(content)
                try:
                    replies = await sampling
                except Exception as error:
                    if not response.prepared:
                        raise
                    problem = error if isinstance(error, RequestRefused) else RequestRefused(one_line(error), 500)
                    await send(event(form.write_error(problem), "error"))
                else:
                    if asked.stored is not None and asked.id is not None:
                        policy.conversations.add(asked.id, stored_messages(asked, replies[0]))
                    await send(stream.ended(replies))
                await response.write_eof()
        finally:
            sampling.cancel()
        return response

    async def _sampled(self, policy: Policy, asked: PolicyRequest) -> Sequence[PolicyResponse]:
        """Return the replies to each prompt, within the limit of replies in progress."""
        count = asked.count * len(asked.prompts)
        if self.under_way + count > self._limits.requests:
            raise RequestRefused(
                f"{self.under_way} replies are in progress: try again later", 429, "rate_limit_exceeded"
            )
        self.under_way += count

        def replies(place: int, prompt: Prompt) -> Coroutine[Any, Any, Sequence[PolicyResponse]]:
            """Sample the replies to one of the prompts. Theirs are numbered behind those to the prompts before."""
            if (show := asked.watch) is None:
                return policy.replies(prompt, asked)
            return policy.replies(
                prompt, replace(asked, watch=lambda number, reply: show(place * asked.count + number, reply))
            )

        try:
            each = await together(replies(place, prompt) for place, prompt in enumerate(asked.prompts))
        finally:
            self.under_way -= count
        return [replace(reply, index=index) for index, reply in enumerate(chain(*each))]

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Convert an exception to an error in the format of the path's API."""
        try:
            if (wrong := refused(request.method, request.headers.items(), token=self._token)) is not None:
                raise RequestRefused(wrong[1], wrong[0])
            return await handler(request)
        except RequestRefused as error:
            problem = error
        except web.HTTPException as error:  # from aiohttp: no such path, another method, a body that is too large
            problem = RequestRefused(_plain(error, request), error.status)
        except web.RequestPayloadError:  # a body with invalid compression or chunks
            problem = RequestRefused("the body cannot be read")
        except UserError as error:
            problem = RequestRefused(one_line(error))
        except Exception:
            traceback.print_exc(file=sys.stderr)
            problem = RequestRefused("internal server error; the server printed it", 500)
        headers = {"Retry-After": "1"} if problem.status in (429, 503) else {}
        form = MESSAGES_FORMAT if MESSAGES_FORMAT.path in request.path else CHAT_FORMAT
        return web.json_response(form.write_error(problem), status=problem.status, headers=headers)


def _plain(error: web.HTTPException, request: web.Request) -> str:
    if error.status not in (404, 405):
        return error.text or error.reason
    there = sorted({f"{route.method} {'/' + '/'.join(parts)}" for route in request.app.router.routes()
                    if route.method != "HEAD" and route.resource is not None
                    for parts in [[p for p in route.resource.canonical.split("/") if p and "{" not in p]]})  # fmt: skip
    return f"there is no {request.method} {request.path:.100}; there are {', '.join(there)}"


async def _body(request: web.Request) -> bytes:
    if "Content-Encoding" in request.headers:
        raise RequestRefused("the body is compressed; send it as it is", 415)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise RequestRefused(f"the body did not arrive within {BODY_SECONDS:g} s", 408) from None


def _compact(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


def serving(application: web.Application, port: int = 0) -> AbstractAsyncContextManager[int]:
    """Context that serves an application on a port of this machine (0: any free one), and yields the port. Raises
    UserError if the port is in use.
    """
    return http_server.serving(application, bound(HOST, port), shutdown_timeout=GOODBYE_SECONDS)
