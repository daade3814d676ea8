"""Counts characters, words, sentences and similar units of a reply, and compares the number with bounds.

Words are runs of letters, digits and underscores, as in IFEval (Zhou et al. 2023, arXiv 2311.07911, whose counter is
the tokeniser r"\\w+"); in scripts without spaces between words, each character is a word. Sentences end with . ! ? or a
similar mark, before white space, but not after an initial, an abbreviation or within a number. To count tokens, pass a
function: `unit=lambda text: len(tokenizer.encode(text))`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from posttrain.core.types import UserError

Unit = Literal["characters", "words", "sentences", "lines", "paragraphs"] | Callable[[str], int]

_WORD = re.compile(
    "[\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\u0e00-\u0e7f\U00020000-\U0003ffff]|"
    "(?:(?![\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\u0e00-\u0e7f\U00020000-\U0003ffff])\\w)+"
)
_END = re.compile(  # possessive, and started once per run of marks: linear time for any text
    "(?<![.!?\u2026])([.!?\u2026]++)[\"'\u201d\u2019)\\]*_]*+(?:\\[[^\\[\\]\n]{1,80}\\])*+(?=\\s|\\Z)"
    "|[\u3002\uff01\uff1f\u0964]++[\u300d\u300f\u201d]?|\n[ \t]*+\n"
)
_BEFORE = re.compile(r"(\S{1,24})$")
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st jr sr vs etc e.g i.e cf fig no vol pp approx inc ltd co dept est al gen rep sen gov u.s u.k "
    "z.b d.h bzw usw ca nr".split()
)


def words(text: str) -> list[str]:
    """Return the words of a text, in order.

    >>> words("It's 3.5 km.")
    ['It', 's', '3', '5', 'km']
    """
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, stripped, in order; pieces without a letter or digit do not count.

    >>> sentences("Dr. Who came at 3.15 p.m. today! Why?")
    ['Dr. Who came at 3.15 p.m. today!', 'Why?']
    """
    found, start = [], 0
    for end in _END.finditer(text):
        if set(end[1] or "!") <= {".", "\u2026"} and _goes_on(text, start, end):
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if any(c.isalnum() for c in sentence)]


def _goes_on(text: str, start: int, end: re.Match[str]) -> bool:
    """Return whether a full stop does not end a sentence: after an initial, an abbreviation or a list's number, or
    before a small letter.
    """
    before = _BEFORE.search(text[max(start, end.start() - 30) : end.start()])
    word = before[1].lstrip("(\"'[\u201c").lower() if before else ""
    after = text[end.end() : end.end() + 20].lstrip(" \t")
    if after[:1].islower() or word in _ABBREVIATIONS:
        return bool(after)
    if len(word) == 1 and word.isalpha() and word != "i":
        return bool(after)
    line = text[start : end.start()].rpartition("\n")[2]
    return word.isdigit() and line.strip(" \t*_#") == word


def count(text: str, unit: Unit = "words") -> int:
    """The number of characters (code points), words, sentences, nonempty lines or paragraphs, or units of a function.

    >>> count("One two. Three!", "sentences")
    2
    """
    if callable(unit):
        return int(unit(text))
    if unit == "characters":
        return len(text)
    if unit == "words":
        return len(words(text))
    if unit == "sentences":
        return len(sentences(text))
    if unit == "lines":
        return sum(1 for line in text.splitlines() if line.strip())
    if unit == "paragraphs":
        return sum(1 for part in re.split(r"\n[ \t]*\n", text) if part.strip())
    raise UserError(f"unit is characters, words, sentences, lines, paragraphs or a function, not {unit!r}")


def within(text: str, least: int = 0, most: int | None = None, unit: Unit = "words") -> float:
    """1.0 if the text has at least `least` and at most `most` of the unit, both inclusive, else 0.0.

    `within(text, 3, unit="sentences")` is IFEval's "at least 3 sentences" (arXiv 2311.07911, table 4).
    """
    found = count(text, unit)
    return float(found >= least and (most is None or found <= most))


def length_penalty(text: str, most: int, soft: int, unit: Unit = "words") -> float:
    """0.0 up to `most - soft`, then falling linearly to -1.0 at `most` and beyond (DAPO, arXiv 2503.14476, eq. 13).

    `soft` is above 0 and at most `most`.

    >>> length_penalty("w " * 95, most=100, soft=10)
    -0.5
    """
    if not 0 < soft <= most:
        raise UserError(f"soft must be above 0 and at most {most}, not {soft}")
    over = count(text, unit) - (most - soft)
    return -min(1.0, max(0, over) / soft)


def length_error(text: str, target: int, unit: Unit = "words") -> float:
    """|n - target| / target, at most 1: 0 at the target length. Use a negative weight (LCPO, arXiv 2503.04697, eq. 1).

    >>> length_error("one two three", target=4)
    0.25
    """
    if target < 1:
        raise UserError(f"target must be at least 1, not {target}")
    return min(1.0, abs(count(text, unit) - target) / target)
