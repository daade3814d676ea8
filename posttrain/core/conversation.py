"""The conversion of turns to tokens of a transcript. Sampled tokens are never decoded and tokenised again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from posttrain.core.pictures import digests
from posttrain.core.transcripts import Media
from posttrain.core.types import Completion, Task, ToolCall, Turn, UserError

MOST_IDS = 100_000  # ids of nine letters and digits: far more than a context has calls


class ContinuedText(Protocol):
    """The template's text after a reply, and a message that represents the reply."""

    @property
    def text(self) -> str: ...
    @property
    def reply(self) -> Mapping[str, Any]: ...


class ToolCallFormat(Protocol):
    """The format of tool calls."""

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]: ...
    def start(self, text: str) -> int: ...


class TextEncoder(Protocol):
    """The methods of a tokenizer that this module needs."""

    chat_template: str | None
    unknown_id: int | None  # the id of the unknown token

    def encode(self, text: str, start: bool = False) -> list[int]: ...
    def check_tokens(self, tokens: Sequence[int]) -> None: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        generation: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str: ...
    def render_after(
        self,
        before: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        calls: Sequence[ToolCall] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ContinuedText: ...
    def encode_seen(self, text: str, digests: Sequence[str], start: bool = False) -> tuple[list[int], list[Media]]: ...
    def with_row(self, given: Mapping[str, Any]) -> TextEncoder: ...
    @property
    def tool_format(self) -> ToolCallFormat | None: ...


AnyEncoder = TypeVar("AnyEncoder", bound=TextEncoder)
ROW_VARIABLES = "chat_template_kwargs"
"""Column of a row with variables of the chat template, as TRL has it."""


def encoder_of(tokenizer: AnyEncoder, task: Task) -> AnyEncoder:
    """Return the tokenizer for a task: variables of its row replace those of the run in the chat template.

    Without a chat template they have no effect. Raises UserError for a variable that the template does not read.
    """
    given = task.get(ROW_VARIABLES)
    return cast(AnyEncoder, tokenizer.with_row(given)) if given and tokenizer.chat_template is not None else tokenizer


class Conversation:
    """The text side of one context: converts turns to tokens for the policy to observe."""

    def __init__(self, tokenizer: TextEncoder) -> None:
        self.tokenizer = tokenizer
        self.messages: list[Mapping[str, Any]] = []
        self.first = True
        self.chat = False  # whether the context began with messages
        self.tools: Sequence[Mapping[str, Any]] | None = None  # the tools that the prompt lists
        self.last_calls: Sequence[ToolCall] = ()  # of the last reply
        self.seen: Sequence[Media] = ()  # pictures of the last turn, places counted from its first token
        self._ids: set[str] = set()  # of all calls so far

    def branch(self) -> Conversation:
        """Return an independent copy that begins with all turns of this one."""
        other = copy(self)
        other._ids = set(self._ids)
        return other

    def show(self, turn: Turn, last: Completion | None) -> list[int]:
        """Return the tokens that present `turn` to the policy. `last`: the completion sampled just before, or None."""
        first, self.first, self.seen = self.first, False, ()
        if turn.messages is None:
            return self.tokenizer.encode(turn.text or "", start=first)
        if first:
            self.messages, self.chat = list(turn.messages), True
            self.tools = None if turn.tools is None else list(turn.tools)
            return self._encoded(self.tokenizer.render(self.messages, True, self.tools), self.messages, start=True)
        if turn.tools is not None and list(turn.tools) != self.tools:
            raise UserError("a chat template shows tools where a context begins: give its first turn all of them")
        new = list(turn.messages)
        after = self.tokenizer.render_after(self.messages, new, self.last_calls, self.tools)
        self.messages = [*self.messages, after.reply, *new]
        tokens = self._encoded(after.text, new)
        # the policy has sampled the end of its reply itself: the end id, a stop string, the end of a call
        sampled = [] if last is None or last.stop.truncated else list(last.tokens)
        longest = min(len(sampled), len(tokens))
        said = next((n for n in range(longest, 0, -1) if sampled[-n:] == tokens[:n]), 0)
        seen: Sequence[Media] = self.seen
        self.seen = tuple(replace(m, start=m.start - said) for m in seen)
        return tokens[said:]

    def _encoded(self, text: str, messages: Sequence[Mapping[str, Any]], start: bool = False) -> list[int]:
        """Return the tokens of the rendered messages, and store the places of their pictures in `seen`."""
        if not (pictures := digests(messages)):
            return self.tokenizer.encode(text, start=start)
        tokens, self.seen = self.tokenizer.encode_seen(text, pictures, start)
        return tokens

    def calls(self, text: str) -> Sequence[ToolCall]:
        """Return the tool calls in a reply."""
        form = self.tokenizer.tool_format if self.chat else None
        self.last_calls = ()
        if form is not None:
            found = form.read(text, self.tools or ())
            self.last_calls = tuple(replace(call, id=self._id(call.id)) for call in found)
        return self.last_calls

    def before_calls(self, text: str) -> int | None:
        """Return the number of characters of the last reply before its first tool call; None if it has none."""
        form = self.tokenizer.tool_format if self.last_calls else None
        return None if form is None else form.start(text)

    def _id(self, own: str) -> str:
        """Return a call's own id if all templates accept it and no earlier call has it, otherwise a new one."""
        fits = re.fullmatch("[A-Za-z0-9]{9}", own) and own not in self._ids
        numbered = (f"call{number:05d}" for number in range(len(self._ids), MOST_IDS))
        id = own if fits else next(id for id in numbered if id not in self._ids)
        self._ids.add(id)
        return id
