"""Evaluates formulas parsed by math-verify: exactly where possible, otherwise with so many digits that the result is
proof.

No verdict depends on floating point. Rational arithmetic is exact. Where a root, a function or a constant makes it
inexact, every intermediate number, however large or small, has many more correct digits than the comparison needs. A
number of more than `MOST_BITS` raises `TooLarge`, before it is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef

from posttrain.verify.structure import Unreadable

FIRST_BITS = 512  # of working precision, for the first attempt
MOST_BITS = 20_000  # of a number: 6,000 digits before or after the decimal point
LARGEST_ARGUMENT = 3000  # of factorials and binomials

Number = Any  # a Fraction if exact, otherwise mpmath's mpf or mpc

_FUNCTIONS = {
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh")},
    **{name: getattr(mpmath, name) for name in ("asin", "acos", "atan", "asec", "acsc", "acot")},
    **{name: getattr(mpmath, name) for name in ("asinh", "acosh", "atanh")},
}
_CONSTANTS = {"Pi": mpmath.pi, "Exp1": mpmath.e, "EulerGamma": mpmath.euler}


class TooLarge(Unreadable):
    """The value has too many digits for a comparison."""


class OutsideDomain(Unreadable):
    """The formula has no value at these values of its variables."""


class Unknown(Unreadable):
    """The formula has a part without a value: an integral, a set, a matrix."""


@dataclass
class FormulaEvaluation:
    """One evaluation at a working precision of mpmath. `bits`: size of the largest or smallest intermediate number."""

    names: Callable[[str], Number]
    bits: int = 0

    def value(self, node: Any) -> Number:
        name = type(node).__name__
        if name == "Symbol":
            return self._met(self.names(node.name))
        if node.is_Rational:
            return self._met(Fraction(int(node.p), int(node.q)))
        if name in _CONSTANTS:
            return +_CONSTANTS[name]
        if name == "ImaginaryUnit":
            return mpmath.mpc(0, 1)
        if name in ("Add", "Mul", "Pow", "exp", "log", "Abs", "factorial", "binomial", "floor", "ceiling"):
            return getattr(self, f"_{name.lower()}")(*map(self.value, node.args))
        if name == "UnevaluatedExpr":
            return self.value(node.args[0])
        if name in _FUNCTIONS:
            return self._met(_defined(_FUNCTIONS[name], *map(_inexact, map(self.value, node.args))))
        if isinstance(node, AppliedUndef):  # "f(2)" is treated as a name
            return self._met(self.names(str(node)))
        raise Unknown(name)

    def _met(self, value: Number) -> Number:
        if isinstance(value, Fraction):
            size = max(value.numerator.bit_length(), value.denominator.bit_length())
        else:
            size = 0 if value == 0 else abs(int(mpmath.mag(value)))
        if size > MOST_BITS:
            raise TooLarge("too many digits")
        self.bits = max(self.bits, size)
        return value

    def _add(self, *terms: Number) -> Number:
        if all(isinstance(term, Fraction) for term in terms):
            return self._met(sum(terms, Fraction(0)))
        return mpmath.fsum(map(_inexact, terms))  # a small sum of large terms does not count as a small number

    def _mul(self, *factors: Number) -> Number:
        product: Number = Fraction(1)
        for factor in factors:
            if not (isinstance(product, Fraction) and isinstance(factor, Fraction)):
                product, factor = _inexact(product), _inexact(factor)
            product = self._met(product * factor)
        return product

    def _pow(self, base: Number, exponent: Number) -> Number:
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            if base == 0:
                if exponent <= 0:
                    raise OutsideDomain("zero to the power of zero, or division by zero")
                return Fraction(0)
            root = _exact_root(base, exponent.denominator)
            if root is not None:
                size = max(root.numerator.bit_length(), root.denominator.bit_length())
                if abs(root) == 1:
                    return root ** (exponent.numerator % 2)
                if size * abs(exponent.numerator) <= MOST_BITS:
                    return self._met(root**exponent.numerator)
        odd = isinstance(exponent, Fraction) and exponent.denominator % 2 == 1
        sign = -1 if odd and not isinstance(base, mpmath.mpc) and base < 0 else 1  # the root of -8 is -2
        base, power = sign * _inexact(base), _inexact(exponent)
        if base == 0:
            raise OutsideDomain("a power of zero")
        with mpmath.workprec(53):
            if abs(mpmath.re(power * mpmath.log(base))) > MOST_BITS:
                raise TooLarge("too many digits")
        whole = isinstance(exponent, Fraction) and exponent.denominator == 1
        value = self._met(_defined(mpmath.power, base, exponent.numerator if whole else power))
        return -value if sign < 0 and exponent.numerator % 2 else value

    def _exp(self, exponent: Number) -> Number:
        exponent = _inexact(exponent)
        if abs(mpmath.re(exponent)) > MOST_BITS:
            raise TooLarge("too many digits")
        return self._met(mpmath.exp(exponent))

    def _log(self, argument: Number, base: Number = None) -> Number:
        value = _defined(mpmath.log, _inexact(argument))
        return self._met(value if base is None else _divided(value, _defined(mpmath.log, _inexact(base))))

    def _abs(self, value: Number) -> Number:
        return abs(value)

    def _factorial(self, number: Number) -> Number:
        if _is_count(number):
            return self._met(Fraction(math.factorial(int(number))))
        return self._met(_defined(mpmath.factorial, _inexact(number)))

    def _binomial(self, number: Number, chosen: Number) -> Number:
        if _is_count(number) and _is_count(chosen):
            return self._met(Fraction(math.comb(int(number), int(chosen))))
        return self._met(_defined(mpmath.binomial, _inexact(number), _inexact(chosen)))

    def _floor(self, value: Number) -> Number:
        if not isinstance(value, Fraction):
            if mpmath.im(value) != 0:
                raise OutsideDomain("the floor of a complex number")
            near = mpmath.nint(mpmath.re(value))
            close = abs(value - near) < mpmath.ldexp(1, -mpmath.mp.prec // 2)
            return Fraction(int(near if close else mpmath.floor(mpmath.re(value))))
        return Fraction(math.floor(value))

    def _ceiling(self, value: Number) -> Number:
        return -self._floor(-value)


@dataclass(frozen=True)
class Values:
    """Values at one precision: every intermediate number has at least 3/4 of `bits` correct bits."""

    numbers: list[Number]
    bits: int

    def same(self, first: Number, second: Number) -> bool:
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        with mpmath.workprec(self.bits):
            return self._zero(_inexact(first) - _inexact(second))

    def real(self, number: Number) -> bool:
        return isinstance(number, Fraction) or self._zero(mpmath.im(number))

    def proportional(self, first: tuple[Number, Number], second: tuple[Number, Number]) -> bool:
        """Return whether two pairs have the same ratio and contain no zero."""
        with mpmath.workprec(self.bits):
            a, b, c, d = map(_inexact, (*first, *second))
            return not any(map(self._zero, (a, b, c, d))) and self._zero(a * d - b * c)

    def _zero(self, number: Number) -> bool:
        return bool(abs(number) < mpmath.ldexp(1, -self.bits // 2))


def values(trees: Sequence[Any], names: Sequence[Callable[[str], Number]]) -> Values:
    """Return the value of each tree, with the values of its names from `names`."""
    bits = FIRST_BITS
    while True:
        with mpmath.workprec(bits):
            evaluations = [FormulaEvaluation(name) for name in names]
            found = [evaluation.value(tree) for evaluation, tree in zip(evaluations, trees, strict=True)]
        met = max(evaluation.bits for evaluation in evaluations)
        if 4 * met <= bits:
            return Values(found, bits)
        bits = 4 * met + FIRST_BITS


def fixed(numbers: Mapping[str, Fraction], variables: Callable[[str], Fraction]) -> Callable[[str], Number]:
    """Return a function from names to values: of a formula's numbers, the imaginary unit, and variables."""

    def value(name: str) -> Number:
        if name in numbers:
            return numbers[name]
        if name == "i":
            return mpmath.mpc(0, 1)
        return variables(written_out(name, numbers))

    return value


def written_out(text: str, numbers: Mapping[str, Fraction]) -> str:
    """Return a formula, or a name, with numbers in place of their symbols."""
    return re.sub(r"\bn[0-9]+\b", lambda found: str(numbers.get(found[0], found[0])), text)


def _inexact(value: Number) -> Number:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _defined(function: Callable[..., Number], *arguments: Number) -> Number:
    try:
        value = function(*arguments)
    except (ValueError, ZeroDivisionError, OverflowError, mpmath.libmp.ComplexResult) as error:
        raise OutsideDomain(f"no value: {error}") from error
    if not mpmath.isfinite(value):
        raise OutsideDomain("no finite value")
    return value


def _divided(value: Number, by: Number) -> Number:
    if by == 0:
        raise OutsideDomain("division by zero")
    return value / by


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """Return the rational root of a rational if there is one; an odd root of a negative number is real."""
    if degree == 1:
        return value
    if degree > MOST_BITS or (value < 0 and degree % 2 == 0):
        return None
    top, top_exact = sympy.integer_nthroot(abs(value.numerator), degree)
    bottom, bottom_exact = sympy.integer_nthroot(value.denominator, degree)
    root = Fraction(int(top), int(bottom)) if top_exact and bottom_exact else None
    return -root if root is not None and value < 0 else root


def _is_count(value: Number) -> bool:
    if abs(value) > LARGEST_ARGUMENT:
        raise TooLarge("too many digits")
    return isinstance(value, Fraction) and value.denominator == 1 and value >= 0
