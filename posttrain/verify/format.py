"""Decides whether a reply has the requested form: XML-like tags or headings, each once and in order."""

from __future__ import annotations

from collections.abc import Sequence


def tags(reply: str, names: Sequence[str] = ("think", "answer"), *, only: bool = True) -> float:
    """1.0 if each tag of `names` is opened and closed once, one pair after the other, else 0.0.

    With `only`, nothing but white space may be outside the tags.

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
    """Return the content of the last closed pair <tag>...</tag>, stripped; None if no pair is closed.

    >>> between("<answer>4</answer> no, <answer>5</answer> or <answer>6", "answer")
    '5'
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opening, 0, max(0, text.rfind(closing)))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.index(closing, start)].strip()


def sections(reply: str, headings: Sequence[str], *, filled: bool = True) -> float:
    """1.0 if each heading is once on a line of its own, in this order, else 0.0.

    A heading may be marked as in Markdown ("## Plan", "**Plan**", "Plan:"); case and surrounding white space do not
    matter. With `filled`, each heading must have text below it.

    >>> sections("# Plan\\nthink\\n# Answer\\n4", ["Plan", "Answer"])
    1.0
    """
    wanted = [_heading(heading) for heading in headings]
    below: list[bool] = []  # for each heading found, whether text follows
    found: list[str] = []
    for line in reply.splitlines():
        if (heading := _heading(line)) in wanted:
            found.append(heading)
            below.append(False)
        elif below and line.strip():
            below[-1] = True
    return float(found == wanted and (all(below) or not filled))


def _heading(line: str) -> str:
    return " ".join(line.strip().strip("#*_:= \t").lower().split())
