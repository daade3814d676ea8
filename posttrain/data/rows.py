"""From files, folders and datasets to rows: plain dicts, each with the place it came from.

Decides which sources and formats are read. Whatever is wrong is a UserError of one line that names the place:
`train.jsonl:17`, `train.parquet row 17`, counted from 1.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

from posttrain.types import UserError

Row = dict[str, Any]
Place = tuple[str, int]  # what stands before the number, and the number: ("train.jsonl:", 17)


class Rows(Sequence[Row]):
    """Rows as they were read, each with the place it came from: `rows[16]`, `rows.where(16) == "train.jsonl:17"`."""

    def __init__(self, placed: Iterable[tuple[Place, Row]]) -> None:
        pairs = list(placed)
        self._places = [place for place, _ in pairs]
        self._rows = [row for _, row in pairs]

    def where(self, index: int) -> str:
        prefix, number = self._places[index]
        return f"{prefix}{number}"

    def placed(self) -> Iterator[tuple[Place, Row]]:
        return zip(self._places, self._rows, strict=True)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return Rows(zip(self._places[index], self._rows[index], strict=True))
        return self._rows[index]


def load_rows(
    source: str | Path | Iterable[Mapping[str, Any]], split: str | None = None, limit: int | None = None
) -> Rows:
    """Read rows from wherever they are.

    source: a file (.jsonl, .json, .csv, .tsv, each also with .gz; .parquet), a folder of such files, a folder written
        by `datasets.Dataset.save_to_disk`, the name of a dataset on the hub ("owner/name", "owner/name:configuration"),
        or rows in memory. A name is looked up on the hub only if there is no such file or folder. A .json file is a
        list of objects, or an object with one list inside.
    split: needed where a folder or a hub dataset has several. In a folder of files, the split of
        `test-00000-of-00002.parquet` and of `test.jsonl` is "test".
    limit: read the first so many rows only.

    Raises UserError, in one line: source or split not found, a malformed row, no row at all, a library missing.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; it must be at least 1, or left out to read every row")
    if not isinstance(source, str | Path):
        name, placed = "the list of rows", _in_memory(source, split)
    elif (path := Path(source).expanduser()).is_file():
        if split is not None:
            raise UserError(f"{source} is a single file and has no split {split!r}; leave split out")
        name, placed = path.name, _read(path)
    elif path.is_dir():
        name, placed = str(source), _in_folder(path, split)
    else:
        name, placed = str(source), _on_hub(source, path, split)
    rows = Rows(islice(placed, limit))
    if not rows:
        raise UserError(f"{name} has no rows")
    return rows


# From a source to rows


def _in_memory(source: Iterable[Mapping[str, Any]], split: str | None) -> Iterator[tuple[Place, Row]]:
    if isinstance(source, Mapping):
        raise UserError(
            f"expected a list of rows, not a mapping; pass one of its values: {', '.join(map(str, source))}"
        )
    if split is not None:
        raise UserError(f"rows in memory have no split {split!r}; leave split out")
    if isinstance(source, Rows):
        return source.placed()
    return ((("row ", number), _row(row, f"row {number}")) for number, row in enumerate(source, 1))


def _in_folder(folder: Path, split: str | None) -> Iterator[tuple[Place, Row]]:
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        datasets = _library("datasets")
        try:
            saved = datasets.load_from_disk(str(folder))
        except Exception as error:  # a damaged folder fails in many ways
            raise UserError(f"{folder} cannot be read as a saved dataset: {one_line(error)}") from error
        return _placed(saved, split, folder.name)
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        stem, kind = _kind(path)
        if kind in READERS and path.is_file():
            splits.setdefault(re.sub(r"-\d{5}-of-\d{5}$", "", stem), []).append(path)
    if not splits:
        raise UserError(f"{folder} holds no data file; it may hold {', '.join(READERS)}, or a saved dataset")
    paths = splits[_choose(splits, split, str(folder))]
    return (placed for path in paths for placed in _read(path))


def _on_hub(source: str | Path, path: Path, split: str | None) -> Iterator[tuple[Place, Row]]:
    local = (
        isinstance(source, Path) or _kind(path)[1] in READERS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:.+)?", source)
    )
    missing = f"there is no file {source}"
    if not path.parent.is_dir():
        missing = f"there is no folder {path.parent}"
    else:
        missing += _suggestion(path.name, (neighbour.name for neighbour in path.parent.iterdir()))
    if local:
        raise UserError(missing)
    name, _, configuration = str(source).partition(":")
    datasets = _library("datasets")
    try:
        found = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the network, the name, the configuration, the split: any of many types
        raise UserError(f"{missing}, and the hub gave no such dataset: {one_line(error)}") from error
    return _placed(found, None, name)


def _placed(found: Any, split: str | None, name: str) -> Iterator[tuple[Place, Row]]:
    """The rows of a `datasets.Dataset`, or of one of a `DatasetDict`."""
    if isinstance(found, Mapping):
        split = _choose(found, split, name)
        found, name = found[split], f"{name} {split}"
    elif split is not None:
        raise UserError(f"{name} is a dataset without splits; leave split {split!r} out")
    return (((f"{name} row ", number), row) for number, row in enumerate(found, 1))


def _choose(splits: Iterable[str], split: str | None, name: str) -> str:
    names = list(splits)
    if split is None and len(names) == 1:
        return names[0]
    if split in names:
        return split
    problem = "several splits" if split is None else f"no split {split!r}{_suggestion(split, names)}"
    raise UserError(f"{name} has {problem}; choose a split of: {', '.join(names)}")


# From a file to rows: each reader gives the number of a row and the row


def _read(path: Path) -> Iterator[tuple[Place, Row]]:
    kind = _kind(path)[1]
    if kind not in READERS:
        raise UserError(f"{path.name}: a file of tasks ends in {', '.join(READERS)}; rename or convert it")
    reader, counted = READERS[kind]
    try:
        for number, row in reader(path):
            yield (path.name + counted, number), _row(row, f"{path.name}{counted}{number}")
    except (OSError, EOFError, zlib.error) as error:  # no permission, or a damaged archive
        raise UserError(f"{path.name} cannot be read: {one_line(error)}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line with its end), decoded line by line so that a wrong byte is found with its line."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte {line[error.start]:#x}"
                raise UserError(f"{path.name}:{number}: {byte} is not UTF-8; save the file as UTF-8") from error


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path):
        if line.strip():
            yield number, _parse(line.rstrip(), path.name, number)


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    text = "".join(line for _, line in _lines(path))
    if not text.strip():
        return
    content = _parse(text.rstrip(), path.name, 1)
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise UserError(f"{path.name}:1: expected a list of objects, or an object with one list, not {len(lists)}")
        content = lists[0]
    if not isinstance(content, list):
        raise UserError(f"{path.name}:1: expected a list of objects, not a {type(content).__name__}")
    yield from enumerate(content, 1)


def _parse(text: str, name: str, line: int) -> Any:
    """The JSON value of a text that begins at a line of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; if each line is an object, name the file .jsonl" if error.msg == "Extra data" else ""
        where = f"{name}:{line + error.lineno - 1}"
        raise UserError(f"{where}: not valid JSON: {error.msg} at column {error.colno}{hint}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets as deep
        raise UserError(f"{name}:{line}: not valid JSON: {one_line(error)}") from error


def _read_table(path: Path, delimiter: str) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses a cell of more than 128 KiB, which a long solution may be
    table = csv.reader((line for _, line in _lines(path)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = table.line_num + 1  # where the row begins; a quoted cell may span lines
        try:
            cells = next(table, None)
        except csv.Error as error:
            raise UserError(f"{path.name}:{line}: not a valid table row: {error}") from error
        if cells is None:
            return
        if not cells:
            continue
        if header is None:
            header = cells
            if twice := sorted({name for name in header if header.count(name) > 1}):
                raise UserError(f"{path.name}:{line}: the header has the column {twice[0]!r} twice; rename one")
        elif len(cells) != len(header):
            raise UserError(f"{path.name}:{line}: {len(cells)} cells under a header of {len(header)}; quote the cells")
        else:
            yield line, dict(zip(header, cells, strict=True))


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    parquet = _library("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except _library("pyarrow").ArrowException as error:
        raise UserError(f"{path.name} cannot be read as parquet: {one_line(error)}") from error


READERS: dict[str, tuple[Callable[[Path], Iterator[tuple[int, Any]]], str]] = {
    ".jsonl": (_read_json_lines, ":"),
    ".json": (_read_json, " item "),
    ".csv": (lambda path: _read_table(path, ","), ":"),
    ".tsv": (lambda path: _read_table(path, "\t"), ":"),
    ".parquet": (_read_parquet, " row "),
}


def _kind(path: Path) -> tuple[str, str]:
    """The name of a file without its ending, and the ending that tells its format: .gz aside."""
    name = Path(path.name.removesuffix(".gz"))
    return name.stem, name.suffix.lower()


# Words for errors


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
        raise UserError(f"{where}: a row must be an object with named columns, not a {type(row).__name__}")
    return dict(row)


def _library(name: str) -> Any:
    """A library of the optional extra `datasets`, imported when a source asks for it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"this source needs {package}: pip install 'posttrain[datasets]'") from error


def no_column(column: str, row: Row) -> str:
    return f"no column {column!r}{_suggestion(column, row)}; the columns are: {', '.join(row)}"


def _suggestion(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
