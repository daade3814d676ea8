"""What tests of rows and tasks share: rows written in every format, and refusals of one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.types import UserError

ROWS = [
    {"question": "What is 1 + 1?", "answer": "2"},
    {"question": "Un café,\ns'il vous plaît: {prix}?", "answer": 'two "euros"'},
    {"question": "3\u2028-1", "answer": "2"},
]


def refused(act: Callable[[], Any], *parts: str) -> str:
    """The one line with which `act` is refused; it holds all `parts`."""
    with pytest.raises(UserError) as error:
        act()
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    for part in parts:
        assert part in message, message
    return message


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_table(path: Path, delimiter: str) -> Path:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["question", "answer"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pa = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path
