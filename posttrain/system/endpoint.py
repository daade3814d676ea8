"""Calls of an OpenAI-compatible endpoint: one event loop in a thread of its own, many concurrent calls.

Decides, for judges and teachers alike, which failures are retried, when, and how they are reported. Connection errors,
408, 429 and 5xx are retried: after a time that doubles with each, or after the time that the endpoint asks for, which
then holds for all calls. The timeout is of a whole call: HTTP libraries have timeouts for single reads, which an answer
that trickles in never reaches. Answers are parsed by the caller.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpcore2

from posttrain.core.messages import clip, inline, one_line
from posttrain.core.seeds import seed_of
from posttrain.core.types import UserError
from posttrain.system.http_connection import Connection, encryption, proxy_for

FIRST_WAIT = 0.5  # seconds before a call is made again; doubles each time
PATIENCE_SECONDS = 2.0  # of silence, while an endpoint is tested
TELL_SECONDS = 60.0  # between messages about waiting
LONGEST_WAIT = 120.0  # longest wait in seconds that an endpoint may ask for: beyond it the call has failed
MOST_BYTES = 64 << 20  # of an answer: the log-probabilities of a long prompt take a few
CLOSE_SECONDS = 5.0
PASSING = (
    httpcore2.NetworkError,
    httpcore2.TimeoutException,
    httpcore2.RemoteProtocolError,
    httpcore2.ProxyError,
)
"""Failures of a connection after which a retry may succeed."""

T = TypeVar("T")


@dataclass(frozen=True)
class EndpointFailure:
    """Reason of a failed call."""

    reason: str
    again: bool = False  # whether a retry may succeed
    rubbish: bool = False  # whether a response came that is not an answer
    wait: float = 0.0  # seconds that the endpoint asks to wait
    status: int | None = None  # of the HTTP response, where that is the reason

    def way(self, key: str, place: str) -> str:
        """Return a hint for the user. `key`: hint about the key; `place`: settings that name the endpoint and its
        model.
        """
        if self.status in (401, 403):
            return key
        if self.status == 404 or self.rubbish:
            return f"an endpoint ends in /v1 as a rule; look at {place}"
        return f"is the server up, and {place} right?" if self.again else f"look at {place}"


def key_in(variable: str) -> str | None:
    """Return the key in an environment variable, None where it is not set. Raises UserError if it is invalid."""
    key = os.environ.get(variable)
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"the environment variable {variable} holds no key: set it to one line of plain ASCII")
    return key or None


class Endpoint:
    """A client: `start` begins work on the event loop, `finished` returns what has been done. It counts what depends on
    the clock.
    """

    def __init__(
        self, address: str, key: str | None, calls: int, per_minute: float | None, seconds: float, retries: int
    ) -> None:
        """Create the client. `address`: up to /v1; `calls`: concurrent; `per_minute`: limit of their number; `seconds`:
        timeout of one.

        Raises UserError for an invalid address, and for a proxy that cannot be used.
        """
        self.address = address.rstrip("/")
        self.seconds, self.retries = seconds, retries
        self.counts = dict.fromkeys(("requests", "retries", "failures"), 0.0)
        proved = [(b"Authorization", f"Bearer {key}".encode())] if key else []
        self._headers = [(b"Content-Type", b"application/json"), (b"User-Agent", b"posttrain"), *proved]
        self._calls, self._interval = calls, 60.0 / per_minute if per_minute else 0.0
        self._encryption, self._proxy = encryption(), proxy_for(self.address)
        self._error_text = -math.inf  # time of the last message about waiting
        self._next = 0.0  # earliest time of the next call, by the monotonic clock
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()

    def start(self, id: int, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine, which may `call`; its result is among the `finished`."""
        asyncio.run_coroutine_threadsafe(self._work(id, work), self._loop)

    def finished(self) -> list[tuple[int, Any]]:
        done = []
        while not self._done.empty():
            done.append(self._done.get_nowait())
        return done

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def try_once(self, work: Coroutine[Any, Any, T | EndpointFailure]) -> T | EndpointFailure:
        """Run the first call to an endpoint that may hang, with a message where it takes long.

        All of it, retries included, takes no longer than one call may.
        """
        running = asyncio.run_coroutine_threadsafe(self._in_time(work), self._loop)
        try:
            return running.result(PATIENCE_SECONDS)
        except TimeoutError:
            if not running.done():
                print(f"waiting for {self.address} to answer, {self.seconds:g} s at most", file=sys.stderr, flush=True)
        return running.result()

    async def _in_time(self, work: Coroutine[Any, Any, T | EndpointFailure]) -> T | EndpointFailure:
        try:
            async with asyncio.timeout(self.seconds):
                return await work
        except TimeoutError:
            return self._late()

    def _late(self) -> EndpointFailure:
        return EndpointFailure(f"no answer within {self.seconds:g} s", again=True)

    def wait_for_all(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run coroutines to their ends, from another thread. An error of one of them cancels all."""

        async def all_of_them() -> list[T]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work) for work in works]
            return [task.result() for task in tasks]

        try:
            return self.wait(all_of_them())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def call(
        self, path: str, body: bytes | None, read: Callable[[Any], T | EndpointFailure], retries: int | None = None
    ) -> T | EndpointFailure:
        """Send a request, with retries as far as they may help, and return the result of `read` of the JSON answer.

        `path`: below the address; `body`: what is posted there, or None for a GET; `retries`: replaces the endpoint's.
        What `read` refuses is not retried: only the caller knows what an answer lacks.
        """
        most = self.retries if retries is None else retries
        for attempt in range(most + 1):
            async with self._slots:
                await self._turn()
                self.counts["requests"] += 1
                outcome = await self._once(f"{self.address}/{path}", body, read)
            if not isinstance(outcome, EndpointFailure):
                return outcome
            if not outcome.again or attempt == most:
                break
            if outcome.wait > LONGEST_WAIT:
                outcome = replace(outcome, reason=f"{outcome.reason}; it asks to wait {outcome.wait:g} s")
                break
            self.counts["retries"] += 1
            self._next = max(self._next, time.monotonic() + outcome.wait)
            if attempt:  # a single failure is not reported
                waits = max(outcome.wait, FIRST_WAIT * 2**attempt) + sum(
                    FIRST_WAIT * 2**n for n in range(attempt + 1, most)
                )
                self._tell_waiting(outcome.reason, waits + (most - attempt) * self.seconds)
            shaken = 0.75 + seed_of(0, "retry", len(body or b""), attempt) / 2**64  # with jitter
            await asyncio.sleep(max(outcome.wait, FIRST_WAIT * 2**attempt * shaken))
        self.counts["failures"] += 1
        return outcome

    def close(self) -> None:
        """Cancel running calls. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_SECONDS)

    def _tell_waiting(self, reason: str, seconds: float) -> None:
        """Report what is waited for, and for how long at most; not at every call."""
        now = time.monotonic()
        if now - self._error_text > TELL_SECONDS:
            self._error_text = now
            print(
                f"waiting for {self.address}: {reason}; it is asked again for {seconds:.0f} s at most",
                file=sys.stderr,
                flush=True,
            )

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop, self._slots = asyncio.Event(), asyncio.Semaphore(self._calls)
        self._idle: list[Connection] = []
        self._ready.set()
        await self._stop.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for connection in self._idle:
            await connection.close()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Return an idle connection: a pool of many would look at each of them for every call."""
        connection = self._idle.pop() if self._idle else Connection(self._encryption, self._proxy)
        try:
            yield connection
        finally:
            self._idle.append(connection)

    async def _work(self, id: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._done.put((id, await work))
        except Exception as error:  # our own error: it is raised where the answer is awaited
            self._done.put((id, error))

    async def _turn(self) -> None:
        """Wait until a call may begin."""
        now = time.monotonic()
        begin = max(now, self._next)
        if self._interval:
            self._next = begin + self._interval
        if begin > now:
            await asyncio.sleep(begin - now)

    async def _once(
        self, address: str, body: bytes | None, read: Callable[[Any], T | EndpointFailure]
    ) -> T | EndpointFailure:
        try:
            async with asyncio.timeout(self.seconds), self._connection() as connection:
                answer = await connection.ask(address, self._headers, body, MOST_BYTES)
        except TimeoutError:
            return self._late()
        except PASSING as error:
            return EndpointFailure(_named(error), again=True)
        except (httpcore2.UnsupportedProtocol, httpcore2.LocalProtocolError, ValueError) as error:
            return EndpointFailure(_named(error))
        if answer is None:
            return EndpointFailure(f"an answer of more than {MOST_BYTES >> 20} MiB", rubbish=True)
        message = _message(*answer)
        return message if isinstance(message, EndpointFailure) else read(message)


def _message(status: int, headers: Mapping[str, str], content: bytes) -> Any:
    """Return the JSON of an HTTP response, or Failed."""
    html = "html" in headers.get("content-type", "") or content.lstrip()[:1] == b"<"
    try:
        message, readable = json.loads(content), True
    except (ValueError, RecursionError):
        message, readable = "" if html else inline(content[:1000].decode("utf-8", "replace")), False
    if status == 200 and readable:
        return message
    if status == 200:
        what = "a page of HTML" if html else f"{clip(message)!r}, which is no JSON," if message else "nothing"
        return EndpointFailure(f"{what} instead of an answer", rubbish=True)
    said = _error_text(message)
    if status in (408, 429) or status >= 500:
        return EndpointFailure(
            f"HTTP {status}{said}", True, wait=_retry_after(headers.get("retry-after")), status=status
        )
    if status in (401, 403):
        said = f", it refuses the key{said}"
    elif status in (301, 302, 303, 307, 308):
        said = f", it has moved to {clip(headers.get('location', 'nowhere'), 100)}"
    return EndpointFailure(f"HTTP {status}{said}", status=status)


def _named(error: Exception) -> str:
    """Describe a failure of the connection."""
    kind, said = type(error).__name__, one_line(error)
    return kind if said == kind else f"{kind}: {said}"


def _error_text(message: Any) -> str:
    """Return an endpoint's error message, as part of ours."""
    for name in ("error", "message", "detail"):
        if isinstance(message, dict):
            message = message.get(name, message)
    return f" ({clip(inline(message), 160)})" if isinstance(message, str) and message.strip() else ""


def _retry_after(value: str | None) -> float:
    """Return the seconds of a Retry-After header, which holds a number or a date; 0 where it holds neither."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return max(0.0, seconds) if seconds < 1e9 else 1e9
