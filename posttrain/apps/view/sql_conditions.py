"""Conditions in SQL that a person wrote, about the rollouts in memory: which rows they mean.

The database is opened when the first one is asked, and locked from its start: it reads no file, loads nothing, and keeps
within a limit of memory. What it sees is one table.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from posttrain.apps.view.column_table import ALL, Places, RolloutColumns
from posttrain.apps.view.sql_text import COLUMNS, OF_GROUPS, TEXTS
from posttrain.core.types import UserError
from posttrain.runs.record.sql_query import bounded, explained

MEMORY, SPILLED = "320MB", "1GB"  # of the database; on disk, while a question needs more
SECONDS = 10.0  # of a question


class Conditions:
    """A database over the rollouts that it is handed."""

    def __init__(self) -> None:
        self._spilled = tempfile.TemporaryDirectory(prefix="posttrain-view-")  # else it would be the working directory
        self._database = duckdb.connect(
            ":memory:",
            config={
                "temp_directory": self._spilled.name,
                "max_temp_directory_size": SPILLED,
                "python_enable_replacements": "false",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "memory_limit": MEMORY,
                "threads": "2",
                "preserve_insertion_order": "false",
            },
        )
        self._database.execute("set enable_external_access = false")  # after its directory, which it then keeps
        self._database.execute("set lock_configuration = true")

    def clean(self) -> None:
        """Delete what was spilled."""
        self._spilled.cleanup()

    def places(self, rows: RolloutColumns, condition: str) -> Places:
        """The rows for which it holds. Raises UserError unless it is a condition in a single SELECT."""
        sql = f"select row from rollouts where ({condition}\n)"
        try:
            bounded(sql)
            statements = duckdb.extract_statements(sql)
        except duckdb.Error as error:
            raise UserError(said(error)) from None
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise UserError("a condition is part of one SELECT: reward < 0.5 and length > 100")
        try:
            with self.limited() as cursor:
                cursor.register("rollouts", rows.kept(ALL, lambda: _table(rows)))
                shown = cursor.execute(f"select ({condition}\n) from rollouts limit 0").description
                if [str(column[1]).upper()[:4] for column in shown] != ["BOOL"]:
                    raise UserError("a condition is true or false, not a value: compare it, as in length > 40")
                found = cursor.execute(sql).fetchnumpy()["row"]
                return np.sort(np.asarray(found, dtype=np.int64))
        except UserError as error:
            if "Cannot extract field" in str(error):
                raise UserError(explained(error, sql, ())) from None
            if "not found in FROM clause" not in str(error):
                raise
            known = ", ".join([*COLUMNS, *(name for name in rows.parts if name not in COLUMNS)])
            first = str(error).split(" in FROM clause")[0].removeprefix("Binder Error: ")
            raise UserError(f"{first}; the columns are {known}") from None

    @contextmanager
    def limited(self, seconds: float = SECONDS) -> Iterator[Any]:
        """A cursor whose questions end after some seconds; what the database finds wrong is a UserError."""
        cursor = self._database.cursor()
        timer = threading.Timer(seconds, cursor.interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield cursor
        except duckdb.InterruptException:
            raise UserError(f"that took longer than {seconds:g} s: ask for less") from None
        except duckdb.Error as error:
            raise UserError(said(error)) from None
        finally:
            timer.cancel()
            cursor.close()


def _table(rows: RolloutColumns) -> pa.Table:
    """What a condition sees: rollouts with their texts, as whole as they are held, and the figures of their groups."""
    columns: dict[str, Any] = {"row": pa.array(np.arange(len(rows), dtype=np.int32))}
    columns |= {name: rows.table[name] for name in rows.table.column_names if not name.endswith("_start")}
    for name in TEXTS:
        codes, values = rows.fullest(name)
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), values)
    for name in OF_GROUPS:
        columns[name] = pa.array(rows.number(name), from_pandas=True)
    return pa.table(columns)


def said(error: BaseException) -> str:
    """The first line of what the database says, without what only its authors read."""
    text = str(error).strip().splitlines()
    return text[0][:300] if text else "the question cannot be answered"
