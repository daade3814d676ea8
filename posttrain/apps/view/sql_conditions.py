"""Evaluates a user's SQL conditions over the rollouts in memory.

They run in a separate process (`sql_worker`), started at the first condition, because nothing else bounds the time and
the memory of a database function. The process sees one table, in shared memory, and its database is locked from the
start: it reads no file and loads nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.apps.view.column_table import Places, RolloutColumns
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.sql_text import OF_GROUPS, TEXTS
from posttrain.apps.view.token_conditions import Marked, chosen
from posttrain.runs.record.sql_query import names_text
from posttrain.system.bounded_process import BoundedProcess

SECONDS, GIB = 10.0, 0.75  # limits of a query

_numbers = count(1)


class Conditions:
    """Conditions in SQL, evaluated by a process that holds the rollouts."""

    def __init__(self) -> None:
        self._process = BoundedProcess("posttrain.apps.view.sql_worker")
        self._handed: tuple[weakref.ref[RolloutColumns], int, _Shared] | None = None

    def places(self, rows: RolloutColumns, condition: str) -> Places:
        """Return the rows for which a condition holds. Raises UserError unless it is a condition in a single SELECT."""
        handed = self._handed
        if handed is None or handed[0]() is not rows:
            handed = self._handed = weakref.ref(rows), next(_numbers), _Shared(_table(rows))
        _, number, shared = handed
        args = condition, SECONDS, list(rows.parts), number
        found = self._process.call("places", *args, seconds=SECONDS, gib=GIB, descriptors=[shared.descriptor])
        return np.asarray(found, dtype=np.int64)

    def marked(
        self, folder: Path, condition: str, sizes: Mapping[RolloutPart, int], vocabulary: Callable[[], Sequence[str]]
    ) -> Marked:
        """Return the rollouts that have a token for which a condition holds.

        `sizes`: part to search -> number of tokens.
        """
        parts, whole = chosen(sizes)
        words = list(vocabulary()) if names_text(condition) else []
        rows = self._process.call("marked", folder, condition, parts, words, SECONDS, seconds=SECONDS, gib=GIB)
        return Marked(rows, parts, whole)

    def close(self) -> None:
        self._process.close()


class _Shared:
    """A table in shared memory, with a descriptor for another process."""

    def __init__(self, table: pa.Table) -> None:
        self.descriptor = os.memfd_create("posttrain-view", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        with pa.OSFile(f"/proc/self/fd/{self.descriptor}", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)


def _table(rows: RolloutColumns) -> pa.Table:
    """Return the table that conditions read: rollouts, their texts as far as held, figures of their groups."""
    columns: dict[str, Any] = {"row": pa.array(np.arange(len(rows), dtype=np.int32))}
    columns |= {name: rows.table[name] for name in rows.table.column_names if not name.endswith("_start")}
    for name in TEXTS:
        codes, values = rows.fullest(name)
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), values)
    for name in OF_GROUPS:
        columns[name] = pa.array(rows.number(name), from_pandas=True)
    return pa.table(columns)
