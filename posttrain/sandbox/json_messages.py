"""Messages between two processes, one of them untrusted: a length in four bytes, then JSON of that length."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
HEAD = _LENGTH.size


def framed(message: dict[str, Any]) -> bytes:
    content = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(content)) + content


def length(head: bytes) -> int:
    found: int = _LENGTH.unpack(head)[0]
    return found


def send(descriptor: int, message: dict[str, Any]) -> None:
    content = framed(message)
    while content:
        content = content[os.write(descriptor, content) :]


def receive(descriptor: int, most: int) -> dict[str, Any]:
    """Return the next message. Raises EOFError, OSError, or ValueError for an invalid message or one longer than
    `most`.
    """
    size = length(_exactly(descriptor, HEAD))
    if size > most:
        raise ValueError(f"a message of {size} bytes")
    message = json.loads(_exactly(descriptor, size))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def _exactly(descriptor: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(descriptor, size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
