"""Functions with unit tests, in the form of MBPP: the reply is a program, and its tests give the reward.

    posttrain check --env code --tasks code/mbpp.jsonl          # the share of the tests that pass
    posttrain check --env code-all --tasks code/mbpp.jsonl      # 1 for all of them, else 0

Columns: "text" (or "prompt"), the assignment; "test_list" and perhaps "challenge_test_list", each test a text such as
"assert f(2) == 4"; "test_setup_code" or "test_imports", code that runs before the tests; "code", a program that passes.
The prompt shows the first test, since it gives the function's name; that test counts only if it is the only one. The
others stay hidden.
"""

from __future__ import annotations

import ast
import builtins
from hashlib import sha256
from typing import Any

from posttrain.core.types import Invalid, Task
from posttrain.sandbox.shared_sandbox import about, begin_in_worker
from posttrain.verify.unit_tests import passes_tests, share_of_tests

__all__ = ["SUCCESS", "about", "all_or_nothing", "reward", "row_to_task"]

begin_in_worker()

SUCCESS = 1.0  # the reward of a program that passes all tests
INSTRUCTION = (
    "\nWrite the program in a block that begins with ```python and ends with ```. It has to pass tests such as this:\n"
)


def row_to_task(row: dict[str, Any]) -> Task | None:
    """Return the task of a row, with the reference program as its "response"; None if the row has no tests."""
    tests = [*row.get("test_list", ()), *row.get("challenge_test_list", ())]
    text = row.get("text") or row.get("prompt")
    if not tests or not text:
        return None
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports", ()))
    task: Task = {
        "id": "code-" + sha256("\n".join([text, *tests]).encode()).hexdigest()[:12],
        "prompt": f"{text.strip()}{INSTRUCTION}{tests[0].strip()}\n",
        "example": tests[0],
        "tests": tests[1:] or tests,
        "setup": setup,
    }
    if code := row.get("code"):
        task |= {"response": f"```python\n{code.strip()}\n```", "entry": shadowed(code)}
    return task


def reward(task: Task, reply: str) -> float | Invalid:
    """Return the share of the tests that the program of a reply passes."""
    return share_of_tests(reply, task["tests"], task.get("setup", ""), task.get("entry", ()))


def all_or_nothing(task: Task, reply: str) -> float | Invalid:
    """Return 1.0 if the program of a reply passes all tests, else 0.0."""
    return passes_tests(reply, task["tests"], task.get("setup", ""), task.get("entry", ()))


def shadowed(code: str) -> list[str]:
    """Return names of Python's builtins that a reference program redefines: in the tests they mean the reply's own
    functions.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return []
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return sorted({name for name in defined if hasattr(builtins, name)})
