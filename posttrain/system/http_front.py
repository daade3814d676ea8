"""Access control of every HTTP server of this package: tokens, origins, and connections per peer.

A web page must not read the data served on this machine. Requests of a page have another Host header if a name was
rebound to our address, have the page's origin in Origin, and have no JSON content type unless the browser was permitted
to send it. A program that sends no content type, or curl's default one, is accepted. A token, where one is set, is
required of everyone.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import defaultdict
from collections.abc import Iterable
from hmac import compare_digest
from typing import Any
from weakref import WeakSet

from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import UserError

HOST = "127.0.0.1"
UNSAID = "application/x-www-form-urlencoded"  # default content type of curl -d
CONNECTIONS = 256  # open connections of one peer
LEAST_TOKEN = 16  # characters


def refused(
    method: str, headers: Iterable[tuple[str, str]], served: str = HOST, token: str | None = None
) -> tuple[int, str] | None:
    """Return the HTTP status and the reason for refusing a request; None if it is accepted.

    `headers`: as received; a repeated one has both values. `served`: the host to which the server is bound. `token`:
    the value that every request must send as "Authorization: Bearer ...", or as "x-api-key: ..." as Anthropic's clients
    do.
    """
    said: dict[str, str] = {}
    for header, value in headers:
        said[header.lower()] = f"{said[header.lower()]}, {value}" if header.lower() in said else value
    host = said.get("host", "")
    name = _name(host)
    if not _is_address(name) and name not in ("localhost", served.lower(), socket.gethostname().lower()):
        return 421, f"this is {served}, and not {host:.100}"
    origin = said.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return 403, f"requests of other sites are not answered ({origin:.100})"
    kind = said.get("content-type", UNSAID).strip().lower()
    kind = kind.partition(";")[0].strip() if "," not in kind else kind
    if method == "POST" and kind != "application/json" and (kind != UNSAID or origin is not None):
        return 415, "the body must be JSON: send Content-Type: application/json"
    given = [said.get("authorization", "").removeprefix("Bearer "), said.get("x-api-key", "")]
    if token is not None and not any([_equal(one.strip(), token) for one in given]):
        return 401, "this server needs its token: send Authorization: Bearer TOKEN, or x-api-key: TOKEN"
    return None


def _equal(given: str, token: str) -> bool:
    """Compare in a time that does not depend on the content."""
    return compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def read_token(file: str | None) -> str | None:
    """Return the token in a file, without surrounding white space; None without a file. Raises UserError."""
    if file is None:
        return None
    try:
        token = user_files.text(file).strip()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"--token {file} cannot be read: {one_line(error)}") from error
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise UserError(
            f"--token {file} must hold at least {LEAST_TOKEN} printable characters (openssl rand -hex 32 makes some)"
        )
    return token


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address of this machine (port 0: any free one). Raises UserError if binding fails."""
    if not 0 <= port < 1 << 16:  # getaddrinfo would take the remainder
        raise UserError(f"--port is 0 to 65535, not {port}")
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listening = _Listening(family, kind)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host} is not an address of this machine: {one_line(error)}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        way = "choose another --port, or 0 for any free one" if port else "check --host"
        raise UserError(f"--port {port} cannot be used on {host}: {error.strerror}; {way}") from None
    return listening


class _Listening(socket.socket):
    """A socket that accepts a limited number of connections per peer. Further ones are closed at once, so that one peer
    cannot exclude others.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: defaultdict[str, WeakSet[socket.socket]] = defaultdict(WeakSet)

    def accept(self) -> tuple[socket.socket, Any]:
        end, address = super().accept()
        held = self._open[address[0]]
        if sum(other.fileno() >= 0 for other in held) >= CONNECTIONS:
            end.close()
            raise ConnectionAbortedError  # servers treat it like a peer that disconnected
        for other in [other for other in held if other.fileno() < 0]:
            held.discard(other)
        held.add(end)
        return end, address


def _name(host: str) -> str:
    """Return the name in a Host header, without the port; "" if the header has more than a name and a port."""
    found = re.fullmatch(r"(?:\[([^]]*)\]|([^][:,\s]*))(?::\d*)?", host.strip().lower())
    return (found[1] or found[2]) if found else ""


def _is_address(name: str) -> bool:
    """Return whether the name is an IP address: no domain name that others could resolve to this machine."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
