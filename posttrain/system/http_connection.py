"""One HTTP connection at a time, over asyncio's own streams.

httpcore2 implements HTTP, with our network backend. Its own backend, with httpx2 on top, would make a dozen system
calls per request, and after each the thread waits for the interpreter's lock, which sampling holds. Here head and body
are sent in one call, and a request takes a third of the processor time.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import httpcore2

from posttrain.core.messages import one_line
from posttrain.core.types import UserError

CONNECT_SECONDS = 10.0  # for a connection, with its TLS handshake
IDLE_SECONDS = 5.0  # after which an idle connection is not reused: servers close such connections
ADDRESS_SECONDS = 0.25  # before another address of the same name is tried in parallel


class _Stream(httpcore2.AsyncNetworkStream):
    """A stream that sends its writes together, at the next read. The timeout is that of the whole call."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unsent: list[bytes] = []

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._unsent:
            self._writer.write(b"".join(self._unsent))
            self._unsent.clear()
            with suppress(ConnectionError):  # a server may refuse before it has read everything: its answer counts
                await self._writer.drain()
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise httpcore2.ReadError(error) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._unsent.append(buffer)

    async def aclose(self) -> None:
        self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except (OSError, TimeoutError) as error:
            await self.aclose()
            raise httpcore2.ConnectError(error) from error
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # asked of an idle connection: readable means that the server closed it
            return self._reader.at_eof() or self._reader.exception() is not None
        return self._writer.get_extra_info(info)


class _Streams(httpcore2.AsyncNetworkBackend):
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                opened = await asyncio.open_connection(host, port, happy_eyeballs_delay=ADDRESS_SECONDS)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(f"no connection within {CONNECT_SECONDS:g} s") from error
        except OSError as error:
            raise httpcore2.ConnectError(error) from error
        return _Stream(*opened)


class Connection:
    """A connection to one server, perhaps through a proxy; opened and reopened when needed."""

    def __init__(self, encryption: ssl.SSLContext, proxy: str | None) -> None:
        how: dict[str, Any] = {
            "ssl_context": encryption, "max_connections": 1, "keepalive_expiry": IDLE_SECONDS, "network_backend": _Streams(),
        }  # fmt: skip
        self._pool = httpcore2.AsyncConnectionPool(**how) if proxy is None else _through(proxy, how)

    async def ask(
        self, address: str, headers: list[tuple[bytes, bytes]], body: bytes | None, most: int
    ) -> tuple[int, dict[str, str], bytes] | None:
        """Return (status, headers by lower-case names, content) of the response; None if it has more than `most` bytes.

        `body`: the content to post; None: a GET. Raises httpcore2's exceptions.
        """
        method, sized = ("GET", []) if body is None else ("POST", [(b"Content-Length", b"%d" % len(body))])
        url = httpcore2.URL(address)
        host = url.host if url.port is None else b"%b:%d" % (url.host, url.port)
        every = [(b"Host", host), *headers, *sized]
        async with self._pool.stream(method, url, headers=every, content=body) as response:
            content = bytearray()
            async for part in response.aiter_stream():
                content += part
                if len(content) > most:
                    return None
        named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        return response.status, named, bytes(content)

    async def close(self) -> None:
        await self._pool.aclose()


def encryption() -> ssl.SSLContext:
    """Return a TLS context with the system's certificates, or with those in SSL_CERT_FILE or SSL_CERT_DIR. It reads
    many files: call it once.
    """
    context: ssl.SSLContext = httpcore2.default_ssl_context()
    return context


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
        raise UserError(f"the environment names the proxy {proxy}: give one of http:// or https://, or set NO_PROXY")
    return proxy


def _through(proxy: str, how: dict[str, Any]) -> httpcore2.AsyncConnectionPool:
    parts = urlsplit(proxy)
    place = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], "/", "", ""))
    auth = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    return httpcore2.AsyncHTTPProxy(proxy_url=place, proxy_auth=auth, **how)
