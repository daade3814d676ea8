"""The steps of a reply as options name them: their delimiter, and the aggregate of their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

LINE, REPLY, SPANS = "line", "reply", "spans"
"""Delimiters that are words: each line is a step; each reply of an episode is one; the environment names the steps'
ends.
"""

Aggregate = Literal["sum", "mean", "min", "last", "product"]
"""Combines the values of all steps to one number."""


def expression_of(delimiter: str) -> str | None:
    """Return the regular expression between the slashes of a delimiter; None if the delimiter has no slashes."""
    regular = len(delimiter) > 2 and delimiter[0] == delimiter[-1] == "/"
    return delimiter[1:-1] if regular else None


SCORED_STEPS = "scored_steps"
"""The note of an episode with what a reward model made of its steps: for each, text, probability or score, and reward."""


def scored_steps(notes: Mapping[str, Any]) -> list[str]:
    """Return a line for each step that a reward model scored, of the notes of an episode."""
    steps = notes.get(SCORED_STEPS)
    return [
        f"{', '.join(f'{n} {v:.4f}' for n, v in step.items() if n != 'text')} │ {' '.join(step['text'].split())}"
        for step in (steps if isinstance(steps, list) else ())  # text: too long for a note
    ]


def places(delimiter: str, text: str) -> list[tuple[int, int]]:
    """Return where the delimiter is in a text: the start and the end of each match. A regular expression may take
    unbounded time.
    """
    return [match.span() for match in re.finditer(_pattern(delimiter), text)]


def _pattern(delimiter: str) -> str:
    if delimiter in (REPLY, SPANS):
        return r"(?!)"  # matches nowhere
    if delimiter == LINE:
        return "\n"
    expression = expression_of(delimiter)
    return re.escape(delimiter) if expression is None else expression
