"""Protocol between a pool and its engines: JSON messages with a length prefix, over a non-blocking socket.

JSON holds only numbers and text, and floats keep their bits (Python writes the shortest text that restores a float).
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.core.messages import one_line
from posttrain.core.types import Completion, Sampling, StopReason

LONGEST = 1 << 28  # maximum of bytes in a message
PIECE = 1 << 18  # bytes per read

Message = list[Any]
"""The name of a message, followed by its arguments."""


class Gone(Exception):
    """Raised when the other side has closed or lost the connection, or sent an invalid message."""


class Wire:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket, self._out, self._in = end, bytearray(), bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether outgoing bytes are still in the buffer."""
        return bool(self._out)

    def send(self, *message: Any) -> None:
        """Send a message. If the connection is broken, the message is dropped, and `receive` raises the error."""
        content = json.dumps(message, allow_nan=False).encode()
        self._out += struct.pack(">I", len(content)) + content
        self.flush()

    def flush(self) -> None:
        """Send as much of the buffer as possible without blocking."""
        try:
            while self._out:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()

    def receive(self) -> list[Message]:
        """Return the complete messages that have arrived. Raises Gone after all earlier messages have been returned."""
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
                raise Gone("it sent invalid JSON") from error
            if not isinstance(message, list) or not message or not isinstance(message[0], str):
                raise Gone("it sent JSON that is not a message")
            found.append(message)
            place += 4 + length
        del self._in[:place]
        return found

    def close(self) -> None:
        self.socket.close()


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def wait(wires: Sequence[Wire], seconds: float | None) -> None:
    """Wait until a connection can be read, or one with pending bytes can be written."""
    ready = select.poll()
    for wire in wires:
        ready.register(wire, select.POLLIN | (select.POLLOUT if wire.pending else 0))
    ready.poll(None if seconds is None else seconds * 1000)


# -- requests and completions -----------------------------------------------------------------------------------------


def decode_sampling(content: dict[str, Any]) -> Sampling:
    return Sampling(**{**content, "stop": tuple(content["stop"])})


def encode_completion(done: Completion) -> Message:
    content: Message = [list(done.tokens), list(done.logp), done.text, str(done.stop), done.version]
    if done.experts is None or done.prompt_experts is None:
        return content
    return [*content, done.experts.tolist(), done.prompt_experts.tolist()]


def decode_completion(id: int, content: Any, vocab: int, most: int) -> Completion:
    """Parse a completion. Raises Gone if it is invalid or has more than `most` tokens."""
    try:
        tokens, logp, text, stop, version, *routed = content
        right = (
            isinstance(text, str)
            and type(version) is int
            and 0 < len(tokens) == len(logp) <= most
            and all(type(token) is int and 0 <= token < vocab for token in tokens)
            and all(type(value) is float and value <= 1e-3 for value in logp)
        )
        if right:
            experts, before = map(_decode_routes, routed) if routed else (None, None)
            if experts is None or len(experts) == len(tokens):
                return Completion(id, tokens, logp, text, StopReason(stop), version, experts, prompt_experts=before)
    except (ValueError, TypeError, OverflowError):
        pass
    raise Gone("it returned an invalid completion")


def _decode_routes(content: Any) -> NDArray[np.int16]:
    """Parse routed experts [tokens, layers, k]. Raises ValueError, TypeError or OverflowError if they are malformed."""
    found = np.array(content, dtype=np.int16)
    if found.ndim != 3:
        raise ValueError("experts are of tokens and layers")
    return found
