"""Names of the sets of rows that a run is evaluated on."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from posttrain.config.named_values import named_value
from posttrain.core.types import UserError

ONLY = ""
"""Name of a single held-out set that the user did not name."""


def held_out_sets(values: Sequence[str]) -> dict[str, str]:
    """Return the rows of each set of `--eval-tasks`, by its name: NAME=ROWS, or ROWS alone.

    Without a name a set among several is named after its file, or after the file's folder where two files are named alike.
    Raises UserError where that does not give each set a name of its own.
    """
    rows = list(filter(None, map(named_value, values)))
    if len(rows) < len(values) or any(where.endswith("=") for _, where in rows):
        raise UserError("--eval-tasks is empty: give a file, as NAME=FILE or alone, or leave it out")
    if len(rows) == 1:
        return dict(rows)  # without a name, under ONLY
    paths = [PurePath(re.split("[:@]", where)[0] if not PurePath(where).suffix else where) for _, where in rows]
    for named in ([p.stem for p in paths], [p.parent.name for p in paths]):
        names = [given or found for (given, _), found in zip(rows, named, strict=True)]
        if all(names) and len(set(names)) == len(names):
            return dict(zip(names, (where for _, where in rows), strict=True))
    twice = [name for name, count in Counter(name for name, _ in rows).items() if name and count > 1]
    wrong = f"has two sets named {twice[0]!r}" if twice else "has several sets of one name"
    raise UserError(f"--eval-tasks {wrong}: give each a name of its own, --eval-tasks easy=a.jsonl hard=b.jsonl")
