r"""Random formulas as trees: their exact value by sympy, without any LaTeX, and their LaTeX in many spellings.

A tree is ("number", Fraction), ("name", "x"), ("add", *trees), ("times", *trees), ("over", top, bottom), ("minus", tree),
("sqrt", tree), ("power", tree, 3), ("factorial", tree) or ("binomial", tree, tree).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import sympy

Tree = tuple[Any, ...]

_NAMES = {"pi": sympy.pi, "i": sympy.I, "e": sympy.E}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": sympy.Add,
    "times": sympy.Mul,
    "over": lambda top, bottom: top / bottom,
    "minus": lambda inner: -inner,
    "sqrt": sympy.sqrt,
    "power": lambda base, exponent: base**exponent,
    "factorial": sympy.factorial,
    "binomial": sympy.binomial,
}


@cache
def value(tree: Tree) -> Any:
    kind, *parts = tree
    if kind == "number":
        return sympy.Rational(parts[0].numerator, parts[0].denominator)
    if kind == "name":
        return _NAMES.get(parts[0]) or sympy.Symbol(parts[0], positive=True)
    return _OPERATIONS[kind](*(value(part) if isinstance(part, tuple) else part for part in parts))


def equal_values(first: Tree, second: Tree) -> bool:
    """By sympy alone: to 60 digits, at three points where there are variables."""
    difference = value(first) - value(second)
    names = sorted(difference.free_symbols, key=str)
    for point in range(3 if names else 1):
        at = {name: sympy.Rational(17 * point + 7 * number + 5, 11 + number) for number, name in enumerate(names)}
        here = difference.subs(at)
        if here != 0 and abs(sympy.N(here, 60, maxn=2000)) > sympy.Float("1e-45"):
            return False
    return True


def has_value(tree: Tree) -> bool:
    found = value(tree)
    return not found.has(sympy.zoo, sympy.nan, sympy.oo) and len(str(found)) < 300


def as_tree(expression: Any) -> Tree:
    """The tree of a value of sympy's; ValueError where it has another form."""
    if expression.is_Rational:
        return ("number", Fraction(int(expression.p), int(expression.q)))
    for name, known in _NAMES.items():
        if expression is known:
            return ("name", name)
    if expression.is_Symbol:
        return ("name", expression.name)
    if expression.is_Add:
        return ("add", *map(as_tree, expression.args))
    if expression.is_Mul:
        top, bottom = expression.as_numer_denom()
        if bottom != 1:
            return ("over", as_tree(top), as_tree(bottom))
        return ("times", *map(as_tree, expression.args))
    if expression.is_Pow:
        base, exponent = expression.args
        if exponent == sympy.Rational(1, 2):
            return ("sqrt", as_tree(base))
        if exponent.is_Integer and exponent > 0:
            return ("power", as_tree(base), int(exponent))
        if exponent.is_negative:
            return ("over", ("number", Fraction(1)), as_tree(base**-exponent))
    raise ValueError(f"no tree for {expression}")


def number(rng: random.Random, most: int = 60) -> Tree:
    top = rng.choice([1, -1]) * rng.randint(1, most)
    return ("number", Fraction(top, rng.choice([1, 1, 1, 2, 3, 4, 5, 7, 8, 12])))


def constant(rng: random.Random, depth: int = 2) -> Tree:
    if depth == 0:
        natural = ("number", Fraction(rng.randint(2, 30)))
        return rng.choice([number(rng), ("sqrt", natural), ("name", "pi"), ("name", "i"), natural])
    kind = rng.choice(["add", "times", "times", "over", "sqrt", "power", "leaf", "binomial", "factorial"])
    below = [constant(rng, depth - 1) for _ in range(2)]
    if kind == "sqrt":
        return ("sqrt", ("number", Fraction(rng.randint(2, 90))))
    if kind == "power":
        return ("power", below[0], rng.randint(2, 4))
    if kind == "binomial":
        top = rng.randint(2, 12)
        return ("binomial", ("number", Fraction(top)), ("number", Fraction(rng.randint(0, top))))
    if kind == "factorial":
        return ("factorial", ("number", Fraction(rng.randint(2, 9))))
    return below[0] if kind == "leaf" else (kind, *below)


def formula(rng: random.Random, depth: int = 2) -> Tree:
    if depth == 0:
        return rng.choice([number(rng, 12), ("name", "x"), ("name", "x"), ("name", rng.choice("xyabnt"))])
    kind = rng.choice(["add", "add", "times", "over", "power"])
    below = [formula(rng, depth - 1) for _ in range(2)]
    return ("power", below[0], rng.randint(2, 4)) if kind == "power" else (kind, *below)


def changed(tree: Tree, rng: random.Random) -> Tree:
    """A near miss: one number, sign, name or operation is another. It may have the same value by chance."""
    kind, *parts = tree
    if kind == "number":
        n = parts[0]
        near = [-n, n + 1, n - 1, n * 10, n / 10, n * 2, n + Fraction(1, 1000), 1 / n if n else n + 1]
        return ("number", rng.choice(near))
    if kind == "name":
        return ("name", rng.choice([name for name in ("x", "y", "e", "pi", "b") if name != parts[0]]))
    if rng.random() < 0.2:
        return ("minus", tree)
    if rng.random() < 0.15 and kind in ("add", "times") and len(parts) == 2:
        return ("times" if kind == "add" else "add", *parts)
    if kind in ("binomial", "factorial"):
        return ("add", tree, ("number", Fraction(rng.choice([1, -1]))))
    at = rng.randrange(len(parts))
    part = parts[at] + 1 if isinstance(parts[at], int) else changed(parts[at], rng)
    return (kind, *parts[:at], part, *parts[at + 1 :])


def rewritten(tree: Tree, rng: random.Random) -> Tree:
    """The same value in another form, where sympy finds one."""
    rewrite = rng.choice([sympy.expand, sympy.factor, sympy.together, sympy.radsimp, sympy.cancel, lambda found: found])
    try:
        return as_tree(rewrite(value(tree)))
    except (ValueError, sympy.PolynomialError):
        return tree


def write(tree: Tree, rng: random.Random, rank: int = 0) -> str:
    """LaTeX in one of its spellings. `rank`: 1 where a sum needs brackets, 2 where a product or a sign does too."""
    kind, *parts = tree
    if kind == "number":
        return _write_number(parts[0], rng, rank)
    if kind == "name":
        return rng.choice([r"\pi ", r"\pi ", "\u03c0", "{\\pi}"]) if parts[0] == "pi" else parts[0]
    if kind == "add":
        text = ""
        for term in rng.sample(parts, len(parts)):
            part = write(term, rng)
            text += part if not text or part.startswith(("-", "\u2212")) else rng.choice(["+", " + "]) + part
        return _bracket(text, rng) if rank >= 1 else text
    if kind == "times":
        return _write_product(parts, rng, rank)
    if kind == "over":
        form = rng.choice([r"\frac{%s}{%s}", r"\dfrac{%s}{%s}", r"\frac {%s} {%s}", r"\tfrac{%s}{%s}"])
        return form % (write(parts[0], rng), write(parts[1], rng))
    if kind == "binomial":
        return rf"\binom{{{write(parts[0], rng)}}}{{{write(parts[1], rng)}}}"
    if kind == "sqrt":
        forms = [r"\sqrt{%s}", r"\sqrt {%s}", r"(%s)^{1/2}", r"(%s)^{\frac12}"]
        return rng.choice(forms[: 2 if rank >= 2 else 4]) % write(parts[0], rng)
    if kind == "minus":
        text = rng.choice(["-", "- "]) + write(parts[0], rng, 1)
        return _bracket(text, rng) if rank >= 1 else text
    text = write(parts[0], rng, 2)
    text += "!" if kind == "factorial" else rng.choice(["^%s", "^{%s}"]) % parts[1]
    return _bracket(text, rng) if rank >= 2 else text


def _write_product(parts: list[Tree], rng: random.Random, rank: int) -> str:
    text = ""
    for part in sorted(parts, key=lambda part: part[0] != "number"):
        factor = write(part, rng, 2 if text else 1)
        beside = not (text[-1:] in "0123456789}" and factor[0] in "0123456789{\\")
        signs = (
            [r"\cdot ", r" \times ", "", " "] if beside or factor.startswith((r"\sqrt", r"\pi")) else [r"\cdot ", "*"]
        )
        text += (rng.choice(signs) if text else "") + factor
    return _bracket(text, rng) if rank >= 2 else text


def _write_number(number: Fraction, rng: random.Random, rank: int) -> str:
    sign = "" if number >= 0 else rng.choice(["-", "-", "\u2212"])
    whole, rest = divmod(abs(number), 1)
    top, bottom = abs(number).numerator, number.denominator
    if rest == 0:
        spellings = [str(whole)]
        if whole >= 1000 and rank == 0:
            spellings += [f"{whole:,}".replace(",", comma) for comma in (",", "{,}", r",\!")]
    else:
        spellings = [rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{top}}}{{{bottom}}}"]
        if top < 10 and bottom < 10:
            spellings.append(rf"\frac{top}{bottom}")
        if rank == 0:
            spellings.append(f"{top}/{bottom}")
        if rank == 0 and whole:
            spellings.append(rf"{whole}\frac{{{rest.numerator}}}{{{bottom}}}")
        if 10**6 % bottom == 0 and rank < 2:
            spellings.append(f"{float(abs(number)):.6f}".rstrip("0"))
    text = sign + rng.choice(spellings)
    return _bracket(text, rng) if rank >= 2 and (sign or rest) else text


def write_plainly(number: Fraction) -> str:
    return _write_number(number, random.Random(0), 2)


def _bracket(text: str, rng: random.Random) -> str:
    return rng.choice(["(%s)", r"\left(%s\right)"]) % text
