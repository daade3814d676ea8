"""Decides which tokens a turn adds to a transcript. What the policy sampled is never decoded and tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from posttrain.types import Completion, StopReason, Turn


class Texts(Protocol):
    """The part of a tokenizer that is needed here."""

    chat_template: str | None

    def encode(self, text: str, start: bool = False) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def render(self, messages: Sequence[Mapping[str, str]], generation: bool = True) -> str: ...
    def render_after(self, before: Sequence[Mapping[str, str]], new: Sequence[Mapping[str, str]]) -> str: ...


class Conversation:
    """The text side of one episode: turns in, tokens to observe out."""

    def __init__(self, tokenizer: Texts) -> None:
        self.tokenizer = tokenizer
        self.messages: list[Mapping[str, str]] = []
        self.first = True

    def show(self, turn: Turn, last: Completion | None) -> list[int]:
        """Tokens that put `turn` before the policy; `last` is what it sampled just before, if anything."""
        first, self.first = self.first, False
        if turn.messages is None:
            return self.tokenizer.encode(turn.text or "", start=first)
        if first:
            self.messages = list(turn.messages)
            return self.tokenizer.encode(self.tokenizer.render(self.messages, generation=True), start=True)
        after = self.tokenizer.encode(self.tokenizer.render_after(self.messages, turn.messages))
        ended = last is not None and not last.stop.truncated and after[:1] == list(last.tokens[-1:])
        if ended:  # the end of the reply is there already: the policy sampled it, as an end id or as a stop string
            after = after[1:]
        said = last.text if last else ""
        if ended and last is not None and last.stop is StopReason.STOP:
            said = said.removesuffix(self.tokenizer.decode(last.tokens[-1:]))
        self.messages = [*self.messages, {"role": "assistant", "content": said}, *turn.messages]
        return after
