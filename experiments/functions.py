"""Small Python functions to be written: descriptions, programs that fulfil them, and unit tests, in the form of MBPP.

A function is a composition of two or three steps on a list of numbers, a text or a number, such as "keep those above 3,
reverse, return the sum". Some descriptions leave a number open, as those of people do ("keep those above n"): then only the
example shows which it is, and a candidate that guesses is right now and then. Compositions fall into three parts that have
none in common, so that a held-out function asks for steps in an order that nothing has ever shown.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from typing import Any

from posttrain.core.types import Task
from posttrain.envs.builtin.code import INSTRUCTION, row_to_task
from posttrain.envs.builtin.code_choice import FAILS, NUMBERED, PASSES, QUESTION
from posttrain.models.tokenizer.tokenizer import Tokenizer

OPEN = "n"  # what stands in a description for a number that it leaves open
TESTS = 6  # of a function: one is shown, five are hidden
FURTHER = 5  # inputs more, on which programs are compared with each other
MOST_TRIES = 200  # to find inputs that tell a function from simpler ones


@dataclass(frozen=True)
class Step:
    """A part of a function. `{n}` in the phrase and in the code is one of the numbers."""

    phrase: str
    code: str  # an expression of x
    numbers: tuple[int, ...] = ()
    ends: bool = False  # gives something of another kind, so that nothing follows it


LISTS = (
    Step("keep the even ones", "[y for y in x if y % 2 == 0]"),
    Step("keep the odd ones", "[y for y in x if y % 2 == 1]"),
    Step("keep those above {n}", "[y for y in x if y > {n}]", (2, 3, 4, 5)),
    Step("keep those below {n}", "[y for y in x if y < {n}]", (4, 5, 6, 7)),
    Step("add {n} to each", "[y + {n} for y in x]", (1, 2, 3, 4)),
    Step("multiply each by {n}", "[y * {n} for y in x]", (2, 3, 4, 5)),
    Step("square each", "[y * y for y in x]"),
    Step("reverse", "x[::-1]"),
    Step("sort", "sorted(x)"),
    Step("sort without repeats", "sorted(set(x))"),
    Step("take the first {n}", "x[:{n}]", (1, 2, 3, 4)),
    Step("leave out the first {n}", "x[{n}:]", (1, 2, 3, 4)),
    Step("take every other one", "x[::2]"),
    Step("return the sum", "sum(x)", ends=True),
    Step("return how many", "len(x)", ends=True),
    Step("return the largest or 0", "max(x, default=0)", ends=True),
)
TEXTS = (
    Step("reverse", "x[::-1]"),
    Step("make it upper case", "x.upper()"),
    Step("take the first {n}", "x[:{n}]", (1, 2, 3, 4)),
    Step("leave out the first {n}", "x[{n}:]", (1, 2, 3, 4)),
    Step("take every other one", "x[::2]"),
    Step("repeat it {n} times", "x * {n}", (2, 3, 4, 5)),
    Step("double each letter", '"".join(y + y for y in x)'),
    Step("sort the letters", '"".join(sorted(x))'),
    Step("remove each a", 'x.replace("a", "")'),
    Step("return how many", "len(x)", ends=True),
    Step("return how many are b", 'x.count("b")', ends=True),
)
NUMBERS = (
    Step("add {n}", "x + {n}", (1, 2, 3, 4)),
    Step("subtract {n}", "x - {n}", (1, 2, 3, 4)),
    Step("multiply by {n}", "x * {n}", (2, 3, 4, 5)),
    Step("divide by {n} and round down", "x // {n}", (2, 3, 4, 5)),
    Step("take the rest by {n}", "x % {n}", (4, 5, 6, 7)),
    Step("square it", "x * x"),
    Step("negate it", "-x"),
    Step("take the sum of its digits", "sum(int(y) for y in str(abs(x)))"),
)
STEPS: dict[str, tuple[Step, ...]] = {"list": LISTS, "text": TEXTS, "number": NUMBERS}
"""Kind of the argument -> what can be done with it."""

PARTS = {"demonstrated": 0.3, "practised": 0.45, "held out": 0.25}
"""Share of all compositions that each part has."""


@dataclass(frozen=True)
class Function:
    """Steps with their numbers, in their order; of those in `open`, the description does not give the number."""

    kind: str
    steps: tuple[tuple[Step, int], ...]
    open: frozenset[int] = frozenset()  # places in `steps`

    @property
    def composition(self) -> tuple[str, ...]:
        """The kinds of steps in their order, whatever the numbers."""
        return (self.kind, *(step.phrase for step, _ in self.steps))

    @property
    def text(self) -> str:
        said = [
            step.phrase.format(n=OPEN if place in self.open else number)
            for place, (step, number) in enumerate(self.steps)
        ]
        return f"f of a {self.kind}: {', '.join(said)}"

    @property
    def code(self) -> str:
        *before, (last, number) = self.steps
        lines = [f"    x = {step.code.format(n=n)}" for step, n in before]
        return "\n".join(["def f(x):", *lines, f"    return {last.code.format(n=number)}"])

    def __call__(self, x: Any) -> Any:
        """The program's result: it is the repository's own, not a policy's."""
        return _compiled(self.code)(x)


@lru_cache(maxsize=4096)
def _compiled(code: str) -> Any:
    names: dict[str, Any] = {}
    exec(code, names)
    return names["f"]


@cache
def compositions(part: str) -> tuple[tuple[str, tuple[Step, ...]], ...]:
    """(kind, steps) of all compositions of a part; decided by their names alone, so the same for every seed."""
    found = []
    for kind, steps in STEPS.items():
        inner = [step for step in steps if not step.ends]
        pairs = [(a, b) for a in inner for b in steps]
        triples = [(a, *pair) for a in inner for pair in pairs]
        found += [(kind, way) for way in (*pairs, *triples) if part_of(kind, way) == part]
    return tuple(found)


def part_of(kind: str, steps: Sequence[Step]) -> str:
    """The part that a composition belongs to."""
    digest = sha256("|".join([kind, *(step.phrase for step in steps)]).encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    for part, share in PARTS.items():
        if place < share:
            return part
        place -= share
    return part


def drawn(part: str, draw: random.Random, vague: float) -> Function:
    """A function of this part, each kind equally often; `vague`: how often a number is left open."""
    kind = draw.choice(list(STEPS))
    steps = draw.choice([way for other, way in compositions(part) if other == kind])
    numbers = tuple((step, draw.choice(step.numbers) if step.numbers else 0) for step in steps)
    hidden = [place for place, step in enumerate(steps) if step.numbers and draw.random() < vague]
    return Function(kind, numbers, frozenset(hidden))


def argument(kind: str, draw: random.Random) -> Any:
    """An input that distinguishes functions."""
    if kind == "list":
        return [draw.randrange(10) for _ in range(draw.randint(4, 6))]
    if kind == "text":
        return "".join(draw.choice("abcd") for _ in range(draw.randint(4, 6)))
    return draw.randint(10, 60)


def row(function: Function, draw: random.Random) -> dict[str, Any]:
    """The function as a row of MBPP's form. Of its tests the first is the example; "calls" are the further inputs.

    The results of the tests are not all equal, if that can be: else one constant would pass them all.
    """
    for _ in range(MOST_TRIES):
        different: dict[str, Any] = {}
        while len(different) < TESTS + FURTHER:
            x = argument(function.kind, draw)
            different[repr(x)] = x
        inputs = list(different.values())
        if len({repr(function(x)) for x in inputs[:TESTS]}) > 2:
            break
    return {
        "text": function.text,
        "code": function.code,
        "test_list": [f"assert f({x!r}) == {function(x)!r}" for x in inputs[:TESTS]],
        "calls": [f"f({x!r})" for x in inputs[TESTS:]],
    }


def tasks(part: str, count: int, seed: int, vague: float) -> list[Task]:
    """So many different tasks of a part, as the environments `code`, `code-all` and `code-choice` take them."""
    draw, found = random.Random(f"{part} {seed}"), dict[str, Task]()
    while len(found) < count:
        function = drawn(part, draw, vague)
        made = row(function, draw)
        task = row_to_task(made)
        assert task is not None
        found[task["id"]] = {**task, "calls": made["calls"], "open": len(function.open), "kind": function.kind}
    return list(found.values())


# -- demonstrations ----------------------------------------------------------------------------------------------------


def careless(function: Function, draw: random.Random, slips: float, reads: float) -> Function:
    """A careless programmer's reading of a description.

    Each step is another one in a share `slips` of the cases. A number that is left open is read off the example in a
    share `reads`; else it is the smallest one in half of the cases, and any in the others.
    """
    steps = []
    for place, (step, number) in enumerate(function.steps):
        if draw.random() < slips:
            step = draw.choice([s for s in STEPS[function.kind] if s.ends == step.ends])
            number = draw.choice(step.numbers) if step.numbers else 0
        elif place in function.open and draw.random() >= reads:
            number = step.numbers[0] if draw.random() < 0.5 else draw.choice(step.numbers)
        steps.append((step, number))
    return Function(function.kind, tuple(steps), function.open)


def demonstrations(count: int, seed: int, vague: float, slips: float, reads: float) -> list[dict[str, Any]]:
    """Rows that imitate the careless programmer, on compositions of the part for this alone."""
    draw, found = random.Random(f"demonstrations {seed}"), []
    for _ in range(count):
        function = drawn("demonstrated", draw, vague)
        task = row_to_task(row(function, draw))
        assert task is not None
        program = careless(function, draw, slips, reads).code
        found.append({"prompt": task["prompt"], "response": f"```python\n{program}\n```"})
    return found


# -- vocabulary --------------------------------------------------------------------------------------------------------


@cache
def phrases() -> tuple[str, ...]:
    """Texts that are one token each; all others are spelt letter by letter."""
    said = {part for steps in STEPS.values() for step in steps for part in step.phrase.split("{n}") if part.strip()}
    python = (
        "```python\n", "\n```", "def f(x):\n", "    x = ", "    return ", "[y", " for y in x", " if y", "sorted(", "set(",
        "sum(", "len(", "max(", ", default=0", '"".join(', ".upper()", ".replace(", ".count(", "int(y)", "str(", "abs(",
        "[::-1]", "[::2]", "[:", ":]", " % ", " == ", " + ", " - ", " * ", " // ", " > ", " < ", "assert f(", ", ",
    )  # fmt: skip
    kinds = [f"f of a {kind}: " for kind in STEPS]
    choosing = (QUESTION, PASSES, FAILS, *(part for part in NUMBERED.split("{number}") if part))
    return tuple(dict.fromkeys([INSTRUCTION, *kinds, *sorted(said, key=lambda s: (-len(s), s)), *python, *choosing]))


def vocabulary() -> Tokenizer:
    """A token for each phrase and for each printable character."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    return Tokenizer.train(characters, len(phrases()) + len(characters) + 3, "characters", phrases())
