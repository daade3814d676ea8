"""Names of the sets of rows that a run is evaluated on."""

import re
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
    if len(rows) < len(values):
        raise UserError("--eval-tasks is empty: give a file, or leave it out")
    if len(rows) == 1:
        return dict(rows)  # without a name, under ONLY
    paths = [PurePath(re.split("[:@]", where)[0] if not PurePath(where).suffix else where) for _, where in rows]
    for named in ([p.stem for p in paths], [p.parent.name for p in paths]):
        names = [given or found for (given, _), found in zip(rows, named, strict=True)]
        if all(names) and len(set(names)) == len(names):
            return dict(zip(names, (where for _, where in rows), strict=True))
    raise UserError("--eval-tasks needs a name for each of its sets: --eval-tasks easy=a.jsonl hard=b.jsonl")
