"""Word problems that the model answers with an expression, "(12-8)*2": it learns which expression to write.

Rows have "id", "question", "answer" and often an "equation", such as "X=((32.0+42.0)-35.0)" or "(x/2)+8=12".
"""

from __future__ import annotations

from typing import Any

from posttrain.core.types import Invalid, Task
from posttrain.verify.expression import Tree, count_x, evaluate, parse
from posttrain.verify.numeric import equal_numbers, read_number

SUCCESS = 1.0  # the reward of a correct answer
TOLERANCE = 1e-9  # relative: rows write 1/3 as 0.3333333333333333, among the numbers and as the answer

_RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


def row_to_task(row: dict[str, Any]) -> Task | None:
    """Return the task of a row; its "response" is the expression, if the row's equation gives the answer."""
    answer = str(row["answer"])
    gold = read_number(answer)
    if gold is None:
        return None
    task = {"id": row["id"], "prompt": row["question"].strip() + "\n", "answer": answer}
    solved = expression(row.get("equation") or "")
    value = evaluate(solved) if solved else None
    if solved and value is not None and equal_numbers(value, gold, TOLERANCE):
        task["response"] = solved
    return task


def reward(task: Task, reply: str) -> float | Invalid:
    """Return 1.0 if the reply is an expression with the answer's value, else 0.0. A bare number is an expression."""
    gold = read_number(task["answer"])
    if gold is None:
        return Invalid(f"gold answer {task['answer']!r} is not a number")
    value = evaluate(reply)
    return float(value is not None and equal_numbers(value, gold, TOLERANCE))


def expression(equation: str) -> str | None:
    """Return the equation solved for x, over its own numbers; None if it is no equation with exactly one x.

    >>> expression("(x/2)+8=12"), expression("X=((32.0+42.0)-35.0)"), expression("8=2+x")
    ('(12-8)*2', '32+42-35', '8-2')
    """
    left, equals, right = equation.partition("=")
    tree, known = (parse(left), parse(right)) if equals else ("x", parse(equation))
    if tree is None or known is None or count_x(tree) + count_x(known) != 1:
        return None
    if count_x(known):
        tree, known = known, tree
    while not isinstance(tree, str):
        tree, known = _invert(tree, known)
    return _write(known)


def _invert(tree: tuple[str, Tree, Tree], known: Tree) -> tuple[Tree, Tree]:
    """Remove the outermost operation from the side that contains x, and apply its inverse to the other side."""
    operation, left, right = tree
    if count_x(left):
        return left, ({"+": "-", "-": "+", "*": "/", "/": "*"}[operation], known, right)
    if operation in "+*":
        return right, ("-" if operation == "+" else "/", known, left)
    return right, (operation, left, known)


def _write(tree: Tree) -> str:
    """Return the text of a tree, with as few brackets as possible."""
    if isinstance(tree, str):
        return tree
    operation, left, right = tree
    left_text, right_text = _write(left), _write(right)
    if isinstance(left, tuple) and _RANK[left[0]] < _RANK[operation]:
        left_text = f"({left_text})"
    if isinstance(right, tuple) and (
        _RANK[right[0]] < _RANK[operation]
        or (_RANK[right[0]] == _RANK[operation] and operation in "-/")
        or (operation == "*" and right[0] == "/")
    ):
        right_text = f"({right_text})"
    return left_text + operation + right_text
