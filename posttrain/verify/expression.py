"""Parses and evaluates arithmetic written by a policy, such as "(12-8)*2", exactly. Nothing is executed.

Expressions are trees: a number as its text, "x", or (operator, left, right).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

LONGEST = 200  # most characters of an expression
DEEPEST = 20  # most levels of brackets and signs

Tree = str | tuple[str, "Tree", "Tree"]

_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+|[-+*/()x])")
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
    """Parse an expression, None if the text is not one. Recursive descent, on at most `LONGEST` characters."""
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
