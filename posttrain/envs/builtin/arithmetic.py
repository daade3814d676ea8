"""Sums that a small model learns in minutes: generated tasks, exact reward.

python -m posttrain.envs.builtin.arithmetic --count 1000 --digits 3 > rows.jsonl
"""

from __future__ import annotations

import operator
import random
import re

from posttrain.core.types import Task, UserError
from posttrain.envs.builtin.generated import HELD_OUT, is_held_out, write

SUCCESS = 1.0  # the reward of a correct answer

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_INTEGER = re.compile(r"-?[0-9]{1,100}")


def tasks(
    count: int, seed: int, *, digits: int = 2, operands: int = 2, operators: str = "+", held_out: bool = False
) -> list[Task]:
    """`count` tasks with distinct prompts, on `operands` numbers of exactly `digits` digits; the same for the same
    arguments. Operators are applied from left to right, which for + and - is the usual reading.

    >>> tasks(1, seed=0)
    [{'id': '86+87', 'prompt': '86+87=', 'answer': '173', 'response': '173'}]
    """
    if digits < 1 or operands < 2 or not operators or set(operators) - set(_OPERATORS):
        raise UserError(f"arithmetic tasks need digits >= 1, operands >= 2, operators out of {''.join(_OPERATORS)!r}")
    if "*" in operators and operands > 2:
        raise UserError("arithmetic tasks with * have two operands")
    low = 10 ** (digits - 1) if digits > 1 else 0
    numbers = 10**digits - low
    size = numbers**operands * len(operators) ** (operands - 1)
    rng = random.Random(seed)
    drawn = min(size, int(count / (HELD_OUT if held_out else 1 - HELD_OUT) * 1.2) + 100)
    while True:
        found = []
        for index in rng.sample(range(size), drawn):
            question, answer = _question(index, low, numbers, operands, operators)
            if is_held_out(question) == held_out:
                found.append({"id": question, "prompt": question + "=", "answer": answer, "response": answer})
        if len(found) >= count:
            return found[:count]
        if drawn == size:
            raise UserError(f"only {len(found)} such tasks exist: lower --count below {count}, or raise --digits")
        drawn = min(size, 2 * drawn)


def reward(task: Task, reply: str) -> float:
    """Return 1.0 if the reply is the correct integer, and nothing else but white space, else 0.0."""
    number = _INTEGER.fullmatch(reply.strip())
    return float(number is not None and int(number[0]) == int(task["answer"]))


def _question(index: int, low: int, numbers: int, operands: int, operators: str) -> tuple[str, str]:
    """Return question number `index` of all possible ones, and its answer."""
    signs = []
    for _ in range(operands - 1):
        index, which = divmod(index, len(operators))
        signs.append(operators[which])
    drawn = []
    for _ in range(operands):
        index, part = divmod(index, numbers)
        drawn.append(low + part)
    drawn.reverse()
    text, value = str(drawn[0]), drawn[0]
    for sign, number in zip(signs, drawn[1:], strict=True):
        text, value = f"{text}{sign}{number}", _OPERATORS[sign](value, number)
    return text, str(value)


if __name__ == "__main__":
    write(tasks)
