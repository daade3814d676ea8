r"""Answers in many spellings, near misses and hostile replies, each with the verdict that an independent oracle expects.

    PYTHONPATH=. python tests/helpers/answers.py --cases 20000 --seed 0
    PYTHONPATH=. python tests/helpers/answers.py --golds math_test.jsonl

The first prints every generated case whose verdict differs, and the counts of each family; the second takes the gold
answers of MATH, each in several replies and as the answer to another problem. None is expected of replies made of
random tokens: any verdict but Invalid.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from formulas import Tree, changed, constant, equal_values, formula, has_value, number, rewritten, write, write_plainly
from places import TESTS

from posttrain.core.types import Invalid
from posttrain.envs.builtin import arithmetic as arithmetic_environment
from posttrain.envs.builtin import gsm8k, word_problems
from posttrain.verify.answer import last_boxed
from posttrain.verify.math import verify

TEXTS: dict[str, list[str]] = json.loads((TESTS / "vectors" / "answers.json").read_text())

Pair = tuple[str, str, float | None]  # an answer, the gold one, the verdict


@dataclass(frozen=True)
class Case:
    family: str
    answer: str
    gold: str
    expected: float | None
    reply: str


def formulas(make: Callable[[random.Random], Tree]) -> Callable[[random.Random], Pair]:
    def pair(rng: random.Random) -> Pair:
        gold = drawn(make, rng)
        answer = rng.choice(
            [lambda: gold, lambda: rewritten(gold, rng), lambda: changed(gold, rng), lambda: make(rng)]
        )()
        answer = answer if has_value(answer) else gold
        return write(answer, rng), write(gold, rng), float(equal_values(answer, gold))

    return pair


def drawn(make: Callable[[random.Random], Tree], rng: random.Random) -> Tree:
    while not has_value(tree := make(rng)):
        pass
    return tree


def collections(rng: random.Random) -> Pair:
    """Tuples, intervals, sets and lists of constants."""
    kinds = ["()", "[]", "(]", "[)", r"\{\}", ""]
    kind = other = rng.choice(kinds)
    parts: list[Tree] = []
    while len(parts) < rng.choice([2, 2, 3]):
        part = drawn(rng.choice([number, lambda rng: constant(rng, 1)]), rng)
        if not any(equal_values(part, before) for before in parts):
            parts.append(part)
    mine = list(parts)
    change = rng.choice(["none", "none", "order", "part", "brackets", "fewer", "more"])
    if change == "order":
        rng.shuffle(mine)
    elif change == "part":
        at = rng.randrange(len(mine))
        mine[at] = drawn(lambda rng: changed(parts[at], rng), rng)
    elif change == "brackets":
        other = rng.choice(kinds)
    elif change == "fewer":
        mine.pop()
    elif change == "more":
        mine.append(number(rng))
    if {kind, other} <= {"", r"\{\}"}:
        covered = all(any(equal_values(a, g) for g in parts) for a in mine)
        covered = covered and all(any(equal_values(a, g) for a in mine) for g in parts)
        expected = covered and (bool(kind or other) or len(mine) == len(parts))
    else:
        expected = kind == other and len(mine) == len(parts) and all(map(equal_values, mine, parts))
    return bracketed(mine, other, rng), bracketed(parts, kind, rng), float(expected)


def bracketed(parts: list[Tree], kind: str, rng: random.Random) -> str:
    half = len(kind) // 2
    inner = rng.choice([", ", " , "]).join(write(part, rng).replace(r",\!", "{,}") for part in parts)
    return kind[:half] + inner + kind[half:]


def intervals(rng: random.Random) -> Pair:
    """Intervals, and chains of inequalities."""
    low, high = map(str, sorted(rng.sample(range(-30, 31), 2)))
    gold = [rng.choice("(["), rng.choice([low, r"-\infty"]), rng.choice([high, r"\infty"]), rng.choice(")]")]
    mine = list(gold)
    change = rng.choice(["none", "none", "end", "bracket"])
    if change == "end":
        at = rng.choice([1, 2])
        mine[at] = rng.choice([str(rng.randint(-40, 40)), gold[at]])
    elif change == "bracket":
        mine[0], mine[3] = rng.choice("(["), rng.choice(")]")
    for interval in (mine, gold):
        interval[0] = "(" if "inf" in interval[1] else interval[0]
        interval[3] = ")" if "inf" in interval[2] else interval[3]
    left, a, b, right = mine
    signs = ["<" if bracket in "()" else rng.choice([r"\le ", r"\leq ", "<=", "\u2264"]) for bracket in (left, right)]
    forms = [f"{left}{a}, {b}{right}", rf"\left{left} {a},{b} \right{right}", rf"x \in {left}{a},{b}{right}"]
    if "inf" not in a and "inf" not in b:
        forms += [f"{a} {signs[0]} x {signs[1]} {b}"] * 3
    elif "inf" in a and "inf" not in b:
        forms += [f"x {signs[1]} {b}"] * 3
    elif "inf" not in a:
        forms += [f"{a} {signs[0]} x", f"x {'>' if left == '(' else '>='} {a}"] * 2
    return rng.choice(forms), "{}{},{}{}".format(*gold), float(mine == gold)


def equations(rng: random.Random) -> Pair:
    right = drawn(lambda rng: formula(rng, 1), rng)
    mine = rng.choice([lambda: right, lambda: rewritten(right, rng), lambda: changed(right, rng)])()
    mine = mine if has_value(mine) else right
    name = rng.choice("yfABk")
    left, other = rng.choice([(name, name), (name, ""), ("", name), (name, "z"), ("f(x)", "f(x)")])
    answer = (f"{other} = " if other else "") + write(mine, rng)
    gold = (f"{left} = " if left else "") + write(right, rng)
    return answer, gold, float(equal_values(mine, right) and (not left or not other or left == other))


def matrices(rng: random.Random) -> Pair:
    rows, columns = rng.randint(1, 3), rng.randint(1, 3)
    cells = [[number(rng, 20) for _ in range(columns)] for _ in range(rows)]
    mine = [list(row) for row in cells]
    if rng.random() < 0.5:
        r, c = rng.randrange(rows), rng.randrange(columns)
        mine[r][c] = changed(mine[r][c], rng)
    if rng.random() < 0.15:
        mine = [list(column) for column in zip(*mine, strict=True)]
    same = len(mine) == rows and len(mine[0]) == columns
    same = same and all(
        equal_values(a, g) for pair in zip(mine, cells, strict=True) for a, g in zip(*pair, strict=True)
    )

    def written(cells: list[list[Tree]]) -> str:
        kind = rng.choice(["pmatrix", "bmatrix"])
        body = r" \\ ".join(" & ".join(write(cell, rng) for cell in row) for row in cells)
        return rf"\begin{{{kind}}} {body} \end{{{kind}}}"

    return written(mine), written(cells), float(same)


def units(rng: random.Random) -> Pair:
    """Units, and what changes a value and looks like one."""
    n = str(rng.choice([rng.randint(3, 99), rng.randint(100, 9999)]))
    if rng.random() < 0.4:
        return n + rng.choice(TEXTS["units"]), n, 1.0
    suffix = rng.choice(TEXTS["not units"])
    if rng.random() < 0.3 and suffix.startswith((" ", r"\text")):  # others may make a gold that nobody can read
        return n, n + suffix, 0.0
    return n + suffix, n, 0.0


def bases(rng: random.Random) -> Pair:
    base = rng.choice([2, 3, 5, 7, 8, 9, 12, 16])
    digits = "0123456789ABCDEF"[:base]
    numeral = rng.choice(digits[1:]) + "".join(rng.choices(digits, k=rng.randint(1, 6)))
    gold = f"{numeral}_{{{base}}}" if base > 9 or rng.random() < 0.5 else f"{numeral}_{base}"
    others = [digit for digit in digits if digit != numeral[-1]]
    answer, expected = rng.choice(
        [(f"{numeral}_{{{base}}}", 1), (f"({numeral})_{{{base}}}", 1), (f"{numeral}_{{ {base} }}", 1),
         (f"{numeral[:-1]}{rng.choice(others)}_{{{base}}}", 0), (f"{numeral}_{{{base + 1}}}", 0),
         (numeral, 0), (str(int(numeral, base)), 0)]
    )  # fmt: skip
    pair = [answer, gold] if expected or rng.random() < 0.5 else [gold, answer]
    return pair[0], pair[1], float(expected)


def texts(rng: random.Random) -> Pair:
    """Choices, words, and numbers in words' clothing."""
    if rng.random() < 0.4:
        gold, answer = rng.choice("ABCDE"), rng.choice("ABCDE")
        wrap = rng.choice([r"\text{(%s)}", r"(\text{%s})", "%s", r"\textbf{(%s)}", r"\mathrm{%s}", "(%s)"])
        return wrap % answer, rng.choice([r"\text{(%s)}", "%s", r"\text{%s}"]) % gold, float(gold == answer)
    if rng.random() < 0.3:
        n = f"{rng.randint(1, 9)}{rng.randint(1, 9)}"
        spellings = [n, f"{n[0]}.{n[1]}", f"-{n}", f".{n}"]
        gold, answer = rng.choice(spellings), rng.choice([*spellings, f"{n[0]} {n[1]}", f"{n[0]},{n[1]}"])
        return rf"\text{{{answer}}}", rng.choice([r"\text{%s}", "%s"]) % gold, float(gold == answer)
    gold = rng.choice(TEXTS["words"])
    answer = rng.choice([rng.choice(TEXTS["words"]), gold, gold.lower(), "not " + gold])
    wrap = rng.choice([r"\text{%s}", "%s", r"\mbox{%s}", r"\text{ %s }", r"\textit{%s}"])
    return wrap % answer, rng.choice([r"\text{%s}", "%s"]) % gold, float(answer.lower() == gold.lower())


def large(rng: random.Random) -> Pair:
    """Values that overflow, or that floating point cannot tell apart."""
    n, p = rng.randint(200, 10**6), rng.randint(3, 9)
    tower = f"{p}^{{{p}^{{{p}}}}}"
    hair = "0" * 3 * p + "1"
    answers: dict[str, tuple[str | None, list[str]]] = {  # gold: another spelling, and what is not equal
        f"{n}!": (f"({n})!", [f"{n + 1}!", f"{n}!+1", str(n), f"-{n}!", f"({n}!)!", f"{n}!!"]),
        f"{p}^{{{n}}}": (None, [f"{p}^{{{n + 1}}}", f"{p}^{{{n}}}+1", f"{p + 1}^{{{n}}}", r"\infty"]),
        f"{p}^{{{tower}}}": (None, [tower, r"\infty", f"{n}!", f"{p}^{{{p + 1}^{{{p}^{{{p}}}}}}}"]),
        rf"\sqrt{{{n}}}": (f"{n}^{{1/2}}", [rf"\sqrt{{{n}}}+10^{{-{5 * p}}}", f"{n**0.5 + 1e-12:.15f}"]),
        "0": (
            r"\sqrt2-\sqrt2",
            [f"10^{{-{n}}}", f"10^{{-{4 * p}}}", rf"\frac{{1}}{{{n}!}}", f"e^{{-{n}}}", f"0.{hair}"],
        ),
        str(n): (f"{n}.000", [f"{n}.{hair}", f"{n - 1}.{'9' * 30}", rf"\frac{{{n}{hair}}}{{1{'0' * len(hair)}}}"]),
        r"\infty": (r"+\infty", [r"-\infty", r"\infty+1", r"2\infty", f"10^{{{n}}}", r"\frac{1}{0}", str(n)]),
        r"\pi": ("\u03c0", ["3.14", "3.141592653589793", r"\frac{22}{7}", r"\frac{355}{113}", r"\pi+10^{-20}"]),
    }
    gold = rng.choice(list(answers))
    same, different = answers[gold]
    if rng.random() < 0.3:
        return rng.choice([gold, same or gold]), gold, 1.0
    return rng.choice(different), gold, 0.0


def hedges(rng: random.Random) -> Pair:
    """More than the answer, or something else that it stands in."""
    n = rng.randint(2, 99)
    text = rng.choice(TEXTS["hedges"])
    return text.replace("{n}", str(n)).replace("{m}", str(n + rng.randint(1, 9))), str(n), 0.0


def soup(rng: random.Random) -> Pair:
    """Tokens at random, alone or around a right answer: whatever they mean, the verdict is a number."""
    golds = ["5", r"\frac{1}{2}", r"\sqrt{2}", "x^2+1", "(1,2)", r"\{1,2\}", r"(-\infty,2]", "1,2", "y = 2x", "10_2"]
    gold = rng.choice([*golds, r"\text{even}", r"\infty"])
    answer = "".join(rng.choices(TEXTS["vocabulary"], k=rng.randint(1, 25)))
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
    return text, write_plainly(gold), float(found == gold)


def expression(rng: random.Random, depth: int) -> tuple[str, str]:
    """The same expression as one writes it, and for Python."""
    if depth == 0 or rng.random() < 0.25:
        n = str(rng.randint(0, 20))
        return n, f"F({n})"
    (a, x), (b, y) = expression(rng, depth - 1), expression(rng, depth - 1)
    kind = rng.choice(["+", "-", "*", "/", "beside", "square"])
    if kind == "beside":
        return f"({a})({b})", f"(({x})*({y}))"
    if kind == "square":
        return f"({a})^2", f"({x})**2"
    if kind in "*/":
        sign = rng.choice([r"\cdot ", r"\times ", "*", "\u00d7"] if kind == "*" else ["/", r"\div "])
        return f"({a}){sign}({b})", f"(({x}){kind}({y}))"
    return f"{a}{kind}({b})", f"({x}{kind}({y}))"


FAMILIES: dict[str, tuple[int, Callable[[random.Random], Pair]]] = {  # the weight of each
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
REPLIES = [
    r"so it is $\boxed{%s}$.",
    r"\boxed{%s}",
    r"\[ \boxed{%s} \] as was to be shown.",
    r"<think>\boxed{0}</think> \boxed{%s}",
]


def cases(count: int, seed: int) -> Iterator[Case]:
    """The same cases for the same arguments."""
    names = [name for name, (weight, _) in FAMILIES.items() for _ in range(weight)]
    for index in range(count):
        rng = random.Random(f"{seed} {index}")
        name = rng.choice(names)
        answer, gold, expected = FAMILIES[name][1](rng)
        yield Case(name, answer, gold, expected, rng.choice(REPLIES).replace("%s", answer))


def cases_of_golds(golds: list[str], seed: int) -> Iterator[Case]:
    """Every gold answer as its own answer, in several replies, and as the answer to another one drawn at random."""
    rng = random.Random(seed)
    stated = ["Therefore the answer is $%s$.", "<think>$\\boxed{0}$</think>**Answer:** $%s$ I hope it is right."]
    for gold in golds:
        for form in (*REPLIES, *stated):
            yield Case("own", gold, gold, 1.0, form.replace("%s", gold))
    for gold in golds:
        other = rng.choice(golds)
        yield Case("another's", other, gold, float(spelled_alike(other) == spelled_alike(gold)), rf"\boxed{{{other}}}")


def spelled_alike(gold: str) -> str:
    for spelling in (r"\!", r"\$", "{,}", ",", "dfrac", "tfrac", r"^\circ", " "):
        gold = gold.replace(spelling, "frac" if "frac" in spelling else "")
    return gold


def judge(case: Case) -> tuple[Case, float | str]:
    try:
        verdict = verify(case.reply, case.gold)
    except Exception as error:
        return case, f"raised {error!r}"
    return case, f"invalid: {verdict.reason}" if isinstance(verdict, Invalid) else verdict


def differs(case: Case, verdict: float | str) -> bool:
    return isinstance(verdict, str) or (case.expected is not None and verdict != case.expected)


def hostile_replies(length: int) -> Iterator[str]:
    """Replies of one piece over and over, alone and in the places where an answer is looked for."""
    for piece in TEXTS["pieces"]:
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
    """What the built-in verifiers make of them that is no verdict: Invalid, or an exception."""
    verifiers: dict[str, Callable[[str], Any]] = {
        "number": lambda reply: verify(reply, "5"),
        "words": lambda reply: verify(reply, r"\text{even}"),
        "gsm8k": lambda reply: gsm8k.reward({"answer": "5"}, reply),
        "word problems": lambda reply: word_problems.reward({"answer": "5"}, reply),
        "arithmetic": lambda reply: arithmetic_environment.reward({"answer": "5"}, reply),
    }
    found = []
    for reply in hostile_replies(length):
        for name, verifier in verifiers.items():
            try:
                if isinstance(verdict := verifier(reply), Invalid):
                    found.append(f"{name}: {verdict.reason}: {reply[:50]!r}")
            except Exception as error:
                found.append(f"{name}: {error!r}: {reply[:50]!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--golds", type=Path, help="rows of MATH: their gold answers instead of generated ones")
    parser.add_argument("--show-accepted", action="store_true", help="print what was accepted of random tokens")
    options = parser.parse_args()
    began = time.monotonic()
    chosen = cases(options.cases, options.seed)
    if options.golds:
        solutions = [json.loads(line)["solution"] for line in options.golds.read_text().splitlines()]
        chosen = cases_of_golds(sorted({(last_boxed(solution) or "").strip() for solution in solutions}), options.seed)
    counts: Counter[tuple[str, str]] = Counter()
    wrong = 0
    with ThreadPoolExecutor(2) as pool:
        for case, verdict in pool.map(judge, chosen):
            counts[case.family, "any" if case.expected is None else "right" if case.expected else "wrong"] += 1
            differing = differs(case, verdict)
            wrong += differing
            if differing or (options.show_accepted and case.expected is None and verdict == 1.0):
                print(f"{case.family}: expected {case.expected}, got {verdict}")
                print(f"    answer {case.answer!r}\n    gold   {case.gold!r}", flush=True)
    for (family, kind), count in sorted(counts.items()):
        print(f"{family:12} {kind:6} {count:7}")
    print(f"{sum(counts.values())} cases, seed {options.seed}: {wrong} differ; {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
