"""Passages: rows are parsed strictly, and written to one file, which is memory-mapped.

A passage is an id and its contents, in the form of Search-R1's corpora: the title in quotes on its own line, then the
text.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posttrain.core import user_files
from posttrain.core.messages import clip, short
from posttrain.core.types import UserError
from posttrain.data.row_files import TEXTS, Row, kind_of, parse_row, read_texts
from posttrain.data.rows import load_rows, no_column

FILE, OFFSETS = "passages.jsonl", "passages.offsets.npy"
LONGEST_CONTENTS = 100_000  # most characters of a passage: longer ones could not be shown completely
NAMES = ("id", "title", "text", "contents")
"""Columns that are read."""

_as_json = json.JSONEncoder(ensure_ascii=False).encode


class Passage(NamedTuple):
    id: str
    contents: str  # "Title"\ntext

    @property
    def title(self) -> str:
        """The title without its quotes."""
        return self.contents.partition("\n")[0].removeprefix('"').removesuffix('"')

    @property
    def text(self) -> str:
        return self.contents.partition("\n")[2]


class PassageSource(NamedTuple):
    """The source of rows: see `posttrain.data.rows.load_rows`."""

    rows: str | Path | Iterable[Mapping[str, Any]]
    split: str | None = None
    limit: int | None = None
    fields: Mapping[str, str] = {}  # name of a column here -> its name in the rows

    @property
    def file(self) -> Path | None:
        """The source's file, if it is one."""
        path = Path(self.rows).expanduser() if isinstance(self.rows, str | Path) else None
        return path if path is not None and path.is_file() else None


def read_passages(source: PassageSource) -> Iterator[Passage]:
    """Yield the passages of rows {"title", "text"} or {"contents"}, each with its "id" or its number, from 0.

    Raises UserError with file, row and column for an invalid one.
    """
    if wrong := sorted(source.fields.keys() - set(NAMES)):
        raise UserError(f"--fields.{wrong[0]}: passages have {', '.join(NAMES)}")
    for number, (row, where) in enumerate(_rows(source)):
        yield _passage(row, where, number, source.fields)


def taken(source: PassageSource) -> str:
    """Describe the columns in use, for the first row, and the unused ones."""
    row, _ = next(_rows(source), ({}, ""))
    named = {name: source.fields.get(name, name) for name in NAMES}
    whole = named["contents"] in row and "text" not in source.fields
    used = [name for name in (("id", "contents") if whole else ("id", "title", "text")) if named[name] in row]
    said = ", ".join(name if named[name] == name else f"{name} from {named[name]!r}" for name in used)
    left = [str(column) for column in row if column not in {named[name] for name in used}]
    told = f"; not read: {', '.join(map(clip, left))}" if left else ""
    if whole and named["title"] in left:
        told += f" (the first line of {named['contents']!r} is the title)"
    return (said or "none") + told


def _rows(source: PassageSource) -> Iterator[tuple[Row, str]]:
    """Yield each row and its place. Files of text are read once, without a copy in the cache."""
    file = source.file
    if file is not None and kind_of(file)[1] in TEXTS and source.split is None:
        place = TEXTS[kind_of(file)[1]][1]
        for count, (number, text) in enumerate(read_texts(file)):
            if count == source.limit:
                return
            yield parse_row(text, file.name, place, number), f"{file.name}{place}{number}"
        return
    rows = load_rows(source.rows, source.split, source.limit)
    for count, row in enumerate(rows):
        yield row, rows.where(count)


def _passage(row: Row, where: str, number: int, fields: Mapping[str, str]) -> Passage:
    named = {name: fields.get(name, name) for name in NAMES}
    if missing := next((own for own in fields.values() if own not in row), None):
        raise UserError(f"{where}: {no_column(missing, row)}")
    id = row.get(named["id"], number)
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise UserError(f"{where}: column {named['id']} is {short(id)}; it must be text or a whole number")
    if named["contents"] in row and "text" not in fields:
        contents = _text(row, named["contents"], where)
    elif named["text"] in row:
        title = " ".join(_text(row, named["title"], where, needed=False).split())
        contents = f'"{title}"\n{_text(row, named["text"], where)}'
    else:
        raise UserError(f"{where}: {no_column('text', row)}; name it with --fields.text COLUMN")
    if len(contents) > LONGEST_CONTENTS:
        raise UserError(
            f"{where}: the passage has {len(contents):,} characters, of at most {LONGEST_CONTENTS:,}: split it"
        )
    return Passage(_whole(str(id), named["id"], where), contents)


def _text(row: Row, column: str, where: str, needed: bool = True) -> str:
    value = row.get(column)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column} is {short(value)}; it must be text")
    if needed and not value.strip():
        raise UserError(f"{where}: column {column} is empty; leave the row out")
    return _whole(value, column, where)


def _whole(text: str, column: str, where: str) -> str:
    """Return the text, or raise UserError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"half a character ({text[error.start]!a}, a lone surrogate)"
        raise UserError(f"{where}: column {column} has {what} at {error.start + 1}; write the file anew") from None
    return text


# -- on disk -----------------------------------------------------------------------------------------------------------


def write_passages(source: PassageSource, folder: Path, see: Callable[[Passage], None]) -> tuple[int, str]:
    """Write passages into a folder and pass each to `see`; return their number and a digest of all.

    Raises UserError for an invalid row, for two passages with the same id, and if there are no rows.
    """
    content = hashlib.blake2b(digest_size=16)
    ends, marks = [0], []
    with (folder / FILE).open("wb") as file:
        for passage in read_passages(source):
            line = _as_json({"id": passage.id, "contents": passage.contents}).encode() + b"\n"
            content.update(line)
            file.write(line)
            ends.append(ends[-1] + len(line))
            marks.append(hash(passage.id))
            see(passage)
    if not marks:
        raise UserError(f"{_name(source)} has no rows")
    known, counts = np.unique(np.array(marks, dtype=np.int64), return_counts=True)
    if len(known) < len(marks):
        _refuse_twice(source, set(known[counts > 1].tolist()))
    np.save(folder / OFFSETS, np.array(ends, dtype=np.int64))
    return len(marks), content.hexdigest()


def _refuse_twice(source: PassageSource, marks: set[int]) -> None:
    """Raise UserError with two rows of the same id, if rows whose ids have these hashes include such."""
    first: dict[str, str] = {}
    for number, (row, where) in enumerate(_rows(source)):
        id = _passage(row, where, number, source.fields).id
        if hash(id) in marks:
            if id in first:
                raise UserError(f"{where}: the id {clip(id)!r} is that of {first[id]}: each passage has one of its own")
            first[id] = where


def _name(source: PassageSource) -> str:
    return str(source.rows) if isinstance(source.rows, str | Path) else "the list of passages"


class Passages:
    """The memory-mapped passages of a folder."""

    def __init__(self, folder: Path, count: int) -> None:
        """Map the files. Raises ValueError or OSError for damaged files."""
        self._ends = np.load(user_files.readable(folder / OFFSETS), mmap_mode="r", allow_pickle=False)
        with user_files.opened(folder / FILE) as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._ends.shape != (count + 1,) or self._ends.dtype != np.int64 or self._ends[-1] != len(self._lines):
            raise ValueError(f"{OFFSETS} does not fit {FILE}")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, place: int) -> Passage:
        """Return a passage. Raises ValueError for a damaged line."""
        start, end = int(self._ends[place]), int(self._ends[place + 1])
        row = json.loads(self._lines[start:end])
        return Passage(str(row["id"]), str(row["contents"]))

    def __iter__(self) -> Iterator[Passage]:
        return map(self.__getitem__, range(len(self)))
