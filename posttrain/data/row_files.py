"""From a data file to its rows. Decides which formats are read, and where in a file a row stands.

Formats of text give the number of a row and its text as JSON, which is read when the row is needed; Parquet gives batches
of Arrow. Whatever is wrong is a UserError of one line that names the place: `train.jsonl:17`, counted from 1.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.messages import one_line
from posttrain.core.types import UserError

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Text = tuple[int, bytes]  # the number of a row, and the row as JSON

_raw_decode = json.JSONDecoder().raw_decode


def kind_of(path: Path) -> tuple[str, str]:
    """The name of a file without its ending, and the ending that tells its format: .gz aside."""
    name = Path(path.name.removesuffix(".gz"))
    return name.stem, name.suffix.lower()


def read_texts(path: Path) -> Iterator[Text]:
    """The rows of a file of text in their order."""
    reader, _ = TEXTS[kind_of(path)[1]]
    try:
        yield from reader(path)
    except (OSError, EOFError, zlib.error) as error:  # no permission, or a damaged archive
        raise UserError(f"{path.name} cannot be read: {one_line(error)}") from error


def parse_row(text: bytes, name: str, place: str, number: int) -> Row:
    """The row that `read_texts` gave as text; `place` is what stands between the file's name and the number."""
    try:
        decoded = text.decode()
        row, end = _raw_decode(decoded)
        if end != len(decoded):
            row = None
    except (ValueError, RecursionError):
        row = None
    if type(row) is not dict:
        row = check_row(_parse(_decode(text, name, number), name, number), f"{name}{place}{number}")
    return row


def check_row(row: Any, where: str) -> Row:
    """Whatever was given as a row, as one of our own. Raises UserError if it is none."""
    if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
        raise UserError(f"{where}: a row must be an object with named columns, not a {type(row).__name__}")
    return dict(row)


def read_parquet(path: Path, size: int) -> tuple[pa.Schema, Callable[[], Iterator[pa.RecordBatch]]]:
    """The schema of a Parquet file, and what reads its batches of `size` rows."""
    import pyarrow as pa
    from pyarrow import parquet

    def refused(error: Exception) -> UserError:
        return UserError(f"{path.name} cannot be read as parquet: {one_line(error)}")

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            with parquet.ParquetFile(path) as file:
                first = 0
                for batch in file.iter_batches(batch_size=size):
                    yield _plainly(batch, schema, f"{path.name} row ", first)
                    first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise refused(error) from error

    try:
        stored = parquet.read_schema(path)
        schema = pa.schema([(field.name, _plain(field.type)) for field in stored])
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: the name of a column
        raise refused(error) from error
    if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise UserError(f"{path.name} has the column {twice[0]!r} twice; rename one")
    return schema, batches


def rows_of(batch: pa.RecordBatch, prefix: str, first: int) -> list[Row]:
    """The rows of a batch, of which `first` stand before it; `prefix` is what stands before the number of a row."""
    columns = [
        _values(column, name, prefix, first) for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _plainly(batch: pa.RecordBatch, schema: pa.Schema, prefix: str, first: int) -> pa.RecordBatch:
    """The batch with the types of `schema`: those of its own without dictionaries."""
    import pyarrow as pa

    columns = [
        column if column.type == field.type else pa.array(_values(column, field.name, prefix, first), field.type)
        for field, column in zip(schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _values(column: pa.Array, name: str, prefix: str, first: int) -> list[Any]:
    """A column as Python's values. Raises UserError with the first row whose value cannot be one."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except Exception as error:  # of Arrow's types, Python's, or those of whoever made the file: each in its own way
        for number, value in enumerate(column, first + 1):
            read_value(value, name, f"{prefix}{number}")
        raise UserError(f"{prefix}{first + 1}: column {name} cannot be read: {one_line(error)}") from error


def read_value(value: pa.Scalar, column: str, where: str) -> Any:
    """A value of Arrow's as one of Python's."""
    try:
        return value.as_py()
    except Exception as error:  # as above
        fix = "write it as text or a number"
        raise UserError(
            f"{where}: column {column} has a value that Python cannot hold: {one_line(error)}; {fix}"
        ) from error


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type without dictionaries: a file of Arrow takes only one for all batches of a column."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind])
    return pa.list_(_plain(kind.value_type)) if pa.types.is_list(kind) else kind


def _lines(path: Path) -> Iterator[Text]:
    """(line number, line with its end), without a byte order mark."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _decode(line: bytes, name: str, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {line[error.start]:#x}"
        raise UserError(f"{name}:{number}: {byte} is not UTF-8; save the file as UTF-8") from error


def _read_json_lines(path: Path) -> Iterator[Text]:
    for number, line in _lines(path):
        if text := line.rstrip():
            yield number, text


def _read_json(path: Path) -> Iterator[Text]:
    text = "".join(_decode(line, path.name, number) for number, line in _lines(path))
    if not text.strip():
        return
    content = _parse(text.rstrip(), path.name, 1)
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise UserError(
                f"{path.name}:1: expected a list of objects, or an object with one list; it has {len(lists)}"
            )
        content = lists[0]
    if not isinstance(content, list):
        raise UserError(f"{path.name}:1: expected a list of objects, not a {type(content).__name__}")
    for number, row in enumerate(content, 1):
        yield number, json.dumps(row).encode()


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


def _read_table(path: Path, delimiter: str) -> Iterator[Text]:
    csv.field_size_limit(2**31 - 1)  # the default refuses a cell of more than 128 KiB, which a long solution may be
    table = csv.reader((_decode(line, path.name, n) for n, line in _lines(path)), delimiter=delimiter, strict=True)
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
            if len(header) == 1 and (other := next((mark for mark in ",;\t|" if mark in header[0]), "")):
                mark = {",": "commas", "\t": "tabs"}[delimiter]
                raise UserError(
                    f"{path.name}:{line}: columns are separated by {other!r}: save the file with {mark} there"
                )
            if twice := sorted({name for name in header if header.count(name) > 1}):
                raise UserError(f"{path.name}:{line}: the header has the column {twice[0]!r} twice; rename one")
        elif len(cells) != len(header):
            raise UserError(f"{path.name}:{line}: {len(cells)} cells under a header of {len(header)}; quote the cells")
        else:
            yield line, json.dumps(dict(zip(header, cells, strict=True))).encode()


TEXTS: dict[str, tuple[Callable[[Path], Iterator[Text]], str]] = {
    ".jsonl": (_read_json_lines, ":"),
    ".json": (_read_json, " item "),
    ".csv": (lambda path: _read_table(path, ","), ":"),
    ".tsv": (lambda path: _read_table(path, "\t"), ":"),
}
"""Ending of a file -> (what reads it, what stands between its name and the number of a row)."""

READ = (*TEXTS, ".parquet")
