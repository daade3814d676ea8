r"""Answers in many spellings, near misses and hostile replies, each with the verdict that an independent oracle expects.

    python tests/answers.py --cases 20000 --seed 0

prints every case whose verdict differs, and the counts of each family. Formulas are made as trees, which sympy gives an
exact value directly, without any LaTeX; two of them are equal when sympy says so of these values. `None` is expected
of hostile replies: any verdict but Invalid, in bounded time, and 1.0 only if arithmetic agrees.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import sympy

from posttrain.envs import arithmetic as arithmetic_environment
from posttrain.envs import gsm8k, word_problems
from posttrain.types import Invalid
from posttrain.verify.answer import last_boxed
from posttrain.verify.math import verify
from posttrain.verify.numeric import last_number

Tree = tuple[Any, ...]  # ("number", Fraction), ("name", "x"), ("add", *trees), ("sqrt", tree), ...


@dataclass(frozen=True)
class Case:
    family: str
    answer: str
    gold: str
    expected: float | None
    reply: str


# ---------------------------------------------------------------------------- values


@cache
def value(tree: Tree) -> Any:
    """The exact value of a tree."""
    kind, *parts = tree
    if kind == "number":
        return sympy.Rational(parts[0].numerator, parts[0].denominator)
    if kind == "name":
        known = {"pi": sympy.pi, "i": sympy.I, "e": sympy.E}
        return known.get(parts[0]) or sympy.Symbol(parts[0], positive=True)
    made = [value(part) if isinstance(part, tuple) else part for part in parts]
    if kind == "power":
        return made[0] ** made[1]
    operations: dict[str, Callable[..., Any]] = {
        "add": lambda *terms: sympy.Add(*terms),
        "times": lambda *factors: sympy.Mul(*factors),
        "over": lambda top, bottom: top / bottom,
        "minus": lambda inner: -inner,
        "sqrt": sympy.sqrt,
        "factorial": sympy.factorial,
        "binomial": sympy.binomial,
        "sin": sympy.sin,
        "cos": sympy.cos,
        "log": lambda inner: sympy.log(inner),
    }
    return operations[kind](*made)


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


def as_tree(expression: Any) -> Tree:
    """The tree of a value of sympy's."""
    if expression.is_Rational:
        return ("number", Fraction(int(expression.p), int(expression.q)))
    if expression is sympy.pi or expression is sympy.I or expression is sympy.E:
        return ("name", {sympy.pi: "pi", sympy.I: "i", sympy.E: "e"}[expression])
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


# ---------------------------------------------------------------------------- LaTeX


def write(tree: Tree, rng: random.Random, rank: int = 0) -> str:
    """LaTeX in one of its spellings. `rank`: 1 where a sum, 2 where a product or a sign needs brackets."""
    kind, *parts = tree
    if kind == "number":
        return write_number(parts[0], rng, rank)
    if kind == "name":
        return {"pi": rng.choice([r"\pi ", r"\pi ", "\u03c0", "{\\pi}"])}.get(parts[0], parts[0])
    if kind == "add":
        terms = list(parts)
        rng.shuffle(terms)
        text = ""
        for term in terms:
            part = write(term, rng, 0)
            text += part if not text or part.startswith(("-", "\u2212")) else rng.choice(["+", " + "]) + part
        return bracket(text, rng) if rank >= 1 else text
    if kind == "times":
        return write_product(parts, rng, rank)
    if kind == "over":
        top, bottom = write(parts[0], rng), write(parts[1], rng)
        return rng.choice([r"\frac{%s}{%s}", r"\dfrac{%s}{%s}", r"\frac {%s} {%s}", r"\tfrac{%s}{%s}"]) % (top, bottom)
    if kind == "minus":
        text = rng.choice(["-", "- "]) + write(parts[0], rng, 1)
        return bracket(text, rng) if rank >= 1 else text
    if kind == "sqrt":
        inner = write(parts[0], rng)
        return (
            rng.choice([r"\sqrt{%s}", r"\sqrt {%s}", r"(%s)^{1/2}", r"(%s)^{\frac12}"][: 2 if rank >= 2 else 4]) % inner
        )
    if kind == "power":
        exponent = str(parts[1])
        text = write(parts[0], rng, 2) + (rng.choice(["^%s", "^{%s}"]) if len(exponent) == 1 else "^{%s}") % exponent
        return bracket(text, rng) if rank >= 2 else text
    if kind == "factorial":
        text = write(parts[0], rng, 2) + "!"
        return bracket(text, rng) if rank >= 2 else text
    if kind == "binomial":
        return r"\binom{%s}{%s}" % (write(parts[0], rng), write(parts[1], rng))
    return (
        bracket(rf"\{kind}{bracket(write(parts[0], rng), rng)}", rng)
        if rank >= 2
        else rf"\{kind}({write(parts[0], rng)})"
    )


def write_product(parts: list[Tree], rng: random.Random, rank: int) -> str:
    text = ""
    for number, part in enumerate(sorted(parts, key=lambda part: part[0] != "number")):
        factor = write(part, rng, 1 if number == 0 else 2)
        touching = text[-1:].isdigit() or (text.endswith("}") and factor.startswith("{"))
        plain = number > 0 and not (
            touching and factor[:1] in "0123456789{\\" and not factor.startswith((r"\sqrt", r"\pi"))
        )
        text += (
            factor
            if not text
            else (rng.choice(["", " ", r"\cdot ", r" \times "] if plain else [r"\cdot ", r" \times "]) + factor)
        )
    return bracket(text, rng) if rank >= 2 else text


def write_number(number: Fraction, rng: random.Random, rank: int) -> str:
    sign = "" if number >= 0 else rng.choice(["-", "-", "\u2212"])
    size = abs(number)
    whole, rest = divmod(size, 1)
    if rest == 0:
        text = str(whole)
        if whole >= 1000 and rank == 0:
            text = rng.choice([text, f"{whole:,}", f"{whole:,}".replace(",", "{,}"), f"{whole:,}".replace(",", r",\!")])
    else:
        top, bottom = rest.numerator, rest.denominator
        spellings = [rf"\frac{{{size.numerator}}}{{{bottom}}}", rf"\dfrac{{{size.numerator}}}{{{bottom}}}"]
        if size.numerator < 10 and bottom < 10:
            spellings.append(rf"\frac{size.numerator}{bottom}")
        if rank == 0:
            spellings.append(f"{size.numerator}/{bottom}")
            if whole:
                spellings.append(rf"{whole}\frac{{{top}}}{{{bottom}}}")
        if 10**6 % bottom == 0 and rank < 2:
            spellings.append(f"{float(size):.6f}".rstrip("0"))
        text = rng.choice(spellings)
    return bracket(sign + text, rng) if rank >= 2 and (sign or rest) else sign + text


def bracket(text: str, rng: random.Random) -> str:
    return rng.choice(["(%s)", r"\left(%s\right)"]) % text


# ---------------------------------------------------------------------------- trees


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
    """A near miss: one number, sign, name or operation of the tree is another. It may have the same value by chance."""
    kind, *parts = tree
    if kind == "number":
        n = parts[0]
        return (
            "number",
            rng.choice([-n, n + 1, n - 1, n * 10, n / 10, 1 / n if n else n + 1, n + Fraction(1, 1000), n * 2]),
        )
    if kind == "name":
        return ("name", rng.choice([name for name in ("x", "y", "e", "pi", "b") if name != parts[0]]))
    at = rng.randrange(len(parts))
    if rng.random() < 0.2:
        return ("minus", tree)
    if rng.random() < 0.15 and kind in ("add", "times") and len(parts) == 2:
        return ("times" if kind == "add" else "add", *parts)
    if isinstance(parts[at], int):
        return (kind, *parts[:at], parts[at] + 1, *parts[at + 1 :])
    if kind in ("binomial", "factorial"):
        return ("add", tree, ("number", Fraction(rng.choice([1, -1]))))
    return (kind, *parts[:at], changed(parts[at], rng), *parts[at + 1 :])


def rewritten(tree: Tree, rng: random.Random) -> Tree:
    """The same value in another form, where sympy finds one."""
    rewrite = rng.choice([sympy.expand, sympy.factor, sympy.together, sympy.radsimp, sympy.cancel, lambda x: x])
    try:
        return as_tree(rewrite(value(tree)))
    except (ValueError, sympy.PolynomialError):
        return tree


def has_value(tree: Tree) -> bool:
    found = value(tree)
    return not found.has(sympy.zoo, sympy.nan, sympy.oo) and sympy.count_ops(found) < 60 and len(str(found)) < 300


# ---------------------------------------------------------------------------- families: (answer, gold, expected)

Pair = tuple[str, str, float | None]


def formulas(make: Callable[[random.Random], Tree]) -> Callable[[random.Random], Pair]:
    def pair(rng: random.Random) -> Pair:
        while True:
            gold = make(rng)
            if has_value(gold):
                break
        answer = rng.choice(
            [lambda: gold, lambda: rewritten(gold, rng), lambda: changed(gold, rng), lambda: make(rng)]
        )()
        if not has_value(answer):
            answer = gold
        return write(answer, rng), write(gold, rng), float(equal_values(answer, gold))

    return pair


def collections(rng: random.Random) -> Pair:
    """Tuples, intervals, sets and lists of constants."""
    kinds = ["()", "[]", "(]", "[)", r"\{\}", ""]
    kind = rng.choice(kinds)
    parts: list[Tree] = []
    while len(parts) < rng.choice([2, 2, 3]):
        part = rng.choice([number, lambda rng: constant(rng, 1)])(rng)
        if has_value(part) and not any(equal_values(part, other) for other in parts):
            parts.append(part)
    mine, other = list(parts), kind
    change = rng.choice(["none", "none", "order", "part", "brackets", "fewer", "more"])
    if change == "order":
        rng.shuffle(mine)
    elif change == "part":
        at = rng.randrange(len(mine))
        mine[at] = changed(mine[at], rng)
        if not has_value(mine[at]):
            mine[at] = ("number", Fraction(12345, 7))
    elif change == "brackets":
        other = rng.choice(kinds)
    elif change == "fewer":
        mine.pop()
    elif change == "more":
        mine.append(number(rng))
    unordered = kind in ("", r"\{\}") and other in ("", r"\{\}")
    expected = len(mine) == len(parts) and (other == kind or unordered)
    if unordered:
        as_sets = kind or other
        covered = (
            [any(equal_values(a, g) for g in parts) for a in mine],
            [any(equal_values(a, g) for a in mine) for g in parts],
        )
        expected = all(covered[0]) and all(covered[1]) and (bool(as_sets) or len(mine) == len(parts))
    elif expected:
        expected = all(map(equal_values, mine, parts))
    return collection(mine, other, rng), collection(parts, kind, rng), float(expected)


def collection(parts: list[Tree], kind: str, rng: random.Random) -> str:
    half = len(kind) // 2
    inner = rng.choice([", ", ", ", " , "]).join(write(part, rng).replace(r",\!", "{,}") for part in parts)
    return kind[:half] + inner + kind[half:]


def intervals(rng: random.Random) -> Pair:
    """Intervals against chains of inequalities."""
    low, high = sorted(rng.sample(range(-30, 31), 2))
    left, right = rng.choice("(["), rng.choice(")]")
    ends = [rng.choice([str(low), r"-\infty"]), rng.choice([str(high), r"\infty"])]
    left, right = "(" if "inf" in ends[0] else left, ")" if "inf" in ends[1] else right
    gold = f"{left}{ends[0]},{ends[1]}{right}"
    mine = [ends[0], ends[1], left, right]
    change = rng.choice(["none", "none", "end", "bracket"])
    if change == "end":
        at = rng.randrange(2)
        mine[at] = rng.choice([str(rng.randint(-40, 40)), "\\infty" if at else "-\\infty"])
    elif change == "bracket":
        mine[2], mine[3] = rng.choice("(["), rng.choice(")]")
    if "inf" in mine[0]:
        mine[2] = "("
    if "inf" in mine[1]:
        mine[3] = ")"
    expected = float(mine == [ends[0], ends[1], left, right])
    a, b, opening, closing = mine
    below, under = (rng.choice([r"\le ", r"\leq ", "<=", "\u2264"]) if x in "[]" else "<" for x in (opening, closing))
    if a.startswith("-\\inf") and b == r"\infty":
        return f"{opening}{a}, {b}{closing}", gold, expected
    if a.startswith("-\\inf"):
        chain = f"x {under} {b}"
    elif b == r"\infty":
        above = ">" if opening == "(" else r"\ge"
        chain = rng.choice([f"{a} {below} x", f"x {above} {a}"])
    else:
        chain = f"{a} {below} x {under} {b}"
    interval = rng.choice([r"%s%s,%s%s", r"\left%s %s, %s \right%s", r"x \in %s%s,%s%s"]) % (opening, a, b, closing)
    return rng.choice([chain, interval]), gold, expected


UNITS = [
    " apples", " cm", " dollars", " degrees", " hours", " mph", " square units", " units", " percent", r"\text{ cm}",
    r"\text{ cm}^2", r"\,\text{cm}^{3}", r"\text{ square feet}", r"\mbox{ inches}", r"\ \mathrm{kg}", "^\\circ", r"^{\circ}",
    "\u00b0", r"\%", "%", r"\text{ ways}", r"\text{ m}", r"\text{ m/s}", r"\text{ sq. cm}", r"\text{ miles per hour}",
    r"\text{ units}^2", " km", " ft", r"\text{ degrees Fahrenheit}", r"^\circ\text{C}", " years old", " cm^2", r"\text{ students}",
]  # fmt: skip
NOT_UNITS = [
    " million", " billion", " hundred", " thousand", " dozen", "k", " k", " K", "K", "M", " squared", " cubed", "!", "x", "t",
    " m", "m", "s", r"\text{ million}", r"\text{million}", r"\text{ billion dollars}", r"\text{ hundred}", r"\text{ thousand}",
    r"\text{ dozen}", r"\text{ dozen eggs}", r"\text{ tenths}", r"\text{ tenth}", r"\text{ hundredths}", r"\text{ thirds}",
    r"\text{ half}", r"\text{ halves}", r"\text{ quarters}", r"\text{ squared}", r"\text{ cubed}", r"\text{ factorial}",
    r"\text{ k}", r"\text{k}", r"\text{ K}", r"\text{M}", r"\text{ a.m.}", r"\text{ p.m.}", r"\text{x}", r"\text{ or so, or }6",
    r"\text{ or }6", " or 6", ", 6", r"\text{ base }8", r"\text{ base eight}", "_8", "_{8}", r"_{\text{eight}}", r"\text{ to }9", r"\cdot 10^3",
    r"\times 10", "e3", r"\text{ score}", r"\text{ sixths}", r"\text{ twentieths}", r"\text{ below zero}", r"\pi", "i", r"\infty", r"\text{ point five}",
    r"\text{ and a half}", r"\frac12", " 1/2", r"\text{ }^2", "^2", "^3", r"^{\text{2}}", "'", "^T", r"\text{7}", r"\,7", r"\ 7", "{7}", "7", ".7", r"\$7",
    "%7", r"\%7", r"\%\%", "!!", r"\text{ June}", r"\text{ minus }1", r"\text{ not}", r"\text{ is wrong}",
]  # fmt: skip


def units(rng: random.Random) -> Pair:
    n = rng.choice([rng.randint(3, 99), rng.randint(100, 9999)])
    if rng.random() < 0.4:
        suffix = rng.choice(UNITS)
        pair = [f"{n}{suffix}", str(n)]
        return pair[0], pair[1], 1.0
    suffix = rng.choice(NOT_UNITS)
    pair = [f"{n}{suffix}", str(n)]
    if rng.random() < 0.3 and suffix.startswith((" ", r"\text")):  # else the gold may be one that nobody can read
        pair.reverse()
    return pair[0], pair[1], 0.0


def bases(rng: random.Random) -> Pair:
    base = rng.choice([2, 3, 5, 7, 8, 9, 12, 16])
    digits = "0123456789ABCDEF"[:base]
    numeral = rng.choice(digits[1:]) + "".join(rng.choices(digits, k=rng.randint(1, 6)))
    gold = rng.choice([f"{numeral}_{base}" if base < 10 else f"{numeral}_{{{base}}}", f"{numeral}_{{{base}}}"])
    kind = rng.choice(["same", "same", "digits", "base", "bare", "value"])
    if kind == "same":
        return rng.choice([f"{numeral}_{{{base}}}", f"({numeral})_{{{base}}}", f"{numeral}_{{ {base} }}"]), gold, 1.0
    if kind == "digits":
        other = numeral[:-1] + rng.choice([digit for digit in digits if digit != numeral[-1]])
        return f"{other}_{{{base}}}", gold, 0.0
    if kind == "base":
        return f"{numeral}_{{{base + 1}}}", gold, 0.0
    pair = [numeral if kind == "bare" else str(int(numeral, base)), gold]
    if rng.random() < 0.5:
        pair.reverse()
    return pair[0], pair[1], 0.0


WORDS = [
    "even",
    "odd",
    "Monday",
    "Friday",
    "circle",
    "ellipse",
    "east",
    "neither",
    "yes",
    "no",
    "June 20",
    "parabola",
    "Dana",
]


def texts(rng: random.Random) -> Pair:
    if rng.random() < 0.4:
        gold, answer = rng.choice("ABCDE"), rng.choice("ABCDE")
        wrap = rng.choice([r"\text{(%s)}", r"(\text{%s})", "%s", r"\textbf{(%s)}", r"\mathrm{%s}", "(%s)"])
        return wrap % answer, rng.choice([r"\text{(%s)}", "%s", r"\text{%s}"]) % gold, float(gold == answer)
    if rng.random() < 0.3:  # dots and signs in text
        n = f"{rng.randint(1, 9)}{rng.randint(1, 9)}"
        gold = rng.choice([n, f"{n[0]}.{n[1]}", f"-{n}", f".{n}"])
        answer = rng.choice([n, f"{n[0]}.{n[1]}", f"-{n}", f".{n}", f"{n[0]} {n[1]}", f"{n[0]},{n[1]}"])
        return rf"\text{{{answer}}}", rng.choice([r"\text{%s}", "%s"]) % gold, float(gold == answer)
    gold, answer = rng.choice(WORDS), rng.choice(WORDS)
    answer = rng.choice([answer, gold, gold.lower(), "not " + gold])
    wrap = rng.choice([r"\text{%s}", "%s", r"\mbox{%s}", r"\text{ %s }", r"\textit{%s}"])
    return wrap % answer, rng.choice([r"\text{%s}", "%s"]) % gold, float(answer.lower() == gold.lower())


def large(rng: random.Random) -> Pair:
    """Values that overflow, or that floating point cannot tell apart."""
    n = rng.randint(200, 10**6)
    power = rng.randint(3, 9)
    golds = [
        (f"{n}!", [(f"{n}!", 1), (f"{n + 1}!", 0), (f"{n}!+1", 0), (f"{n}", 0), (f"-{n}!", 0), (f"({n}!)!", 0)]),
        (f"{power}^{{{n}}}", [(f"{power}^{{{n}}}", 1), (f"{power}^{{{n + 1}}}", 0), (f"{power}^{{{n}}}+1", 0), (f"{power + 1}^{{{n}}}", 0)]),
        (f"{power}^{{{power}^{{{power}^{{{power}}}}}}}", [(f"{power}^{{{power}^{{{power}}}}}", 0), (r"\infty", 0), (f"{n}!", 0)]),
        (rf"\sqrt{{{n}}}", [(rf"\sqrt{{{n}}}+10^{{-{power * 5}}}", 0), (f"{n**0.5:.15f}", 0), (rf"{n}^{{1/2}}", 1)]),
        ("0", [(f"10^{{-{n}}}", 0), (f"10^{{-{power * 4}}}", 0), (rf"\frac{{1}}{{{n}!}}", 0), (rf"e^{{-{n}}}", 0), (r"\sqrt2-\sqrt2", 1)]),
        (str(n), [(f"{n}.{'0' * power * 3}1", 0), (f"{n - 1}.{'9' * 30}", 0), (rf"\frac{{{n}0000000000000000001}}{{10000000000000000000}}", 0), (f"{n}.000", 1)]),
        (r"\infty", [(r"-\infty", 0), (r"\infty", 1), (r"+\infty", 1), (r"\infty+1", 0), (r"2\infty", 0), (f"10^{{{n}}}", 0), (r"\frac{1}{0}", 0), (f"{n}", 0)]),
        (r"\pi", [("3.14", 0), ("3.141592653589793", 0), (r"\frac{22}{7}", 0), (r"\frac{355}{113}", 0), ("\u03c0", 1), ("3.14159265358979323846264338327950288", 0)]),
    ]  # fmt: skip
    gold, answers = rng.choice(golds)
    answer, expected = rng.choice(answers)
    return answer, gold, float(expected)


def hedges(rng: random.Random) -> Pair:
    n = rng.randint(2, 99)
    other = n + rng.randint(1, 9)
    answer = rng.choice(
        [f"{n} or {other}", rf"{n}\text{{ or }}{other}", f"{n}, {other}", rf"\pm {n}", f"{n}={other}", f"{other}={n}", f"{n}/{other}",
         f"{n} {other}", f"{n}:{other}", f"{n}-{other}", rf"\{{{n},{other}\}}", f"({n},{other})", f"{n} < x", rf"{n}\ne {other}",
         rf"\text{{{n}}}\text{{{other}}}", f"{n};{other}", rf"{n}\;{other}", rf"{n}\quad {other}", rf"{n}\\{other}", f"{n}&{other}", f"?{n}", f"{n}?",
         rf"\text{{not }}{n}", rf"\neq {n}", rf"<{n}", rf"\approx {other}", f"{n}...", rf"{n}\ldots", f"x{n}", f"x_{n}", f"x^{n}", rf"\phantom{{{other}}}{n}",
         rf"\cancel{{{other}}}{n}", rf"\color{{white}}{n}", rf"{n}\%{other}", rf"\int {n}", rf"\sum_{{k=1}}^{{{n}}} 1", rf"\gcd({n},{n})", rf"\max({n},{other})",
         rf"\frac{{d}}{{dx}}{n}x", rf"\lim_{{x\to 0}} {n}", rf"\det\begin{{pmatrix}}{n}\end{{pmatrix}}", rf"\operatorname{{rank}}({n})", rf"\variable{{n0}}"]
    )  # fmt: skip
    return answer, str(n), 0.0


def equations(rng: random.Random) -> Pair:
    while True:
        right = formula(rng, 1)
        if has_value(right):
            break
    name = rng.choice("yfABk")
    mine = rng.choice([lambda: right, lambda: rewritten(right, rng), lambda: changed(right, rng)])()
    if not has_value(mine):
        mine = right
    expected = equal_values(mine, right)
    left, other = rng.choice([(name, name), (name, ""), ("", name), (name, "z"), ("f(x)", "f(x)")])
    answer = (f"{other} = " if other else "") + write(mine, rng)
    gold = (f"{left} = " if left else "") + write(right, rng)
    return answer, gold, float(expected and (not left or not other or left == other))


def matrices(rng: random.Random) -> Pair:
    rows, columns = rng.randint(1, 3), rng.randint(1, 3)
    cells = [[number(rng, 20) for _ in range(columns)] for _ in range(rows)]
    mine = [list(row) for row in cells]
    if rng.random() < 0.5:
        r, c = rng.randrange(rows), rng.randrange(columns)
        mine[r][c] = changed(mine[r][c], rng)
    if rng.random() < 0.15:
        mine = [list(column) for column in zip(*mine, strict=True)]
    same = len(mine) == rows and all(
        len(a) == len(g) and all(map(equal_values, a, g)) for a, g in zip(mine, cells, strict=False)
    )

    def written(cells: list[list[Tree]]) -> str:
        kind = rng.choice(["pmatrix", "bmatrix"])
        body = r" \\ ".join(" & ".join(write(cell, rng).replace(r",\!", "") for cell in row) for row in cells)
        return rf"\begin{{{kind}}} {body} \end{{{kind}}}"

    return written(mine), written(cells), float(same)


VOCABULARY = [
    *"0123456789+-*/^_(){}[]|!,.;:=<>xyeipn%&~'\"`?#@ ", "\\", "\n", "\\frac", "\\sqrt", "\\text", "\\text{", "\\pi", "\\cdot", "\\infty", "\\boxed{", "\\left(",
    "\\right)", "\\{", "\\}", "\\pm", "\\cup", "\\le", "\\in", "\\mathbb{R}", "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "\\sum", "\\int", "\\lim",
    "\\log", "\\sin", "\\binom", "\\overline{", "\\circ", "^\\circ", "\\%", "\\$", "$", "million", " and ", " or ", "^{", "_{", "}{", "999999999", "\\lfloor",
    "\\rfloor", "\\operatorname{", "__import__('os').system('true')", "eval(", "lambda", "\\variable{n0}", "\u00bd", "\u2212", "\u0663", "\ud800", "\x00", "!!!!",
    "9^9^9^9", "10^{10^{10}}", "\\ldots", "\\variable", "\\alpha", "\\mod", "\\gcd(", "\\matrix", "\\frac{d}{dx}", "dx", "\\to", "'", "\\ne", "\\approx", "\\dots", "\\cap",
]  # fmt: skip


def soup(rng: random.Random) -> Pair:
    """Tokens at random: whatever they mean, the verdict is a number."""
    gold = rng.choice(
        [
            "5",
            r"\frac{1}{2}",
            r"\sqrt{2}",
            "x^2+1",
            "(1,2)",
            r"\{1,2\}",
            r"(-\infty,2]",
            "1,2",
            "y = 2x",
            r"\text{even}",
            "10_2",
            r"\infty",
        ]
    )
    answer = "".join(rng.choices(VOCABULARY, k=rng.randint(1, 25)))
    if rng.random() < 0.5:
        at = rng.randint(0, len(gold))
        answer = rng.choice([gold + answer[:8], answer[:8] + gold, gold[:at] + answer[:6] + gold[at:]])
    return answer, gold, None


def arithmetic(rng: random.Random) -> Pair:
    """Sums, products and quotients of whole numbers in plain text, and their value by Python's own arithmetic."""
    text, explicit = expression(rng, 3)
    try:
        found = eval(explicit, {"F": Fraction})
    except ZeroDivisionError:
        return text, "1", 0.0
    gold = rng.choice([found, found, found + 1, -found, Fraction(rng.randint(-30, 60))])
    return text, write_number(gold, rng, 0), float(found == gold)


def expression(rng: random.Random, depth: int) -> tuple[str, str]:
    """The same expression as one writes it and for Python."""
    if depth == 0 or rng.random() < 0.25:
        n = str(rng.randint(0, 20))
        return n, f"F({n})"
    (a, x), (b, y) = expression(rng, depth - 1), expression(rng, depth - 1)
    kind = rng.choice(["+", "-", "*", "/", "beside", "^2"])
    if kind == "beside":
        return f"({a})({b})", f"(({x})*({y}))"
    if kind == "^2":
        return f"({a})^2", f"({x})**2"
    if kind in "*/":
        sign = {"*": rng.choice([r"\cdot ", r"\times ", "*", "\u00d7"]), "/": rng.choice(["/", r"\div "])}[kind]
        return f"({a}){sign}({b})", f"(({x}){kind}({y}))"
    return f"{a}{kind}({b})", f"({x}{kind}({y}))"


FAMILIES: dict[str, tuple[int, Callable[[random.Random], Pair]]] = {
    "rationals": (3, formulas(lambda rng: number(rng, 3000))),
    "constants": (4, formulas(constant)),
    "formulas": (4, formulas(formula)),
    "collections": (4, collections),
    "intervals": (2, intervals),
    "equations": (2, equations),
    "matrices": (1, matrices),
    "units": (3, units),
    "bases": (1, bases),
    "texts": (2, texts),
    "large": (2, large),
    "hedges": (2, hedges),
    "soup": (3, soup),
    "arithmetic": (2, arithmetic),
}


# ---------------------------------------------------------------------------- long and hostile replies

PIECES = [
    " ", "\t", "\n", "a", "5", "5 ", ".", "... ", "! ", "answer ", "answer is ", "answer:", "answer**", "the answer is 5", " because", " so", "\\boxed",
    "\\boxed ", "\\boxed{", "\\boxed{}", "\\boxed{5}", "\\boxed $", "\\fbox \n", "{", "}", "\\{", "\\", "\\\\", "$", "$$", "\\(", "\\[", "</think>",
    "<answer>", "</answer>", "####", "#### ", "#", "*", "**", ",", "1,", "111,", "1/", "-", "(", "\\frac", "\\frac{", "\\sqrt", "sqrt(", "\\text{", "\\text{a}",
    "\\text{ and }", " and ", "^", "_{", "e", "%", "\u00bd", "\u2009", "\u0661", "\ud800", "\x00", "5\\text{ cm}", " apples", "1 1/2 ", "x=",
]  # fmt: skip


def hostile_replies(length: int) -> Iterator[str]:
    """Replies of one piece over and over, alone and in the places where an answer is looked for."""
    for piece in PIECES:
        run = (piece * (length // len(piece) + 1))[:length]
        yield from (
            run,
            "the answer is 5" + run,
            f"\\boxed{{{run}}}",
            "\\boxed " + run,
            "#### " + run,
            "answer: $" + run,
        )
        for short in (380, 980):
            yield from (f"\\boxed{{5{run[:short]}}}", f"<answer>5{run[:short]}x</answer>", f"#### 5{run[:short]}5")


def judge_hostile(length: int) -> list[str]:
    """What the built-in verifiers make of them: every verdict that is Invalid, or an exception."""
    found = []
    for reply in hostile_replies(length):
        verdicts: dict[str, Callable[[], Any]] = {
            "number": lambda: verify(reply, "5"),
            "words": lambda: verify(reply, r"\text{even}"),
            "gsm8k": lambda: gsm8k.reward({"answer": "5"}, reply),
            "word problems": lambda: word_problems.reward({"answer": "5"}, reply),
            "arithmetic": lambda: arithmetic_environment.reward({"answer": "5"}, reply),
            "last number": lambda: last_number(reply),
        }
        for name, verdict in verdicts.items():
            try:
                if isinstance(made := verdict(), Invalid):
                    found.append(f"{name}: {made.reason}: {reply[:50]!r}")
            except Exception as error:
                found.append(f"{name}: {error!r}: {reply[:50]!r}")
    return found


# ---------------------------------------------------------------------------- replies and the run


def wrapped(answer: str, rng: random.Random) -> str:
    """A reply that ends with the answer."""
    forms = [
        r"so it is $\boxed{%s}$.",
        r"\boxed{%s}",
        r"\[ \boxed{%s} \] as was to be shown.",
        r"<think>\boxed{0}</think> $\boxed{%s}$",
    ]
    return rng.choice(forms).replace("%s", answer)


def cases(count: int, seed: int) -> Iterator[Case]:
    """The same cases for the same arguments."""
    names = [name for name, (weight, _) in FAMILIES.items() for _ in range(weight)]
    for index in range(count):
        rng = random.Random(f"{seed} {index}")
        name = rng.choice(names)
        answer, gold, expected = FAMILIES[name][1](rng)
        yield Case(name, answer, gold, expected, wrapped(answer, rng))


def judge(case: Case) -> tuple[Case, float | str]:
    try:
        verdict = verify(case.reply, case.gold)
    except Exception as error:
        return case, f"raised {type(error).__name__}: {error}"
    return case, f"invalid: {verdict.reason}" if isinstance(verdict, Invalid) else verdict


def differs(case: Case, verdict: float | str) -> bool:
    return isinstance(verdict, str) or (case.expected is not None and verdict != case.expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--show-accepted", action="store_true", help="print what was accepted among the hostile replies"
    )
    options = parser.parse_args()
    began = time.monotonic()
    counts: Counter[tuple[str, str]] = Counter()
    wrong = 0
    with ThreadPoolExecutor(2) as pool:
        for case, verdict in pool.map(judge, cases(options.cases, options.seed)):
            kind = "any" if case.expected is None else ("right" if case.expected else "wrong")
            counts[case.family, kind] += 1
            bad = differs(case, verdict)
            wrong += bad
            if bad or (options.show_accepted and case.expected is None and verdict == 1.0):
                mark = "differs" if bad else "accepted"
                print(
                    f"{mark}  {case.family}  expected {case.expected}  got {verdict}\n    answer {case.answer!r}\n    gold   {case.gold!r}"
                )
    for (family, kind), count in sorted(counts.items()):
        print(f"{family:12} {kind:6} {count:7}")
    print(f"{options.cases} cases, seed {options.seed}: {wrong} differ; {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
