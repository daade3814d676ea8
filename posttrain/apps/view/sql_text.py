"""SQL for filters: translates what a user types, and shows a filter as SQL that a user could have typed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

SCALARS = (
    "step", "held_out", "index", "kind", "group", "member", "task", "side", "epoch", "reward", "shaping", "penalty",
    "used", "advantage", "replayed", "truncated", "version", "sampled", "scored", "length", "total", "why", "invalid",
    "flags", "fate", "stop", "invalid_kind",
)  # fmt: skip
TEXTS = ("prompt", "text", "columns", "notes")
OF_GROUPS = ("mean", "sd", "n", "right_n")
COLUMNS = (*SCALARS, *TEXTS, *OF_GROUPS)
"""The names that a condition may use, besides the parts of the reward."""

_WORD = re.compile(r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | (?<![\w.])[^\W\d]\w*(?!\w|\s*[(.])""", re.VERBOSE)


def quoted(text: str) -> str:
    """Return a text as an SQL string literal."""
    return "'" + text.replace("'", "''").replace("\0", "") + "'"


def named(name: str) -> str:
    """Return a column's name as an SQL identifier."""
    return '"' + name.replace('"', '""').replace("\0", "") + '"'


def by_name(condition: str, parts: Sequence[str], say: Callable[[str], str]) -> str:
    """Return a condition with each part of the reward, which a user names directly, replaced by `say(part)`.

    A name that is also a column of the rollouts means that column; "part.length" in quotes means the part.
    """

    def replaced(found: re.Match[str]) -> str:
        word = found[0]
        name = word[1:-1].replace('""', '"') if word.startswith('"') else word
        short = name.removeprefix("part.")
        meant = short if short in parts and (name != short or name not in COLUMNS) else None
        return word if meant is None or word.startswith("'") else say(meant)

    return _WORD.sub(replaced, condition)


def named_part(name: str) -> str:
    """Return the part's column in the table in memory."""
    return named(f"part.{name}")


def listed_part(name: str) -> str:
    """Return the part's expression over the files."""
    return f"list_filter(parts, lambda p: p.name = {quoted(name)})[1].value"
