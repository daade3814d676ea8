"""Word problems that the model answers with an expression, "(12-8)*2": what is learned is what to compute.

Rows have "id", "question", "answer" and often an "equation", such as "X=((32.0+42.0)-35.0)" or "(x/2)+8=12".

Expressions are trees: a number as its text, "x", or (operator, left, right).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from posttrain.types import Invalid, Task
from posttrain.verify.numeric import equal_numbers, read_number

SUCCESS = 1.0  # the reward of a right answer
LONGEST = 200  # characters of an expression
DEEPEST = 20  # levels of brackets and signs
TOLERANCE = 1e-9  # relative: rows write 1/3 as 0.3333333333333333, among the numbers and as the answer

Tree = str | tuple[str, "Tree", "Tree"]

_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+|[-+*/()x])")
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_SPELLINGS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "X": "x"})
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


def row_to_task(row: dict[str, Any]) -> Task | None:
    """The task of a row; its "response" is the expression, where the row has an equation that gives the answer."""
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
    """1.0 if the reply is an expression with the value of the answer, else 0.0. A bare number is an expression."""
    gold = read_number(task["answer"])
    if gold is None:
        return Invalid(f"gold answer {task['answer']!r} is not a number")
    value = evaluate(reply)
    return float(value is not None and equal_numbers(value, gold, TOLERANCE))


def evaluate(text: str) -> Fraction | None:
    """The exact value of an expression of numbers, + - * / and brackets; None if it is none, or divides by zero.

    >>> evaluate("(12-8)*2"), evaluate("2**9"), evaluate("1/0")
    (Fraction(8, 1), None, None)
    """
    tree = _parse(text)
    try:
        return None if tree is None or _count_x(tree) else _value(tree)
    except ZeroDivisionError:
        return None


def expression(equation: str) -> str | None:
    """The equation solved for x, over its own numbers; None if it is no equation in which x stands once.

    >>> expression("(x/2)+8=12"), expression("X=((32.0+42.0)-35.0)"), expression("8=2+x")
    ('(12-8)*2', '32+42-35', '8-2')
    """
    left, equals, right = equation.partition("=")
    tree, known = (_parse(left), _parse(right)) if equals else ("x", _parse(equation))
    if tree is None or known is None or _count_x(tree) + _count_x(known) != 1:
        return None
    if _count_x(known):
        tree, known = known, tree
    while not isinstance(tree, str):
        tree, known = _invert(tree, known)
    return _write(known)


def _invert(tree: tuple[str, Tree, Tree], known: Tree) -> tuple[Tree, Tree]:
    """Takes the outermost operation off the side that contains x, and applies its inverse to the other."""
    operation, left, right = tree
    if _count_x(left):
        return left, ({"+": "-", "-": "+", "*": "/", "/": "*"}[operation], known, right)
    if operation in "+*":
        return right, ("-" if operation == "+" else "/", known, left)
    return right, (operation, left, known)


def _write(tree: Tree) -> str:
    """With as few brackets as the meaning allows."""
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


def _count_x(tree: Tree) -> int:
    return int(tree == "x") if isinstance(tree, str) else _count_x(tree[1]) + _count_x(tree[2])


def _value(tree: Tree) -> Fraction:
    if isinstance(tree, str):
        return Fraction(tree)
    left, right = _value(tree[1]), _value(tree[2])
    if tree[0] == "+":
        return left + right
    if tree[0] == "-":
        return left - right
    return left * right if tree[0] == "*" else left / right


def _parse(text: str) -> Tree | None:
    """The tree of an expression, None if the text is none. Recursive descent, on at most `LONGEST` characters."""
    text = text.strip()
    if not text or len(text) > LONGEST:
        return None
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text.translate(_SPELLINGS))
    tokens, end = [], 0
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            return None
        tokens.append(match[1])
        end = match.end()
    try:
        tree, rest = _sum(tokens, 0, 0)
    except (IndexError, SyntaxError):
        return None
    return tree if rest == len(tokens) else None


def _sum(tokens: list[str], at: int, depth: int) -> tuple[Tree, int]:
    tree, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "+-":
        right, after = _product(tokens, at + 1, depth)
        tree, at = (tokens[at], tree, right), after
    return tree, at


def _product(tokens: list[str], at: int, depth: int) -> tuple[Tree, int]:
    tree, at = _factor(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "*/":
        right, after = _factor(tokens, at + 1, depth)
        tree, at = (tokens[at], tree, right), after
    return tree, at


def _factor(tokens: list[str], at: int, depth: int) -> tuple[Tree, int]:
    token = tokens[at]
    if depth > DEEPEST:
        raise SyntaxError("too deep")
    if token == "-":
        tree, at = _factor(tokens, at + 1, depth + 1)
        return ("-", "0", tree), at
    if token == "(":
        tree, at = _sum(tokens, at + 1, depth + 1)
        if tokens[at] != ")":
            raise SyntaxError("a bracket is not closed")
        return tree, at + 1
    if token in "+*/)":
        raise SyntaxError(f"{token} where a number should be")
    if "." in token:
        token = token.rstrip("0").removesuffix(".")
    return ("0" + token if token.startswith(".") else token or "0"), at + 1
