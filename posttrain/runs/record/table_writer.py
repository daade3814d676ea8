"""Writes tables of rollouts: the layout of columns in a file, and the precision of numbers.

The bytes depend only on the rows and the version of pyarrow. Bytes that are equal in most rows, such as the signs and
exponents of log-probabilities and the lower half of a rounded number, are grouped (BYTE_STREAM_SPLIT), so that zstd
finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from posttrain.core import user_files
from posttrain.runs.record.schema import NUMBERS
from posttrain.runs.run_files import naming

KEPT_BITS = 11  # precision of a number's mantissa with its implicit bit: that of half precision
_DROPPED = 24 - KEPT_BITS
LEVEL = 9  # compression level of zstd
GROUP_TOKENS, LEAST_ROWS = 1 << 17, 64
"""Approximate number of tokens in a row group, which is read as a whole to open one rollout; and the smallest number of
rows, because each group costs bytes and time.
"""
_ELEMENT = ".list.element"
_SPLIT = [f"{name}{_ELEMENT}" for name in ("tokens", "engine", *NUMBERS)]


def half(values: Any) -> np.ndarray:
    """Return float32 values with the mantissa of half precision, rounded to nearest, and the exponent of float32."""
    bits = np.array(values, dtype=np.float32).view(np.uint32)
    special = (bits & 0x7F800000) == 0x7F800000  # infinite or NaN
    up = (1 << (_DROPPED - 1)) - 1 + ((bits >> np.uint32(_DROPPED)) & 1)
    rounded = (bits + up.astype(np.uint32)) & np.uint32(0xFFFFFFFF << _DROPPED & 0xFFFFFFFF)
    return np.where(special, bits, rounded).astype(np.uint32).view(np.float32)


def write_table(path: Path, table: pa.Table, ending: str = ".tmp") -> None:
    """Write a file completely or not at all. `ending`: added to its name until it is complete."""
    unfinished = path.with_name(path.name + ending)
    split = [name for name in _SPLIT if name.removesuffix(_ELEMENT) in table.schema.names]
    leaves = [leaf for field in table.schema for leaf in _leaves(field.name, field.type) if leaf not in split]
    try:
        with naming(path), pa.OSFile(str(user_files.writable(unfinished)), "wb") as file:
            parquet.write_table(
                table,
                file,
                row_group_size=_rows_together(table),
                compression="zstd",
                compression_level=LEVEL,
                use_dictionary=leaves,
                column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
                write_statistics=False,
                write_page_checksum=True,
            )
        unfinished.replace(path)
    except OSError:  # no room: an incomplete file is useless
        with suppress(OSError):
            unfinished.unlink()
        raise


def _rows_together(table: pa.Table) -> int:
    """Return the number of rows in a row group."""
    rows = max(1, table.num_rows)
    if "tokens" not in table.column_names:
        return rows
    tokens = pc.sum(table["total"]).as_py() or 0
    return rows if tokens <= GROUP_TOKENS else max(LEAST_ROWS, rows * GROUP_TOKENS // tokens)


def numbers(values: list[Any], whole: Sequence[bool] = ()) -> pa.Array:
    """Return lists of numbers, rounded, all at once: there may be thousands of short ones. `whole`: lists not to be
    rounded.
    """
    there = [value for value in values if value is not None]
    exact = np.concatenate(there).astype(np.float32) if there else np.zeros(0, dtype=np.float32)
    flat = half(exact)
    if any(whole):
        kept = [np.full(len(value), own) for value, own in zip(values, whole, strict=True) if value is not None]
        flat = np.where(np.concatenate(kept), exact, flat) if kept else flat
    ends = accumulate((0 if value is None else len(value) for value in values), initial=0)
    begins = [None if value is None else end for value, end in zip(values, ends, strict=False)]
    return pa.ListArray.from_arrays(pa.array([*begins, len(flat)], pa.int32()), pa.array(flat))


def array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array(_whole(values), kind)


def _whole(value: Any) -> Any:
    """Return the value with each half of a surrogate pair as its escape, because UTF-8 cannot encode it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def _leaves(name: str, kind: pa.DataType) -> Iterable[str]:
    """Return the columns of the file that hold the values of a table's column."""
    if pa.types.is_list(kind):
        yield from _leaves(name + _ELEMENT, kind.value_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{name}.{field.name}", field.type)
    else:
        yield name
