"""Reads rows from a data file: the supported formats, and the place of each row.

Readers of text formats return the number of a row and its text as JSON, which is parsed when the row is needed; the
reader of Parquet returns Arrow batches. Every error is a UserError of one line with the place: `train.jsonl:17`, from
1.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import UserError

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Text = tuple[int, bytes]  # the number of a row, and the row as JSON

ROW_COLUMNS = {"prompt", "messages", "conversations", "instruction", "question", "query", "chosen", "text"}
"""Columns of a row that an object without a list of rows has."""
LIST_COLUMNS = {"completions", "responses", "tools", "turns", "transcripts", "replies", "comparisons", "pairs", "steps"}
"""Columns of a row that may be lists of objects."""

_raw_decode = json.JSONDecoder().raw_decode


def kind_of(path: Path) -> tuple[str, str]:
    """Return a file's name without its ending, and the ending that determines the format, without .gz."""
    name = Path(path.name.removesuffix(".gz"))
    return name.stem, name.suffix.lower()


def read_texts(path: Path) -> Iterator[Text]:
    """Yield the rows of a text file in order."""
    reader, _ = TEXTS[kind_of(path)[1]]
    try:
        yield from reader(path)
    except (OSError, EOFError, zlib.error) as error:  # no permission, or a damaged archive
        raise UserError(f"{path.name} cannot be read: {one_line(error)}") from error


def parse_row(text: bytes, name: str, place: str, number: int) -> Row:
    """Parse a row's text from `read_texts`. `place`: the separator of the file's name and the row's number."""
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
    """Return a value that is a row. Raises UserError if it is not one."""
    if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
        raise UserError(f"{where}: a row must be an object with named columns, not a {type(row).__name__}")
    return dict(row)


def read_parquet(path: Path, size: int) -> tuple[pa.Schema, Callable[[], Iterator[pa.RecordBatch]]]:
    """Return the schema of a Parquet file, and a function that iterates over its batches of `size` rows."""
    import pyarrow as pa
    from pyarrow import parquet

    def refused(error: Exception) -> UserError:
        return UserError(f"{path.name} cannot be read as parquet: {one_line(error)}")

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            with parquet.ParquetFile(user_files.readable(path)) as file:
                first = 0
                for batch in file.iter_batches(batch_size=size):
                    yield _plainly(batch, schema, f"{path.name} row ", first)
                    first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise refused(error) from error

    try:
        stored = parquet.read_schema(user_files.readable(path))
        schema = pa.schema([(field.name, _plain(field.type)) for field in stored])
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: in the name of a column
        raise refused(error) from error
    if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise UserError(f"{path.name} has the column {twice[0]!r} twice; rename one")
    return schema, batches


def rows_of(batch: pa.RecordBatch, prefix: str, first: int) -> list[Row]:
    """Return the rows of a batch that follows `first` rows. `prefix`: the text before a row's number in errors."""
    columns = [
        _values(column, name, prefix, first) for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _plainly(batch: pa.RecordBatch, schema: pa.Schema, prefix: str, first: int) -> pa.RecordBatch:
    """Return the batch converted to `schema`, its own types without dictionaries."""
    import pyarrow as pa

    columns = [
        column if column.type == field.type else pa.array(_values(column, field.name, prefix, first), field.type)
        for field, column in zip(schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _values(column: pa.Array, name: str, prefix: str, first: int) -> list[Any]:
    """Convert a column to Python values. Raises UserError for the first row whose value cannot be converted."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except Exception as error:  # an error of Arrow's types, Python's, or the file's writer
        for number, value in enumerate(column, first + 1):
            read_value(value, name, f"{prefix}{number}")
        raise UserError(f"{prefix}{first + 1}: column {name} cannot be read: {one_line(error)}") from error


def read_value(value: pa.Scalar, column: str, where: str) -> Any:
    """Convert an Arrow value to a Python value."""
    try:
        return value.as_py()
    except Exception as error:  # as above
        fix = "write it as text or a number"
        raise UserError(
            f"{where}: column {column} has a value that Python cannot represent: {one_line(error)}; {fix}"
        ) from error


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type without dictionaries: an Arrow file has a single one for all batches of a column."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind])
    return pa.list_(_plain(kind.value_type)) if pa.types.is_list(kind) else kind


def _lines(path: Path) -> Iterator[Text]:
    """Yield (line number, line with its end), without the byte order mark."""
    with user_files.opened(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        for number, line in enumerate(user_files.lines(file), 1):
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
    if isinstance(content, dict) and (framed := _framed(content)) is not None:
        content = framed
    elif isinstance(content, dict) and _is_row(content):
        content = [content]
    elif isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise UserError(
                f"{path.name}:1: expected a list of rows, a row, or an object with one list; it has {len(lists)} lists"
            )
        content = lists[0]
    if not isinstance(content, list):
        raise UserError(f"{path.name}:1: expected a list of objects, not a {type(content).__name__}")
    for number, row in enumerate(content, 1):
        yield number, json.dumps(row).encode()


def _framed(content: Row) -> list[Any] | None:
    """Return the only list of rows in an object, whatever else describes it; None if there is none, or several."""
    lists = [
        value
        for name, value in content.items()
        if name not in LIST_COLUMNS
        and isinstance(value, list)
        and value
        and all(isinstance(row, dict) and not {"role", "from"} & row.keys() for row in value)
    ]
    return lists[0] if len(lists) == 1 else None


def _is_row(content: Row) -> bool:
    """Return whether the only object of a file is a row."""
    if ROW_COLUMNS & content.keys():
        return True
    kinds = set(map(type, content.values()))
    return list not in kinds and bool(kinds - {dict})


def _parse(text: str, name: str, line: int) -> Any:
    """Parse JSON text that begins at this line of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = ""
        if error.msg == "Extra data" and text[: error.pos].count("\n") < 2:
            hint = "; if each line is an object, name the file .jsonl"
        elif error.msg == "Extra data":
            hint = "; put several rows into a list, [{...}, {...}], or each on one line of a .jsonl file"
        elif line == 1 and error.pos == 0 and ("," in text or "\t" in text):
            hint = f"; it looks like a table: name the file .{'csv' if ',' in text else 'tsv'}"
        elif text.strip() in ("{", "["):
            hint = "; a .jsonl file has each row on a line of its own: name a file of one list, or of one row, .json"
        where = f"{name}:{line + error.lineno - 1}"
        raise UserError(
            f"{where}: not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}{hint}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nesting as deep
        raise UserError(f"{name}:{line}: not valid JSON: {one_line(error)}") from error


def _read_table(path: Path, delimiter: str) -> Iterator[Text]:
    csv.field_size_limit(2**31 - 1)  # the default refuses cells of more than 128 KiB, which a long solution may exceed
    table = csv.reader((_decode(line, path.name, n) for n, line in _lines(path)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = table.line_num + 1  # first line of the row; a quoted cell may span lines
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
"""File ending -> (reader, separator between the file's name and a row's number)."""

READ = (*TEXTS, ".parquet")
