"""Parses the verdict at the end of a judge's reply: yes or no after a marker, or a score.

The last marker counts, and the verdict is all of the following text in its line. "verdict: yes or no" is no verdict.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FRAME = " \t*_`\"'()[]{}$"  # characters that models put around a verdict
ENDS = FRAME + ".,;!"
MOST_DIGITS = 20

_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")


class Behind(NamedTuple):
    """The text after a marker, in its line."""

    text: str  # without surrounding characters of `FRAME`
    start: int  # its index in the reply


def final_verdict(reply: str, marker: str = "verdict:", words: tuple[str, str] = ("yes", "no")) -> float | None:
    """Return 1.0 if the first of `words` follows the last marker, 0.0 if the second does, otherwise None.

    Case is ignored, in the marker too.

    >>> final_verdict("2+2=4, not 5. verdict: yes? No: verdict: **no**.")
    0.0
    """
    found = behind(reply, marker)
    if found is None:
        return None
    said = found.text.casefold()
    return {words[1].casefold(): 0.0, words[0].casefold(): 1.0}.get(said)


def final_score(reply: str, marker: str = "score:", scale: tuple[float, float] = (1.0, 10.0)) -> float | None:
    """Return the number after the last marker; None if there is none, or if it is outside the scale.

    >>> final_score("Right, but long. Score: 7.5")
    7.5
    """
    found = behind(reply, marker)
    if found is None or len(found.text) > MOST_DIGITS or not _NUMBER.fullmatch(found.text):
        return None
    number = float(found.text)
    return number if scale[0] <= number <= scale[1] else None


def behind(reply: str, marker: str) -> Behind | None:
    """Return the text from the last marker to the end of its line; None without a marker."""
    ends = [found.end() for found in re.finditer(re.escape(marker), reply, re.IGNORECASE)]
    if not ends:
        return None
    line = reply[ends[-1] :].partition("\n")[0]
    text = line.lstrip(FRAME)
    return Behind(text.rstrip(ENDS), ends[-1] + len(line) - len(text))
