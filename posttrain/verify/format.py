"""Decides whether a reply has the asked form: XML-like tags, each pair once and in order."""

from __future__ import annotations

from collections.abc import Sequence


def tags(reply: str, names: Sequence[str] = ("think", "answer"), *, only: bool = True) -> float:
    """1.0 if every tag of `names` is opened once and closed once, one pair after the other, else 0.0.

    With `only`, nothing but white space may stand outside the tags.

    >>> tags("<think>40 + 2</think> <answer>42</answer>")
    1.0
    """
    end = 0
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if reply.count(opening) != 1 or reply.count(closing) != 1:
            return 0.0
        start = reply.index(opening)
        if start < end or (only and reply[end:start].strip()):
            return 0.0
        end = reply.index(closing) + len(closing)
        if end < start:
            return 0.0
    return 0.0 if only and reply[end:].strip() else 1.0


def between(text: str, tag: str) -> str | None:
    """What stands in the last closed pair <tag>...</tag>, stripped; None if no pair is closed.

    >>> between("<answer>4</answer> no, <answer>5</answer> or <answer>6", "answer")
    '5'
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opening, 0, max(0, text.rfind(closing)))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.index(closing, start)].strip()
