"""Countdown: reach a target with + - * / and brackets from given numbers, each used at most as often as it is given.

    python -m posttrain.envs.builtin.countdown --count 1000 --numbers 4 > rows.jsonl

Columns: "numbers" (or "nums", as public data sets have it), "target"; "all": true asks for every number to be used.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from posttrain.core.types import Invalid, Task, UserError
from posttrain.envs.builtin.generated import distinct, write
from posttrain.verify.expression import leaves, parse, value_of
from posttrain.verify.format import between

SUCCESS = 1.0  # the reward of a correct answer
FORM_WEIGHT = 0.1  # reward of a legal expression, whatever its value
FEWEST, MOST = 2, 8  # numbers of a generated task

_STRICT = re.compile("[0-9-+*/() \n\t\u00d7\u00f7\u2212]*")  # no points, commas or powers; no digits of other scripts


def tasks(
    count: int, seed: int, *, numbers: int = 4, largest: int = 25, target: int = 100, held_out: bool = False
) -> list[Task]:
    """Tasks that can be solved, with a solution as the response: `numbers` numbers from 1 to `largest`, and what they make.

    The target is a whole number from 1 to `target` that is none of them. Distinct; the same for the same arguments.

    >>> tasks(1, seed=0)[0]["prompt"]
    'Make 26 from 5 18 20 23: '
    """
    if not FEWEST <= numbers <= MOST or largest < 1 or target < 1:
        raise UserError(f"countdown tasks need {FEWEST} to {MOST} numbers, largest >= 1 and target >= 1")
    return distinct(_draws(random.Random(seed), numbers, largest, target), count, held_out)


def row_to_task(row: dict[str, Any]) -> Task | None:
    """Return the task of a row, with a generated prompt if it has none; None if it has no numbers or no target."""
    numbers = row.get("numbers", row.get("nums"))
    if not isinstance(numbers, list) or not numbers or row.get("target") is None:
        return None
    prompt = row["prompt"] if isinstance(row.get("prompt"), str) else _prompt(numbers, row["target"])
    return {**row, "numbers": numbers, "prompt": prompt}


def reward(task: Task, reply: str) -> dict[str, float] | Invalid:
    """Return {"answer": 1 for the target, "form": 0.1 for a legal expression}.

    The expression is in <answer> tags, or is the whole reply. It may be followed by "= target".
    """
    numbers, target = task.get("numbers"), task.get("target")
    if not isinstance(numbers, list) or not all(map(_is_whole, numbers)) or not _is_whole(target):
        return Invalid(f"numbers {numbers!r:.60} and target {target!r:.40} are not whole numbers")
    answer = between(reply, "answer")
    text, equals, right = (reply if answer is None else answer).partition("=")
    if equals and right.strip() != str(target):
        return {"answer": 0.0, "form": 0.0}
    value = value_with(text, numbers, every=bool(task.get("all")))
    return {"answer": float(value == target), "form": FORM_WEIGHT * (value is not None)}


def value_with(text: str, numbers: list[int], every: bool = False) -> Fraction | None:
    """Return the value of an expression; None if it is invalid, divides by zero, or uses other numbers than those
    given.

    `every`: also None if it does not use all of them.
    >>> value_with("(25-5)*2", [2, 5, 25]), value_with("2*2", [2, 5, 25]), value_with("25-5*2", [2, 5])
    (Fraction(40, 1), None, None)
    """
    tree = parse(text) if _STRICT.fullmatch(text) else None
    if tree is None:
        return None
    used, given = Counter(map(int, leaves(tree))), Counter(numbers)  # a sign counts as a 0
    if used - given or (every and used != given):
        return None
    try:
        return value_of(tree)
    except ZeroDivisionError:
        return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt(numbers: list[int], target: int) -> str:
    return f"Make {target} from {' '.join(map(str, numbers))}: "


def _draws(rng: random.Random, numbers: int, largest: int, target: int) -> Iterator[Task]:
    """Yield random tasks without end. Draws whose value is no valid target are repeated."""
    while True:
        for _ in range(10_000):
            drawn = sorted(rng.randint(1, largest) for _ in range(numbers))
            used = rng.sample(drawn, rng.randint(max(FEWEST, numbers - 1), numbers))
            response, value = _combined(rng, used)
            if 0 < value <= target and value not in drawn:
                break
        else:
            raise UserError("no such countdown task was found: ask for a larger target, or for smaller numbers")
        row = {"numbers": drawn, "target": value, "prompt": _prompt(drawn, value), "response": response}
        yield {"id": f"{' '.join(map(str, drawn))} -> {value}", **row}


def _combined(rng: random.Random, used: list[int]) -> tuple[str, int]:
    """Return a random expression of all these numbers whose parts are all whole numbers, and its value."""
    parts = [(str(number), number) for number in used]
    while len(parts) > 1:
        (left, a), (right, b) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        signs = "+-*/" if b and a % b == 0 else "+-*"
        sign = rng.choice(signs)
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign]
        parts.append((f"({left}{sign}{right})", value))
    return parts[0][0][1:-1], parts[0][1]


if __name__ == "__main__":
    write(tasks)
