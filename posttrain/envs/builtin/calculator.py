"""Sums with a calculator: it evaluates the expression in <calc>...</calc>, and the policy then gives the answer.

    python -m posttrain.envs.builtin.calculator --count 1000 > rows.jsonl

Columns: "prompt" (or "messages"), "answer"; "calls": most calls that are answered (4).
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import replace

from posttrain.core.types import Invalid, Reply, Task, Turn, UserError, Verdict
from posttrain.envs.builtin.generated import distinct, write
from posttrain.envs.play.load_env import opening
from posttrain.verify.expression import evaluate
from posttrain.verify.format import between
from posttrain.verify.numeric import equal_numbers, read_number, written_tolerance

SUCCESS = 1.0  # the reward of a correct answer
CALLS = 4  # default of the task's column "calls"
OPEN, CLOSE = "<calc>", "</calc>"


def calculator(task: Task) -> Generator[Turn, Reply, Verdict]:
    """Run an episode; the reward is 1.0 for a correct last reply, as a whole or in its <answer> tags, else 0.0."""
    gold = read_number(str(task.get("answer", "")))
    if gold is None:
        return Invalid(f"gold answer {task.get('answer')!r:.40} is not a number")
    turn = opening(task)
    reply = yield replace(turn, stop=(*turn.stop, CLOSE))
    for _ in range(int(task.get("calls", CALLS))):
        if not reply.endswith(CLOSE):
            break
        asked = reply.removesuffix(CLOSE).rpartition(OPEN)
        result = worked_out(asked[2]) if asked[1] else f"write {OPEN} before what is asked"
        reply = yield Turn(text=f"<out>{result}</out>", tool=True, stop=(*turn.stop, CLOSE))
    said = between(reply, "answer")
    value = read_number(reply if said is None else said)
    return float(value is not None and equal_numbers(value, gold, written_tolerance(str(task["answer"]))))


def worked_out(text: str) -> str:
    """Return the calculator's answer: a number, exact where it has few digits, or an error message.

    >>> worked_out("(12-8)*2"), worked_out("1/8"), worked_out("2/3"), worked_out("1/0")
    ('8', '0.125', '0.666666666667', 'not an expression that can be worked out')
    """
    value = evaluate(text)
    if value is None:
        return "not an expression that can be worked out"
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def tasks(count: int, seed: int, *, operands: int = 3, digits: int = 3, held_out: bool = False) -> list[Task]:
    """Sums and products of `operands` numbers with up to `digits` digits: too large for a small model to do alone.

    >>> tasks(1, seed=0)[0]["replies"]
    ['<calc>865-777-42</calc>', '46']
    """
    if operands < 2 or digits < 1:
        raise UserError("calculator tasks need operands >= 2 and digits >= 1")
    return distinct(_draws(random.Random(seed), operands, digits), count, held_out)


def _draws(rng: random.Random, operands: int, digits: int) -> Iterator[Task]:
    while True:
        text = str(rng.randint(1, 10**digits - 1))
        for _ in range(operands - 1):
            text += rng.choice("+-*") + str(rng.randint(1, 10**digits - 1))
        answer = worked_out(text)
        replies = [f"{OPEN}{text}{CLOSE}", answer]
        yield {"id": text, "prompt": f"What is {text}? ", "answer": answer, "replies": replies}


if __name__ == "__main__":
    write(tasks)
