r"""Decides whether the final answer of a reply is the gold answer of a mathematical problem.

The answer is read from the reply alone: after a closing </think>, the last closed \boxed{}, else <answer>, `####`, a
sentence "the answer is ...", or a reply that is nothing but an answer. Words and exact rationals are compared here;
all other LaTeX by math-verify, in a process with a time limit.

Units are not compared, and a percentage equals its number with and without the sign. A rounded decimal is not equal to
the exact value, unless the gold itself is such a decimal (`written_tolerance`).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from posttrain.types import Invalid
from posttrain.verify.format import between
from posttrain.verify.limit import limited
from posttrain.verify.numeric import equal_numbers, gsm8k_answer, read_number, written_tolerance

LONGEST = 1000  # characters of an answer; a longer one is wrong, unless the gold is long itself
DEEPEST = 20  # levels of brackets of an answer; the parser's time explodes with them

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_STATED = re.compile(r"(?i)\b(?:answer|result|solution)\**\s*(?:is|was|:|=)(?:\s*:)?")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|\n|,?\s+(?:because|since|which|so|as)\b")

_SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u221e": r"\infty ", "\u03c0": r"\pi ", "\u222a": r"\cup ",
    "\u2229": r"\cap ", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/", "\u2264": r"\le ", "\u2265": r"\ge ",
    "\u2260": r"\ne ", "\u00b0": r"^\circ ", "\u00b1": r"\pm ", "\u00b2": "^2", "\u00b3": "^3", "\u221a": r"\sqrt ",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2044": "/", "\u2032": "'",
}  # fmt: skip
_UNICODE = str.maketrans(_SYMBOLS)
# Applied in order: spellings of the same LaTeX.
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])\.?", ""),
        (r",\s*\\!\s*|\{,\}", ""),  # thousands
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\(?:mbox|textrm|textbf|textit|textnormal|mathrm|mathbf|mathsf)(?![a-zA-Z])", r"\\text"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (r"\\frac\s*(\\[a-zA-Z]+)\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt\s*([0-9]+)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<=[\])])\s*U\s*(?=[\[(])", r"\\cup "),
        (r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge"),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])", ""),
        (r"\\begin\{[bB]matrix\}|\\begin\{array\}\{[^{}]*\}", r"\\begin{pmatrix}"),
        (r"\\end\{[bB]matrix\}|\\end\{array\}", r"\\end{pmatrix}"),
        (r",?\s*\\text\{\s*,?\s*(?:and|or)\s*\}|,?\s(?:and|or)\s", ", "),
        (r"\s+", " "),
    ]
]
_UNIT = re.compile(r"(?s)(.*[0-9}\])a-z])\s*\\text\s*\{([^{}]*)\}(?:\^\s*\{?\s*[23]\s*\}?)?")
_CLOCK = re.compile(r"(?i)[ap]\.?\s?m\.?\s*")
_MIXED = re.compile(
    r"(-?)\s*(\d+)?\s*(-?)\s*\\frac\s*\{\s*(-?[\d,]+)\s*\}\s*\{\s*(-?[\d,]+)\s*\}(?:\s*\\text\{[^{}]*\})?"
)
_IN_BASE = re.compile(r"([0-9A-Za-z]+)\s*_\s*\{?\s*([0-9]+)\s*\}?")
_BRACKETED = re.compile(r"(\\\{|[(\[]).*(?:\\\}|[)\]])")
_NAME = re.compile(r"^([A-Za-z])\s*=\s*")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ ,]+[A-Za-z]{3,})*|\(?[A-Z]\)?")


def verify(reply: str, gold: str, *, seconds: float = 5.0) -> float | Invalid:
    r"""1.0 if the final answer of `reply` is `gold`, 0.0 if it is another or there is none.

    Invalid if the gold cannot be read, or the comparison took longer than `seconds` or too much memory.
    `gold` is an answer ("\frac{1}{2}") or a text with a \boxed{} one.

    >>> verify(r"so we get $\boxed{\frac{2}{4}}$", "0.5")
    1.0
    """
    gold = _clean(last_boxed(gold) or gold)
    if not gold or not _balanced(gold):
        return Invalid(f"gold answer {gold[:80]!r} cannot be read")
    answer = final_answer(reply)
    if answer is None or len(answer) > max(LONGEST, 4 * len(gold)):
        return 0.0
    answer = _clean(answer)
    if not answer:
        return 0.0
    if _tight(answer) == _tight(gold):
        return 1.0
    verdict = _compare_exactly(answer, gold)
    if verdict is not None:
        return verdict
    return limited(_compare_symbolically, answer, gold, seconds=seconds, imports=("math_verify",))


def final_answer(reply: str) -> str | None:
    """The answer that a reply ends with, as it is written; None if it gives none."""
    reply = reply.rpartition("</think>")[2]
    boxed = last_boxed(reply)
    if boxed is not None:
        return boxed
    for found in (between(reply, "answer"), gsm8k_answer(reply), _stated(reply)):
        if found:
            return found
    alone = reply.strip()
    is_formula = len(alone) > 2 and alone[0] == alone[-1] == "$" and "$" not in alone[1:-1].strip("$")
    return alone if is_formula or read_number(alone) is not None else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{} whose braces are closed; None if there is none."""
    end = len(text)
    for start in reversed([match.start() for match in _BOX.finditer(text)]):
        box = _BOX.match(text, start)
        assert box is not None
        if text[box.end() : box.end() + 1] != "{":
            bare = re.match(r"[^\s$.,]+", text[box.end() :]) if box[0].endswith(" ") else None
            if bare:
                return bare[0]
        else:
            close = _closing(text, box.end(), end)
            if close is not None:
                return text[box.end() + 1 : close]
        end = start  # an unclosed box runs at most to the next one: no character is looked at twice
    return None


def _closing(text: str, start: int, end: int) -> int | None:
    """The place of the brace that closes the one at `start`, before `end`."""
    depth = 0
    for match in re.compile(r"\\[{}\\]|[{}]").finditer(text, start, end):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def _stated(reply: str) -> str | None:
    anchors = list(_STATED.finditer(reply))
    if not anchors:
        return None
    rest = reply[anchors[-1].end() :].lstrip(" \t*:")
    formula = re.match(r"\$\$?([^$]+)\$\$?(?![0-9])|\\\((.+?)\\\)|\\\[(.+?)\\\]", rest.lstrip(), re.DOTALL)
    if formula:
        return next(group for group in formula.groups() if group is not None)
    end = _SENTENCE_END.search(rest)
    return rest[: end.start()] if end else rest


def _clean(text: str) -> str:
    """One spelling for what LaTeX and Unicode spell in many ways. Keeps what distinguishes answers."""
    text = text.strip().strip("*").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    text = text.translate(_UNICODE)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = text.replace(r"\$", "").replace(r"\%", "%").strip().removesuffix(".").strip()
    unit = _UNIT.fullmatch(text)
    if unit and not _CLOCK.fullmatch(unit[2].strip()) and re.search(r"[0-9]|\\pi", unit[1]):
        text = unit[1] + (" %" if "percent" in unit[2] else "")
    return text.strip()


def _tight(text: str) -> str:
    """Without the spaces that LaTeX ignores; those after a comma stay, for "5, 678" is not "5,678"."""
    return re.sub(r"(?<![a-zA-Z,])\s+|\s+(?![a-zA-Z0-9])", "", text)


def _balanced(text: str) -> bool:
    depth = 0
    for match in re.finditer(r"\\[{}\\]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    return depth == 0


def _compare_exactly(answer: str, gold: str) -> float | None:
    """The verdict on words, rationals and what cannot be equal; None if it takes algebra to tell."""
    if not _balanced(answer) or _depth(answer) > max(DEEPEST, _depth(gold)):
        return 0.0
    if r"\text" in gold or _WORDS.fullmatch(gold):
        same = _words(answer, gold) == _words(gold, gold)
        if same or len(gold) == 1 or not gold.isalpha():  # else it may be a product: "abc"
            return float(same)
    answer_name, gold_name = _NAME.match(answer), _NAME.match(gold)
    if answer_name and gold_name and answer_name[1] != gold_name[1]:
        return 0.0
    answer_number, gold_number = _rational(answer), _rational(gold)
    if answer_number is not None and gold_number is not None:
        tolerance = written_tolerance(gold)
        factors = [Fraction(1)]
        if ("%" in gold) != ("%" in answer):
            factors.append(Fraction(100) if "%" in gold else Fraction(1, 100))
        return float(any(equal_numbers(answer_number * factor, gold_number, tolerance) for factor in factors))
    answer_base, gold_base = _IN_BASE.fullmatch(answer), _IN_BASE.fullmatch(gold)
    if answer_base and gold_base:
        return float(answer_base.groups() == gold_base.groups())
    answer_bracket, gold_bracket = _BRACKETED.fullmatch(answer), _BRACKETED.fullmatch(gold)
    if answer_bracket is None or gold_bracket is None or r"\cup" in answer + gold:
        return None
    # A set is neither a tuple nor an interval: math-verify takes (1,2) for {1,2}.
    return 0.0 if (answer_bracket[1] == r"\{") != (gold_bracket[1] == r"\{") else None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest


def _words(text: str, gold: str) -> list[str]:
    """The parts of an answer in words, in any order: "\\text{(B), C}" gives ["b", "c"]."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    if r"\text" in gold or len(gold) > 3:  # else one letter, which may be a variable
        text = text.lower()
    return sorted(re.sub(r"[\s.()]", "", part) for part in text.split(","))


def _rational(text: str) -> Fraction | None:
    text = _NAME.sub("", text).replace("%", "").strip()
    match = _MIXED.fullmatch(text)
    if match is None:
        return read_number(text) if r"\text" not in text else None
    top, bottom = (int(match[i].replace(",", "")) for i in (4, 5))
    if bottom == 0 or (match[2] and match[3]) or (match[2] and top < 0):
        return None
    value = int(match[2] or 0) + Fraction(top, bottom)
    return -value if "-" in (match[1], match[3]) else value


def _compare_symbolically(answer: str, gold: str) -> float | Invalid:
    """Runs in the limited process. math-verify's own time limits are alarm signals: off."""
    import math_verify

    def parse(text: str) -> Any:
        return math_verify.parse(
            "$" + text.replace("$", "").replace("\n", " ") + "$",
            [math_verify.LatexExtractionConfig()],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )

    gold_parsed = parse(gold)
    if not gold_parsed:
        return Invalid(f"gold answer {gold[:80]!r} cannot be parsed")
    answer_parsed = parse(answer)
    return float(
        bool(answer_parsed)
        and math_verify.verify(
            gold_parsed,
            answer_parsed,
            float_rounding=9,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    )
