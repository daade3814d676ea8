"""The text of a reply that is being sampled, decoded in pieces: each call costs as much as its new tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # the end of a text whose last character lacks bytes


class GrowingText:
    """Decodes tokens that become more. A piece is decoded with the piece before it, as a token's text may depend on it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._text = ""
        self._first = self._known = 0  # where the last decoded piece begins and ends

    def of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that begin with those of the call before."""
        if len(tokens) == self._known:
            return self._text
        before = len(self._decode(tokens[self._first : self._known]))
        piece = self._decode(tokens[self._first :])
        text = self._text + piece[before:]
        if not piece.endswith(UNFINISHED):  # else more tokens may change its end
            self._text, self._first, self._known = text, self._known, len(tokens)
        return text
