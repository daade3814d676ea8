"""A question with a Python interpreter as a tool: code in <python> tags is run, and its output is returned.

    posttrain check --env python --tasks gsm8k/train.jsonl

Columns: "question" (or "prompt", "messages"), "answer"; in GSM8K's form, `#### 72`, the answer follows the mark.
"calls": most calls that are answered (4). The code runs in the sandbox; an episode has one interpreter, which keeps its
state.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

from posttrain.core.types import Invalid, Reply, Task, Turn, Verdict
from posttrain.envs.play.load_env import opening
from posttrain.sandbox.program import SandboxError
from posttrain.sandbox.session import InterpreterSession
from posttrain.sandbox.shared_sandbox import about, begin_in_worker
from posttrain.verify.fenced import fenced
from posttrain.verify.format import between
from posttrain.verify.numeric import equal_numbers, gsm8k_answer, read_number, written_tolerance
from posttrain.verify.short_answer import exact_match

__all__ = ["SUCCESS", "about", "python", "row_to_task"]

begin_in_worker()

SUCCESS = 1.0  # the reward of a correct answer
CALLS = 4  # default of the task's column "calls"
OPEN, CLOSE, END = "<python>", "</python>", "</answer>"
INSTRUCTION = (
    "\nYou may run Python: write code in <python> </python>, and what it prints is shown to you in <output> </output>. Give "
    "the final answer in <answer> </answer>.\n"
)


def row_to_task(row: dict[str, Any]) -> Task | None:
    """Return the task of a row; None if the row has no answer."""
    answer = gsm8k_answer(str(row.get("answer", ""))) or str(row.get("answer", "")).strip()
    if not answer:
        return None
    task = {**row, "answer": answer, "response": f"<answer>{answer}</answer>"}
    if isinstance(row.get("question"), str):
        task["prompt"] = row["question"].strip() + INSTRUCTION
    return task


def python(task: Task) -> Generator[Turn, Reply, Verdict]:
    """Run an episode; the reward is 1.0 for the correct answer in <answer> tags of the last reply. "calls" counts tool
    calls.
    """
    stop = (*opening(task).stop, CLOSE, END)
    calls = 0
    with closing(InterpreterSession()) as session:
        reply = yield replace(opening(task), stop=stop)
        while calls < int(task.get("calls", CALLS)) and reply.endswith(CLOSE):
            calls += 1
            try:
                output = answered(session, reply)
            except SandboxError as error:
                return Invalid(str(error))
            reply = yield Turn(text=f"\n<output>\n{output}</output>\n", tool=True, stop=stop)
    right = judged(between(reply, "answer"), str(task["answer"]))
    return right if isinstance(right, Invalid) else {"reward": right, "calls": float(calls)}


def answered(session: InterpreterSession, reply: str) -> str:
    """Return the tool's output for a reply that ends with code; it ends with a line end unless it is empty."""
    _, opened, code = reply.removesuffix(CLOSE).rpartition(OPEN)
    if not opened:
        return f"Write {OPEN} before the code.\n"
    block = fenced(code + "\n")
    output = session.run(code.strip("\n") if block is None else block)
    return output if not output or output.endswith("\n") else output + "\n"


def judged(said: str | None, gold: str) -> float | Invalid:
    """Return whether an answer equals the gold one: as numbers if the gold is a number, else as short texts."""
    known = read_number(gold)
    if known is None:
        return exact_match(said, gold)
    value = None if said is None else read_number(said)
    return float(value is not None and equal_numbers(value, known, written_tolerance(gold)))
