"""SQL that a person writes, and that is shown of a question: names and texts as it has them, the reward's parts by name."""

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
"""The names that a condition may use, beside the parts of the reward."""

_WORD = re.compile(r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | (?<![\w.])[^\W\d]\w*(?!\w|\s*[(.])""", re.VERBOSE)


def quoted(text: str) -> str:
    """Return a text as SQL has it."""
    return "'" + text.replace("'", "''").replace("\0", "") + "'"


def named(name: str) -> str:
    """Return a name of a column as SQL has it."""
    return '"' + name.replace('"', '""').replace("\0", "") + '"'


def by_name(condition: str, parts: Sequence[str], say: Callable[[str], str]) -> str:
    """A condition with the reward's parts, which a person calls by the names of the table's columns, as a database has them.

    A name that is a column of the rollouts' anyway means that column; "part.length" in quotes means the part.
    """

    def replaced(found: re.Match[str]) -> str:
        word = found[0]
        name = word[1:-1].replace('""', '"') if word.startswith('"') else word
        short = name.removeprefix("part.")
        meant = short if short in parts and (name != short or name not in COLUMNS) else None
        return word if meant is None or word.startswith("'") else say(meant)

    return _WORD.sub(replaced, condition)


def named_part(name: str) -> str:
    """Return the name in the table in memory."""
    return named(f"part.{name}")


def listed_part(name: str) -> str:
    """Return the name in the files."""
    return f"list_filter(parts, lambda p: p.name = {quoted(name)})[1].value"
