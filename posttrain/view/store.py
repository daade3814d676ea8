"""The rollouts of one run in memory, where questions about them are answered within a blink.

It decides what is kept: scalars of every rollout, each text once, and nothing of tokens. The database is locked from the
start: it reads no file, loads nothing, and keeps within a limit of memory. What is handed to it are tables.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from posttrain.record.schema import KINDS
from posttrain.types import Fate, InvalidKind, StopReason, UserError
from posttrain.view import older
from posttrain.view.marking import Marked, marked
from posttrain.view.naming import COLUMNS, PLAIN, named
from posttrain.view.source import File, Part, parts_of, rows, scalars

MEMORY, SPILLED = "320MB", "1GB"  # of the database; on disk, while a question needs more
TEXT_BYTES = 160 * 2**20  # texts that are held; more are read from their files when they are searched
SECONDS = 10.0  # of a question that a person wrote
MARKS = 8  # conditions on tokens whose answers are held

_HELD = ("prompt", "text", "columns", "notes")  # texts that a search looks into, or a filter
_ENUMS = {"kind": KINDS, "fate": tuple(Fate), "stop": tuple(StopReason), "invalid_kind": tuple(InvalidKind)}
_TABLES = f"""
create type fate_name as enum ({", ".join(f"'{v}'" for v in _ENUMS["fate"])});
create type kind_name as enum ({", ".join(f"'{v}'" for v in _ENUMS["kind"])});
create type stop_name as enum ({", ".join(f"'{v}'" for v in _ENUMS["stop"])});
create type invalid_kind_name as enum ({", ".join(f"'{v}'" for v in _ENUMS["invalid_kind"])});
create sequence places start 1;
create table strings (id integer, value varchar);
create table keys (gid integer, step integer, held_out boolean, kind kind_name, "group" varchar, side varchar,
                   task varchar, epoch integer);
create table base (row integer, step integer, held_out boolean, "index" integer, gid integer, member integer,
                   kind kind_name, fate fate_name, stop stop_name, invalid_kind invalid_kind_name, prompt integer,
                   text integer, {", ".join(f"{name} {kind}" for name, kind in PLAIN.items())});
create table marked (mark integer, row integer, place integer, times integer);
create table full_texts (row integer, prompt integer, text integer, columns integer, notes integer, longer boolean);
"""


class Store:
    """The rollouts of a run, as far as they have been read; `follow` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[Part, File] = {}  # that are in the database
        self.damaged: dict[Part, tuple[File, str]] = {}  # that are not, and why
        self.parts: list[str] = []  # names of the reward's
        self.success: float | None = None  # the reward from which on a reply is right; None: nobody said
        self.version = 0  # rises with every change
        self.searchable = False  # whether texts are held
        self.longer = False  # whether any of them is longer than its beginning, which is held anyway
        self.progress = 0.0  # share of the parts that are there have been read
        self.vocabulary: Callable[[], Sequence[str]] = list  # texts of tokens, by their ids
        self.marks = 0
        self._marking = threading.Lock()
        self._marks: dict[tuple[Any, ...], tuple[int, Marked]] = {}  # what conditions on tokens have found
        self._writing = threading.Lock()
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
        self._database.execute(_TABLES)
        self._database.execute("set lock_configuration = true")
        self.settle()

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask(self, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of a question of our own."""
        cursor = self._database.cursor()
        found = cursor.execute(sql, list(parameters))
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def table(self, sql: str) -> pa.Table:
        return self._database.cursor().sql(sql).to_arrow_table()

    def task_columns(self) -> list[str]:
        """Names of the tasks' own columns whose values are short enough to choose by."""
        found: dict[str, None] = {}
        for row in self.ask(
            "select value from strings semi join full_texts on strings.id = full_texts.columns limit 50"
        ):
            with suppress(ValueError, RecursionError):
                columns = json.loads(row["value"])
                found |= {n: None for n, v in columns.items() if isinstance(v, str | int | float) and len(str(v)) <= 40}
        return list(found)

    def value(self, sql: str) -> Any:
        found = self._database.cursor().execute(sql).fetchone()
        return found[0] if found else None

    def check_condition(self, condition: str) -> None:
        """Raise UserError unless a condition that a person wrote is one, in a single SELECT."""
        sql = f"select ({condition}\n) from rollouts limit 0"
        try:
            statements = self._database.extract_statements(sql)
        except duckdb.Error as error:
            raise UserError(said(error)) from None
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise UserError("a condition is part of one SELECT: reward < 0.5 and length > 100")
        try:
            with self.limited() as cursor:
                kinds = [str(column[1]).upper() for column in cursor.execute(sql).description]
            if kinds not in (["BOOLEAN"], ["BOOL"]):
                raise UserError("a condition is true or false, not a value: compare it, as in length > 40")
        except UserError as error:
            if "not found in FROM clause" not in str(error):
                raise
            known = ", ".join([*COLUMNS, *(name for name in self.parts if name not in COLUMNS)])
            first = str(error).split(" in FROM clause")[0].removeprefix("Binder Error: ")
            raise UserError(f"{first}; the columns are {known}") from None

    def expect(self, parts: Iterable[str]) -> None:
        """Know these parts of the reward before any rollout with them is read."""
        for name in parts:
            if name not in self.parts:
                self._database.execute(f"alter table base add column {named('part.' + name)} double")
                self.parts.append(name)  # only now: who asks meanwhile is told of the columns there are

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

    # -- tokens --------------------------------------------------------------------------------------------------------

    def mark(self, condition: str, where: str) -> tuple[int, Marked]:
        """Find rollouts with such a token in the steps that `where`, a condition on b.step and b.held_out, names.

        The number under which the table `marked` has them, and what was found.
        """
        sizes = self.ask(f"select step, held_out, sum(length) as n from base b where {where} group by all")
        meant = {Part(row["step"], row["held_out"]): int(row["n"] or 0) for row in sizes}
        stamps = tuple(sorted((part, self.files[part].stamp) for part in meant if part in self.files))
        key = (condition, stamps)
        with self._marking:  # a page asks for its rows, their histograms and their means at once
            if key not in self._marks:
                self._marks[key] = self._keep(marked(self.folder, condition, meant, self.vocabulary))
            return self._marks[key]

    def _keep(self, found: Marked) -> tuple[int, Marked]:
        """Put what was found into the table, and take out what was asked for long ago."""
        with self._writing:
            number = self.marks = self.marks + 1
            names = ("step", "held_out", "index", "place", "times")
            cursor = self._database.cursor()
            cursor.register(
                "incoming", pa.table({name: [row[n] for row in found.rows] for n, name in enumerate(names)})
            )
            cursor.execute(
                f"""insert into marked select {number}, b.row, i.place, i.times from incoming i join base b
                    on b."index" = i."index" and b.step = i.step and b.held_out = i.held_out"""
            )
            cursor.unregister("incoming")
            for old in list(self._marks)[: max(0, len(self._marks) - MARKS + 1)]:
                self._database.execute(f"delete from marked where mark = {self._marks.pop(old)[0]}")
        return number, found

    # -- reading -------------------------------------------------------------------------------------------------------

    def follow(self) -> bool:
        """Read what is new or has changed; whether anything was."""
        with self._writing:
            there = parts_of(self.folder)
            self.damaged = {part: (file, why) for part, (file, why) in self.damaged.items() if there.get(part) == file}
            gone = [part for part, file in self.files.items() if there.get(part) != file]
            known = {**self.files, **{part: file for part, (file, _) in self.damaged.items()}}
            new = {part: file for part, file in there.items() if known.get(part) != file}
            if not gone and not new:
                self.progress = 1.0
                return False
            for part in gone:
                self._forget(part)
            self._read(new, len(there))
            self.settle()
            self.version += 1
            self.progress = 1.0
            return True

    def _forget(self, part: Part) -> None:
        self._delete(part)
        del self.files[part]

    def _delete(self, part: Part) -> None:
        where = f"step = {part.step} and held_out = {part.held_out}"
        self._database.execute(f"delete from full_texts where row in (select row from base where {where})")
        self._database.execute(f"delete from base where {where}")
        self._database.execute(f"delete from keys where {where}")

    def _read(self, new: dict[Part, File], among: int) -> None:
        lines = {part: file for part, file in new.items() if file.lines}
        tables = {part: file for part, file in new.items() if not file.lines}
        read = 0
        for parts, table in chain(scalars(self.folder, tables), older.scalars(lines)):
            if isinstance(table, UserError):
                self.damaged |= {part: (new[part], str(table)) for part in parts}
                continue
            try:
                self._insert(table)
            except (duckdb.Error, pa.ArrowException, LookupError) as error:
                self.damaged |= {part: (new[part], f"{new[part].path} cannot be read: {said(error)}") for part in parts}
                for part in parts:
                    self._delete(part)
                continue
            self.files |= {part: new[part] for part in parts}
            read += len(parts)
            self.progress = min(0.99, read / max(1, among))

    @property
    def problem(self) -> str | None:
        """What could not be read, if anything."""
        told = [why for _, why in self.damaged.values()]
        return None if not told else told[0] if len(told) == 1 else f"{told[0]}; and {len(told) - 1} more files"

    def _insert(self, table: pa.Table) -> None:
        """Add rows of the index's columns; of the older form, with whole texts."""
        parts = _parts_of(table)
        self.expect(parts)
        table = table.drop_columns(["parts"])
        for name, values in parts.items():
            table = table.append_column(f"part.{name}", values)
        cursor = self._database.cursor()
        cursor.register("incoming", table)
        texts = [name for name in ("prompt_start", "text_start") if name in table.column_names]
        self._remember(cursor, "incoming", texts)
        cursor.execute(
            """insert into keys select (select coalesce(max(gid), 0) from keys) + row_number() over (), * from (
               select distinct step, held_out, try_cast(kind as kind_name), "group", coalesce(side, ''), task, epoch
               from incoming)"""
        )
        own = ", ".join(f"try_cast({name} as {kind})" for name, kind in PLAIN.items())
        enums = ", ".join(f"try_cast(i.{name} as {name}_name)" for name in ("kind", "fate", "stop", "invalid_kind"))
        extra = "".join(f", {named('part.' + name)}" for name in parts)
        names = f"""row, step, held_out, "index", gid, member, kind, fate, stop, invalid_kind, prompt, text,
                    {", ".join(PLAIN)}"""
        cursor.execute(
            f"""insert into base ({names}{extra})
                select nextval('places'), i.step, i.held_out, i."index", k.gid, i.member, {enums}, p.id, t.id, {own}{extra}
                from incoming i
                left join keys k on k.step = i.step and k.held_out = i.held_out and k."group" is not distinct from i."group"
                                 and k.side = coalesce(i.side, '') and k.task is not distinct from i.task
                                 and k.epoch is not distinct from i.epoch
                left join strings p on p.value = i.prompt_start left join strings t on t.value = i.text_start"""
        )
        cursor.unregister("incoming")

    @staticmethod
    def _remember(cursor: Any, table: str, names: Iterable[str]) -> None:
        every = " union all ".join(f"select {name} as value from {table}" for name in names)
        cursor.execute(
            f"""insert into strings select (select coalesce(max(id), 0) from strings) + row_number() over (), value
                from (select distinct value from ({every}) where value is not null) anti join strings using (value)"""
        )

    @property
    def limit(self) -> float:
        """The reward from which on a reply counts as right, less what rounding may take: the best one, if nobody said."""
        best = self.success if self.success is not None else self.value("select max(reward) from base")
        return (0.0 if best is None else float(best)) - 1e-6

    def settle(self) -> None:
        """Make what is said of groups and of tasks. Replies are told apart by their whole texts where these are held."""
        texts = " left join full_texts f on f.row = b.row and f.longer" if self.longer else ""
        reply = "coalesce(f.text, b.text)" if self.longer else "b.text"
        right = f"b.reward >= {self.limit!r}"
        self._database.execute(
            f"""create or replace table groups as
                select k.*, s.* exclude gid from keys k join (
                    select gid, count(*) as n, count(reward) as valid, count(*) filter ({right}) as right_n,
                           avg(reward) as mean, stddev_pop(reward) as sd, min(reward) as low, max(reward) as high,
                           count(distinct {reply}) as replies, min("index") as first, avg(length) as length
                    from base b{texts} group by gid) s using (gid) order by step, first"""
        )
        self._database.execute(
            """create or replace table tasks as
               select held_out, kind, task, side, count(*) as visits, arg_max(gid, step) as last_gid, max(step) as last_step,
                      arg_max(right_n / valid, step) as last_right, max(right_n / valid) as best_right,
                      arg_min(right_n / valid, step) as first_right
               from groups where valid > 0 group by all"""
        )
        self._views()

    def _views(self) -> None:
        """What a person asks: rollouts with their texts and the figures of their groups."""
        plain = ", ".join(f"b.{name}" for name in PLAIN)
        extra = "".join(f", b.{named('part.' + name)}" for name in self.parts)
        self._database.execute(
            f"""create or replace view rollouts as
                select b.row, b.step, b.held_out, b."index", b.kind, g."group", b.member, g.task, g.side, g.epoch, {plain},
                       b.fate,
                       b.stop, b.invalid_kind, coalesce(p.value, s.value) as prompt, coalesce(t.value, u.value) as text,
                       c.value as columns, n.value as notes, g.mean, g.sd, g.n, g.right_n{extra}
                from base b left join groups g using (gid) left join strings s on s.id = b.prompt
                left join strings u on u.id = b.text left join full_texts f on f.row = b.row
                left join strings p on p.id = f.prompt left join strings t on t.id = f.text
                left join strings c on c.id = f.columns left join strings n on n.id = f.notes"""
        )

    # -- texts ---------------------------------------------------------------------------------------------------------

    def read_texts(self) -> None:
        """Hold the texts too, if they are not too many: searches then read no file. Takes a second or two."""
        if sum(file.stamp[1] for file in self.files.values()) > 20 * TEXT_BYTES:
            return
        have = {Part(r["step"], r["held_out"]) for r in self.ask(
            "select distinct step, held_out from base semi join full_texts using (row)"
        )}  # fmt: skip
        missing = [part for part in self.files if part not in have]
        held = self.value("select coalesce(sum(strlen(value)), 0) from strings")
        for begin in range(0, len(missing), 40):
            held += self._hold(missing[begin : begin + 40])
            if held > TEXT_BYTES:
                self._database.execute("delete from full_texts")
                return
        self.longer = bool(self.value("select bool_or(longer) from full_texts"))
        self.searchable = True
        if self.longer:
            self.settle()
            self.version += 1

    def _hold(self, some: Sequence[Part]) -> int:
        """Hold the texts of these parts; bytes of the texts that are new."""
        lines = {part: self.files[part] for part in some if self.files[part].lines}
        tables = [older.texts(lines)] if lines else []
        for part in some:
            if part not in lines:
                tables.append(_placed(rows(part, self.files[part], names=["index", *_HELD]), part))
        with self._writing:
            cursor = self._database.cursor()
            cursor.register("incoming", pa.concat_tables(tables))
            before = self.value("select coalesce(max(id), 0) from strings")
            self._remember(cursor, "incoming", _HELD)
            steps = sorted(part.step for part in some)
            cursor.execute(
                f"""insert into full_texts
                    select b.row, p.id, t.id, c.id, n.id, coalesce(p.id <> b.prompt or t.id <> b.text, false)
                    from incoming i
                    join (select row, step, held_out, "index", prompt, text from base
                          where step between {steps[0]} and {steps[-1]}) b
                      on b.step = i.step and b.held_out = i.held_out and b."index" = i."index"
                    left join strings p on p.value = i.prompt left join strings t on t.value = i.text
                    left join strings c on c.value = i.columns left join strings n on n.value = i.notes"""
            )
            cursor.unregister("incoming")
        return int(self.value(f"select coalesce(sum(strlen(value)), 0) from strings where id > {before}"))


def _placed(table: pa.Table, part: Part) -> pa.Table:
    """With the columns that say of which part it is."""
    count = table.num_rows
    table = table.append_column("step", pa.array([part.step] * count, pa.int32()))
    return table.append_column("held_out", pa.array([part.held_out] * count, pa.bool_()))


def _parts_of(table: pa.Table) -> dict[str, pa.Array]:
    """Name of a part of the reward -> its values, null where a row has none of it."""
    found: dict[str, list[float | None]] = {}
    lists = table["parts"].combine_chunks()
    if lists.null_count == len(lists) or len(lists.flatten()) == 0:
        return {}
    import numpy as np

    flat, parents = lists.flatten(), np.asarray(pa.compute.list_parent_indices(lists))
    names, values = flat.field("name").dictionary_encode(), flat.field("value")
    numbers = values.to_numpy(zero_copy_only=False)
    codes = names.indices.to_numpy(zero_copy_only=False)
    for code, name in enumerate(names.dictionary.to_pylist()):
        column = np.full(len(lists), np.nan)
        column[parents[codes == code]] = numbers[codes == code]
        found[name] = pa.array(column, pa.float64(), from_pandas=True)
    return found


def said(error: BaseException) -> str:
    """The first line of what the database says, without what only its authors read."""
    text = str(error).strip().splitlines()
    return text[0][:300] if text else "the question cannot be answered"
