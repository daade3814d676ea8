"""Demonstrations for recipes/wordproblems.toml: the problems that carry an equation, each also with other numbers.

A thousand problems are too few to learn from scratch to copy the numbers of the question into the expression.
So every problem of the training share is repeated with fresh numbers, the same in question and expression:

    python recipes/wordproblems.py --seed 0 --out runs/wordproblems/demonstrations.jsonl

The same hash selects held-out problems as in `posttrain rl --held-out 0.2 --seed 0`; none of them, nor one that
differs from one of them in its numbers only, is used.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from posttrain.core.types import Task
from posttrain.data.rows import load_rows
from posttrain.data.tasks import hold_out, to_tasks
from posttrain.envs.builtin.word_problems import row_to_task
from posttrain.verify.expression import evaluate

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def renumber(task: Task, rng: random.Random) -> Task | None:
    """The problem with other numbers of about the same size; None if none were found that keep the answer's kind."""
    answer = evaluate(task["response"])
    assert answer is not None
    asked = set(NUMBER.findall(task["prompt"]))
    for _ in range(20):
        fresh = {n: _like(n, rng) for n in sorted(asked & set(NUMBER.findall(task["response"])))}
        question, response = (substituted(task[key], fresh) for key in ("prompt", "response"))
        value = evaluate(response)
        if value is None or value <= 0 or (answer.denominator == 1 and value.denominator != 1):
            continue
        return {"prompt": question, "response": response, "answer": str(value)}
    return None


def substituted(text: str, fresh: dict[str, str]) -> str:
    """The text with other numbers."""
    return NUMBER.sub(lambda found: fresh.get(found[0], found[0]), text)


def _like(number: str, rng: random.Random) -> str:
    whole, dot, decimals = number.partition(".")
    drawn = str(rng.randint(2, 9) if len(whole) == 1 else rng.randint(10 ** (len(whole) - 1), 10 ** len(whole) - 1))
    return drawn + dot + "".join(rng.choice("123456789") for _ in decimals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default="../shared/data/wordproblems/train.jsonl")
    parser.add_argument("--out", default="runs/wordproblems/demonstrations.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=float, default=0.2)
    parser.add_argument("--copies", type=int, default=15, help="of each problem, with other numbers")
    options = parser.parse_args()
    train, held_out = hold_out(to_tasks(load_rows(options.tasks), convert=row_to_task), options.held_out, options.seed)
    forbidden = {shape(t["prompt"]) for t in held_out}
    chosen = [t for t in train if "response" in t and shape(t["prompt"]) not in forbidden]
    rng = random.Random(options.seed)
    rows = [{k: t[k] for k in ("prompt", "response", "answer")} for t in chosen]
    for task in chosen:
        rows += [fresh for _ in range(options.copies) if (fresh := renumber(task, rng))]
    unique = list({r["prompt"]: r for r in rows}.values())
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in unique))
    print(f"{len(chosen)} problems, {len(unique)} demonstrations in {path}; {len(held_out)} problems held out")


def shape(prompt: str) -> str:
    """A question without its numbers, capitals and spacing: equal for problems that differ in their numbers only."""
    return re.sub(r"[^a-z#]+", " ", NUMBER.sub("#", prompt).lower()).strip()


if __name__ == "__main__":
    main()
