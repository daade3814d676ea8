r"""Normalises the spelling of LaTeX, Unicode and English: "\dfrac12\text{ cm}" becomes "\frac{1}{2}".

Units at the end of a number are dropped: known abbreviations, and words in \text{} or after a space. Words that change
the value are not units and are kept ("5\text{ million}", "3\text{ tenths}", "7 squared", "101 base two"), and so are
single letters outside \text{}, which are variables ("3s", "5 m").
"""

from __future__ import annotations

import re
from string import ascii_letters, digits

from posttrain.verify.answer import closing_brace
from posttrain.verify.numeric import is_unit, read_number

_SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2044": "/", "\u2032": "'", "\u00b2": "^2", "\u00b3": "^3",
    "\u221e": r"\infty ", "\u03c0": r"\pi ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u00d7": r"\times ",
    "\u00b7": r"\cdot ", "\u00f7": r"\div ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ",
    "\u2208": r"\in ", "\u2248": r"\approx ", "\u00b0": r"^\circ ", "\u00b1": r"\pm ", "\u221a": "sqrt ",
    "\u03b8": r"\theta ", "\u03b1": r"\alpha ", "\u03b2": r"\beta ",
    "\u00a0": r"\ ", "\u2009": r"\,", "\u202f": r"\,",
}  # fmt: skip
_UNICODE = str.maketrans(_SYMBOLS)
# Applied in order, to text whose runs of white space are single spaces.
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])\.?", ""),
        (r"(?<=[0-9])(?:, ?\\!|\{,\}|\\[,;:! ]|~) ?(?=[0-9]{3}(?![0-9]))", ""),  # thousands
        (r"\{,\}|, ?\\! ?", ","),
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\(?:math(?:bf|it|sf)|text(?:bf|it)|boldsymbol|bm) ?\{([a-zA-Z]|[-0-9.,]+)\}", r"\1"),
        (r"\\mathrm ?\{([ei])\}", r"\1"),
        (r"\\(?:boldsymbol|bm)(?![a-zA-Z])|\\math(?:bf|it|sf) ?(?=\{[^{}]*[0-9\\=+^])", ""),
        (r"\\(?:mbox|text(?:rm|bf|it|normal)|math(?:rm|bf|it|sf))(?![a-zA-Z])", r"\\text"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(sin|cos|tan) ?\^ ?\{ ?- ?1 ?\}", r"\\arc\1"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"(?<![\\a-zA-Z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt ?([0-9]+)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<=[\])]) ?U ?(?=[\[(])", r"\\cup "),
        (r"\\(?:leq|leqslant)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|(?<![0-9)\]}])!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset "),
        (r"\\(?:lvert|rvert|vert)(?![a-zA-Z])", "|"),
        (r"\^ ?\{ ?\\(?:circ|degree) ?\}|\^ ?\\(?:circ|degree)(?![a-zA-Z])|\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"\\begin\{[bB]matrix\}|\\begin\{array\}\{[^{}]*\}", r"\\begin{pmatrix}"),
        (r"\\end\{[bB]matrix\}|\\end\{array\}", r"\\end{pmatrix}"),
        (r"(?<=[a-zA-Z])''(?![a-zA-Z'])", "_{second}"),
        (r"(?<=[a-zA-Z])(?:'(?![a-zA-Z'])|\^ ?\\prime(?![a-zA-Z])|\^ ?\{ ?\\prime ?\})", "_{prime}"),
        (r",? ?\\text ?\{ ?,? ?(?:and|or) ?\}|,? (?:and|or) ", ", "),
        (r"\\%", "%"),
        (r"\*\*", "^"),
        (r"(?<![0-9])\\\$|\\\$(?! ?[0-9])", ""),
        (r"(?<=[0-9])_ ?(?:10(?![0-9])|\{ ?10 ?\})", ""),  # a number in base ten is a plain number
        # braces that group a single element: 2{\pi}; braces behind \frac1 are an argument
        (r"(?<=[0-9)])(?<!\\frac[0-9])(?<!\\binom[0-9]) ?\{ ?(\\[a-zA-Z]+(?:\{[^{}]*\})*|[a-zA-Z]) ?\}", r"\1 "),
        (r" +", " "),
    ]
]
_LAST_SPACE = re.compile(r"(?<!\\)\\\s+\Z")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"\^\\circ(?![a-zA-Z]) ?(?:\\text ?\{ ?[CF] ?\}|[CF](?![a-zA-Z]))?")
_ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1}
_TAKES_ARGUMENTS = re.compile(r"\\(frac|binom|sqrt)(?![a-zA-Z])")
_TOKEN = re.compile(r"\\[a-zA-Z]+|[0-9a-zA-Z]")
_NO_ARGUMENTS = frozenset(
    "pi infty cdot times div pm mp cup cap le ge ne in approx circ emptyset ldots dots cdots theta alpha beta gamma delta "
    "lambda mu omega phi sigma ell".split()
)
_PIECE = re.compile(r"\\([a-zA-Z]+)|\\.|.", re.DOTALL)
_COMMAND_LAST = re.compile(r"\\[a-zA-Z]+\Z")
_OVER = re.compile(r"\\over(?![a-zA-Z])")
_ATOM = re.compile(r"[0-9]+|[a-zA-Z]|\\[a-zA-Z]+|\([^()]*\)")
_UNIT = re.compile(
    r"(?<=[0-9a-zA-Z}\])%]) ?\\text ?\{([^{}]*)\}(?: ?\^ ?(?:[23]|\{ ?[23] ?\}))?(?= ?(?:$|[,)\]]|\\[}\\]|\\cup|&))"
)
_POWER = re.compile(r"(?<=[a-zA-Z]) ?\^ ?(?:[23]|\{[23]\})$|(?<=[cdkm]m|[^a-z]m|ft|in)[23]$")
_SHORT_UNIT = re.compile(
    r"[mckd]m|in|ft|yd|mi|[mk]g|gm|oz|lbs?|[mcd][lL]|gal|sq|cu|hrs?|mins?|secs?|ms|deg|rad|[mk]ph|kmh|kWh|Hz|rpm|men|cups?|"
    r"days?|ways?|tons?|box|yrs?|years?|pts?|USD|EUR|GBP|th|st|nd|rd"
)
_PERCENT = frozenset({"percent", "percentage", "pct"})
_NUMERAL = r"([0-9A-Fa-f]*[0-9][0-9A-Za-z]*(?:\.[0-9A-Za-z]+)?)"
_BASE = re.compile(rf"(-?) ?(?:{_NUMERAL}|\({_NUMERAL}\)) ?_ ?(?:([0-9]+)|\{{ ?([0-9]+) ?\}})")


def clean(text: str) -> str:
    """Normalise the spelling of an answer, without merging distinct answers."""
    text = _LAST_SPACE.sub("", text.translate(_UNICODE))
    text = " ".join(text.split()).strip("*").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = without_groups(brace_arguments(text))
    if not _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(" ", text)
    text = text.strip()
    text = text if text.endswith("..") else text.removesuffix(".").strip()
    for _ in range(3):  # "\text{ sq.}\text{ cm}"
        text = _UNIT.sub(_without_unit, text)
    text = _without_words(text)
    alone = re.fullmatch(r"\\text ?\{([^{}]*)\}", text)
    if alone and read_number(alone[1]) is not None:
        text = alone[1]
    return " ".join(text.split())


def tight(text: str) -> str:
    """Remove the spaces that LaTeX ignores. "1 5" does not become "15", nor "5, 678" "5,678"."""
    return re.sub(r"(?<![a-zA-Z0-9,]) | (?![a-zA-Z0-9])|(?<=[0-9]) (?=[a-zA-Z])", "", text)


def balanced(text: str) -> bool:
    """Return whether all braces are closed."""
    depth = 0
    for match in re.finditer(r"\\[{}\\]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    return depth == 0


def depth(text: str) -> int:
    """Return the number of nested brackets of all kinds."""
    level = deepest = 0
    for character in text:
        level += (character in "{([") - (character in "})]")
        deepest = max(deepest, level)
    return deepest


def words(text: str, fold: bool) -> list[str]:
    r"""Return the parts of an answer in words, for comparison in any order: "\text{(B), C}" gives ["b", "c"].

    Spaces, and dots of abbreviations, are ignored, except between digits. `fold`: case is ignored.
    """
    text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text)
    parts = []
    for part in (text.lower() if fold else text).split(","):
        part = re.sub(r"(?<![0-9]) | (?![0-9])|(?<![0-9])\.(?![0-9])|\.$", "", part.strip())
        letter = re.fullmatch(r"\(?([A-Za-z])\)?", part)
        parts.append(letter[1] if letter else part)
    return sorted(parts)


def in_base(text: str) -> tuple[str, str, str] | None:
    """Return (sign, digits, base) of a number with a subscript, such as "-221_3"; else None."""
    found = _BASE.fullmatch(text)
    return (found[1], (found[2] or found[3]).lower(), found[4] or found[5]) if found else None


def brace_arguments(text: str) -> str:
    r"""Put braces around arguments that have none: "\frac\pi4" becomes "\frac{\pi}{4}"."""
    for command in reversed(list(_TAKES_ARGUMENTS.finditer(text))):
        at, written = command.end(), command[0]
        for _ in range(_ARGUMENTS[command[1]]):
            at += text.startswith(" ", at)
            if text.startswith("[", at) and command[1] == "sqrt" and (close := text.find("]", at)) > 0:
                written += text[at : close + 1]
                at = close + 1
            if text.startswith("{", at):
                end = closing_brace(text, at, len(text))
                if end is None:
                    break
                written, at = written + text[at : end + 1], end + 1
                continue
            token = _TOKEN.match(text, at)
            if token is None:
                break
            written, at = f"{written}{{{token[0]}}}", token.end()
        text = text[: command.start()] + written + text[at:]
    return text


def without_groups(text: str) -> str:
    r"""Remove the invisible braces that only group: "2{\pi}" becomes "2\pi", and "{1 \over 2}" becomes "\frac{1}{2}".

    Braces around arguments, powers and indices are kept, and those around the base of a power, as in "{x+1}^2".
    """
    written, at, due = "", 0, 0  # due: number of arguments that must still follow
    while at < len(text):
        piece = _PIECE.match(text, at)
        assert piece is not None
        shown, at = piece[0], piece.end()
        close = closing_brace(text, at - 1, len(text)) if shown == "{" else None
        if close is not None:
            shown, at = without_groups(text[at:close]), close + 1
            if due or (text[at:].lstrip(" ")[:1] in ("^", "_") and not _ATOM.fullmatch(shown)):
                shown, due = f"{{{shown}}}", max(0, due - 1)
        elif piece[1]:
            due = 0 if piece[1] in _NO_ARGUMENTS else _ARGUMENTS.get(piece[1], 1)
        elif shown == "[" and due and (end := text.find("]", at)) > 0:  # a root's degree
            shown, at = text[at - 1 : end + 1], end + 1
        elif shown != " ":
            due = int(shown in "^_")
        written += " " + shown if shown[:1].isalpha() and _COMMAND_LAST.search(written[-30:]) else shown
    over = [part.strip() for part in _OVER.split(written)]
    return rf"\frac{{{over[0]}}}{{{over[1]}}}" if len(over) == 2 and all(map(balanced, over)) else written


def _without_unit(found: re.Match[str]) -> str:
    """Return the text for a \\text{...} after a number."""
    unit = found[1].strip()
    first = re.split(r"[^a-zA-Z\u00b0]", unit)[0]
    behind_number = re.search(r"[0-9]|\\pi", found.string[: found.start()])
    known = len(first) != 2 or _SHORT_UNIT.fullmatch(first)
    if not behind_number or not unit or not known or not is_unit(unit):
        return found[0]
    return " %" if first.lower() in _PERCENT else ""


def _without_words(text: str) -> str:
    """Remove plain words after a number if they are units: known ones, or long and separate ones, as letters may be
    variables.
    """
    power = _POWER.search(text)
    body = text[: power.start()] if power else text
    number = body.rstrip(ascii_letters + " /,.")
    words = body[len(number) :]
    if number.endswith("\\"):
        if not words.startswith("pi "):
            return text
        number, words = number + "pi", words[2:]
    first = re.split(r"[^a-zA-Z]", words.strip())[0]
    known = _SHORT_UNIT.fullmatch(first) or (len(first) > 3 and words.startswith(" "))
    if number[-1:] not in {*digits, "%", "}", "i"} or not known or not is_unit(words):
        return text
    return number + (" %" if first.lower() in _PERCENT else "")
