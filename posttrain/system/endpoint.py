"""Calls of an OpenAI-compatible endpoint: one event loop in its own thread, with many concurrent calls.

Decides for judges and teachers which failures are retried, when, and how they are reported. Connection errors, 408, 429
and 5xx are retried: after a wait that doubles each time, or after the wait that the endpoint asks for, which then
applies to all calls. The timeout covers a whole call: HTTP libraries limit single reads only, which an answer that
arrives in small pieces never exceeds. The caller parses the answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import queue
import ssl
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from posttrain.core.messages import clip, inline, one_line, safe
from posttrain.core.seeds import seed_of
from posttrain.core.types import UserError

FIRST_WAIT = 0.5  # seconds before the first retry; doubles each time
PATIENCE_SECONDS = 2.0  # of waiting before a message, while an endpoint is tested
TELL_SECONDS = 60.0  # between messages about waiting
LONGEST_WAIT = 120.0  # longest wait in seconds that an endpoint may ask for: a longer one fails the call
MOST_BYTES = 64 << 20  # size limit of an answer: the log-probabilities of a long prompt take a few MiB
CLOSE_SECONDS = 5.0
CONNECT_SECONDS = 10.0  # for a connection, with its TLS handshake
IDLE_SECONDS = 5.0  # after which an idle connection is not reused: servers close such connections

T = TypeVar("T")


@dataclass(frozen=True)
class EndpointFailure:
    """The reason of a failed call."""

    reason: str
    again: bool = False  # whether a retry may succeed
    rubbish: bool = False  # whether the response was not a valid answer
    wait: float = 0.0  # seconds that the endpoint asks to wait
    status: int | None = None  # of the HTTP response, where that is the reason

    def way(self, key: str, place: str) -> str:
        """Return a hint for the user. `key`: the hint if the key was refused; `place`: the settings with the endpoint
        and its model.
        """
        if self.status in (401, 403):
            return key
        if self.status == 404 or self.rubbish:
            return f"an endpoint usually ends in /v1; check {place}"
        return f"check that the server runs, and {place}" if self.again else f"look at {place}"


def key_in(variable: str) -> str | None:
    """Return the key in an environment variable; None if it is not set. Raises UserError if the key is invalid."""
    key = os.environ.get(variable)
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"the environment variable {variable} holds no key: set it to one line of plain ASCII")
    return key or None


class Endpoint:
    """A client: `start` runs work on the event loop, `finished` returns its results. It counts requests, retries and
    failures.
    """

    def __init__(
        self, address: str, key: str | None, calls: int, per_minute: float | None, seconds: float, retries: int
    ) -> None:
        """Create the client. `address`: up to /v1; `calls`: most concurrent calls; `per_minute`: most calls a minute;
        `seconds`: timeout of a call.

        Raises UserError for an invalid address, and for a proxy that cannot be used.
        """
        self.address = address.rstrip("/")
        self.seconds, self.retries = seconds, retries
        self.counts = dict.fromkeys(("requests", "retries", "failures"), 0.0)
        proved = {"Authorization": f"Bearer {key}"} if key else {}
        self._headers = {"Content-Type": "application/json", "User-Agent": "posttrain", **proved}
        self._calls, self._interval = calls, 60.0 / per_minute if per_minute else 0.0
        self._proxy = proxy_for(self.address)
        self._error_text = -math.inf  # time of the last message about waiting
        self._next = 0.0  # earliest time of the next call, by the monotonic clock
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._encryption = ssl.create_default_context()  # reads many files
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="endpoint", daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()

    def start(self, id: int, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine, which may await `call`; `finished` returns its result."""
        asyncio.run_coroutine_threadsafe(self._work(id, work), self._loop)

    def finished(self) -> list[tuple[int, Any]]:
        done = []
        while not self._done.empty():
            done.append(self._done.get_nowait())
        return done

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, called from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def try_once(self, work: Coroutine[Any, Any, T | EndpointFailure]) -> T | EndpointFailure:
        """Run the first call to an endpoint that may not answer, with a message if it takes long.

        With all retries it takes no longer than the timeout of one call.
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
        """Run coroutines to their ends, called from another thread. An error in one of them cancels all."""

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
        """Send a request, with retries where these may help, and return `read` of the JSON answer.

        `path`: below the address; `body`: the content to post, or None for a GET; `retries`: replaces the endpoint's
        setting. Failures that `read` returns are not retried: only the caller knows the fault of an answer.
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
            if attempt:  # the first failure is not reported
                waits = max(outcome.wait, FIRST_WAIT * 2**attempt) + sum(
                    FIRST_WAIT * 2**n for n in range(attempt + 1, most)
                )
                self._tell_waiting(outcome.reason, waits + (most - attempt) * self.seconds)
            shaken = 0.75 + seed_of(0, "retry", len(body or b""), attempt) / 2**64  # jitter
            await asyncio.sleep(max(outcome.wait, FIRST_WAIT * 2**attempt * shaken))
        self.counts["failures"] += 1
        return outcome

    def close(self) -> None:
        """Cancel running calls. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_SECONDS)

    def _tell_waiting(self, reason: str, seconds: float) -> None:
        """Report the reason for waiting and the longest wait, but at most every `TELL_SECONDS`."""
        now = time.monotonic()
        if now - self._error_text > TELL_SECONDS:
            self._error_text = now
            print(
                f"waiting for {self.address}: {reason}; it is asked again for {seconds:.0f} s at most",
                file=sys.stderr,
                flush=True,
            )

    # -- on the event loop ---------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop, self._slots = asyncio.Event(), asyncio.Semaphore(self._calls)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, ssl=self._encryption),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            skip_auto_headers=["Accept-Encoding"],
            auto_decompress=False,  # a few kilobytes may become gigabytes
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
        ) as self._session:
            self._ready.set()
            await self._stop.wait()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

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
        method, content = "GET" if body is None else "POST", bytearray()
        asking = self._session.request(method, address, data=body, proxy=self._proxy, allow_redirects=False)
        try:
            async with asyncio.timeout(self.seconds), asking as response:
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > MOST_BYTES:
                        return EndpointFailure(f"an answer of more than {MOST_BYTES >> 20} MiB", rubbish=True)
        except aiohttp.ServerTimeoutError:
            return EndpointFailure(f"no connection within {CONNECT_SECONDS:g} s", again=True)
        except TimeoutError:
            return self._late()
        except (aiohttp.NonHttpUrlClientError, ValueError) as error:  # ValueError: also aiohttp.InvalidURL
            return EndpointFailure(_named(error))
        except aiohttp.ClientError as error:
            return EndpointFailure(_named(error), again=True)
        message = _message(response.status, response.headers, bytes(content))
        return message if isinstance(message, EndpointFailure) else read(message)


def proxy_for(address: str) -> str | None:
    """Return the proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY define for an address; None for none.

    Raises UserError for a proxy that does not speak HTTP, and for an invalid address.
    """
    try:
        parts, proxies = urlsplit(address), getproxies()
    except ValueError as error:
        raise UserError(f"{address} is no address: {one_line(error)}") from error
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = found if "://" in found else f"http://{found}"
    if not proxy.startswith(("http://", "https://")):
        scheme = proxy.partition("://")[0]  # the rest may hold a password
        raise UserError(
            f"the environment names the proxy {scheme}://...: give one of http:// or https://, or set NO_PROXY"
        )
    return proxy


def _message(status: int, headers: Mapping[str, str], content: bytes) -> Any:
    """Return the JSON of an HTTP response, or the failure."""
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
        said = f", it has moved to {safe(clip(headers.get('location', 'nowhere'), 100))}"
    return EndpointFailure(f"HTTP {status}{said}", status=status)


def _named(error: Exception) -> str:
    """Describe a failure of the connection."""
    kind, said = type(error).__name__, one_line(error)
    if isinstance(error, aiohttp.ClientResponseError):  # its text names the proxy with its password
        said = f"HTTP {error.status} {inline(error.message)}"
    return kind if said == kind else f"{kind}: {said}"


def _error_text(message: Any) -> str:
    """Return an endpoint's error message, shortened for use in ours."""
    for name in ("error", "message", "detail"):
        if isinstance(message, dict):
            message = message.get(name, message)
    return f" ({safe(clip(inline(message), 160))})" if isinstance(message, str) and message.strip() else ""


def _retry_after(value: str | None) -> float:
    """Return the seconds of a Retry-After header, which is a number or a date; 0 if it is neither."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return 0.0 if math.isnan(seconds) else min(max(0.0, seconds), 1e9)
