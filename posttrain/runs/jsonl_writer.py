"""A file of JSON lines, written as the rows are made, and continued after its process was killed.

The inputs of the rows (options, tasks, models) are stored in a hidden file beside it, and a file that was begun with
other inputs is not continued. The day is stored there too, and kept. Only complete lines count: an incomplete one at
the end is dropped. One process writes at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.core import run_date, user_files
from posttrain.core.json_text import json_document, json_line, plain
from posttrain.core.messages import clip
from posttrain.core.types import UserError
from posttrain.runs.run_files import replace, writing


class Lines:
    """The file, open for appending."""

    def __init__(self, path: Path, follows_from: Mapping[str, Any], resume: bool, overwrite: bool) -> None:
        """Open the file. `follows_from`: the inputs of the rows, by names that users understand.

        Raises UserError for a file that exists, was begun with other inputs, or is being written.
        """
        self.path, self.origin = path, path.with_name(f".{path.name}.made")
        self.day = run_date.today()  # the day on which the file was begun
        there = os.path.exists(path) and os.path.getsize(path) > 0
        if there and not (resume or overwrite):
            raise UserError(f"--out {path} is there already: continue it with --resume, or replace it with --overwrite")
        if there and resume and not overwrite:
            self.day = self._continued(plain(follows_from))
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = user_files.opened(path, "r+b" if os.path.exists(path) else "w+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UserError(f"--out {path} is being written by another process: wait until it ends") from error
        self._told = {**plain(follows_from), "day": self.day}
        self._kept = there and overwrite  # a file to be replaced is kept until there is a first row
        with writing(path):
            self.ends: list[int] = [] if overwrite else self._whole_lines()
        if not self._kept:
            self._begin()

    @property
    def count(self) -> int:
        return len(self.ends)

    def last(self) -> dict[str, Any] | None:
        """Return the last row, or None. Raises UserError if it is damaged."""
        return self[self.count - 1] if self.ends else None

    def __getitem__(self, place: int) -> dict[str, Any]:
        self._file.seek(self.ends[place - 1] if place else 0)
        try:
            row = json.loads(self._file.readline())
            assert isinstance(row, dict)
        except (ValueError, RecursionError, AssertionError) as error:
            raise UserError(f"{self.path}:{place + 1} is damaged: put a copy back, or use --overwrite") from error
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[place] for place in range(self.count))

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows. After the call they survive a power failure."""
        if self._kept:
            self._begin()
        with writing(self.path.parent):
            self._file.seek(0, os.SEEK_END)
            for row in rows:
                self._file.write(json_line(row))
                self.ends.append(self._file.tell())
            self._file.flush()
            os.fsync(self._file.fileno())

    def drop(self) -> None:
        """Remove the last row."""
        self.ends.pop()
        with writing(self.path.parent):
            self._file.truncate(self.ends[-1] if self.ends else 0)

    def close(self) -> None:
        """Close the file; delete it if it has no line."""
        if not self.ends and not self._kept:
            self.path.unlink(missing_ok=True)
            self.origin.unlink(missing_ok=True)
        with suppress(OSError):  # of rows that a full disk did not take, which `write` has told
            self._file.close()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self) -> None:
        self._kept = False
        with writing(self.path.parent):
            self._file.truncate(self.ends[-1] if self.ends else 0)
            replace(self.origin, json_document(self._told))

    def _continued(self, told: Mapping[str, Any]) -> str:
        """Return the day on which the file was begun. Raises UserError if it was begun with other inputs."""
        try:
            before = json.loads(user_files.content(self.origin))
            day: str = before.pop("day")
            assert run_date.is_day(day)
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(
                f"cannot resume {self.path}: {self.origin.name} beside it, which lists its inputs, is missing or "
                "damaged; use --overwrite"
            ) from error
        for name in {**before, **told}:
            then, now = before.get(name), told.get(name)
            if then != now:
                shown = not isinstance(now, str) or len(now) < 40
                was = f"was {clip(repr(then))} and is {clip(repr(now))}" if shown else "has changed"
                raise UserError(
                    f"cannot resume {self.path}: {name} {was}; restore it, write another --out, or use --overwrite"
                )
        return day

    def _whole_lines(self) -> list[int]:
        """Return the offsets of line ends."""
        self._file.seek(0)
        ends, end = [], 0
        for line in self._file:
            end += len(line)
            if line.endswith(b"\n"):
                ends.append(end)
        return ends


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], overwrite: bool) -> int:
    """Write a file of rows completely or not at all; return their number. Raises UserError if the file exists."""
    if os.path.exists(path) and not overwrite:
        raise UserError(f"{path} is there already: choose another name, or replace it with --overwrite")
    lines = [json_line(row) for row in rows]
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, b"".join(lines))
    return len(lines)
