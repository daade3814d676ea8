"""SQL queries over a run: one SELECT over the run's own files, with limits of time and memory.

The database can read only these files: they are listed before the query is parsed, and the list is locked. Statements
other than SELECT are not started, since COPY could write even if nothing else may be read.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from posttrain.core.extras import install
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_index import left_out, open_index
from posttrain.runs.record.rollout_reading import SUFFIX, open_file
from posttrain.runs.record.schema import ROLLOUTS as TABLE
from posttrain.runs.record.schema import SECONDS as SECONDS_TABLE
from posttrain.runs.record.token_view import tokens_of
from posttrain.runs.run_files import EVALS, ROLLOUTS, SECONDS, Folder, kept_file
from posttrain.runs.run_reading import (
    divides_by_sampler,
    missing_rollouts,
    read_health,
    read_metrics,
    read_run,
    read_timing,
    rollout_steps,
)

THREADS = 2
LONGEST, DEEPEST = 100_000, 300
"""Most characters of a query, and most nested brackets."""
TABLES = ("rollouts", "evals", "tokens", "seconds", "rollout_index", "metrics", "timing", "health")
_TOKENS = re.compile(r"\b(?:from|join|describe)\s+(?:[\w\".]+(?:\s+\w+)?\s*,\s*)*\"?tokens\b", re.IGNORECASE)
_TEXT = re.compile(r"\btext\b", re.IGNORECASE)
_PART = "create macro part(among, wanted) as list_filter(among, lambda p: p.name = wanted)[1].value"
"""SQL macro for a part of the reward by name: part(parts, 'form')."""
_JSON = ("columns", "notes", "answers", "label")


class Questions:
    """A database over one run, or over a file of rollouts of an evaluation.

    `seconds`, `gib`: limits of a query. `vocabulary`: returns the texts of token ids; [] if unknown. `only`: the files
    to read, as (step, whether they are held out); default: all.
    """

    def __init__(
        self,
        folder: Folder,
        seconds: float = 60.0,
        gib: float = 2.0,
        vocabulary: Callable[[], Sequence[str]] = list,
        only: Container[tuple[int, bool]] | None = None,
    ) -> None:
        """Raises UserError if neither of the two exists."""
        self.left_out: list[str] = []  # parts that are missing in the result, with reasons
        self._folder, self._seconds, self._vocabulary, self._only = Path(folder), seconds, vocabulary, only
        self._alone = self._folder.suffix == SUFFIX and self._folder.is_file()
        self._sampler = False if self._alone else divides_by_sampler(read_run(folder))
        self._base = _library().connect(
            ":memory:",
            config={
                "memory_limit": f"{int(gib * 1024)}MiB",
                "threads": str(THREADS),
                "temp_directory": "",
                "python_enable_replacements": "false",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
            },
        )

    def ask(self, sql: str, most: int | None = None) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return the column names, and all rows or the first `most`. Only one query per database is possible.

        Raises UserError for anything but a single SELECT, for an error in it, and if it exceeds a limit.
        """
        duckdb = _library()
        bounded(sql)
        self._check(sql)
        self._open({word for word in TABLES if word in sql.lower()} or set(TABLES if _lists_tables(sql) else ()))
        if _TOKENS.search(sql) or _lists_tables(sql):
            self._lay_tokens(names_text(sql))
        asked = threading.Timer(self._seconds, self._base.interrupt)
        asked.start()
        try:
            found = self._base.execute(sql)
            rows = found.fetchall() if most is None else found.fetchmany(most)
            return [column[0] for column in found.description or ()], rows
        except duckdb.InterruptException as error:
            raise UserError(
                f"the question took longer than {self._seconds:g} s: narrow it, or raise --timeout"
            ) from error
        except (duckdb.OutOfMemoryException, MemoryError) as error:
            raise UserError("the question needs more memory than it may take: narrow it, or raise --memory") from error
        except duckdb.Error as error:
            raise UserError(f"the question cannot be answered: {explained(error, sql, self._tables)}") from error
        finally:
            asked.cancel()

    def close(self) -> None:
        self._base.close()

    def __enter__(self) -> Questions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check(self, sql: str) -> None:
        duckdb = _library()
        try:
            statements = duckdb.extract_statements(sql)
        except duckdb.Error as error:
            raise UserError(f"the question cannot be read: {explained(error, sql, self._tables)}") from error
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise UserError("a question must be one SELECT statement, which writes, changes and loads nothing")

    @property
    def _tables(self) -> tuple[str, ...]:
        return ("rollouts", "tokens") if self._alone else TABLES

    def _open(self, wanted: set[str]) -> None:
        """Create the tables, and forbid all other access."""
        wanted &= set(self._tables)
        tables: dict[str, list[Path]] = {}
        if self._alone:
            tables["rollouts"] = [self._folder]
        elif wanted & {"rollouts", "evals", "tokens"}:
            tables |= {"rollouts": self._files(ROLLOUTS), "evals": self._files(EVALS)}
        if "seconds" in wanted:
            tables["seconds"] = self._files(SECONDS)
        if "rollout_index" in wanted:
            tables["rollout_index"] = open_index(self._folder)
        if not self._alone and self._only is None:
            self.left_out = self._lacking(wanted, tables.get("rollout_index"))
        if "metrics" in wanted or "timing" in wanted or "health" in wanted:
            for name, read in (("metrics", read_metrics), ("timing", read_timing), ("health", read_health)):
                self._base.register(name, _table(read(self._folder)))
        paths = [str(path.absolute()) for files in tables.values() for path in files]
        self._set("allowed_paths", "[" + ", ".join(map(_quoted, paths)) + "]")
        self._set("enable_external_access", "false")
        self._set("lock_configuration", "true")
        for name, files in tables.items():
            listed = ", ".join(_quoted(str(path.absolute())) for path in files)
            read_files = f"read_parquet([{listed}], union_by_name=true)"
            if name == "seconds":
                step = "cast(regexp_extract(filename, 'step-(\\d+)', 1) as integer)"
                read_files = (
                    f"(select {step} as step, * exclude (filename) from read_parquet([{listed}], filename=true))"
                )
            if files:
                self._view(name, read_files, files)
            else:
                self._base.register(name, (SECONDS_TABLE if name == "seconds" else TABLE).empty_table())
        self._base.execute(_PART)

    def _lacking(self, wanted: set[str], index: list[Path] | None) -> list[str]:
        """Return the parts of the run that are missing in these tables."""
        found = []
        if wanted & {"rollouts", "tokens", "rollout_index"}:
            with suppress(UserError):  # damaged metrics need no message here
                gone = missing_rollouts(self._folder)
                found += [] if gone is None else [f"{gone}: put copies of them back"]
        damaged = [] if index is None else left_out(self._folder, index)
        return [*found, *(f"rollout_index lacks {path}, which is damaged: put a copy of it back" for path in damaged)]

    def _view(self, name: str, read_files: str, files: list[Path]) -> None:
        try:
            self._base.execute(f"create view {name} as select * from {read_files}")
        except _library().Error as error:
            for path in files:
                open_file(path)  # raises for the damaged file
            raise UserError(f"the table {name} cannot be read: {one_line(error)}") from error

    def _lay_tokens(self, texts: bool) -> None:
        """Create the table of single tokens, with their texts if the query reads them."""
        words = list(self._vocabulary()) if texts else []
        if texts and not words:
            raise UserError("the tokenizer is missing, so tokens have no text: select them by id, token = 5")
        if words:
            self._base.register("vocabulary", pa.table({"id": pa.array(range(len(words)), pa.int32()), "text": words}))
        kinds = ("rollouts",) if self._alone else ("rollouts", "evals")
        every = " union all ".join(f"select *, kind = 'eval' as held_out from {name}" for name in kinds)
        laid = tokens_of(f"({every})", "vocabulary" if words else None, self._sampler)
        self._base.execute(f"create view tokens as {laid}")

    def _set(self, name: str, value: str) -> None:
        self._base.execute(f"set {name} = {value}")

    def _files(self, kind: str) -> list[Path]:
        """Return the tables of a kind."""
        steps = rollout_steps(self._folder, kind == EVALS)
        wanted = [step for step in steps if self._only is None or (step, kind == EVALS) in self._only]
        return [path for step in wanted if (path := kept_file(self._folder, kind, step)) is not None]


def names_text(sql: str) -> bool:
    """Return whether a query may read the texts of tokens."""
    return _TEXT.search(sql) is not None


def bounded(sql: str) -> None:
    """Raise UserError for a query too deep for DuckDB's parser, whose time for nested brackets is cubic and which
    cannot be interrupted.
    """
    try:
        sql.encode()
    except UnicodeEncodeError:
        raise UserError("a question must be text in UTF-8") from None
    depth = accumulate({"(": 1, ")": -1}.get(c, 0) for c in sql)
    if len(sql) > LONGEST or max(depth, default=0) > DEEPEST:
        raise UserError(f"a question may have at most {LONGEST:,} characters and {DEEPEST} nested brackets")


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return a table of rows with any columns."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names or ("step",)})


def explained(error: Exception, sql: str, tables: Sequence[str]) -> str:
    """Return DuckDB's message about a query, with help for the most common mistakes."""
    said = one_line(error).partition(" LINE 1:")[0]
    column = re.search(r'Referenced column "(.*?)" not found', said)
    field = re.search(r"Cannot extract field '(.*?)' from expression \"(?:\w+\.)?(\w+)\"", said)
    if table := re.search(r"Table with name (\S+) does not exist", said):
        return f"there is no table {table[1]}: there {'is' if len(tables) == 1 else 'are'} {', '.join(tables)}"
    if column and f'"{column[1]}"' in sql:
        return f"{said}; write texts in single quotes and names of columns in double quotes"
    if column:
        alike = re.findall(r'"(\w+)"', said.partition("Candidate bindings:")[2])
        listed = f"like it are {', '.join(alike)}; " if alike else ""
        return f'there is no column {column[1]!r}: {listed}"describe rollouts" lists those of a table'
    if field and field[2] == "parts":
        return f"the parts of a reward are a list: write part(parts, '{field[1]}')"
    if field and field[2] in _JSON:
        return f"{field[2]} is JSON as text: write {field[2]}->>'{field[1]}'"
    if "syntax error" in said and re.search(r'(?<!")\bgroup\b(?!")(?!\s+by\b)', sql, re.IGNORECASE):
        return f'{said}; as the name of a column write "group", in double quotes'
    return said


def _lists_tables(sql: str) -> bool:
    return sql.split()[:1] != [] and sql.split()[0].lower() == "show"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _library() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise UserError(f"questions in SQL need DuckDB: {install('view')}") from error
    return duckdb
