"""Small indices and what they are made of: what tests of retrieval share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.retrieval.index import build

ROWS = [
    {"id": "rome", "title": "Rome", "text": "Rome is the capital of Italy. It lies on the Tiber."},
    {"id": "paris", "title": "Paris", "text": "Paris is the capital of France, on the Seine."},
    {"id": "hobbit", "title": "The Hobbit", "text": "The Hobbit is a novel by J. R. R. Tolkien, of 1937."},
    {"id": "tolkien", "title": "Tolkien", "text": "Tolkien was a professor at Oxford. He wrote a novel."},
    {"id": "seine", "title": "Seine", "text": "The Seine is a river of France that flows through Paris."},
]


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]] = ROWS) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def small_index(folder: Path, rows: Iterable[Mapping[str, Any]] = ROWS, **options: Any) -> Path:
    """An index of these rows, given in memory."""
    build(list(rows), folder, **options)
    return folder
