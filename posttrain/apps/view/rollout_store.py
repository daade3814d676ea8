"""The rollouts of one run in memory, for fast queries.

It keeps scalars of every rollout and each distinct text once, but no tokens. `rows` is an immutable snapshot; later
reads replace it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.apps.view.column_table import Places, RolloutColumns, merged, outside
from posttrain.apps.view.rollout_files import UNUSED, File, RolloutPart, parts_of, rows, scalars
from posttrain.apps.view.sql_text import TEXTS
from posttrain.core.types import UserError
from posttrain.runs.record.schema import INDEX, START

if TYPE_CHECKING:
    from posttrain.apps.view.sql_conditions import Conditions
    from posttrain.apps.view.token_conditions import Marked

TEXT_BYTES = 160 * 2**20  # most bytes of distinct texts in memory; beyond, searches see only beginnings
FILE_BYTES = 20 * TEXT_BYTES  # size of the run's files beyond which texts are not read at all
TOGETHER = 40  # files whose texts are read in one go
SHOWN_AFTER = 3.0  # seconds of reading after which the rows so far are shown

_TEXT = pa.dictionary(pa.int32(), pa.string())


def _kind(field: pa.Field) -> pa.DataType:
    return _TEXT if field.type == pa.string() else field.type


_KINDS = {field.name: _kind(field) for field in INDEX if field.name not in {*UNUSED, "parts"}}
_EMPTY = pa.Table.from_batches([], pa.schema(list(_KINDS.items())))
_NO_TEXTS = pa.schema([*((n, _KINDS[n]) for n in ("step", "held_out", "index")), *((n, _TEXT) for n in TEXTS)])


def expecting(parts: Iterable[str]) -> RolloutColumns:
    """Return columns without rows, for a run whose reward has these parts."""
    empty = pa.table({f"part.{name}": pa.array([], pa.float64()) for name in parts})
    return RolloutColumns(
        pa.table({name: _EMPTY[name] for name in _EMPTY.column_names} | {n: empty[n] for n in empty.column_names})
    )


class Store:
    """The rollouts of a run that have been read so far; `follow` reads new ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[RolloutPart, File] = {}  # files whose rollouts are in `rows`
        self.damaged: dict[RolloutPart, tuple[File, str]] = {}  # files that cannot be read, and the reason
        self.rows = RolloutColumns(_EMPTY)
        self.success: float | None = None  # the reward from which on a reply succeeds; None: unknown
        self.version = 0  # increases with every change
        self.vocabulary: Callable[[], Sequence[str]] = list  # texts of tokens, by their ids
        self._marking, self._opening = threading.Lock(), threading.Lock()
        self.closed = False  # whether the page is closed
        self.searchable = False  # whether reading of texts is complete
        self.unsearched: str | None = None  # texts whose beginnings alone are searched, and the reason
        self.progress = 0.0  # share of the parts on disk that have been read
        self._texts: pa.Table = pa.Table.from_batches([], _NO_TEXTS)
        self._too_many: str | None = None  # reason for holding no texts
        # part -> (file whose texts were read, the error if any)
        self._read_of: dict[RolloutPart, tuple[File, str | None]] = {}
        self._conditions: Conditions | None = None
        self._writing = threading.Lock()

    def meant(self, rows: RolloutColumns, condition: str) -> Places:
        """Return the rows for which an SQL condition holds. Raises UserError if it is not a valid condition."""
        return self._asking().places(rows, condition)

    def _asking(self) -> Conditions:
        with self._opening:
            if self._conditions is None:
                from posttrain.apps.view.sql_conditions import Conditions

                self._conditions = Conditions()
            return self._conditions

    def close(self) -> None:
        """Stop the process that evaluates conditions."""
        if self._conditions is not None:
            self._conditions.close()

    def marked(self, rows: RolloutColumns, condition: str, sizes: Mapping[RolloutPart, int]) -> Marked:
        """Return the rows that have a token for which an SQL condition holds. `sizes`: part -> number of its tokens."""
        stamps = tuple(sorted((part, self.files[part].stamp) for part in sizes if part in self.files))
        with self._marking:  # a page requests rows, histograms and means at once
            found: Marked = rows.remembered(
                ("tokens", condition, stamps),
                lambda: self._asking().marked(self.folder, condition, sizes, self.vocabulary),
            )
        return found

    @property
    def problem(self) -> str | None:
        """The read errors, if any."""
        told = [why for _, why in self.damaged.values()]
        return None if not told else told[0] if len(told) == 1 else f"{told[0]}; and {len(told) - 1} more files"

    # -- scalars -------------------------------------------------------------------------------------------------------

    def follow(self) -> bool:
        """Read new and changed files; return whether there were any."""
        with self._writing:
            there = parts_of(self.folder)
            self.damaged = {part: (file, why) for part, (file, why) in self.damaged.items() if there.get(part) == file}
            gone = [part for part, file in self.files.items() if there.get(part) != file]
            known = {**self.files, **{part: file for part, (file, _) in self.damaged.items()}}
            new = {part: file for part, file in there.items() if known.get(part) != file}
            if not gone and not new:
                self.progress = 1.0
                return False
            if gone:
                self._forget(gone)
            self._read(new, len(there))
            self.version += 1
            self.progress = 1.0
            return True

    def settle(self) -> None:
        """Recompute the rows with the current success threshold."""
        self.rows = RolloutColumns(self.rows.table, self.success, self._texts)

    def _forget(self, gone: Iterable[RolloutPart]) -> None:
        self.rows = RolloutColumns(outside(self.rows.table, gone))
        self._texts = outside(self._texts, gone)
        for part in gone:
            del self.files[part]
            self._read_of.pop(part, None)

    def _read(self, new: dict[RolloutPart, File], among: int) -> None:
        tables, read, shown = [self.rows.table], 0, time.monotonic()
        for parts, table in scalars(self.folder, new):
            if self.closed:
                break
            why = str(table) if isinstance(table, UserError) else None
            if not isinstance(table, UserError):
                try:
                    tables.append(_held(table))
                except (pa.ArrowException, LookupError) as error:
                    why = f"{new[parts[0]].path} cannot be read: {' '.join(str(error).split())[:200]}"
            if why is not None:
                self.damaged |= {part: (new[part], why) for part in parts}
                continue
            self.files |= {part: new[part] for part in parts}
            read += len(parts)
            self.progress = min(0.99, read / max(1, among))
            if time.monotonic() - shown > SHOWN_AFTER:
                tables = [merged(tables)]
                self.rows = RolloutColumns(tables[0], self.success, self._texts)
                self.version += 1
                shown = time.monotonic()
        self.rows = RolloutColumns(merged(tables), self.success, self._texts)
        del tables
        pa.default_memory_pool().release_unused()  # buffers of the pieces take 100 MB

    # -- texts ---------------------------------------------------------------------------------------------------------

    def read_texts(self) -> None:
        """Read whole texts into memory, if they fit: searches then see all of them without reading files."""
        if self._too_many is None and sum(file.stamp[1] for file in self.files.values()) > FILE_BYTES:
            self._too_many = f"the run's files have more than {FILE_BYTES / 2**30:.1f} GiB"
        if self._too_many is not None:
            self._tell(self._too_many)
            return
        missing = [part for part, file in self.files.items() if self._read_of.get(part, (None,))[0] != file]
        long = self._long()
        for begin in range(0, len(missing), TOGETHER):
            if self.closed:
                return
            tables = [self._texts]
            for part in missing[begin : begin + TOGETHER]:
                try:
                    tables.append(self._texts_of(part, part in long))
                    self._read_of[part] = self.files[part], None
                except (UserError, OSError, pa.ArrowException) as error:
                    self._read_of[part] = self.files[part], str(error)
            self._texts = merged(tables)
            if sum(self._texts[name].chunk(0).dictionary.nbytes for name in TEXTS if len(self._texts)) > TEXT_BYTES:
                self._texts, self._read_of = pa.Table.from_batches([], _NO_TEXTS), {}
                self._too_many = f"its texts have more than {TEXT_BYTES >> 20} MiB"
                self._tell(self._too_many)
                self.rows = self.rows.with_texts(self._texts)
                return
        if missing:
            self.rows = self.rows.with_texts(self._texts)
            self.version += self.rows.long  # whole texts can change the number of distinct replies
        failed = sorted(part for part, (_, why) in self._read_of.items() if why is not None and part in long)
        if failed:
            steps = ", ".join(part.name for part in failed[:8]) + (" …" if len(failed) > 8 else "")
            self._tell(self._read_of[failed[0]][1] or "", f"of step{'s' if len(failed) > 1 else ''} {steps}")
        else:
            self.unsearched, self.searchable = None, True

    def _tell(self, why: str, which: str = "of each text") -> None:
        self.unsearched = f"search sees only the first {START} characters {which}: {why}"
        self.searchable = True

    def _long(self) -> set[RolloutPart]:
        """Return the parts with texts longer than the beginnings that are in `rows` anyway."""
        rows, found = self.rows, np.zeros(len(self.rows), dtype=bool)
        for name in ("prompt_start", "text_start"):
            reaches = pc.greater_equal(pc.utf8_length(rows.values(name)), START).to_numpy(zero_copy_only=False)
            found |= np.append(reaches, False)[rows.codes(name)]  # the last one is that of -1
        return {RolloutPart(int(key >> 1), bool(key & 1)) for key in np.unique(rows.key[found] >> 32).tolist()}

    def _texts_of(self, part: RolloutPart, long: bool) -> pa.Table:
        """Return the texts of a part; if none is long, only `columns` and `notes`."""
        table = rows(self.files[part], names=["index", *(TEXTS if long else ("columns", "notes"))])
        count = table.num_rows
        columns = {name: _encoded(table[name]) for name in TEXTS if name in table.column_names}
        places = {"step": pa.array([part.step] * count, pa.int32()), "held_out": pa.array([part.held_out] * count)}
        return pa.table({**places, "index": table["index"].cast(pa.int32()), **columns})


def _held(table: pa.Table) -> pa.Table:
    """Convert a table of the index's columns to the form in memory.

    Raises ArrowException or LookupError for other tables.
    """
    columns = {}
    for name, kind in _KINDS.items():
        columns[name] = _encoded(table[name]) if kind == _TEXT else table[name].cast(kind)
    if table["step"].null_count or table["index"].null_count or (pc.min(table["index"]).as_py() or 0) < 0:
        raise LookupError("rows without a place")
    return pa.table(columns | {f"part.{name}": values for name, values in _parts_of(table).items()})


def _encoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column.cast(pa.string()))


def _parts_of(table: pa.Table) -> dict[str, pa.Array]:
    """Return part of the reward -> its values, null where a row lacks it."""
    found: dict[str, pa.Array] = {}
    lists = table["parts"].combine_chunks()
    if lists.null_count == len(lists) or len(lists.flatten()) == 0:
        return {}
    flat, parents = lists.flatten(), np.asarray(pc.list_parent_indices(lists))
    names, values = flat.field("name").dictionary_encode(), flat.field("value")
    numbers = values.to_numpy(zero_copy_only=False)
    codes = names.indices.to_numpy(zero_copy_only=False)
    for code, name in enumerate(names.dictionary.to_pylist()):
        column = np.full(len(lists), np.nan)
        column[parents[codes == code]] = numbers[codes == code]
        found[name] = pa.array(column, pa.float64(), from_pandas=True)
    return found
