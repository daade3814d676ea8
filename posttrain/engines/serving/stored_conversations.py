"""Bounded store, in memory, of conversations that later requests continue by the id of a response."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.engines.serving.requests import RequestRefused

MOST_CONVERSATIONS = 1024
MOST_CHARACTERS = 32 << 20  # maximum over all stored messages; shared prefixes count each time

Messages = tuple[dict[str, Any], ...]


class StoredConversations:
    """Messages up to and including a reply, by the id of its response. The least recently used are dropped first."""

    def __init__(self, most: int = MOST_CONVERSATIONS, characters: int = MOST_CHARACTERS) -> None:
        """Create an empty store. `most`: maximum of conversations; `characters`: maximum over all messages."""
        self._most, self._characters = most, characters
        self._stored: OrderedDict[str, tuple[Messages, int]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._stored)

    def find(self, id: str) -> Messages:
        """Return a conversation. Raises RequestRefused if it was not stored, or was dropped."""
        if id not in self._stored:
            raise RequestRefused(
                f"Previous response with id {id[:200]!r} not found: it was not stored, or later responses replaced it; send "
                "the whole input",
                code="previous_response_not_found",
                parameter="previous_response_id",
            )
        self._stored.move_to_end(id)
        return self._stored[id][0]

    def add(self, id: str, messages: Sequence[dict[str, Any]]) -> None:
        """Store a conversation under the id of its last reply's response."""
        size = sum(map(_characters, messages))
        self._stored[id] = tuple(messages), size
        self._size += size
        while len(self._stored) > self._most or self._size > self._characters:
            _, (_, freed) = self._stored.popitem(last=False)
            self._size -= freed


def _characters(message: Mapping[str, Any]) -> int:
    return len(str(message))
