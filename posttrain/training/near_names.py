"""Warns about mistyped names of columns, such as `--fields.promt`. A reward may read a column of any name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from posttrain.config.row_options import Data
from posttrain.runs.terminal.notices import warn

COLUMNS = ("prompt", "messages", "response", "completion", "answer", "chosen", "rejected", "label", "score")
NEAR = 0.8  # similarity from which a name is a mistyped one


def warn_near_names(config: Data, warn: Callable[[str], None] = warn) -> None:
    """Warn about names of `--fields` that look like misspelt columns; they are valid, as a reward may read any name."""
    for name, column in config.fields.items():
        if name.removesuffix("s") not in COLUMNS and (close := get_close_matches(name, COLUMNS, 1, NEAR)):
            warn(f"--fields.{name} {column}: only your own code reads {name!r}; did you mean --fields.{close[0]}?")
