r"""Decides whether two mathematical answers are equal. Runs in the limited process, where math-verify is imported.

Formulas are parsed by math-verify's parser with a name in place of every number, so that it cannot round numbers, add
adjacent ones ("2(3)" is 5 to it), or drop the base of "10_2". They are then compared by their values
(`posttrain.verify.formula_values`), with variables at random points: two formulas that agree there are equal except on
a set of points of measure zero. Sets, and relations with words, are compared by math-verify itself.

The rules: lists may have any order and count repeated parts; sets do neither; tuples and intervals need the same
brackets; a chain of inequalities is the interval that it describes; a set or list of one part is that part; a named
value ("x = 3") equals the bare one, but two names must be equal; an equation has the value of its right side, with
which its other sides must agree if they are numbers; i is the imaginary unit and e Euler's number.
"""

from __future__ import annotations

import re
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from posttrain.verify.formula_values import Number, OutsideDomain, TooLarge, Unknown, Values, fixed, values, written_out
from posttrain.verify.spelling import in_base, tight
from posttrain.verify.structure import Form, Unreadable, interval, mirrored, read_form

POINTS = 6  # points at which formulas with variables are compared; the first half has positive coordinates only

_CONVERSION = ConversionConfig(lowercase_symbols=False)
_COMMAND = re.compile(r"\\([a-zA-Z]+|.)")
_USUAL = re.compile(
    r"frac|sqrt|binom|pi|cdot|times|div|infty|emptyset|mathbb|cup|cap|le|ge|ne|in|circ|log|ln|exp|[lr]floor|[lr]ceil|[{}]|ell|"
    r"(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|"
    r"lambda|mu|nu|xi|rho|sigma|tau|upsilon|(?:var)?phi|chi|psi|omega|Delta|Theta|Lambda|Xi|Sigma|Upsilon|Phi|Psi|Omega"
)
_SUBSCRIPT = re.compile(r"_ ?(?:\{[^{}]*\}|[0-9]+|[a-zA-Z])")
_NUMBER = re.compile(
    rf"\\log ?_ ?\{{?|{_SUBSCRIPT.pattern}"  # a subscript is part of a name, unless it is the base of a logarithm
    r"|(?P<whole>[0-9]*)\.(?P<start>[0-9]*)\\overline ?\{(?P<period>[0-9]+)\}|(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
)
_MIXED = re.compile(r"(?<![\^_0-9.])([0-9]+) ?(\\frac\{ ?[0-9]+ ?\}\{ ?[0-9]+ ?\})")
# A letter before a bracket is a function only if it is one of the usual names of functions: "x(t)" is a product.
_FACTOR = re.compile(
    rf"\\[a-zA-Z]+|(?![fghFGHPQpq])[a-zA-Z](?:{_SUBSCRIPT.pattern})?(?:\^ ?(?:[0-9]+|[a-zA-Z]|\{{[^{{}}]*\}}))? ?(?=\()"
)
_TRANSPOSED = re.compile(r"\^T|\^\{T\}")  # the parser drops the transposition
# Text that the parser misreads: numbers side by side, a time, a double factorial, a power of a power.
_MISREAD = re.compile(
    r"\.[0-9]*\.|[0-9.] +[0-9.]|: ?0[0-9]|(?<![_^])[0-9] ?\{|(?:^|[-+*/=(,]) ?\{[^{}]*\} ?[0-9{]|! ?!|['$\"]|"
    r"\^ ?(?:[0-9]+|[a-zA-Z]|\{[^{}]*\}) ?\^"
)
_EXAMPLES = (
    r"-3x^2+\frac{2\sqrt{3}}{5}-\frac{\pi}{4}", r"(x-1)(2x+3)^{10}", r"2\pi r(r+h)", r"\sqrt[3]{2}+\frac{1+\sqrt{5}}{2}i",
    r"y=-\frac{1}{2}x+4", r"x^2+y^2=13", r"\frac{x+2}{(x+1)(x-2)}", r"\sin 3x+\cos^{2}x", r"2\cos 15^\circ", r"\log_{2}x",
    r"e^{2x}\cdot 5!", r"\binom{5}{2}+|x|", r"(-\infty,-2]\cup[2,\infty)", r"1<2x\le 5",
)  # fmt: skip
_SET = re.compile(r"\\(?:mathbb|emptyset)(?![a-zA-Z])")
_SAYS = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z0-9]|\\text ?\{[^{}]*[a-zA-Z]|\\[a-zA-Z]+[{_ ]")
_NAME = re.compile(r"(?:\\?[a-zA-Z](?:_(?:[a-zA-Z0-9]|\{[a-zA-Z0-9]+\}))? ?)+(?:\([a-zA-Z, ]+\))?")


def equal(answer: str, gold: str) -> bool:
    """Return whether two answers are equal; both have normalised spelling. Raises if the gold answer cannot be
    parsed.
    """
    expected = read_form(gold)
    readings = (False, True) if expected.kind == "list" else (False,)  # "100,200,300" may be one number
    for inside in readings:
        with suppress(Unreadable):
            if same(read_form(answer, inside=inside), expected):
                return True
    return False


def prepare() -> None:
    """Fill the parser's tables, which every child of the server inherits: otherwise a child takes ten times as long."""
    for text in _EXAMPLES:
        readable(text)


def readable(gold: str) -> bool:
    """Return whether a gold answer equals itself. Raises if it cannot be parsed."""
    form = read_form(gold)
    for formula in form.formulas():
        if not _is_literal(formula.text):
            read_formula(formula.text, formula.text)
    return same(form, form)


class Formula:
    """A formula as a sympy tree, in which numbers are symbols n0, n1, ...; `numbers` has their exact values."""

    def __init__(self, text: str, gold: str) -> None:
        """Parse a formula. `gold`: a formula whose commands are permitted in addition to the usual ones, so that an
        answer may contain an integral only if the gold answer does.
        """
        commands = set(_COMMAND.findall(_NUMBER.sub("", text))) - set(_COMMAND.findall(gold))
        if not all(map(_USUAL.fullmatch, commands)) or _MISREAD.search(_SUBSCRIPT.sub("_", text)):
            raise Unreadable(f"{text[:80]!r} is not read")
        self.numbers: dict[str, Fraction] = {}
        text = _TRANSPOSED.sub("^{(T)}", text)
        text = _FACTOR.sub(lambda found: found[0] + ("" if found[0].startswith("\\") else r"\cdot "), text)
        text = _MIXED.sub(r"(\1+\2)", text).replace("%", r"\%")
        text = _NUMBER.sub(self._hide, text)
        try:
            self.tree = latex2sympy(
                text, is_real=True, convert_degrees=True, normalization_config=None, conversion_config=_CONVERSION
            )
        except Exception as error:  # the parser raises plain Exception
            raise Unreadable(f"{text[:80]!r} cannot be parsed") from error
        if not isinstance(self.tree, sympy.Basic | sympy.MatrixBase):
            raise Unreadable(f"{text[:80]!r} is not a formula")
        self.variables = {symbol.name for symbol in getattr(self.tree, "free_symbols", ())} - {*self.numbers, "i"}

    def _hide(self, found: re.Match[str]) -> str:
        """Return a variable in place of the number, in the syntax of math-verify's parser."""
        if not found["number"] and not found["period"]:
            return found[0]
        name = f"n{len(self.numbers)}"
        number = found["number"]
        self.numbers[name] = Fraction(number.removesuffix(".")) if number else _repeating(*found.groups()[:3])
        return rf"\variable{{{name}}}"

    def at(self, point: int) -> Any:
        return fixed(self.numbers, lambda name: coordinate(name, point))

    def written(self) -> str:
        return written_out(str(self.tree), self.numbers)

    def exact(self) -> Any:
        """Return the tree with its numbers inserted, which may take unbounded time."""
        return self.tree.xreplace(
            {
                sympy.Symbol(name, real=True): sympy.Rational(number.numerator, number.denominator)
                for name, number in self.numbers.items()
            }
        )


@lru_cache(maxsize=1000)
def read_formula(text: str, gold: str) -> Formula:
    """Parse a formula, cached, as each formula of a list is compared with several others."""
    return Formula(text, gold)


def coordinate(name: str, point: int) -> Fraction:
    """Return a pseudorandom coordinate of a variable, equal in every process: between 0 and 4, or -4 and 4."""
    drawn = int.from_bytes(sha256(f"{name} {point}".encode()).digest()[:8], "big")
    value = Fraction(drawn % 3989 + 1, 997)
    return -value if point >= POINTS // 2 and drawn >> 63 else value


def same(answer: Form, gold: Form) -> bool:
    """Return whether two forms are equal. Raises Unreadable if they cannot be compared."""
    answer, gold = _exactly(answer), _exactly(gold)
    if "=" in answer.marks or "=" in gold.marks:
        return _same_equations(answer, gold)
    for one in (answer, gold):
        if one.marks == ("in",) and _is_name(one.parts[0]):
            return same(one.parts[-1], gold) if one is answer else same(answer, one.parts[-1])
    if answer.kind == "list" and gold.kind == "union":  # "x < 1 or x > 2"
        rays = [interval(part) for part in answer.parts]
        return len({ray and ray[0] for ray in rays}) == 1 and _matched(tuple(ray[1] for ray in rays if ray), gold.parts)
    if answer.kind in ("list", "set") or gold.kind in ("list", "set"):
        return _same_collections(answer, gold)
    if answer.kind == gold.kind in ("tuple", "matrix"):
        return answer.marks == gold.marks and _pairwise(answer.parts, gold.parts)
    if answer.kind == gold.kind == "formula":
        return _same_formulas(answer.text, gold.text)
    if answer.kind == gold.kind == "chain":
        for chain in (answer, mirrored(answer)):
            if chain.marks == gold.marks and _pairwise(chain.parts, gold.parts):
                return True
    if "chain" in (answer.kind, gold.kind):
        found = [interval(form) or (None, form) for form in (answer, gold)]
        names = {name for name, _ in found if name}
        if len(names) == 1 and found[0][1].kind == found[1][1].kind == "tuple":
            return same(found[0][1], found[1][1])
    if answer.kind == gold.kind == "union" and _matched(answer.parts, gold.parts):
        return True
    beyond = any(form.kind in ("chain", "union", "matrix") or _SET.search(form.text) for form in (answer, gold))
    return beyond and _same_trees(read_formula(answer.text, gold.text), read_formula(gold.text, gold.text))


def _exactly(form: Form) -> Form:
    """Return the exact side of an approximation; the approximation itself if the exact side is a name."""
    if "approx" not in form.marks:
        return form
    first, second = form.parts[:2]
    return second if _is_name(first) else first


def _pairwise(answers: tuple[Form, ...], golds: tuple[Form, ...]) -> bool:
    return len(answers) == len(golds) and all(map(same, answers, golds))


def _matched(answers: tuple[Form, ...], golds: tuple[Form, ...]) -> bool:
    """Return whether the parts of both can be paired one to one."""
    left = list(golds)
    for answer in answers:
        found = next((gold for gold in left if same(answer, gold)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_collections(answer: Form, gold: Form) -> bool:
    answers, golds = (form.parts if form.kind in ("list", "set") else (form,) for form in (answer, gold))
    if "set" in (answer.kind, gold.kind):
        return all(any(same(a, g) for g in golds) for a in answers) and all(
            any(same(a, g) for a in answers) for g in golds
        )
    named = [all(_named(part) for part in parts) for parts in (answers, golds)]
    if named[0] != named[1]:  # "a = 3, b = 4" against "3, 4": the order assigns names
        alike = len({part.parts[0].text for part in (answers if named[0] else golds)}) == 1
        if not alike:
            return _pairwise(answers, golds)
    return _matched(answers, golds)


def _named(form: Form) -> bool:
    return form.kind == "chain" and form.marks == ("=",) and form.parts[0].kind == "formula"


def _same_equations(answer: Form, gold: Form) -> bool:
    if "=" not in gold.marks:
        return set(answer.marks) == {"="} and _consistent(answer) and same(answer.parts[-1], gold)
    named = set(gold.marks) == {"="} and all(map(_is_name, gold.parts[:-1]))
    if "=" not in answer.marks:
        return named and same(answer, gold.parts[-1])
    if named and set(answer.marks) == {"="} and tight(answer.parts[0].text) == tight(gold.parts[0].text):
        return _consistent(answer) and same(answer.parts[-1], gold.parts[-1])
    if answer.marks == gold.marks == ("=",):
        return _same_zeros(answer, gold)
    return answer.marks == gold.marks and _pairwise(answer.parts, gold.parts)


def _is_name(form: Form) -> bool:
    return form.kind == "tuple" or _NAME.fullmatch(form.text) is not None


def _consistent(chain: Form) -> bool:
    """Return whether the other sides of "a = 2 + 3 = 5" equal the last if they are numbers, and are not trivial."""
    *others, last = chain.parts
    for side in others:
        if not _SAYS.search(side.text):
            return False
        try:
            first, second = read_formula(side.text, ""), read_formula(last.text, "")
            if not first.variables and not _same_values(first, second):
                return False
        except TooLarge:
            return False
        except Unreadable:
            continue
    return True


def _same_formulas(answer: str, gold: str) -> bool:
    if _is_literal(gold) or _is_literal(answer):
        return _literal(answer) == _literal(gold)
    first, second = read_formula(answer, gold), read_formula(gold, gold)
    try:
        return _same_values(first, second)
    except TooLarge:
        return first.written() == second.written()
    except Unknown:
        return _same_trees(first, second)


def _is_literal(text: str) -> bool:
    """Return whether a formula is compared as text: a number in another base, infinity, an ellipsis."""
    return in_base(text) is not None or tight(text).lstrip("+-") in (r"\infty", r"\ldots", r"\dots", r"\cdots")


def _literal(text: str) -> object:
    return in_base(text) or tight(text).removeprefix("+")


def _same_values(answer: Formula, gold: Formula) -> bool:
    """Return whether two formulas have equal values, at the points where the gold formula is real if there are any."""
    found: list[tuple[Number, Number | None, Values]] = []
    for point in range(POINTS if answer.variables | gold.variables else 1):
        try:
            both = values([gold.tree, answer.tree], [gold.at(point), answer.at(point)])
            found.append((both.numbers[0], both.numbers[1], both))
        except Unreadable:
            with suppress(OutsideDomain):
                alone = values([gold.tree], [gold.at(point)])
                found.append((alone.numbers[0], None, alone))
    if not found:
        raise Unreadable("it has no value")
    inside = [case for case in found if case[2].real(case[0])] or found
    return all(number is not None and case.same(expected, number) for expected, number, case in inside)


def _same_zeros(answer: Form, gold: Form) -> bool:
    """Return whether two equations are equivalent: their differences of both sides are proportional, or math-verify
    finds equal solutions.
    """
    if any(part.kind != "formula" for part in (*answer.parts, *gold.parts)):
        return False
    texts = [f"({form.parts[0].text})-({form.parts[1].text})" for form in (answer, gold)]
    first, second = read_formula(texts[0], texts[1]), read_formula(texts[1], texts[1])
    if not first.variables or not second.variables:
        return False
    try:
        cases = [(first.tree, first.at(point), second.tree, second.at(point)) for point in range(POINTS // 2)]
        both = values([tree for a, _, g, _ in cases for tree in (a, g)], [at for _, a, _, g in cases for at in (a, g)])
    except Unreadable:
        return False
    pairs = [(both.numbers[i], both.numbers[i + 1]) for i in range(0, len(both.numbers), 2)]
    if all(both.proportional(pairs[0], pair) for pair in pairs[1:]):
        return True
    solutions = [
        {name: sympy.solve(formula.exact(), sympy.Symbol(name, real=True)) for name in sorted(second.variables)}
        for formula in (first, second)
    ]
    return any(solutions[1].values()) and all(
        len(found) == len(solutions[0][name])
        and _same_to_library(sympy.FiniteSet(*solutions[0][name]), sympy.FiniteSet(*found))
        for name, found in solutions[1].items()
        if found
    )


def _same_trees(answer: Formula, gold: Formula) -> bool:
    return _same_to_library(answer.exact(), gold.exact())


def _same_to_library(answer: Any, gold: Any) -> bool:
    """Return math-verify's verdict. Its own time limits use alarm signals, so they are off."""
    return bool(
        math_verify.verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
    )


def _repeating(whole: str, start: str, period: str) -> Fraction:
    """Return 0.1666... for ("0", "1", "6")."""
    return Fraction(int(whole + start or "0") + Fraction(int(period), 10 ** len(period) - 1), 10 ** len(start))
