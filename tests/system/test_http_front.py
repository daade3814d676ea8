"""Who may ask a server of this machine: programs here, no web page, no peer that holds all connections, nobody without
the token."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from posttrain.core.types import UserError
from posttrain.system import http_front
from posttrain.system.http_front import bound, read_token, refused

JSON = {"host": "127.0.0.1:8000", "content-type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, None),
        ({"host": "localhost:8000"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"host": "10.1.2.3:8000"}, None),
        ({"host": f"{socket.gethostname()}:8000"}, None),
        ({"content-type": "application/json; charset=utf-8"}, None),
        ({"content-type": http_front.UNSAID}, None),
        ({"origin": "http://127.0.0.1:8000"}, None),
        ({"host": "evil.com"}, 421),
        ({"host": "127.0.0.1.evil.com"}, 421),
        ({"host": ""}, 421),
        ({"host": "[::1"}, 421),
        ({"origin": "http://evil.com"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9000"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": http_front.UNSAID, "origin": "http://127.0.0.1:8000"}, 415),
    ],
)
def test_a_web_page_of_another_site_is_refused_and_a_program_is_heard(
    headers: dict[str, str], status: int | None
) -> None:
    found = refused("POST", {**JSON, **headers}.items())
    assert (found and found[0]) == status


@pytest.mark.parametrize(
    ("name", "others", "status"),
    [("Host", "evil.com", 421), ("Origin", "http://evil.com", 403), ("Content-Type", "text/plain", 415)],
)
def test_what_is_said_twice_is_not_heard_once(name: str, others: str, status: int) -> None:
    own = {**JSON, "origin": "http://127.0.0.1:8000"}
    for twice in ([(name, others), *own.items()], [*own.items(), (name, others)]):
        assert (found := refused("POST", twice)) is not None and found[0] == status


def test_a_name_that_the_server_was_told_is_its_own() -> None:
    assert refused("GET", [("host", "search.lab:80")], served="search.lab") is None
    assert refused("GET", [("host", "search.lab:80")]) is not None


def test_without_the_token_nobody_is_answered(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    token = read_token(str(tmp_path / "token"))
    assert token == "0123456789abcdef"
    for given in ("", "Bearer 0123456789abcdeF", "Bearer é", "Bearer \udcff"):
        assert (found := refused("GET", {**JSON, "authorization": given}.items(), token=token)) and found[0] == 401
    assert refused("GET", {**JSON, "authorization": f"Bearer {token}"}.items(), token=token) is None
    for content in ("short", "with a\nnew line in it"):
        (tmp_path / "token").write_text(content)
        with pytest.raises(UserError, match="printable characters"):
            read_token(str(tmp_path / "token"))


@pytest.mark.parametrize("port", [-1, 65_536, 99_999, 1 << 40])
def test_a_number_that_is_no_port_opens_no_other_port(port: int) -> None:
    with pytest.raises(UserError, match=f"--port is 0 to 65535, not {port}"):
        bound("127.0.0.1", port)


def test_a_peer_has_so_many_connections_and_those_that_end_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_front, "CONNECTIONS", 3)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"!")
        await writer.drain()
        writer.close()

    async def asked(port: int) -> bytes:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"?")
            found = await reader.read(1)
            writer.close()
        except ConnectionError:
            return b""
        return found

    async def run() -> None:
        listening = bound("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=listening):
            port = listening.getsockname()[1]
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            await asyncio.sleep(0)
            assert await asked(port) == b""
            for _, writer in silent:
                writer.close()
            end = time.monotonic() + 20
            while await asked(port) != b"!":
                assert time.monotonic() < end
                await asyncio.sleep(0.01)

    asyncio.run(run())
