"""Wire formats: how requests to a path are read, and how responses, streams and errors are written."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.thoughts import CLOSES
from posttrain.engines.serving.policy_responses import PolicyResponse
from posttrain.engines.serving.requests import PolicyRequest, RequestRefused
from posttrain.engines.serving.stored_conversations import StoredConversations

Step = tuple[str | None, dict[str, Any]]
"""An event: its name, if the format names events, and its content."""
TextOf = Callable[[dict[str, Any]], tuple[dict[str, Any], str] | None]


@dataclass(frozen=True)
class WireFormat:
    """The wire format of an API."""

    path: str
    read: Callable[[dict[str, Any], StoredConversations], PolicyRequest]
    """Reads a request's body. Raises RequestRefused."""
    write: Callable[[str, PolicyRequest, Sequence[PolicyResponse]], dict[str, Any]]
    """Builds the response from the model's name, the request, and the replies to each of its prompts."""
    events: Callable[[str, PolicyRequest, Sequence[PolicyResponse]], Iterator[Step]]
    """Yields the same as events: each text of a reply is one event, which `EventStream` divides."""
    write_error: Callable[[RequestRefused], dict[str, Any]]
    text_of: TextOf = lambda content: None
    """Finds the text in an event that grows while the reply is sampled: what holds it, and the key."""
    splits_thoughts: bool = False
    ending: bytes = b""  # what follows all events


def alone(
    read: Callable[[dict[str, Any]], PolicyRequest],
) -> Callable[[dict[str, Any], StoredConversations], PolicyRequest]:
    """Adapt the reader of a wire format whose requests have the whole conversation, and need no stored one."""
    return lambda body, stored: read(body)


def event(content: dict[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


class EventStream:
    """The server-sent events of a response, from its first words on."""

    def __init__(self, form: WireFormat, name: str, asked: PolicyRequest) -> None:
        self._form, self._name, self._asked = form, name, asked
        self._begins_thinking: bool | None = None  # of what was sent; None: nothing was
        self._place = self._characters = self._number = 0  # whole events that were sent, characters of the next one

    def grown(self, reply: PolicyResponse) -> bytes:
        """Return what is new in a reply in progress: the events up to its last text, as far as that goes."""
        if self._form.splits_thoughts and reply.begins_thinking and CLOSES not in reply.completion.text:
            return b""  # the thoughts are known as such at their end
        steps = list(self._form.events(self._name, self._asked, [reply]))
        last = max((place for place, step in enumerate(steps) if self._text(step)), default=-1)
        if last < self._place or len(self._text(steps[last])) <= self._characters * (last == self._place):
            return b""
        self._begins_thinking = reply.begins_thinking
        return self._up_to(steps[:last]) + self._piece(steps[last])

    def ended(self, replies: Sequence[PolicyResponse]) -> bytes:
        """Return all further events."""
        if self._begins_thinking is not None:
            replies = [replace(reply, begins_thinking=self._begins_thinking) for reply in replies]
        return self._up_to(list(self._form.events(self._name, self._asked, replies))) + self._form.ending

    def _text(self, step: Step) -> str:
        found = self._form.text_of(step[1])
        return "" if found is None else str(found[0][found[1]])

    def _up_to(self, steps: Sequence[Step]) -> bytes:
        out = b""
        for step in steps[self._place :]:
            out += self._piece(step)
            self._place, self._characters = self._place + 1, 0
        return out

    def _piece(self, step: Step) -> bytes:
        """Return an event, without the text of it that was sent."""
        name, content = step
        if text := self._text(step):
            content = copy.deepcopy(content)
            holder, key = self._form.text_of(content) or ({}, "")
            holder[key] = text[self._characters :]
            if not holder[key]:
                return b""
            self._characters = len(text)
        if "sequence_number" in content:
            content = {**content, "sequence_number": self._number}
        self._number += 1
        return event(content, name)
