"""Functions for messages to a user: exceptions in one line, values cut short, control codes shown, the nearest word."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Iterable
from typing import Any

SYSTEM = re.compile(r"\[Errno -?\d+\] | \(os error \d+\)| at 0x[0-9a-f]+")  # error numbers and addresses

_HARMLESS = frozenset("\n\xa0\u2009\u200a\u200c\u200d\u202f\u3000")  # they move no text, and hide none
_UNSEEN = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")  # JSON itself escapes codes below 32


def clip(text: str, longest: int = 60) -> str:
    """Return the text, or its beginning and "..."."""
    return text if len(text) <= longest else text[:longest] + "..."


def several(number: int, noun: str) -> str:
    """Return "1 step" or "4 steps"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def dashed(name: str) -> str:
    """Return an option as a user writes it: --clip-high for clip_high."""
    return f"--{name.replace('_', '-')}"


def message_of(error: BaseException) -> str:
    """Return the message of an exception; "" where even that raises."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the user's own __str__
        return ""


def inline(text: str) -> str:
    """Return the text for use in a message: without line ends, with control codes made visible, and cut short."""
    return clip(safe(SYSTEM.sub("", " ".join(text.split()))), 300)


def one_line(error: BaseException) -> str:
    """Return an exception's message for use in another message; its type where the message is empty or does not
    help.
    """
    text = inline(message_of(error))
    return text if text and "object>" not in text else type(error).__name__


def toml_problem(error: BaseException) -> str:
    """Return the message of an error of tomllib, with the usual fix of a value that is none."""
    text = one_line(error)
    return f"{text}: put text in quotes" if text.startswith("Invalid value") else text


def safe(text: str) -> str:
    """Return the text with control codes made visible: printed raw, they could rewrite the screen.

    Spaces of any width and joiners are no control codes: Chinese, Persian and emoji are written with them.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _HARMLESS else c.encode("unicode_escape").decode() for c in text)


def readable(text: str) -> str:
    """Return a model's text as it is read: tabs as spaces, line ends of any system, other control codes made visible."""
    return safe(text.replace("\r\n", "\n").expandtabs(4))


def safe_json(line: str) -> str:
    """Return a line of JSON with the same content, with control codes and direction marks as escapes."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def near(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" if a known word is similar, else ""."""
    import difflib

    close = difflib.get_close_matches(word, list(known), 5)
    close.sort(key=lambda c: sorted(c) != sorted(word))  # letters in another order are the likeliest typo
    return f"; did you mean {close[0]!r}?" if close else ""


def near_or_all(word: str, known: list[str], most: int = 12) -> str:
    """Return "; did you mean ...? (there are: ...)", or "" where nothing helps. `most`: largest number of names
    listed.
    """
    listed = ", ".join(known[:most]) + (", ..." if len(known) > most else "")
    return f"{near(word, known)} (there are: {listed})" if known else ""


def near_or_where(word: str, known: Iterable[str], where: str) -> str:
    """Return "; did you mean ...? COMMAND lists all", for sets of names that are too large to list in a message."""
    close = near(word, known)
    return f"{close or ';'} {where} lists all"


def in_row(value: Any) -> str:
    """Return a value of a row as text, cut short; a missing one is JSON's null, whatever the file."""
    return "null" if value is None else clip(repr(value), 40)


def short(value: Any) -> str:
    """Return the value as text for a reason, cut short."""
    try:
        shown = " ".join(repr(value).split())
    except Exception:  # an error in the user's __repr__
        shown = "?"
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if isinstance(value, Coroutine):
        return "a coroutine (declare the function with async def)"
    if shown.startswith("<"):  # an object without its own text: its address helps nobody
        return f"a value of type {type(value).__name__}"
    return f"{shown if len(shown) <= 60 else shown[:60] + '...'} ({type(value).__name__})"
