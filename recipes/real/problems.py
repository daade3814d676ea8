"""Word problems for the recipes on a real model: those to learn from, and held-out ones that share no wording with them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from posttrain.core.types import Task
from posttrain.envs.builtin.word_problems import row_to_task
from posttrain.verify.expression import evaluate
from recipes.real.study import number, read
from recipes.wordproblems import NUMBER, shape, substituted

HELD_OUT = 5  # every fifth wording


def problems(data: Path) -> tuple[list[Task], list[Task]]:
    """Problems to learn from, and held-out ones. Two that differ in their numbers only are on the same side.

    Each has "id", "prompt" (the question), "answer", and where the data give its equation, an expression as "response".
    """
    sides: tuple[list[Task], list[Task]] = ([], [])
    for row in read(data / "wordproblems" / "train.jsonl"):
        if task := row_to_task(row):
            task["prompt"] = task["prompt"].strip()
            sides[number(shape(task["prompt"])) % HELD_OUT == 0].append(task)
    return sides


def enlarged(tasks: Iterable[Task], rng: random.Random) -> list[Task]:
    """The problems whose numbers are all in their expression, with numbers of three digits in place of their own."""
    return [found for task in tasks if "response" in task and (found := _enlarged(task, rng))]


def _enlarged(task: Task, rng: random.Random) -> Task | None:
    asked = NUMBER.findall(task["prompt"])
    if not asked or sorted(asked) != sorted(NUMBER.findall(task["response"])) or len(set(asked)) < len(asked):
        return None
    for _ in range(50):
        fresh = {old: str(rng.randint(101, 999)) for old in asked}
        question, response = (substituted(task[key], fresh) for key in ("prompt", "response"))
        value = evaluate(response)
        if value is not None and value > 0 and value.denominator == 1:
            return {"id": task["id"], "prompt": question, "response": response, "answer": str(value)}
    return None
