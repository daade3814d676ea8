"""Files of JSON lines and their checks: an error is a UserError of one line with the file and the line number."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.core import user_files
from posttrain.core.messages import clip
from posttrain.core.types import UserError

Row = dict[str, Any]

LINE, FILE = "put a copy of the file back, or delete the line", "put a copy of it back"  # remedies in messages


def checked(row: Row, kinds: dict[str, type], where: str) -> Row:
    for name, kind in kinds.items():
        if name not in row:
            raise damaged(where, f"it has no {name!r}")
        if type(row[name]) is not kind:
            raise damaged(where, f"{name} is {clip(repr(row[name]), 40)}")
    return row


def lines(path: Path) -> Iterator[tuple[Row, str, int]]:
    """Yield (row, its place, bytes until its end) of a file of JSON lines; nothing if there is no file.

    An incomplete last line, which is still being written, is left out.
    """
    if not os.path.lexists(path):
        return
    end = 0
    for number, line in enumerate(content_of(path).splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        end += len(line)
        yield parsed(line, f"{path}:{number}"), f"{path}:{number}", end


def content_of(path: Path) -> bytes:
    try:
        return user_files.content(path)
    except OSError as error:
        raise unreadable(path, error) from error


def parsed(text: bytes, where: str, way: str = LINE) -> Row:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        row = json.loads(text.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise damaged(where, f"byte {error.start} is not UTF-8", way) from error
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"not valid JSON: {' '.join(str(error).split())[:100]}", way) from error
    if not isinstance(row, dict):
        raise damaged(where, "not a JSON object", way)
    return row


def damaged(where: str, why: str, way: str = LINE) -> UserError:
    return UserError(f"{where} is damaged ({why}): {way}")


def unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror or error}")
