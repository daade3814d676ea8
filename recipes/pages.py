"""Pages of results: a recipe writes between two marks, and keeps the text around them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain import UserError
from posttrain.core.intervals import student_interval

BEGIN, END = "<!-- written by the recipe -->", "<!-- end of what the recipe writes -->"


def write_page(file: Path, lines: Sequence[str], part: str = "") -> Path:
    """Put the lines between the marks of the page; a page that has none, or is not there, consists of them and the marks.

    A part of a page that several recipes write has marks with its name, and begins at the page's end. Raises UserError
    if the page has one mark without the other.
    """
    begin, end = (mark.replace(" -->", f": {part} -->") if part else mark for mark in (BEGIN, END))
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    if begin not in old and end not in old:
        old = f"{old if part else ''}{begin}\n{end}\n"
    before, begun, rest = old.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise UserError(f"{file} needs both marks, {begin} before {end}: put them in, or delete both")
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join([before + begin, *lines, end + after])
    file.write_text(text, encoding="utf-8")
    return file


def with_seeds(values: Sequence[float], form: str = ".3f") -> str:
    """Return the mean over seeds with its interval, then every seed; a value that all have in common once."""
    if len(set(values)) == 1:
        return f"{values[0]:{form}}"
    return f"{over_seeds(values, form)} ({', '.join(f'{value:{form}}' for value in values)})"


def over_seeds(values: Sequence[float], form: str = ".3f") -> str:
    """Return the mean over seeds with Student's 95% interval; of one seed the value alone."""
    mean = f"{sum(values) / len(values):{form}}"
    return f"{mean} {student_interval(values).text(form)}" if values[1:] else mean
