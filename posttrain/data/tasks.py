"""From files and datasets to tasks. Decides how rows are read, what makes a row a task, and which tasks are held out.

Three steps, each usable alone: `load_rows` reads rows and remembers where each one stood, `to_tasks` renames, converts,
fills templates and checks, `hold_out` splits. Whatever is wrong with the data is a UserError of one line that names the
place: `train.jsonl:17`, `train.parquet row 17`, counted from 1.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import importlib
import json
import re
import string
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from posttrain.types import Task, UserError

Row = dict[str, Any]
Place = tuple[str, int]  # what stands before the number, and the number: ("train.jsonl:", 17)
Pattern = list[tuple[str, str | None]]  # a template: literal text, and the column to put after it

ROLES = ("system", "user", "assistant", "tool")


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


class Tasks(list[Task]):
    """The tasks that came of some rows, and how many rows gave none."""

    left_out: int = 0  # rows for which `convert` returned None
    merged: int = 0  # rows equal in every column to one before them, kept once


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


def to_tasks(
    rows: Rows | Iterable[Mapping[str, Any]],
    *,
    fields: Mapping[str, str] | None = None,
    prompt_template: str | None = None,
    response_template: str | None = None,
    convert: Callable[[Row], Task | None] | None = None,
    need: Sequence[str] = ("prompt",),
) -> Tasks:
    """Make each row a Task, in this order.

    1. `fields` renames: {"prompt": "question"} makes the column "question" the key "prompt", in place of a
       column already called so; other columns are kept.
    2. `convert` makes the row a task, or returns None to leave it out (counted in `.left_out`).
    3. Templates such as "Question: {question}\\nAnswer:" make "prompt" and "response" of the columns there are now.
       Only whole columns are filled in; braces inside the data are left alone.
    4. A "prompt" that is a list is a conversation and becomes "messages". Prompt, messages and response are checked.
    5. `need` names the keys this use cannot do without; a null or blank value counts as missing. "messages" serve as
       the prompt, and as prompt and response if they end with an assistant turn. Of a row that has both, the one that
       meets the need is kept, the prompt first; so a task never has two prompts.
    6. "id" is the row's own, as a string, and must be unique. A row without one gets a hash of all its columns, so rows
       that differ in anything (one prompt, two responses) stay apart, and exact repetitions are kept once (`.merged`).

    Raises UserError, in one line that names the row.
    """
    if not isinstance(rows, Rows):
        rows = load_rows(rows)
    patterns = {
        key: _parse_template(template, f"{key}_template")
        for key, template in (("prompt", prompt_template), ("response", response_template))
        if template is not None
    }
    tasks = Tasks()
    seen: dict[str, tuple[str, bool]] = {}  # id -> the place of its row, and whether the id is the row's own
    for index, row in enumerate(rows):
        where = rows.where(index)
        task = _rename(row, fields or {}, where)
        converted = task if convert is None else _convert(task, convert, where)
        if converted is None:
            tasks.left_out += 1
            continue
        task = _meet(_check(_fill(converted, patterns, where), where), need, where)
        task, own = _identify(task, where)
        if task["id"] not in seen:
            seen[task["id"]] = (where, own)
            tasks.append(task)
        elif own or seen[task["id"]][1]:
            first = seen[task["id"]][0]
            raise UserError(f"{where}: id {task['id']!r} is already that of {first}; give every row an id of its own")
        else:
            tasks.merged += 1
    if not tasks:
        raise UserError(f"no task is left: {tasks.left_out} of {len(rows)} rows were left out by convert")
    return tasks


def hold_out(tasks: Sequence[Task], fraction: float, seed: int = 0) -> tuple[list[Task], list[Task]]:
    """Split tasks into (train, held out); both keep the order of `tasks`.

    A task's side depends on the seed and the text of its prompt alone (of its conversation without the final assistant
    turn; of its id where it has neither). So the order of the rows does not matter, new rows never move old ones, equal
    prompts under different ids or with different responses fall on the same side, and a larger fraction holds out what
    a smaller one did and more. Each prompt is held out with probability `fraction`: the share is near it, not equal.

    Raises UserError if fraction is not between 0 and 1, or if one side would be empty.
    """
    if not 0 < fraction < 1:
        raise UserError(f"the held-out fraction is {fraction}; it must be between 0 and 1, for example 0.1")
    train: list[Task] = []
    held_out: list[Task] = []
    for task in tasks:
        draw = int(_hash([seed, _question(task)]), 16) / 2**64  # uniform in [0, 1)
        (held_out if draw < fraction else train).append(task)
    if not train or not held_out:
        side = "held out" if not held_out else "left to train on"
        raise UserError(f"with fraction {fraction} none of the {len(tasks)} tasks is {side}; change it, or add tasks")
    return train, held_out


def order(n: int, epoch: int, seed: int) -> Sequence[int]:
    """The order [n] in which epoch `epoch` (0, 1, ...) visits n tasks: a permutation, the same on every machine.

    It sorts the raw output of a Philox generator, which numpy keeps stable between releases; `permutation` is not.
    """
    assert n >= 0 and epoch >= 0
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(n)
    visits: list[int] = np.argsort(keys, kind="stable").tolist()
    return visits


# From a row to a task


def _rename(row: Row, fields: Mapping[str, str], where: str) -> Task:
    for column in fields.values():
        if column not in row:
            raise UserError(f"{where}: {_no_column(column, row)}")
    moved = set(fields.values()) | set(fields)
    return {key: row[column] for key, column in fields.items()} | {
        key: value for key, value in row.items() if key not in moved
    }


def _convert(row: Row, convert: Callable[[Row], Task | None], where: str) -> Task | None:
    try:
        task = convert(row)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # the function may be the user's and fail in any way; what helps is to know the row
        problem = f"{type(error).__name__}: {_one_line(error)}"
        if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and error.args[0] not in row:
            problem = _no_column(error.args[0], row)
        raise UserError(f"{where}: {_name(convert)}: {problem}") from error
    if task is not None and not isinstance(task, dict):
        raise UserError(f"{where}: {_name(convert)} returned a {type(task).__name__}; it must return a dict or None")
    return None if task is None else dict(task)


def _parse_template(template: str, name: str) -> Pattern:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"{name}: {error}; write {{column}}, and {{{{ or }}}} for a brace") from error
    for _, column, form, conversion in parts:
        if column is not None and (form or conversion):
            raise UserError(f"{name}: a column takes no format or conversion; write {{{column}}}")
    return [(text, column) for text, column, _, _ in parts]


def _fill(task: Task, patterns: Mapping[str, Pattern], where: str) -> Task:
    """The task with the texts that templates make of it; a templated prompt takes the place of any conversation."""
    filled = {}
    for key, pattern in patterns.items():
        place = f"{where}: {key}_template"
        filled[key] = "".join(
            text + (_cell(task, column, place) if column is not None else "") for text, column in pattern
        )
    return {key: value for key, value in task.items() if key != "messages" or "prompt" not in filled} | filled


def _cell(task: Task, column: str, place: str) -> str:
    # The name is looked up as it stands: "a.b" and "a[0]" are columns of that name, never an access into a value.
    if column not in task:
        raise UserError(f"{place}: {_no_column(column, task)}")
    if not isinstance(task[column], str | int | float):
        raise UserError(f"{place}: column {column!r} holds a {type(task[column]).__name__}, not text or a number")
    return str(task[column])


def _check(task: Task, where: str) -> Task:
    """The task without null prompt and messages, a list for a prompt taken as messages, and both of the right type."""
    task = {key: value for key, value in task.items() if value is not None or key not in ("prompt", "messages")}
    if isinstance(task.get("prompt"), list):
        task["messages"] = task.pop("prompt")
    if "prompt" in task and not _text(task["prompt"], "prompt", where).strip():
        raise UserError(f"{where}: the prompt is empty")
    if "messages" in task:
        task["messages"] = _messages(task["messages"], where)
    return task


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}, with at least one')
    checked = []
    for number, message in enumerate(messages, 1):
        place = f"{where}: message {number}"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(f'{place} must be an object with "role" and "content"')
        if message["role"] not in ROLES:
            raise UserError(f"{place}: role {message['role']!r} is not one of {', '.join(ROLES)}")
        _text(message["content"], "content", place)
        # Table formats give every message the keys of all; templates ask whether a key is there, so nulls must go.
        checked.append({key: value for key, value in message.items() if value is not None})
    return checked


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} must be text, and is a {type(value).__name__}")
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise UserError(f"{where}: {name} holds half a surrogate pair, which is not a character; remove it")
    return value


def _meet(task: Task, need: Sequence[str], where: str) -> Task:
    """The task with one prompt: "prompt" or "messages", whichever meets the need."""
    missing = [key for key in need if _blank(task.get(key))]
    plain = "prompt" in task and "messages" not in need and not missing
    if "messages" in task and not plain and set(missing) <= {"prompt", "response"}:
        last = task["messages"][-1]
        if "response" in need and (last["role"] != "assistant" or _blank(last["content"])):
            raise UserError(
                f"{where}: the messages must end with the assistant turn to imitate, and it must not be empty"
            )
        if "prompt" in need and "response" not in need and last["role"] == "assistant":
            raise UserError(f"{where}: the messages end with an assistant turn; drop it, the model is to write it")
        return {key: value for key, value in task.items() if key != "prompt"}
    if missing:
        has = ", ".join(key for key, value in task.items() if not _blank(value)) or "nothing"
        raise UserError(f"{where}: no {' and no '.join(missing)}; the row has: {has}")
    if "response" in need:
        _text(task["response"], "response", where)
    return {key: value for key, value in task.items() if key != "messages" or "prompt" not in task}


def _identify(task: Task, where: str) -> tuple[Task, bool]:
    """The task with its id, and whether the id is the row's own."""
    id = task.get("id")
    rest = {key: value for key, value in task.items() if key != "id"}
    if id is None or id == "":
        try:
            return {"id": _hash(rest), **rest}, False
        except TypeError as error:
            raise UserError(f"{where}: {error}; give the rows an id") from error
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise UserError(f"{where}: the id must be text or a whole number, and is a {type(id).__name__}")
    return {"id": str(id), **rest}, True


def _question(task: Task) -> Any:
    """What the policy is asked, by which tasks are told apart when they are split."""
    if "prompt" in task:
        return task["prompt"]
    if "messages" not in task:
        return task["id"]
    messages = task["messages"]
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def _hash(value: Any) -> str:
    """64 bits in hexadecimal, the same in every process and for every order of keys."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=_plain).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """What json cannot write, as it can; only for types whose text is the same in every process."""
    if hasattr(value, "tolist"):  # arrays
        return value.tolist()
    if isinstance(value, bytes | date | time | timedelta | Decimal):
        return repr(value)
    raise TypeError(f"a value of type {type(value).__name__} gives no stable id")


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
            raise UserError(f"{folder} cannot be read as a saved dataset: {_one_line(error)}") from error
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
        raise UserError(f"{missing}, and the hub gave no such dataset: {_one_line(error)}") from error
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
        raise UserError(f"{path.name} cannot be read: {_one_line(error)}") from error


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
        raise UserError(f"{name}:{line}: not valid JSON: {_one_line(error)}") from error


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
        raise UserError(f"{path.name} cannot be read as parquet: {_one_line(error)}") from error


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


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _no_column(column: str, row: Row) -> str:
    return f"no column {column!r}{_suggestion(column, row)}; the columns are: {', '.join(row)}"


def _suggestion(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
