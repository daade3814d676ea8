"""HTTP server of an index, or of any object that searches; protocol: `search_protocol`.

    POST /retrieve    queries in, passages out
    GET  /health      the index, and the length of the queue

No client can block others: a request must arrive, and its answer must be read, within a time limit, and bodies, queries
and answers have size limits. Access control: `posttrain.system.http_front`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from aiohttp import web

from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.services.retrieval.batcher import Batcher, Busy
from posttrain.services.retrieval.passage_index import PassageIndex
from posttrain.services.retrieval.search_protocol import MOST_BYTES, PATH, SearchRefused, read_request, written_answer
from posttrain.system import http_server
from posttrain.system.http_front import HOST, bound, refused

ARRIVE_SECONDS = 15.0  # for the head of a request to arrive, and for its body
TAKE_SECONDS = 30.0  # for the client to read an answer
LINGER_SECONDS = 2.0  # for the rest of a request that was refused before all of it arrived
GOODBYE_SECONDS = 2.0  # for answers to open requests at shutdown


class SearchHandlers:
    """The HTTP handlers of an index."""

    def __init__(
        self,
        index: PassageIndex,
        topk: int,
        most_bytes: int = MOST_BYTES,
        host: str = HOST,
        token: str | None = None,
    ) -> None:
        """Create the handlers. `topk`: passages per query by default; `host`: the address of the server; `token`:
        required of every client.
        """
        self._host, self._token = host, token
        self._index, self._topk, self._most_bytes = index, topk, most_bytes
        self._batcher = Batcher(index.search)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer_errors], client_max_size=self._most_bytes)
        app.router.add_post(f"/{PATH}", self.retrieve)
        app.router.add_get("/health", self.health)
        app.cleanup_ctx.append(self._searching)
        return app

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Return errors as JSON."""
        try:
            if (wrong := refused(request.method, request.headers.items(), self._host, self._token)) is not None:
                raise SearchRefused(*wrong)
            return await handler(request)
        except SearchRefused as error:
            status, said = error.status, str(error)
        except web.HTTPException as error:  # of aiohttp: unknown path, wrong method, body too large
            status, said = error.status, _plain(error, request)
        except UserError as error:  # a damaged file, or an encoder that fails
            print(f"posttrain: {error}", file=sys.stderr, flush=True)
            status, said = 500, one_line(error)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            status, said = 500, "internal server error; the server printed it"
        return await _answered(request, status, json.dumps({"detail": said}).encode())

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        if "Content-Encoding" in request.headers:
            raise SearchRefused(415, "the body is compressed; send it as it is")
        try:
            async with asyncio.timeout(ARRIVE_SECONDS):
                body = await request.read()
        except TimeoutError:
            raise SearchRefused(408, f"the body did not arrive within {ARRIVE_SECONDS:g} s") from None
        asked = read_request(body, self._topk)
        try:
            found = await self._batcher.search(asked.queries, asked.topk)
        except Busy:
            raise SearchRefused(503, f"{self._batcher.waiting:,} queries are queued; try again later") from None
        return await _answered(request, 200, written_answer(found, asked.scores))

    async def health(self, request: web.Request) -> web.StreamResponse:
        manifest = self._index.manifest
        told = {
            "status": "ok", "kind": manifest.kind, "passages": manifest.count, "fingerprint": manifest.fingerprint,
            "waiting": self._batcher.waiting,
        }  # fmt: skip
        return await _answered(request, 200, json.dumps(told).encode())

    async def _searching(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.get_running_loop().create_task(self._batcher.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _plain(error: web.HTTPException, request: web.Request) -> str:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body has more than {request.client_max_size >> 20} MiB"
    return f"there is POST /{PATH} and GET /health" if error.status in (404, 405) else error.reason


async def _answered(request: web.Request, status: int, body: bytes) -> web.StreamResponse:
    """Send the answer. A client that does not read it is disconnected."""
    response = web.StreamResponse(status=status, headers={"Retry-After": "1"} if status == 503 else {})
    response.content_type = "application/json"
    response.content_length = len(body)
    try:
        async with asyncio.timeout(TAKE_SECONDS):
            await response.prepare(request)
            await response.write(body)
            await response.write_eof()
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
    return response


def serving(application: web.Application, host: str = HOST, port: int = 0) -> AbstractAsyncContextManager[int]:
    """Serve the application on a port (0: any free one), and yield its number. Raises UserError if the port cannot be
    used.
    """
    return http_server.serving(
        application,
        bound(host, port),
        keepalive_timeout=ARRIVE_SECONDS,  # from the connection's start, or its last answer, to a whole head
        lingering_time=LINGER_SECONDS,
        shutdown_timeout=GOODBYE_SECONDS,
    )


def serve(
    index: PassageIndex,
    host: str,
    port: int,
    topk: int,
    say: Callable[[str], Any] = print,
    token: str | None = None,
) -> None:
    """Serve an index until the process is interrupted, which raises KeyboardInterrupt."""

    async def run() -> None:
        stopped = http_server.stop_signal()
        async with serving(SearchHandlers(index, topk, host=host, token=token).application(), host, port) as served:
            shown = f"[{host}]" if ":" in host else host
            say(f"index       {index.description}\naddress     http://{shown}:{served}/{PATH}")
            await stopped

    asyncio.run(run())
    raise KeyboardInterrupt
