"""What a pool and its engines say to each other: messages of JSON, each behind its length, over a socket that never waits.

JSON and not pickle: what comes may come from another machine, and nothing in it can be more than numbers and text. Numbers
keep their bits (Python writes the shortest text that gives a float back). A peer that comes over the network first proves
that it has the token (HMAC-SHA256 over a number that only this connection has, each side in its turn), before a single
message of it is read. Nothing is encrypted: across networks that others read, use a tunnel.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import Completion, Sampling, StopReason, UserError

LONGEST = 1 << 28  # bytes of a message
PIECE = 1 << 18  # bytes that are read at once
TOKEN = "POSTTRAIN_ENGINE_TOKEN"  # the environment variable
LEAST_TOKEN = 16  # characters
PROOF_SECONDS = 10.0  # for a peer to prove that it has the token

Message = list[Any]
"""What it is about, and what belongs to that."""


class Gone(Exception):
    """The other side has closed, broken off, or said what cannot be read."""


class Wire:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket, self._out, self._in = end, bytearray(), bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def owes(self) -> bool:
        """Whether something that was told has not left yet."""
        return bool(self._out)

    def tell(self, *message: Any) -> None:
        """What cannot be told any more is dropped: `heard` says that the other side is gone."""
        content = json.dumps(message, allow_nan=False).encode()
        self._out += struct.pack(">I", len(content)) + content
        self.flush()

    def flush(self) -> None:
        """As much of what was told as the other side takes now."""
        try:
            while self._out:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()

    def heard(self) -> list[Message]:
        """The messages that have come whole. Raises Gone, when all that came before has been given."""
        ended = None
        while ended is None:
            try:
                piece = self.socket.recv(PIECE)
            except BlockingIOError:
                break
            except OSError as error:
                ended = one_line(error)
                break
            self._in += piece
            ended = None if piece else "it closed the connection"
        found = self._whole()
        if ended is not None and not found:
            raise Gone(ended)
        return found

    def _whole(self) -> list[Message]:
        found, place = [], 0
        while len(self._in) - place >= 4:
            (length,) = struct.unpack_from(">I", self._in, place)
            if length > LONGEST:
                raise Gone(f"it announced a message of {length} bytes")
            if len(self._in) - place - 4 < length:
                break
            try:
                message = json.loads(self._in[place + 4 : place + 4 + length], parse_constant=_refuse)
            except (ValueError, RecursionError) as error:
                raise Gone("it said what is no JSON") from error
            if not isinstance(message, list) or not message or not isinstance(message[0], str):
                raise Gone("it said what is no message")
            found.append(message)
            place += 4 + length
        del self._in[:place]
        return found

    def close(self) -> None:
        self.socket.close()


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def wait(wires: Sequence[Wire], seconds: float | None) -> None:
    """Until one of them has something to say, or can take what it is owed."""
    ready = select.poll()
    for wire in wires:
        ready.register(wire, select.POLLIN | (select.POLLOUT if wire.owes else 0))
    ready.poll(None if seconds is None else seconds * 1000)


# -- what is said of requests ------------------------------------------------------------------------------------------


def sampling_read(said: dict[str, Any]) -> Sampling:
    return Sampling(**{**said, "stop": tuple(said["stop"])})


def completion_said(done: Completion) -> Message:
    said: Message = [list(done.tokens), list(done.logp), done.text, str(done.stop), done.version]
    if done.experts is None or done.prompt_experts is None:
        return said
    return [*said, done.experts.tolist(), done.prompt_experts.tolist()]


def completion_read(id: int, said: Any, vocab: int, most: int) -> Completion:
    """Raises Gone for what is no completion of at most so many tokens."""
    try:
        tokens, logp, text, stop, version, *routed = said
        right = (
            isinstance(text, str)
            and type(version) is int
            and 0 < len(tokens) == len(logp) <= most
            and all(type(token) is int and 0 <= token < vocab for token in tokens)
            and all(type(value) is float and value <= 1e-3 for value in logp)
        )
        if right:
            experts, before = map(_routes_read, routed) if routed else (None, None)
            if experts is None or len(experts) == len(tokens):
                return Completion(id, tokens, logp, text, StopReason(stop), version, experts, prompt_experts=before)
    except (ValueError, TypeError, OverflowError):
        pass
    raise Gone("it gave a reply that is none")


def _routes_read(said: Any) -> NDArray[np.int16]:
    """[tokens, layers, k]. Raises ValueError, TypeError or OverflowError for anything else."""
    found = np.array(said, dtype=np.int16)
    if found.ndim != 3:
        raise ValueError("experts are of tokens and layers")
    return found


# -- who may ask -------------------------------------------------------------------------------------------------------


def read_token(file: str | None) -> bytes:
    """From a file, or from the environment. Raises UserError where there is none, or one that is too short."""
    try:
        token = user_files.text(file, 1 << 20).strip() if file else os.environ.get(TOKEN, "")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--engine-token {file} cannot be read: {one_line(error)}") from error
    if len(token) < LEAST_TOKEN:
        raise UserError(
            f"engines over the network need a token of at least {LEAST_TOKEN} characters that both sides know: give "
            f"--engine-token FILE, or {TOKEN} in the environment (openssl rand -hex 32 makes one)"
        )
    return token.encode()


def prove(end: socket.socket, token: bytes, listening: bool) -> None:
    """Show each other that both have the token. The one who connects proves it first. Raises Gone."""
    deadline = time.monotonic() + PROOF_SECONDS
    mine = os.urandom(32)
    roles = (b"listens", b"connects") if listening else (b"connects", b"listens")

    def proof(role: bytes, number: bytes) -> bytes:
        return hmac.digest(token, b"posttrain engine " + role + number, "sha256")

    try:
        end.settimeout(PROOF_SECONDS)
        end.sendall(mine)
        theirs = _exactly(end, 32, deadline)
        if not listening:
            end.sendall(proof(roles[0], theirs))
        if not hmac.compare_digest(_exactly(end, 32, deadline), proof(roles[1], mine)):
            raise Gone("it has another token")
        if listening:
            end.sendall(proof(roles[0], theirs))
    except OSError as error:
        raise Gone(f"it did not prove that it has the token ({one_line(error)})") from error


def _exactly(end: socket.socket, count: int, deadline: float) -> bytes:
    found = b""
    while len(found) < count:
        end.settimeout(max(0.001, deadline - time.monotonic()))
        piece = end.recv(count - len(found))
        if not piece:
            raise Gone("it closed the connection before it proved that it has the token (has it the same one?)")
        found += piece
    return found


def keep_alive(end: socket.socket) -> None:
    """Notice within a minute that the other machine is gone."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def host_and_port(address: str, option: str) -> tuple[str, int]:
    """Raises UserError for what is no address."""
    scheme, found, rest = address.partition("://")
    if found:
        there = rest.partition("/")[0] or "127.0.0.1:7000"
        raise UserError(f"{option} {address}: it is no {scheme} that is spoken there: give {there} alone")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise UserError(f"{option} {address}: give a machine and a port, such as 127.0.0.1:7000")
    return host.strip("[]"), int(port)
