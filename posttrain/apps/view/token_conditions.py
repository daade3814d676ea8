"""Search for rollouts that have a token for which a condition holds, such as ratio > 2 or trim(text) = 'wait'.

Tokens are not held in memory, so the files of the selected steps are read, within limits of time and memory. Beyond
them only the last steps are searched, and the result reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.core.types import UserError
from posttrain.runs.record.sql_query import Questions
from posttrain.runs.record.token_view import COLUMNS

GIB = 0.1  # most memory of a search
TOKENS = 8_000_000  # most tokens to search
ROLLOUTS = 200_000  # most rollouts in a result


class Marked(NamedTuple):
    """The rows found, (step, held out, index, first such token, number of such tokens), and the parts searched."""

    rows: Sequence[tuple[int, bool, int, int, int]]
    parts: Collection[RolloutPart]  # the parts that were searched
    whole: bool  # whether all selected parts were searched


def chosen(sizes: Mapping[RolloutPart, int]) -> tuple[list[RolloutPart], bool]:
    """Return the last parts with at most TOKENS together, at least one part, and whether these are all."""
    found: list[RolloutPart] = []
    total = 0
    for part in sorted(sizes, reverse=True):
        total += sizes[part]
        if found and total > TOKENS:
            return found[::-1], False
        found.append(part)
    return found[::-1], True


def marked(
    folder: Path,
    condition: str,
    parts: Collection[RolloutPart],
    vocabulary: Callable[[], Sequence[str]],
    seconds: float,
) -> list[tuple[int, bool, int, int, int]]:
    """Return `Marked.rows` of these parts. Raises UserError if the condition is invalid, or takes too long."""
    sql = f"""select step, held_out, "index", min(place), count(*) from tokens where ({condition}\n) group by all"""
    with Questions(folder, seconds, GIB, vocabulary, {(part.step, part.held_out) for part in parts}) as questions:
        try:
            names, rows = questions.ask(sql, ROLLOUTS + 1)
        except UserError as error:
            raise UserError(_error_text(str(error), seconds)) from None
    if len(names) != 5 or not all(_is_row(row) for row in rows[:1]):
        raise UserError("a condition on tokens is part of one SELECT: ratio > 2 and learned")
    if len(rows) > ROLLOUTS:
        raise UserError(f"more than {ROLLOUTS:,} rollouts have such a token: name steps, or ask for less")
    return [(int(s), bool(h), int(i), int(p), int(n)) for s, h, i, p, n in rows]


def _is_row(row: tuple[Any, ...]) -> bool:
    return isinstance(row[1], bool) and all(isinstance(row[n], int) for n in (0, 2, 3, 4))


def _error_text(problem: str, seconds: float) -> str:
    text = problem.removeprefix("the question cannot be answered: ").removeprefix("the question cannot be read: ")
    if "not found in FROM clause" in text:
        first = text.split(" in FROM clause")[0].removeprefix("Binder Error: ")
        return f"{first}; the columns of a token are {', '.join(COLUMNS)}"
    if text.startswith("the question took longer"):
        return f"that took longer than {seconds:g} s: name steps"
    if text.startswith("the question needs more memory"):
        return "that needs more memory than it may take: name steps"
    return text
