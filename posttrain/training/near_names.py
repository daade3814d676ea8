"""Mistyped names of columns: `--fields.promt` is no mistake by itself, as a reward may read a column of any name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from posttrain.config.row_options import Data
from posttrain.runs.terminal.notices import warn

COLUMNS = ("prompt", "messages", "response", "completion", "answer", "chosen", "rejected", "label", "score")
NEAR = 0.8  # similarity from which a name is a mistyped one


def warn_near_names(config: Data, warn: Callable[[str], None] = warn) -> None:
    """Warn about names of `--fields` that are nearly those of columns that are read: any name reaches a reward."""
    for name, column in config.fields.items():
        if name.removesuffix("s") not in COLUMNS and (close := get_close_matches(name, COLUMNS, 1, NEAR)):
            warn(f"--fields.{name} {column}: only code of yours reads {name!r}; did you mean --fields.{close[0]}?")
