"""Parses and evaluates arithmetic written by a policy, such as "(12-8)*2", exactly. Nothing is executed.

Expressions are trees: a number as its text, "x", or (operator, left, right).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate

LONGEST = 200  # most characters of an expression
DEEPEST = 20  # most levels of brackets, and most signs in a row

Tree = str | tuple[str, "Tree", "Tree"]

_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_WRITTEN = re.compile(r"[-+*/()x0-9.\s]*")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_SIGNS = re.compile(rf"(?:-\s*){{{DEEPEST + 1}}}")
_LEADING_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])")
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_SPELLINGS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "X": "x"})


def evaluate(text: str) -> Fraction | None:
    """Return the exact value of an expression of numbers, + - * / and brackets; None if it is invalid, or divides by
    zero.

    >>> evaluate("(12-8)*2"), evaluate("2**9"), evaluate("1/0")
    (Fraction(8, 1), None, None)
    """
    tree = parse(text)
    try:
        return None if tree is None or count_x(tree) else value_of(tree)
    except ZeroDivisionError:
        return None


def leaves(tree: Tree) -> Iterator[str]:
    """Yield the numbers of an expression, and each x, from left to right. A sign is a subtraction from 0."""
    if isinstance(tree, str):
        yield tree
    else:
        yield from leaves(tree[1])
        yield from leaves(tree[2])


def count_x(tree: Tree) -> int:
    """Count the occurrences of x."""
    return int(tree == "x") if isinstance(tree, str) else count_x(tree[1]) + count_x(tree[2])


def value_of(tree: Tree) -> Fraction:
    """Evaluate a tree without x. Raises ZeroDivisionError."""
    if isinstance(tree, str):
        return Fraction(tree)
    left, right = value_of(tree[1]), value_of(tree[2])
    if tree[0] == "+":
        return left + right
    if tree[0] == "-":
        return left - right
    return left * right if tree[0] == "*" else left / right


def parse(text: str) -> Tree | None:
    """Parse an expression of at most `LONGEST` characters, None if the text is not one.

    Python's parser reads it. Numbers lose zeros before them: 007 is 7.
    """
    text = text.strip()
    if len(text) > LONGEST:
        return None
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text.translate(_SPELLINGS))
    levels = accumulate((character == "(") - (character == ")") for character in text)
    if not _WRITTEN.fullmatch(text) or _SIGNS.search(text) or max(levels, default=0) > DEEPEST:
        return None
    text = _LEADING_ZEROS.sub("", " ".join(text.split()))
    try:
        return _tree(ast.parse(text, mode="eval").body, text)
    except SyntaxError:
        return None


def _tree(node: ast.expr, text: str) -> Tree:
    """Return the tree of Python's. Raises SyntaxError for anything else than numbers, x and the four operations."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)], _tree(node.left, text), _tree(node.right, text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return "-", "0", _tree(node.operand, text)
    written = text[node.col_offset : node.end_col_offset]
    if written == "x":
        return "x"
    if not isinstance(node, ast.Constant) or not _NUMBER.fullmatch(written):
        raise SyntaxError(f"{written} is neither a number nor x")
    if "." in written:
        written = written.rstrip("0").removesuffix(".")
    return "0" + written if written.startswith(".") else written or "0"
