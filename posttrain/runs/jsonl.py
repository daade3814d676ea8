"""Lines of JSON, and what they are to hold: what is wrong is a UserError of one line that names the file and the line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path
from typing import Any

from posttrain.core.messages import clip
from posttrain.core.types import UserError

Row = dict[str, Any]

LINE, FILE = "put a copy of the file back, or delete the line", "put a copy of it back"  # the ways out


class Maybe:
    """Of a field that need not be there."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


def checked(row: Row, kinds: dict[str, Any], where: str) -> Row:
    if problem := _misfit(row, kinds, ""):
        raise damaged(where, problem)
    return row


def _misfit(value: Any, kind: Any, name: str) -> str | None:
    """What in a value is not of its kind, if anything. `name`: its place in the row, "" for the row itself."""
    strange = f"{name} is {clip(repr(value), 40)}"
    if isinstance(kind, list):
        if not isinstance(value, list):
            return strange
        return next(filter(None, (_misfit(item, kind[0], f"{name}[{n}]") for n, item in enumerate(value))), None)
    if isfunction(kind):
        return None if kind(value) else strange
    if not isinstance(kind, dict):
        return None if isinstance(value, kind) and not isinstance(value, bool) else strange
    if not isinstance(value, dict):
        return strange
    if str in kind:
        kind = dict.fromkeys(value, kind[str])
    for field, wanted in kind.items():
        optional, place = isinstance(wanted, Maybe), f"{name}.{field}".removeprefix(".")
        if field not in value and not optional:
            return f"{name or 'it'} has no {field!r}"
        if field in value and (problem := _misfit(value[field], wanted.kind if optional else wanted, place)):
            return problem
    return None


def lines(path: Path, whole: bool = False) -> Iterator[tuple[Row, str, int]]:
    """(row, its place, bytes until its end) of a file of JSON lines, none if there is no file.

    A last line that is still being written is left out; of a file that appeared as a `whole`, it is a damage.
    """
    if not os.path.lexists(path):
        return
    end = 0
    for number, line in enumerate(content_of(path).splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            if whole:
                raise damaged(f"{path}:{number}", "its last line is torn off")
            return
        end += len(line)
        yield parsed(line, f"{path}:{number}"), f"{path}:{number}", end


def content_of(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path} is not a file: put a copy of it back")
    try:
        return path.read_bytes()
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
