"""Loads rows from files, folders, datasets and lists: plain dicts, each with its place of origin.

Decides which sources are supported. A large source is read lazily: it is converted once to a memory-mapped Arrow file
(see `arrow_store.py`). Every error is a UserError of one line with the place, counted from 1: `train.jsonl:17`,
`train.parquet row 17`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.core import user_files
from posttrain.core.extras import install
from posttrain.core.messages import clip, one_line
from posttrain.core.several_files import as_mixture, listed
from posttrain.core.types import UserError
from posttrain.data.arrow_store import Table, digest, fingerprint, keep_table
from posttrain.data.row_files import (
    READ,
    TEXTS,
    Row,
    Text,
    check_row,
    kind_of,
    parse_row,
    read_parquet,
    read_texts,
    read_value,
    rows_of,
)
from posttrain.system.hub import HubName, as_far_as_reached, name_in_address, problem
from posttrain.system.user_code import describe_error

if TYPE_CHECKING:
    import pyarrow as pa

SMALL = 4 << 20  # bytes: files up to this size are read completely each time
FEW = 10_000  # rows: larger files with up to this many rows are read completely as well
_HUB = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?:@(\w[\w./-]*))?(?::(.+))?")
"""A dataset of the hub, with revision or configuration: openai/gsm8k:main, org/name@v1.0."""
BLOCK = 1000  # rows per batch when iterating over all; larger batches are slower, as they exceed the caches


class RowFile(Protocol):
    """The rows of one file, dataset or list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...
    def where(self, index: int) -> str: ...
    def blocks(self) -> Iterator[list[Row]]: ...  # all rows in order, faster than one by one


@dataclass(frozen=True)
class Listed:
    """Rows in memory."""

    rows: Sequence[Row]
    prefix: str  # text before a row's number: "train.jsonl:"
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Row:
        return self.rows[index]

    def where(self, index: int) -> str:
        return f"{self.prefix}{self.numbers[index]}"

    def blocks(self) -> Iterator[list[Row]]:
        for first in range(0, len(self), BLOCK):
            yield list(self.rows[first : first + BLOCK])


@dataclass(frozen=True)
class Columns:
    """Rows of an Arrow table with the columns of their Parquet file or dataset."""

    table: Table
    prefix: str

    def __len__(self) -> int:
        count: int = self.table.whole.num_rows
        return count

    def __getitem__(self, index: int, /) -> Row:
        whole = self.table.whole
        pairs = zip(whole.column_names, whole.columns, strict=True)
        return {name: read_value(column[index], name, self.where(index)) for name, column in pairs}

    def where(self, index: int) -> str:
        return f"{self.prefix}{index + 1}"

    def blocks(self) -> Iterator[list[Row]]:
        first = 0
        for batch in self.table.batches(BLOCK):
            yield rows_of(batch, self.prefix, first)
            first += batch.num_rows


@dataclass(frozen=True)
class JsonRows:
    """Rows of an Arrow table with the JSON text of each row, exactly as in its file."""

    table: Table
    file: str
    place: str  # separator of the file's name and a row's number

    def __len__(self) -> int:
        count: int = self.table.whole.num_rows
        return count

    def __getitem__(self, index: int, /) -> Row:
        text, number = (self.table.whole[name][index].as_py() for name in ("text", "number"))
        return parse_row(text, self.file, self.place, number)

    def where(self, index: int) -> str:
        return f"{self.file}{self.place}{self.table.whole['number'][index].as_py()}"

    def blocks(self) -> Iterator[list[Row]]:
        for batch in self.table.batches(BLOCK):
            texts, numbers = batch["text"].to_pylist(), batch["number"].to_pylist()
            yield [parse_row(t, self.file, self.place, n) for t, n in zip(texts, numbers, strict=True)]


class Rows:
    """Rows with the place of each: `rows[16]`, `rows.where(16) == "train.jsonl:17"`."""

    def __init__(self, parts: Sequence[RowFile], key: str | None = None) -> None:
        """Concatenate parts. `key`: a name for exactly these rows, under which results are cached; None: no caching."""
        self.key = key
        self._parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        part, at = self._find(index)
        return part[at]

    def __iter__(self) -> Iterator[Row]:
        return (row for block in self.blocks() for row in block)

    def where(self, index: int) -> str:
        part, at = self._find(index)
        return part.where(at)

    def blocks(self) -> Iterator[list[Row]]:
        """Yield all rows in order, a thousand at a time."""
        return (block for part in self._parts for block in part.blocks())

    def _find(self, index: int) -> tuple[RowFile, int]:
        index = range(len(self))[index]
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def load_rows(
    source: str | Path | Iterable[Mapping[str, Any]], split: str | None = None, limit: int | None = None
) -> Rows:
    """Return the rows of a source.

    source: a file (.jsonl, .json, .csv, .tsv, each also with .gz; .parquet), a folder of such files, a folder written
        by `datasets.Dataset.save_to_disk`, the name of a dataset on the hub ("owner/name", "owner/name:configuration"),
        a `datasets.Dataset`, or rows in memory. A name is looked up on the hub only if there is no such file or folder. A
        .json file is a list of objects, or an object with one list inside.
    split: needed where a folder or a hub dataset has several. In a folder of files, the split of
        `test-00000-of-00002.parquet` and of `test.jsonl` is "test".
    limit: at most this many rows, from the first on.

    Raises UserError, in one line: source or split not found, a malformed file, no row at all, a library missing. A line
    of a large .jsonl file that is not JSON is found when it is read, which `to_tasks` does.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; it must be at least 1, or left out to read every row")
    if not isinstance(source, str | Path):
        name, rows = "the list of rows", _in_memory(source, split, limit)
    elif (path := _place(source)).is_file():
        if split is not None:
            raise UserError(f"{source} is a single file and has no split {split!r}: leave split out")
        name, rows = str(source), _of_files([path], limit)
    elif path.is_dir():
        name, rows = str(source), _in_folder(path, split, limit)
    elif os.path.lexists(path):
        kind = "a link that leads to no file" if path.is_symlink() else "a pipe or a device, which cannot be read twice"
        raise UserError(f"{source} is {kind}: give a file of rows, such as train.jsonl")
    else:
        name, rows = str(source), _on_hub(source, path, split, limit)
    if not len(rows):
        raise UserError(f"{name} has no rows")
    return rows


# From a source to rows


def _place(source: str | Path) -> Path:
    """Return the path of a source. Raises UserError for an invalid one."""
    try:
        path = Path(source).expanduser()
        path.is_file()
    except (OSError, RuntimeError) as error:  # too long, or the home of an unknown user
        raise UserError(f"{clip(str(source))} is not a source of rows: {clip(one_line(error))}") from error
    return path


def _in_memory(source: Iterable[Mapping[str, Any]], split: str | None, limit: int | None) -> Rows:
    if hasattr(source, "with_format"):
        return _of_dataset(source, split, "dataset", limit)
    if isinstance(source, Mapping):
        raise UserError(
            f"expected a list of rows, not a mapping; pass one of its values: {', '.join(map(str, source))}"
        )
    if split is not None:
        raise UserError(f"rows in memory have no split {split!r}: leave split out")
    rows: list[Row] = []
    try:
        for row in islice(source, limit):
            rows.append(check_row(row, f"row {len(rows) + 1}"))
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a generator is the user's code and may fail in any way, or call exit()
        raise UserError(f"the row generator failed after {len(rows)}: {describe_error(error, None)}") from error
    return Rows([Listed(rows, "row ", range(1, len(rows) + 1))])


def _in_folder(folder: Path, split: str | None, limit: int | None) -> Rows:
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        datasets = _library("datasets")
        try:
            for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):  # one folder per split
                user_files.readable_folder(place)
            saved = datasets.load_from_disk(str(folder))
        except Exception as error:  # a damaged folder raises many types of errors
            raise UserError(f"{folder} cannot be read as a saved dataset: {one_line(error)}") from error
        return _of_dataset(saved, split, folder.name, limit)
    if (folder / "run.json").is_file() and (folder / "rollouts").is_dir():
        folder = folder / "rollouts"  # of a run: its rollouts are valid rows
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        stem, kind = kind_of(path)
        if kind in READ and path.is_file():
            splits.setdefault(re.sub(r"-\d{5}-of-\d{5}$", "", stem), []).append(path)
    if not splits:
        raise UserError(f"{folder} holds no data file; it may hold {', '.join(READ)}, or a saved dataset")
    if split is None and all(re.fullmatch(r"step-\d{6}", name) for name in splits):
        return _of_files([path for name in sorted(splits) for path in splits[name]], limit)
    return _of_files(splits[_choose(splits, split, str(folder))], limit)


def find_rows(source: str) -> None:
    """Raise UserError for a source that is neither on this machine nor the name of a dataset of the hub."""
    path = _place(source)
    if not os.path.lexists(path):
        _hub_dataset(source, path)


def _hub_dataset(source: str | Path, path: Path) -> tuple[HubName, str | None, str]:
    """Return (dataset, configuration, the message that there is no such file). Raises UserError for other names."""
    local = isinstance(source, Path) or kind_of(path)[1] in READ or not _HUB.fullmatch(source)
    if of_hub := name_in_address(str(source)):
        raise UserError(f"{source}: write a dataset of the hub as its name alone, {of_hub}")
    if "://" in str(source):
        raise UserError(f"{source} is an address, and rows are read from this machine: download the file first")
    if len(files := listed(str(source))) > 1:
        raise UserError(as_mixture(files))
    missing = f"there is no file {source}"
    if not path.parent.is_dir():
        missing = f"there is no folder {path.parent}"
    else:
        missing += _suggestion(path.name, (neighbour.name for neighbour in path.parent.iterdir()))
    found = _HUB.fullmatch(str(source))
    if local or found is None:
        raise UserError(missing)
    return HubName(found[1], found[2]), found[3], missing


def _on_hub(source: str | Path, path: Path, split: str | None, limit: int | None) -> Rows:
    named, configuration, missing = _hub_dataset(source, path)
    datasets = _library("datasets")
    with as_far_as_reached(datasets.config) as unreached:
        try:
            rows = datasets.load_dataset(named.name, configuration, split=split, revision=named.revision)
        except Exception as error:  # many types: for the network, the name, the configuration, the split
            if unreached:
                why = f"{unreached}, and no dataset of that name was downloaded before: give a file of rows"
                raise UserError(f"{missing}, and {why}") from None
            raise UserError(f"{missing}, and {problem(error, named, 'dataset')}") from error
    return _of_dataset(rows, None, str(named), limit)


def _of_dataset(found: Any, split: str | None, name: str, limit: int | None) -> Rows:
    """Return the rows of a `datasets.Dataset`, or of a split of a `DatasetDict`. Both are in Arrow already."""
    if isinstance(found, Mapping):
        split = _choose(found, split, name)
        found, name = found[split], f"{name} {split}"
    elif split is not None:
        raise UserError(f"{name} is a dataset without splits: leave split {split!r} out")
    table: pa.Table = found.with_format("arrow")[:][:limit]
    return Rows([Columns(Table(table), f"{name} row ")], digest("dataset", found._fingerprint, limit))


def _of_files(paths: Sequence[Path], limit: int | None) -> Rows:
    """Return the rows of files, in the order of the files."""
    parts: list[RowFile] = []
    keys: list[str] = []
    for path in paths:
        kind = kind_of(path)[1]
        if kind not in READ:
            raise UserError(f"{path.name}: a file of tasks ends in {', '.join(READ)}; rename or convert it")
        rest = None if limit is None else limit - sum(map(len, parts))
        if rest == 0:
            break
        try:
            keys.append(digest("rows", fingerprint(path), rest))
            large = path.stat().st_size > SMALL and (rest is None or rest > FEW)
        except OSError as error:
            raise UserError(f"{path.name} cannot be read: {one_line(error)}") from error
        parts.append((_of_texts if kind in TEXTS else _of_parquet)(path, rest, keys[-1] if large else None))
    return Rows(parts, digest(*keys))


def _of_texts(path: Path, limit: int | None, key: str | None) -> RowFile:
    """Return the rows of a text file: cached under `key`, or in memory."""
    place = TEXTS[kind_of(path)[1]][1]
    if key is None:
        texts = list(islice(read_texts(path), limit))
        rows = [parse_row(text, path.name, place, number) for number, text in texts]
        return Listed(rows, path.name + place, [number for number, _ in texts])
    import pyarrow as pa

    schema = pa.schema({"number": pa.int64(), "text": pa.binary()})
    table = keep_table(key, schema, lambda: _batches(islice(read_texts(path), limit), schema))
    return JsonRows(table, path.name, place)


def _batches(texts: Iterator[Text], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    while held := list(islice(texts, BLOCK)):
        numbers, rows = zip(*held, strict=True)
        columns = [pa.array(numbers, pa.int64()), pa.array(rows, pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _of_parquet(path: Path, limit: int | None, key: str | None) -> RowFile:
    schema, batches = read_parquet(path, BLOCK)
    if key is None:
        rows: list[Row] = []
        for batch in _first(batches(), limit):
            rows += rows_of(batch, f"{path.name} row ", len(rows))
        return Listed(rows, f"{path.name} row ", range(1, len(rows) + 1))
    return Columns(keep_table(key, schema, lambda: _first(batches(), limit)), f"{path.name} row ")


def _first(batches: Iterable[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if limit is not None and batch.num_rows >= limit:
            yield batch[:limit]
            return
        yield batch
        limit = None if limit is None else limit - batch.num_rows


def _choose(splits: Iterable[str], split: str | None, name: str) -> str:
    names = list(splits)
    if split is None and len(names) == 1:
        return names[0]
    if split in names:
        return split
    problem = "several splits" if split is None else f"no split {split!r}{_suggestion(split, names)}"
    raise UserError(f"{name} has {problem}; choose a split of: {', '.join(names)}")


# Words for errors


def _library(name: str) -> Any:
    """Import a library of the optional extra `datasets`, when a source needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"this source needs {package}: {install('datasets')}") from error


def no_column(column: str, row: Row) -> str:
    above, dot, _ = column.rpartition(".")
    inner = _inside(row, above) if dot else None
    if isinstance(inner, Mapping) and inner:
        return f"no {column!r}; {above} holds: {quoted_names(inner)}"
    return f"no column {column!r}{_suggestion(column, row)}; the columns are: {quoted_names(row)}"


def value_in(row: Row, column: str) -> Any:
    """Return the value of a column, or at a path in one ("reward_model.ground_truth"). Raises UserError if it is
    missing.
    """
    found = row[column] if column in row else _inside(row, column)
    if found is None and column not in row:
        raise UserError(no_column(column, row))
    return found


def _inside(row: Row, place: str) -> Any:
    found: Any = row
    for part in place.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def quoted_names(columns: Iterable[str]) -> str:
    """Return column names for a message, quoted where a command line needs it."""
    return ", ".join(name if re.fullmatch(r"[\w.:@%+/-]+", name) else repr(name) for name in columns)


def _suggestion(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
