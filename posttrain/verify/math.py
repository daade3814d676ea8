r"""Decides whether the final answer of a reply equals the gold answer of a mathematical problem.

The answer is found in the reply alone: after a closing </think>, the last closed \boxed{}, else <answer>, `####`, a
sentence "the answer is ...", or a reply that consists of an answer. Words, exact rationals and numbers in another base
are compared here; all other LaTeX in a process with limits (`posttrain.verify.algebra` defines equality there).

Units are not compared: "5\text{ cm}" is 5. Words that change the value are not units: "5\text{ million}", "3\text{
tenths}", "7\text{ squared}", "101\text{ base two}" and "9\text{ a.m.}" equal only the same words, as does a number with
a base ("10_2" is neither 10 nor 2). A percentage equals its number with and without the sign. A rounded decimal is not
equal to the exact value, unless the gold itself is such a decimal (`written_tolerance`). A ratio is its fraction:
"8:17" is 8/17 unless `ratios` is False.

Whether a verdict is Invalid depends on the gold answer alone, which is first compared with itself. If that works, an
answer that takes too long, crashes the process or raises is wrong: a policy cannot leave its group by any reply.
"""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.core.types import Invalid
from posttrain.verify.answer import final_answer, last_boxed
from posttrain.verify.limited_process import CheckFailed, limited, limited_verdict
from posttrain.verify.numeric import equal_numbers, read_number, written_tolerance
from posttrain.verify.spelling import balanced, clean, depth, in_base, tight, words

LONGEST = 1000  # most characters of an answer; a longer one is wrong, unless the gold is as long
DEEPEST = 20  # most levels of brackets in an answer; the parser's time is exponential in them
REMEMBERED = 10_000  # number of gold answers whose check is cached

_MIXED = re.compile(r"(-?) ?([0-9]{1,400})? ?(-?) ?\\frac ?\{ ?(-?[0-9]{1,400}) ?\}\{ ?(-?[0-9]{1,400}) ?\} ?(?:%|$)")
_NAME = re.compile(r"^([A-Za-z]) ?= ?")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ ,]+[A-Za-z]{2,})*|\(?[A-Z]\)?")
_WORD = re.compile(r"(?<![\\a-zA-Z{])[A-Za-z]{4,}")
_LETTERS = re.compile("[a-zA-Z]")
_SCIENTIFIC = re.compile(r"[-+]?[0-9.,]+[eE][-+]?[0-9]+|[-+]?[0-9.,]+ ?x ?10 ?\^ ?\{?[-+]?[0-9]+\}?")

_unreadable: dict[str, str | None] = {}  # gold -> reason why it cannot be compared with itself


def verify(reply: str, gold: str, *, timeout: float = 2.0, ratios: bool = True) -> float | Invalid:
    r"""1.0 if the final answer of the reply equals `gold`, else 0.0, also for a reply without an answer.

    Invalid if the gold cannot be parsed, or compared with itself, within `timeout` seconds of processor time. `gold` is
    an answer ("\frac{1}{2}") or a text with a \boxed{} one. `ratios`: if False, "8:17" is wrong unless the gold is a
    ratio as well: beside a probability it may mean odds.

    >>> verify(r"so we get $\boxed{\frac{2}{4}}$", "0.5")
    1.0
    """
    gold = clean(last_boxed(gold) or gold)
    trouble = _check(gold, timeout)
    if trouble is not None:
        return trouble
    answer = final_answer(reply)
    if answer is None or len(answer) > max(LONGEST, 2 * len(gold)):
        return 0.0
    try:
        answer = clean(answer)
        if not ratios and ":" in answer and ":" not in gold:
            return 0.0
        verdict = _compare_exactly(answer, gold)
    except Exception:  # the gold alone works, so the answer causes the failure
        return 0.0
    if verdict is not None:
        return verdict
    return limited_verdict("posttrain.verify.algebra:equal", answer, gold, seconds=timeout)


def _check(gold: str, timeout: float) -> Invalid | None:
    """Return the reason why a gold answer cannot be compared; cached, unless the machine was the reason."""
    if not gold or not balanced(gold):
        return Invalid(f"gold answer {gold[:80]!r} cannot be read")
    if _in_words(gold) or _rational(gold) is not None or in_base(gold):
        return None
    if gold not in _unreadable:
        readable = limited("posttrain.verify.algebra:readable", gold, seconds=timeout)
        if isinstance(readable, Invalid):
            return readable
        if len(_unreadable) >= REMEMBERED:
            _unreadable.clear()
        trouble = readable.reason if isinstance(readable, CheckFailed) else "it does not equal itself"
        _unreadable[gold] = None if readable is True else trouble
    found = _unreadable[gold]
    return None if found is None else Invalid(f"gold answer {gold[:80]!r} cannot be compared: {found}")


def _in_words(gold: str) -> bool:
    return r"\text" in gold or _WORDS.fullmatch(gold) is not None or _WORD.search(gold) is not None


def _compare_exactly(answer: str, gold: str) -> float | None:
    """Return the verdict for words, rationals and obvious cases; None if algebra is needed."""
    if tight(answer) == tight(gold):
        return 1.0
    if not answer or not balanced(answer) or depth(answer) > max(DEEPEST, depth(gold)):
        return 0.0
    if _in_words(gold):
        fold = r"\text" in gold or len(gold) > 3  # otherwise one letter, which may be a variable
        same = words(answer, fold) == words(gold, fold)
        if same or len(gold) not in (2, 3) or not gold.isalpha():  # otherwise it may be a product: "abc"
            return float(same)
    if r"\text" in answer and "=" not in answer:
        return 0.0
    answer_number, gold_number = _rational(answer), _rational(gold)
    if answer_number is not None and gold_number is not None:
        names = {name[1] for name in (_NAME.match(answer), _NAME.match(gold)) if name}
        return float(len(names) < 2 and _equal_percentages(answer, answer_number, gold, gold_number))
    answer_base, gold_base = in_base(answer), in_base(gold)
    return float(answer_base == gold_base) if answer_base or gold_base else None


def _equal_percentages(answer: str, answer_number: Fraction, gold: str, gold_number: Fraction) -> bool:
    """Return whether two rationals are equal, also after adding the percent sign that only one of them has."""
    factors = [Fraction(1)]
    if ("%" in gold) != ("%" in answer):
        factors.append(Fraction(100) if "%" in gold else Fraction(1, 100))
    tolerance = written_tolerance(gold)
    return any(equal_numbers(answer_number * factor, gold_number, tolerance) for factor in factors)


def _rational(text: str) -> Fraction | None:
    """Return the value of an integer, decimal, fraction or mixed number, with or without a name and a percent sign;
    else None.
    """
    text = _NAME.sub("", text)
    mixed = _MIXED.fullmatch(text)
    if mixed is None:
        return read_number(text) if not _LETTERS.search(text) or _SCIENTIFIC.fullmatch(text) else None
    top, bottom = int(mixed[4]), int(mixed[5])
    if bottom == 0 or (mixed[2] and (mixed[3] or top < 0 or bottom < 0)):
        return None
    value = int(mixed[2] or 0) + Fraction(top, bottom)
    return -value if "-" in (mixed[1], mixed[3]) else value
