"""Parses the verdict at the end of a judge's reply: yes or no behind a marker, or a score.

Decided here: the last marker counts, and the verdict is all of its line that follows. "verdict: yes or no" is none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FRAME = " \t*_`\"'()[]{}$"  # marks around a verdict that models add
ENDS = FRAME + ".,;!"
MOST_DIGITS = 20

_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")


class Behind(NamedTuple):
    """The text behind a marker, in its line."""

    text: str  # without surrounding marks
    start: int  # its place in the reply


def final_verdict(reply: str, marker: str = "verdict:", words: tuple[str, str] = ("yes", "no")) -> float | None:
    """1.0 if the first of `words` stands behind the last marker, 0.0 if the second does, None if neither does.

    Upper and lower case are the same, in the marker too.

    >>> final_verdict("2+2=4, not 5. verdict: yes? No: verdict: **no**.")
    0.0
    """
    found = behind(reply, marker)
    if found is None:
        return None
    said = found.text.casefold()
    return {words[1].casefold(): 0.0, words[0].casefold(): 1.0}.get(said)


def final_score(reply: str, marker: str = "score:", scale: tuple[float, float] = (1.0, 10.0)) -> float | None:
    """The number behind the last marker; None if there is none, or one beyond the scale.

    >>> final_score("Right, but long. Score: 7.5")
    7.5
    """
    found = behind(reply, marker)
    if found is None or len(found.text) > MOST_DIGITS or not _NUMBER.fullmatch(found.text):
        return None
    number = float(found.text)
    return number if scale[0] <= number <= scale[1] else None


def behind(reply: str, marker: str) -> Behind | None:
    """Return the text behind the last marker, to the end of its line; None if there is no marker."""
    ends = [found.end() for found in re.finditer(re.escape(marker), reply, re.IGNORECASE)]
    if not ends:
        return None
    line = reply[ends[-1] :].partition("\n")[0]
    text = line.lstrip(FRAME)
    return Behind(text.rstrip(ENDS), ends[-1] + len(line) - len(text))
