"""Reads rollouts, as tables or as rows, from the files of a run or of an evaluation. Needs no lock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.runs import run_files
from posttrain.runs.record.rollout_rows import Row, said_by
from posttrain.runs.record.schema import KEY, ROLLOUTS, SCALARS, SECONDS, TOKENS, VERSION, columns
from posttrain.runs.run_files import Folder, kept_file
from posttrain.runs.run_reading import rollout_steps

READ = (*SCALARS.names, *TOKENS.names)
"""Default columns of a row: all except numbers per token."""
EVERY = tuple(ROLLOUTS.names)

_JSON = ("columns", "notes", "answers", "label")
SUFFIX = ".parquet"
MOST = 1 << 22
"""Most rows of a file: a few bytes may claim billions."""


def read_table(folder: Folder, step: int, names: Iterable[str] | None = None, held_out: bool = False) -> pa.Table:
    """Return the rollouts of a step, in these columns (None: all). Raises UserError if there are none.

    `held_out`: those of the evaluation after that step.
    """
    path = kept_file(Path(folder), run_files.EVALS if held_out else run_files.ROLLOUTS, step)
    if path is None:
        steps = rollout_steps(folder, held_out)
        what = "evaluated rollouts" if held_out else "rollouts"
        raise UserError(
            f"{folder} holds no {what} of step {step}: take one of {_listed(steps)}"
            if steps
            else f"{folder} holds no {what}: no step has left any"
        )
    table = read_file(path, names)
    if "step" in table.column_names and pc.any(pc.not_equal(table["step"], step)).as_py():
        raise UserError(f"{path} holds rollouts of another step: put the right file there")
    return table


def _listed(steps: Sequence[int]) -> str:
    """Return "1 to 20", "0, 5, 10", or the ends of many steps with gaps."""
    if steps[-1] - steps[0] == len(steps) - 1 and len(steps) > 1:
        return f"{steps[0]} to {steps[-1]}"
    few = [*map(str, steps)] if len(steps) <= 8 else [*map(str, steps[:3]), "...", *map(str, steps[-3:])]
    return ", ".join(few)


def read_file(
    file: str | os.PathLike[str], names: Iterable[str] | None = None, places: Sequence[int] | None = None
) -> pa.Table:
    """Return the rollouts in a file, such as an evaluation writes. Raises UserError if there are none."""
    path = Path(file)
    if not os.path.isfile(path):
        raise UserError(f"{file}: no such file; a run is given by its folder")
    if path.suffix != SUFFIX:
        raise UserError(f"{file} is not a file of rollouts: give one, whose name ends in {SUFFIX}")
    return _read(path, columns(ROLLOUTS.names if names is None else names), places)


def rows_of(table: pa.Table) -> list[Row]:
    """Return a dict per row: JSON columns parsed, `parts` by name, and "id": "12/3".

    Raises UserError for rows that no run has written.
    """
    try:
        return _rows_of(table)
    except (TypeError, AttributeError, LookupError, UnicodeDecodeError) as error:
        raise UserError(
            f"these are not valid rollouts of posttrain ({one_line(error)[:100]}): put a copy of the file back"
        ) from error


def _rows_of(table: pa.Table) -> list[Row]:
    values = {name: _values(table[name]) for name in table.column_names}
    for name in _JSON:
        if name in values:
            values[name] = [_data(text) for text in values[name]]
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    for row in rows:
        if "index" in row and "step" in row:
            row["id"] = f"{row['step']}/{row['index']}"
        if "parts" in row:
            row["parts"] = {part["name"]: part["value"] for part in row["parts"] or ()}
        for turn in row.get("turns") or ():
            turn["text"] = said_by(turn, row.get("prompt") or "", row.get("text") or "")
            turn["calls"] = [{**call, "arguments": _data(call["arguments"] or "{}")} for call in turn["calls"] or ()]
    return rows


def _data(text: str | None) -> Any:
    """Return the data of JSON text; other text unchanged."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, or too deep
        return text


def read_rollouts(folder: Folder, step: int, names: Iterable[str] | None = READ, held_out: bool = False) -> list[Row]:
    """Return the rollouts that a step sampled, as rows (see `rows_of`); by default without numbers per token.

    Rollouts of earlier steps that it trained on again are only in its table.
    """
    wanted = EVERY if names is None else tuple(names)
    table = read_table(folder, step, {*wanted, "replayed"}, held_out)
    played = [not again for again in table["replayed"].to_pylist()]
    return rows_of(table.filter(pa.array(played, pa.bool_())).select([n for n in EVERY if n in wanted]))


def timed_rollouts(folder: Folder, step: int, names: Iterable[str] | None = READ) -> list[Row]:
    """Return the same, with the "seconds" of each turn and of each rollout's reward where they are known."""
    rows = read_rollouts(folder, step, names)
    for row, times in zip(rows, read_seconds(folder, step), strict=False):
        for turn, seconds in zip(row["turns"] or (), times["turns"] or (), strict=False):
            turn["seconds"] = seconds
        row["seconds"] = times["reward"]
    return rows


def read_seconds(folder: Folder, step: int) -> list[Row]:
    """Return the seconds of a step's rollouts; [] if they are unknown."""
    path = kept_file(Path(folder), run_files.SECONDS, step)
    if path is None:
        return []
    found: list[Row] = _read(path, SECONDS).to_pylist()
    return found


def open_file(path: Path) -> None:
    """Raise UserError if a table is damaged at its beginning or end."""
    try:
        parquet.read_metadata(user_files.readable(path))
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def checked_schema(path: Path, file: parquet.ParquetFile) -> pa.Schema:
    """Return the schema of a table. Raises UserError for another version, or for more rows than a step can have."""
    if file.metadata.num_rows > MOST:
        raise UserError(f"{path} claims to have {file.metadata.num_rows:,} rollouts: no step has as many")
    schema = file.schema_arrow  # a property that creates it anew
    if (schema.metadata or {}).get(KEY) != VERSION.encode():
        raise another_version(path)
    return schema


def another_version(path: Path) -> UserError:
    return UserError(f"{path} holds no rollouts of this version of posttrain: read it with the one that wrote it")


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} is damaged ({one_line(error)[:100]}): put a copy of it back, or move it away to read the others"
    )


def _read(path: Path, wanted: pa.Schema, places: Sequence[int] | None = None) -> pa.Table:
    """Return these columns of a file. Raises UserError if it is damaged, or has another version."""
    try:
        with user_files.opened(path) as source:
            file = parquet.ParquetFile(source, page_checksum_verification=True)
            if not set(wanted.names) <= set(checked_schema(path, file).names):
                raise another_version(path)
            if places is None:
                table: pa.Table = file.read(columns=wanted.names, use_threads=False)
            else:
                table = _rows(file, wanted.names, places)
        return table.select(wanted.names).cast(pa.schema(list(wanted)))
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        if isinstance(error, UserError):
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        raise _damaged(path, error) from error


def _rows(file: parquet.ParquetFile, names: list[str], places: Sequence[int]) -> pa.Table:
    """Return the rows at these indices; only row groups that contain them are read."""
    ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)], dtype=np.int64)
    wanted = np.array(places, dtype=np.int64)
    if len(wanted) and not 0 <= wanted.min() <= wanted.max() < (ends[-1] if len(ends) else 0):
        raise UserError(f"there is no rollout {wanted.max()}: there are {ends[-1] if len(ends) else 0}")
    own = np.searchsorted(ends, wanted, side="right")
    groups, within = np.unique(own, return_inverse=True)
    if not len(groups):
        return file.schema_arrow.empty_table().select(names)
    sizes = [file.metadata.row_group(int(group)).num_rows for group in groups]
    table = file.read_row_groups([int(group) for group in groups], columns=names, use_threads=False)
    begins = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    first = np.concatenate([[0], ends])[own]
    return table.take(pa.array(begins[within] + wanted - first))


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column as Python values; lists of numbers by way of numpy, which is many times faster."""
    if column.type.id == pa.list_(pa.int32()).id and column.type.value_type in (pa.int32(), pa.float32()):
        array = column.combine_chunks()
        array = array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)
        if not array.values.null_count:
            flat, ends = array.values.to_numpy(zero_copy_only=False), np.asarray(array.offsets)
            valid = array.is_valid().to_pylist()
            return [
                flat[begin:end].tolist() if there else None
                for begin, end, there in zip(ends[:-1], ends[1:], valid, strict=True)
            ]
    found: list[Any] = column.to_pylist()
    return found


def plainly(value: Any) -> Any:
    """Return the value as JSON data: without infinity and NaN."""
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {name: plainly(item) for name, item in value.items()}
    return [plainly(item) for item in value] if isinstance(value, list | tuple) else value
