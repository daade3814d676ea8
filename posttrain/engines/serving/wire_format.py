"""Wire formats: how requests to a path are read, and how responses, streams and errors are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.engines.serving.policy_responses import PolicyResponse
from posttrain.engines.serving.requests import PolicyRequest, RequestRefused
from posttrain.engines.serving.stored_conversations import StoredConversations


@dataclass(frozen=True)
class WireFormat:
    """The wire format of an API."""

    path: str
    read: Callable[[dict[str, Any], StoredConversations], PolicyRequest]
    """Reads a request's body. Raises RequestRefused."""
    write: Callable[[str, PolicyRequest, Sequence[PolicyResponse]], dict[str, Any]]
    """Builds the response from the model's name, the request, and the replies to each of its prompts."""
    events: Callable[[str, PolicyRequest, Sequence[PolicyResponse]], Iterator[bytes]]
    """Yields the same as server-sent events: each part of a reply is one piece, since engines return whole replies."""
    write_error: Callable[[RequestRefused], dict[str, Any]]


def alone(
    read: Callable[[dict[str, Any]], PolicyRequest],
) -> Callable[[dict[str, Any], StoredConversations], PolicyRequest]:
    """Adapt the reader of a wire format whose requests have the whole conversation, and need no stored one."""
    return lambda body, stored: read(body)


def event(content: dict[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
