"""GSM8K: school mathematics with a worked solution. Rows {"question", "answer"}; the answer ends with `#### 72`."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

from posttrain.core.types import Invalid, Task
from posttrain.verify.format import between, tags
from posttrain.verify.numeric import equal_numbers, gsm8k_answer, read_number, written_tolerance

SUCCESS = 1.0  # the reward of a correct answer
INSTRUCTION = "\nThink step by step in <think> </think>, then give the number alone in <answer> </answer>.\n"
FORMAT_WEIGHT = 0.1  # reward of the tags, besides 1 for the answer

_CALCULATOR = re.compile(r"<<[^<>]*>>")


def row_to_task(row: dict[str, Any]) -> Task | None:
    """Return the task of a row, with the worked solution as its "response"; None if the row's answer is no number."""
    answer = gsm8k_answer(row["answer"])
    if answer is None or read_number(answer) is None:
        return None
    answer = answer.replace(",", "")
    solution = _CALCULATOR.sub("", row["answer"].rpartition("####")[0]).strip()
    return {
        "id": "gsm8k-" + sha256(row["question"].encode()).hexdigest()[:12],
        "prompt": row["question"].strip() + INSTRUCTION,
        "answer": answer,
        "response": f"<think>{solution}</think>\n<answer>{answer}</answer>",
    }


def reward(task: Task, reply: str) -> dict[str, float] | Invalid:
    """Return {"answer": 1 or 0, "format": 0.1 or 0}. The answer is in its tags, or without tags after `####`."""
    gold = read_number(task["answer"])
    if gold is None:
        return Invalid(f"gold answer {task['answer']!r} is not a number")
    answer = between(reply, "answer")
    number = read_number(gsm8k_answer(reply) or "" if answer is None else answer)
    right = number is not None and equal_numbers(number, gold, written_tolerance(task["answer"]))
    return {"answer": float(right), "format": FORMAT_WEIGHT * tags(reply)}
