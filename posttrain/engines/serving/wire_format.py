"""Wire formats: how requests to a path are read, and how responses, streams and errors are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from posttrain.core.thoughts import CLOSES
from posttrain.engines.serving.policy_responses import PolicyResponse
from posttrain.engines.serving.requests import PolicyRequest, RequestRefused
from posttrain.engines.serving.stored_conversations import StoredConversations

Step = tuple[str | None, dict[str, Any]]
"""An event: its name, if the format names events, and its content."""


class GrowingField(NamedTuple):
    """The text in an event that grows while the reply is sampled."""

    holder: dict[str, Any]
    key: str
    of_tokens: dict[str, Any]  # its lists have an entry for each token of the reply


TextOf = Callable[[dict[str, Any]], GrowingField | None]


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
    """Finds the text in an event that grows while the reply is sampled."""
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


@dataclass
class _Sent:
    """The events of a choice that were sent."""

    place: int = 0  # number of whole ones
    characters: int = 0  # of the text of the next one
    tokens: int = 0  # entries of its lists
    begins_thinking: bool | None = None  # None: nothing was sent


class EventStream:
    """The server-sent events of a response, from its first words on. Each choice has its own."""

    def __init__(self, form: WireFormat, name: str, asked: PolicyRequest) -> None:
        self._form, self._name, self._asked = form, name, asked
        self._sent: dict[int, _Sent] = {}  # by the index of the choice
        self._number = 0  # of events

    def grown(self, reply: PolicyResponse) -> bytes:
        """Return what is new in a reply in progress: the events up to its last text, as far as that goes."""
        if self._form.splits_thoughts and reply.begins_thinking and CLOSES not in reply.completion.text:
            return b""  # the thoughts are known as such at their end
        sent = self._sent.setdefault(reply.index, _Sent())
        steps = list(self._form.events(self._name, self._asked, [reply]))
        last = max((place for place, step in enumerate(steps) if self._text(step)), default=-1)
        if last < sent.place or len(self._text(steps[last])) <= sent.characters * (last == sent.place):
            return b""
        sent.begins_thinking = reply.begins_thinking
        return self._up_to(steps[:last], sent) + self._piece(steps[last], sent)

    def whole(self, reply: PolicyResponse) -> bytes:
        """Return all further events of one of several choices."""
        sent = self._sent.setdefault(reply.index, _Sent())
        asked = replace(self._asked, stream_usage=False)  # of all of them
        reply = replace(reply, begins_thinking=sent.begins_thinking)
        return self._up_to(list(self._form.events(self._name, asked, [reply])), sent)

    def ended(self, replies: Sequence[PolicyResponse]) -> bytes:
        """Return all further events."""
        sent = [self._sent.setdefault(reply.index, _Sent()) for reply in replies]
        known = [replace(one, begins_thinking=own.begins_thinking) for one, own in zip(replies, sent, strict=True)]
        steps: dict[int, list[Step]] = {reply.index: [] for reply in replies}
        for step in self._form.events(self._name, self._asked, known):
            choices = step[1].get("choices")
            steps[choices[0]["index"] if choices else replies[-1].index].append(step)
        out = b"".join(self._up_to(own, self._sent[index]) for index, own in steps.items())
        return out + self._form.ending

    def _text(self, step: Step) -> str:
        found = self._form.text_of(step[1])
        return "" if found is None else str(found.holder[found.key])

    def _up_to(self, steps: Sequence[Step], sent: _Sent) -> bytes:
        out = b""
        for step in steps[sent.place :]:
            out += self._piece(step, sent)
            sent.place, sent.characters, sent.tokens = sent.place + 1, 0, 0
        return out

    def _piece(self, step: Step, sent: _Sent) -> bytes:
        """Return an event, without the text of it that was sent, and the tokens of that."""
        name, content = step
        found = self._form.text_of(content)
        if found is not None and (text := self._text(step)):
            lists = {key: each for key, each in found.of_tokens.items() if isinstance(each, list)}
            found.holder[found.key] = text[sent.characters :]
            found.of_tokens.update({key: each[sent.tokens :] for key, each in lists.items()})
            tokens = max(map(len, lists.values()), default=0)
            if not found.holder[found.key] and tokens <= sent.tokens:
                return b""
            sent.characters, sent.tokens = len(text), max(tokens, sent.tokens)
        if "sequence_number" in content:
            content = {**content, "sequence_number": self._number}
        self._number += 1
        return event(content, name)
