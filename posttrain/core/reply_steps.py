"""The steps of a reply as options name them: their delimiter, and the aggregate of their values."""

from __future__ import annotations

from typing import Literal

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
