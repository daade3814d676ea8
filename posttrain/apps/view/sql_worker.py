"""The process that evaluates SQL conditions and questions, for `sql_conditions` and `posttrain query`.

The parent kills it if a query takes too long; its memory is limited, and its temporary folder is deleted with it.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from posttrain.apps.view import token_conditions
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.sql_text import COLUMNS
from posttrain.apps.view.token_texts import vocabulary_of
from posttrain.core.types import UserError
from posttrain.runs.record.sql_query import Questions, bounded, explained

MEMORY, SPILLED = "320MB", "1GB"  # limits of the database in memory, and on disk if a query needs more

_held: tuple[int, pa.Table] | None = None


@cache
def _database() -> duckdb.DuckDBPyConnection:
    database = duckdb.connect(
        ":memory:",
        config={
            "temp_directory": tempfile.gettempdir(),  # else it would be the working directory
            "max_temp_directory_size": SPILLED,
            "python_enable_replacements": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "memory_limit": MEMORY,
            "threads": "2",
            "preserve_insertion_order": "false",
        },
    )
    database.execute("set enable_external_access = false")  # after setting temp_directory, which cannot change any more
    database.execute("set lock_configuration = true")
    return database


def places(condition: str, seconds: float, parts: Sequence[str], number: int, descriptor: int) -> NDArray[np.int64]:
    """Return the rows of an open file's table for which a condition holds.

    `number`: identifies the table; `parts`: parts of the reward in it. Raises UserError unless it is a condition in a
    single SELECT.
    """
    rollouts = _table(number, descriptor)
    sql = f"select row from rollouts where ({condition}\n)"
    try:
        bounded(sql)
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise UserError(error_text(error)) from None
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise UserError("a condition is part of one SELECT: reward < 0.5 and length > 100")
    try:
        with _limited(seconds) as cursor:
            cursor.register("rollouts", rollouts)
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
        known = ", ".join([*COLUMNS, *(name for name in parts if name not in COLUMNS)])
        first = str(error).split(" in FROM clause")[0].removeprefix("Binder Error: ")
        raise UserError(f"{first}; the columns are {known}") from None


def marked(
    folder: Path, condition: str, parts: Sequence[RolloutPart], words: Sequence[str], seconds: float
) -> list[tuple[int, bool, int, int, int]]:
    """Return `Marked.rows`. `words`: the texts of tokens, by id, where the condition may need them."""
    return token_conditions.marked(folder, condition, parts, lambda: words, seconds)


def asked(
    run: str, sql: str, most: int, seconds: float, gib: float
) -> tuple[list[str], list[tuple[Any, ...]], list[str]]:
    """Return the names of the columns, the first `most` rows, and notes on data left out."""
    with Questions(run, seconds, gib, lambda: vocabulary_of(Path(run))) as questions:
        names, rows = questions.ask(sql, most)
        return names, rows, questions.left_out


def _table(number: int, descriptor: int) -> pa.Table:
    global _held
    try:
        if _held is None or _held[0] != number:
            _held = number, pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{descriptor}")).read_all()
        return _held[1]
    finally:
        os.close(descriptor)


@contextmanager
def _limited(seconds: float) -> Iterator[Any]:
    """Yield a cursor whose queries end after some seconds. Errors of the database become UserErrors."""
    cursor = _database().cursor()
    timer = threading.Timer(seconds, cursor.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield cursor
    except duckdb.InterruptException:
        raise UserError(f"that took longer than {seconds:g} s: ask for less") from None
    except duckdb.OutOfMemoryException as error:
        raise MemoryError from error
    except duckdb.Error as error:
        raise UserError(error_text(error)) from None
    finally:
        timer.cancel()
        cursor.close()


def error_text(error: BaseException) -> str:
    """Return the first line of the database's error message, cut to 300 characters."""
    text = str(error).strip().splitlines()
    return text[0][:300] if text else "the question cannot be answered"
