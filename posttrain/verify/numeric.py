"""Parses numbers in text exactly: numbers are rationals, so 0.5 is 1/2.

A percent sign, a currency sign and words after the number are units and are dropped: "50%", "$50" and "50 apples" are
50. A text with words that change the value ("5 million", "5 or 6") is not a number.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from posttrain.core.types import Invalid

LONGEST = 400  # most characters of a number: longer ones are meaningless, and slow to convert

_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\uff0d\ufe63", "-"))
_DIGITS = str.maketrans({chr(0xFF10 + i): str(i) for i in range(10)} | {"\u2044": "/"})
_VULGAR = {
    number: f" {Fraction(unicodedata.numeric(chr(number))).limit_denominator(10)}"
    for number in (*range(0xBC, 0xBF), *range(0x2150, 0x215F))
}
_THIN_SPACE = re.compile("(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)"
_EXPONENT = r"(?:[eE](?P<e>[+-]?[0-9]{1,3})| ?[x*\u00d7] ?10 ?(?:\^|\*\*) ?\{?(?P<ten>[+-]?[0-9]{1,3})\}?)"
_CURRENCY = r"[$\u20ac\u00a3\u00a5\u20b9]"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?{_CURRENCY}? ?(?P<inner>[+-]?)"
    rf"(?:(?P<whole>{_WHOLE}) (?:and )?(?P<part>[0-9]+) ?/ ?(?P<parts>[0-9]+)"
    rf"|(?P<top>{_DECIMAL}) ?/ ?(?P<bottom>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL}){_EXPONENT}?)"
    rf" ?(?:%|{_CURRENCY})?(?:(?<!\.)\.| ?(?<!\.)(?<!\. )(?P<unit>[^0-9 ].*))?"
)
_UNIT_WORD = re.compile(r"[A-Za-z\u00b0\u00b5][A-Za-z\u00b0\u00b5.]*(?:/[A-Za-z]+)?(?:\^?[23]|[\u00b2\u00b3])?,?")
_LETTER_UNITS = frozenset("mgshlLCFJNWV\u00b0")  # not K and k, which may be thousands
# Words that are not units: they change the value, join several values, or belong to a sentence.
_NOT_UNITS = re.compile(
    r"(hundred|thousand|million|billion|trillion)(s|ths?)?|tens|lakhs?|crores?|bn|mil|mn|mio|dozens?|score|gross|grand|"
    r"hal(f|ves)|(third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|[a-z]+teenth|"
    r"[a-z]+tieth)s?|ths|squared?|cubed?|factorial|inverse|negative|below|under|base|binary|ternary|octal|hex(adecimal)?|"
    r"mille|ppm|bps|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|twenty|thirty|forty|"
    r"fifty|sixty|seventy|eighty|ninety|pi|sqrt|and|or|to|plus|minus|times|over|divided|by|mod|is|are|was|were|not|if|"
    r"but|than|least|most|maybe|perhaps|either|both|versus|vs|am|pm|january|february|march|april|may|june|july|august|"
    r"september|october|november|december",
    re.IGNORECASE,
)
_POWERS = frozenset({"square", "squared", "cubic", "cube", "cubed"})  # after a unit these belong to it: "5 cm squared"
_IN_TEXT = re.compile(
    rf"(?<![\w.])(?:(?<![0-9)\]] )(?P<sign>[+-]))?(?:{_CURRENCY})?(?P<top>{_DECIMAL})(?:/(?P<bottom>{_DECIMAL}))?"
)


def read_number(text: str) -> Fraction | None:
    """Return the number that the whole of `text` denotes; None if it is not a single number.

    Reads thousands separators, currency, percent, units, fractions, mixed numbers, scientific notation, Unicode minus.

    >>> read_number("-$1,250.50"), read_number("2 3/4 cups"), read_number("5 or 6")
    (Fraction(-2501, 2), Fraction(11, 4), None)
    """
    if len(text) > LONGEST:
        return None
    match = _NUMBER.fullmatch(" ".join(_plain(text).split()))
    if match is None or not is_unit(match["unit"] or "") or (match["sign"] and match["inner"]):
        return None
    value = _value(match)
    return -value if value is not None and "-" in (match["sign"], match["inner"]) else value


def is_unit(text: str) -> bool:
    """Return whether words after a number are a unit, which does not change its value. An empty text is a unit."""
    words = text.split()
    if len(words) > 5 or not all(_UNIT_WORD.fullmatch(word) for word in words):
        return False
    names = [re.split(r"[^A-Za-z\u00b0\u00b5]", word.replace(".", ""))[0] for word in words]
    if names[:1] not in (["squared"], ["cubed"]):
        names = [name for name in names if name.lower() not in _POWERS] or names
    return all(not _NOT_UNITS.fullmatch(name) and (len(name) > 1 or name in _LETTER_UNITS) for name in names if name)


def gsm8k_answer(text: str) -> str | None:
    """Return the text from the last `####` to the end of its line, as in GSM8K; None if there is none."""
    _, marker, after = text.rpartition("####")
    answer = after.split("\n", 1)[0].strip()
    return answer if marker and answer else None


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text; None without one. It is 3 in "10 - 3", and -3 in "(-3)" and "= -3"."""
    last = None
    for match in _IN_TEXT.finditer(_plain(text)):
        last = match
    if last is None or len(last[0]) > LONGEST:
        return None
    bottom = _fraction(last["bottom"] or "1")
    value = _fraction(last["top"]) / bottom if bottom else _fraction(last["top"])
    return -value if last["sign"] == "-" else value


def written_tolerance(gold: str) -> Fraction:
    """Return the relative tolerance for a written gold answer: 1e-9 for a decimal of 10 or more digits, else 0.

    Such a decimal (0.6666666666666666) is a rational rounded by a computer; a shorter one (0.67) is exact.
    """
    digits = gold.replace(",", "").strip().lstrip("+-").lstrip("0.")
    significant = sum(character.isdigit() for character in digits)
    return Fraction(1, 10**9) if "." in gold and significant >= 10 else Fraction(0)


def equal_numbers(value: Fraction, gold: Fraction, tolerance: Fraction | float = Fraction(0)) -> bool:
    """Return whether two numbers are equal, exactly or within `tolerance` relative to the gold."""
    return abs(value - gold) <= Fraction(tolerance) * abs(gold)


def same_number(answer: str | None, gold: str, *, tolerance: float | None = None) -> float | Invalid:
    """1.0 if the answer is the gold number, exactly or within a relative tolerance, else 0.0.

    Words around the number are allowed: the last number counts. Invalid if the gold is not a number. For a gold of ten
    digits or more the default tolerance is 1e-9.

    >>> same_number("about $1,250", "1250"), same_number("3.14", "3.14159", tolerance=0.01)
    (1.0, 1.0)
    """
    wanted = read_number(gold)
    if wanted is None:
        return Invalid(f"gold answer {gold!r:.100} is not a number")
    if answer is None:
        return 0.0
    number = read_number(answer)
    number = last_number(answer) if number is None else number
    near = written_tolerance(gold) if tolerance is None else tolerance
    return float(number is not None and equal_numbers(number, wanted, near))


def _plain(text: str) -> str:
    """Replace Unicode forms of minus, digits and fractions by ASCII."""
    text = text.translate(_MINUS).translate(_DIGITS)
    if text.isascii():
        return text
    return _THIN_SPACE.sub("", text.translate(_VULGAR))


def _value(match: re.Match[str]) -> Fraction | None:
    if match["whole"]:
        parts = int(match["parts"])
        return _fraction(match["whole"]) + Fraction(int(match["part"]), parts) if parts else None
    if match["top"]:
        bottom = _fraction(match["bottom"])
        return _fraction(match["top"]) / bottom if bottom else None
    return _fraction(match["decimal"]) * Fraction(10) ** int(match["e"] or match["ten"] or 0)


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))
