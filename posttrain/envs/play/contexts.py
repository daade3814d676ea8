"""Decides which context of an episode a turn belongs to.

An environment yields only new text. A program that uses a model's API sends the whole conversation each time, and may
hold several conversations at once. Its messages are therefore compared with the contexts so far. If they continue a
context, only the new part is an observation, so sampled tokens are never tokenised again. Otherwise a new context
begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from posttrain.core.conversation import Conversation, TextEncoder
from posttrain.core.thoughts import same_reply
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Reply, Turn


class Context:
    """The messages and tokens of one conversation of the policy."""

    def __init__(self, tokenizer: TextEncoder, side: str = "") -> None:
        self.tokenizer = tokenizer
        self.side = side  # the side that owns it
        self.conversation = Conversation(tokenizer)
        self.transcript = Transcript()
        self.last: Completion | None = None  # last completion sampled in it
        self.told = False  # whether it got the end of the episode, in a turn without the whole conversation
        self._earlier: tuple[Any, ...] = ()  # the state before the last turn
        self.messages: list[Mapping[str, Any]] | None = []  # of user and policy; None: some turns were not messages
        self._stop: tuple[str, ...] = ()  # stop strings of the last turn
        self._texts: tuple[str | Completion, ...] | None = ()  # texts and completions; None: some turns were not text

    def branch(self) -> Context:
        """Return another context that begins with all of this one."""
        other = copy(self)
        other.conversation, other.transcript = self.conversation.branch(), self.transcript.branch()
        return other

    def read(self, turn: Turn) -> list[int]:
        """Return the tokens that show a turn to the policy."""
        self._earlier = vars(self.conversation).copy(), self.messages, self._texts, self._stop
        if turn.tokens is not None:
            tokens, self.conversation.seen = list(turn.tokens), ()
            self.tokenizer.check_tokens(tokens)
        else:
            tokens = self.conversation.show(turn, self.last)
        self.shown(turn)
        return tokens

    def take_back(self) -> None:
        """Undo the last `read`: its turn was not shown to the policy."""
        if self._earlier:
            conversation, self.messages, self._texts, self._stop = self._earlier
            vars(self.conversation).update(conversation)

    def reply(self, completion: Completion, said: Reply, learn: bool, temperature: float | None) -> None:
        self.transcript.sample(completion, learn, temperature)
        self.last = completion
        if self.messages is not None:
            calls = [call.id for call in said.tool_calls if call.problem is None and self.conversation.tools]
            self.messages = [*self.messages, {"said": said, "calls": calls, "stop": self._stop}]
        if self._texts is not None:
            self._texts = (*self._texts, completion)

    def rest(self, turn: Turn) -> Turn | None:
        """Return the new part of a turn that holds a whole conversation; None if it does not continue this context."""
        if turn.tokens is not None:
            so_far = self.transcript.tokens
            begins = len(so_far) <= len(turn.tokens) and list(turn.tokens[: len(so_far)]) == so_far
            return replace(turn, tokens=turn.tokens[len(so_far) :]) if begins else None
        if turn.messages is not None:
            count = len(self.messages or ())
            begins = 0 < count < len(turn.messages) and (turn.tools or None) == (self.conversation.tools or None)
            begins = begins and all(map(_same, self.messages or (), turn.messages))
            return replace(turn, messages=turn.messages[count:]) if begins else None
        before, text = self._whole_text(), turn.text or ""
        return replace(turn, text=text[len(before) :]) if before and text.startswith(before) else None

    def _whole_text(self) -> str:
        """Return the whole context as text; "" if it has none, or if the text does not show all sampled tokens."""
        replies = [part for part in self._texts or () if isinstance(part, Completion)]
        if any(self.tokenizer.decode(reply.tokens) != reply.text for reply in replies):
            self._texts = None
        if self._texts is None:
            return ""
        whole = "".join(part.text if isinstance(part, Completion) else part for part in self._texts)
        self._texts = (whole,)
        return whole

    def shown(self, turn: Turn) -> None:
        """Record a turn that is shown to the policy."""
        self.conversation.first, self._stop = False, turn.stop
        if turn.messages is None:
            self.messages = None
        elif self.messages is not None:
            self.messages = [*self.messages, *turn.messages]
        self._texts = None if turn.text is None or self._texts is None else (*self._texts, turn.text)


def placed(turn: Turn, contexts: Sequence[Context]) -> tuple[Turn, Context | None]:
    """Return the new part of a whole turn and the context that it continues; if none, the turn itself, marked fresh,
    and None.

    If it continues several, the longest is chosen, and of equal ones the latest.
    """
    for context in sorted(reversed(contexts), key=lambda c: -len(c.transcript)):
        if len(context.transcript) and (rest := context.rest(turn)) is not None:
            return replace(rest, fresh=False), context
    return replace(turn, fresh=True), None


def _same(seen: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Return whether a message is the one that was seen.

    A reply is recognised by its tool calls, or else by its text, with or without the stop string. Programs trim a
    model's replies and its thoughts, so white space around them is not compared.
    """
    said: Reply | None = seen.get("said")
    if said is None:
        return dict(seen) == dict(given)
    calls = seen["calls"]
    if calls or given.get("tool_calls"):
        return given["role"] == "assistant" and [call.get("id") for call in given.get("tool_calls") or ()] == calls
    text = given.get("content")
    shown = (said, *(said.removesuffix(stop) for stop in seen["stop"]))
    return given["role"] == "assistant" and isinstance(text, str) and any(same_reply(text, one) for one in shown)


def positions(steps: Iterable[tuple[int, int, float]], transcripts: Sequence[Transcript]) -> list[tuple[int, float]]:
    """Return step rewards at positions in scored tokens of the whole rollout.

    `steps`: (transcript, scored tokens of that transcript up to the step's end, reward).
    """
    before = [0]
    for transcript in transcripts:
        before.append(before[-1] + transcript.n_scored)
    return [(before[place] + scored, reward) for place, scored, reward in steps]
