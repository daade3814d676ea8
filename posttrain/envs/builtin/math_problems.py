r"""Competition mathematics (MATH): rows {"problem", "solution", "level", "type"}, answer in the last \boxed{}."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from posttrain.core.types import Invalid, Task
from posttrain.verify.answer import last_boxed
from posttrain.verify.math import verify

SUCCESS = 1.0  # the reward of a correct answer
INSTRUCTION = "\nThink step by step and put the final answer in \\boxed{}.\n"


def row_to_task(row: dict[str, Any]) -> Task | None:
    """Return the task of a row, with the solution as its "response"; None if the solution boxes no answer."""
    answer = (last_boxed(row["solution"]) or "").strip()
    if not answer:
        return None
    return {
        "id": "math-" + sha256(row["problem"].encode()).hexdigest()[:12],
        "prompt": row["problem"].strip() + INSTRUCTION,
        "answer": answer,
        "response": row["solution"].strip(),
        "level": row.get("level"),
        "type": row.get("type"),
    }


def reward(task: Task, reply: str) -> float | Invalid:
    """Return 1.0 if the reply's final answer is the task's, else 0.0; Invalid if the task's answer cannot be read."""
    return verify(reply, task["answer"])
