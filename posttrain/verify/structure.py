r"""Parses the structure of an answer: lists, sets, tuples and intervals, matrices, unions, chains of relations.

The leaves are formulas, which `posttrain.verify.algebra` compares. The structure is parsed from the text: an algebra
library reads (1,2) as an interval, a tuple and a set at once, and [2,1] as (2,1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

PLUS_MINUS = 3  # most plus-minus signs in one formula

_TOKEN = re.compile(r"\\begin\{[a-z]+\}|\\end\{[a-z]+\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = frozenset({"(", "[", "{", r"\{", r"\begin{pmatrix}"})
_CLOSING = frozenset({")", "]", "}", r"\}", r"\end{pmatrix}"})
_RELATIONS = {"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\in": "in",
              r"\approx": "approx"}  # fmt: skip
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_SIGNS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_VARIABLE = re.compile(r"[a-zA-Z]|\\[a-z]+")


class Unreadable(ValueError):
    """The text has no supported structure."""


@dataclass(frozen=True)
class Form:
    """An answer, or a part of one.

    `kind`: "formula" (no parts), "list", "set", "tuple" (`marks`: its two brackets), "matrix" (of tuples, the rows),
    "union", or "chain" (parts joined by the relations `marks`).
    """

    kind: str
    text: str
    parts: tuple[Form, ...] = ()
    marks: tuple[str, ...] = ()

    def formulas(self) -> Iterator[Form]:
        if self.kind == "formula":
            yield self
        for part in self.parts:
            yield from part.formulas()


def read_form(text: str, *, inside: bool = False) -> Form:
    """Parse a text with normalised spelling (`spelling.clean`). `inside` brackets, a comma is never part of a
    number.
    """
    text = text.strip()
    if not text:
        raise Unreadable("a part is empty")
    if not inside:
        text = _join_thousands(text)
    parts, _ = _split(text, {",", ";"})
    if len(parts) > 1:
        return Form("list", text, _flat(read_form(part, inside=True) for part in parts))
    parts, marks = _split(text, _RELATIONS.keys())
    if marks:
        return Form("chain", text, tuple(read_form(part, inside=inside) for part in parts), marks)
    parts, marks = _split(text, {r"\cup"})
    if marks:
        return Form("union", text, tuple(read_form(part, inside=inside) for part in parts))
    return _read_brackets(text) or _read_signs(text)


def interval(form: Form) -> tuple[str, Form] | None:
    """Return the variable and interval of a chain such as "-3 < x \\le 2" or "x > 1"; None for any other chain."""
    if form.kind != "chain" or not set(form.marks) <= _MIRRORED.keys() or len(form.marks) > 2:
        return None
    parts, marks = form.parts, form.marks
    if marks[0] in (">", ">="):
        parts, marks = parts[::-1], tuple(_MIRRORED[mark] for mark in reversed(marks))
    if not set(marks) <= {"<", "<="}:
        return None
    low, high = Form("formula", r"-\infty"), Form("formula", r"\infty")
    left, right = "(", ")"
    if len(marks) == 2:
        low, variable, high = parts
        left, right = "[" if marks[0] == "<=" else "(", "]" if marks[1] == "<=" else ")"
    elif _VARIABLE.fullmatch(parts[0].text):
        variable, high = parts
        right = "]" if marks[0] == "<=" else ")"
    else:
        low, variable = parts
        left = "[" if marks[0] == "<=" else "("
    if not _VARIABLE.fullmatch(variable.text):
        return None
    return variable.text, Form("tuple", form.text, (low, high), (left, right))


def mirrored(form: Form) -> Form:
    """Return the same chain from right to left; unchanged if one of its relations cannot be reversed."""
    if not set(form.marks) <= _MIRRORED.keys():
        return form
    return Form("chain", form.text, form.parts[::-1], tuple(_MIRRORED[mark] for mark in reversed(form.marks)))


def _split(text: str, marks: object) -> tuple[list[str], tuple[str, ...]]:
    """Split the text at the marks that are outside all brackets; return the pieces, and the marks in normalised
    spelling.
    """
    parts, found, start, depth = [], [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in _OPENING:
            depth += 1
        elif token[0] in _CLOSING:
            depth -= 1
            if depth < 0:
                raise Unreadable("a bracket closes that was not open")
        elif depth == 0 and token[0] in marks:  # type: ignore[operator]
            parts.append(text[start : token.start()])
            found.append(_RELATIONS.get(token[0], token[0]))
            start = token.end()
    if depth:
        raise Unreadable("a bracket is not closed")
    return [*parts, text[start:]], tuple(found)


def _join_thousands(text: str) -> str:
    """Remove commas within numbers if they are outside all brackets: "(2,100)" has two parts."""
    depth, runs = 0, [""]
    for token in _TOKEN.finditer(text):
        depth += token[0] in _OPENING and token[0] != "{"
        if (len(runs) % 2 == 1) != (depth == 0):
            runs.append("")
        runs[-1] += token[0]
        depth -= token[0] in _CLOSING and token[0] != "}"
    runs[::2] = [_THOUSANDS.sub(lambda found: found[0].replace(",", ""), run) for run in runs[::2]]
    return "".join(runs)


def _read_brackets(text: str) -> Form | None:
    """Parse a text that is one pair of brackets with parts in it; else return None."""
    tokens = list(_TOKEN.finditer(text))
    opening, closing = tokens[0][0], tokens[-1][0]
    depth = 0
    for token in tokens[:-1]:
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0:
            return None
    inner = text[len(opening) : len(text) - len(closing)]
    if opening == r"\begin{pmatrix}" and closing == r"\end{pmatrix}":
        rows = [_split(row, {"&"})[0] for row in _split(inner, {r"\\"})[0] if row.strip()]
        cells = [tuple(read_form(cell, inside=True) for cell in row) for row in rows]
        return Form("matrix", text, tuple(Form("tuple", "", row, ("", "")) for row in cells))
    if opening == "{" and closing == "}":
        return read_form(inner, inside=True)
    if opening == r"\{" and closing == r"\}":
        parts = _split(inner, {",", ";"})[0] if inner.strip() else []
        return Form("set", text, _flat(read_form(part, inside=True) for part in parts))
    if opening in ("(", "[") and closing in (")", "]"):
        parts = _split(inner, {",", ";"})[0]
        if len(parts) > 1:
            return Form("tuple", text, tuple(read_form(part, inside=True) for part in parts), (opening, closing))
        if (opening, closing) != ("(", ")"):
            raise Unreadable("one part between brackets")
    return None


def _read_signs(text: str) -> Form:
    """Parse a formula; with plus-minus signs, as the list of its values."""
    signs = list(_SIGNS.finditer(text))
    if not signs:
        return Form("formula", text)
    if len(signs) > PLUS_MINUS:
        raise Unreadable("too many plus-minus signs")
    values = []
    for upper in product((True, False), repeat=1 if any(sign[1] == "mp" for sign in signs) else len(signs)):
        value, end = "", 0
        for number, sign in enumerate(signs):
            plus = upper[number % len(upper)] == (sign[1] == "pm")
            value += text[end : sign.start()] + ("+" if plus else "-")
            end = sign.end()
        values.append(Form("formula", value + text[end:]))
    return Form("list", text, tuple(values))


def _flat(parts: Iterator[Form]) -> tuple[Form, ...]:
    """Flatten lists within a list or a set: "1 \\pm 2, 7" has three parts."""
    flat: list[Form] = []
    for part in parts:
        flat.extend(part.parts if part.kind == "list" else [part])
    return tuple(flat)
