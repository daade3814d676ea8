"""Reads what runs leave behind, while they are on and afterwards. Needs no lock.

Decides what a sound file looks like: whatever is wrong is a UserError of one line that names the file and the line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path
from typing import Any

from posttrain.messages import clip
from posttrain.runs.files import HEALTH, METRICS, ROLLOUTS, RUN, TIMING, Folder, rollout_file, seconds_file, step_of
from posttrain.types import StopReason, UserError

Row = dict[str, Any]

LINE, FILE = "put a copy of the file back, or delete the line", "put a copy of it back"  # the ways out


def read_run(folder: Folder) -> Row:
    """run.json of a run; UserError if the folder holds none."""
    path = Path(folder) / RUN
    if not os.path.lexists(path):
        raise UserError(f"{folder} holds no run: pass a folder with a {RUN} in it")
    run = _parse(_content(path), str(path), FILE)
    kinds: dict[str, type] = {"verb": str, "config": dict, "resumes": list, "final": dict, "inputs": dict}
    for name, kind in kinds.items():
        if not isinstance(run.get(name, kind()), kind) or (name in ("verb", "config") and name not in run):
            raise _damaged(str(path), f"no valid {name!r}", FILE)
    return run


def read_metrics(folder: Folder) -> list[Row]:
    """One dict a step: {"step": 12, "reward": 0.5, ...}; None for what was not finite. Works during the run."""
    return [row for row, _ in read_steps(Path(folder) / METRICS)]


def read_timing(folder: Folder) -> list[Row]:
    """One dict a step: {"step": 12, "seconds/rollout": 1.5, ...}."""
    return [row for row, _ in read_steps(Path(folder) / TIMING)]


def read_health(folder: Folder) -> list[Row]:
    """One dict a finding: {"step": 52, "name": "entropy", "message": "..."}."""
    path = Path(folder) / HEALTH
    return [_checked(row, _FINDING, where) for row, where, _ in _lines(path)]


def rollout_steps(folder: Folder) -> list[int]:
    """The steps whose rollouts are there, in order. Whatever else lies among them is not looked at."""
    inside = Path(folder) / ROLLOUTS
    try:
        names = os.listdir(inside) if inside.is_dir() else []
    except OSError as error:
        raise _unreadable(inside, error) from error
    steps = (step_of(name.removesuffix(".jsonl")) for name in names if name.endswith(".jsonl"))
    return sorted(step for step in steps if step is not None and rollout_file(Path(folder), step).is_file())


def read_rollouts(folder: Folder, step: int) -> list[Row]:
    """The rollouts of a step as they were written; UserError if there are none."""
    path = rollout_file(Path(folder), step)
    if not path.is_file():
        steps = rollout_steps(folder)
        there = (
            f"take one of {steps[0]} to {steps[-1]}" if steps else "it holds none at all; rl and eval --out keep them"
        )
        raise UserError(f"{folder} holds no rollouts of step {step}: {there}")
    return [_checked(row, _ROLLOUT, where) for row, where, _ in _lines(path, whole=True)]


def timed_rollouts(folder: Folder, step: int) -> list[Row]:
    """The same, each turn with its "seconds" where they are known, and each rollout with those of its reward."""
    rows, path = read_rollouts(folder, step), seconds_file(Path(folder), step)
    times = [_checked(row, _SECONDS, where) for row, where, _ in _lines(path, whole=True)] if path.is_file() else []
    for row, time in zip(rows, times, strict=False):
        for turn, seconds in zip(row["turns"], time["turns"], strict=False):
            turn["seconds"] = seconds
        row["seconds"] = time.get("reward", 0.0)
    return rows


def read_rollout_file(file: str | os.PathLike[str]) -> list[Row]:
    """The rollouts in a file, such as an evaluation leaves; UserError if there are none."""
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{file}: no such file; a run is given by its folder")
    kinds = {name: kind for name, kind in _ROLLOUT.items() if name not in ("id", "advantage")}
    return [_checked(row, kinds, where) for row, where, _ in _lines(path, whole=True)]


def missing_steps(folder: Path, last: int) -> list[str]:
    """What a whole record of the steps up to `last` would hold and this one does not, in words."""
    metrics = [row for row, _ in read_steps(folder / METRICS, last)]
    timed = {row["step"] for row, _ in read_steps(folder / TIMING, last)}
    every = set(range(1, last + 1))
    absent = {
        METRICS: every - {row["step"] for row in metrics},
        TIMING: every - timed,
        f"{ROLLOUTS}/": {row["step"] for row in metrics if row.get("rollouts")} - set(rollout_steps(folder)),
    }
    return [f"{name} lacks {_in_words(sorted(steps))}" for name, steps in absent.items() if steps]


def read_steps(path: Path, last: int | None = None) -> Iterator[tuple[Row, int]]:
    """(row, bytes until its end) of metrics.jsonl or timing.jsonl; with `last`: up to that step.

    What lies after step `last` is not looked at: a power cut may have left anything there. Raises UserError for a line
    that is not a row of figures, or not of a later step than the one before it.
    """
    before = -1
    for row, where, end in _lines(path):
        step = row.get("step")
        if type(step) is not int or step <= before:
            raise _damaged(
                where, f"its step is {clip(repr(step), 40)}, after step {before}" if before >= 0 else "no valid step"
            )
        if wrong := [name for name, value in row.items() if value is not None and not _finite(value)]:
            raise _damaged(where, f"{wrong[0]} is {clip(repr(row[wrong[0]]), 40)}, not a number")
        if last is not None and step > last:
            return
        yield row, end
        if step == last:
            return
        before = step


def _in_words(steps: list[int]) -> str:
    """ "step 3", "steps 4 to 9", "17 steps from 4 on"."""
    first, last = steps[0], steps[-1]
    if len(steps) == 1:
        return f"step {first}"
    return f"steps {first} to {last}" if last - first == len(steps) - 1 else f"{len(steps)} steps from {first} on"


def _is_run(value: Any) -> bool:
    """Whether it is [first, number] of sampled tokens."""
    return isinstance(value, list) and [type(part) for part in value] == [int, int]


class _Maybe:
    """Of a field that need not be there."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


_NUMBER = (int, float, type(None))
_FINDING: dict[str, Any] = {"step": int, "name": str, "message": str}
_SECONDS: dict[str, Any] = {"turns": [(int, float)], "reward": _Maybe((int, float))}
_CALL: dict[str, Any] = {"tool": str, "arguments": dict, "problem": _Maybe(str)}
_TURN: dict[str, Any] = {
    **dict.fromkeys(("kind", "text"), str),
    **dict.fromkeys(("transcript", "start", "length"), int),
    "reward": _NUMBER,
    "cut": _Maybe(int),
    "calls": _Maybe([_CALL]),
}
_ROLLOUT: dict[str, Any] = {
    **dict.fromkeys(("id", "group", "prompt", "text"), str),
    "stop": lambda value: value in list(StopReason),
    **dict.fromkeys(("reward", "advantage"), _NUMBER),
    **dict.fromkeys(("side", "invalid"), _Maybe(str)),
    "rewards": _Maybe({str: _NUMBER}),
    "turns": [_TURN],
    "transcripts": [{"sampled": [_is_run]}],
}
"""What every row of a file holds, and of which kind: types, a list of one kind, a dict of such fields or of any (`str`),
or what a function says."""


def _checked(row: Row, kinds: dict[str, Any], where: str) -> Row:
    if problem := _misfit(row, kinds, ""):
        raise _damaged(where, problem)
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
        optional, place = isinstance(wanted, _Maybe), f"{name}.{field}".removeprefix(".")
        if field not in value and not optional:
            return f"{name or 'it'} has no {field!r}"
        if field in value and (problem := _misfit(value[field], wanted.kind if optional else wanted, place)):
            return problem
    return None


def _lines(path: Path, whole: bool = False) -> Iterator[tuple[Row, str, int]]:
    """(row, its place, bytes until its end) of a file of JSON lines, none if there is no file.

    A last line that is still being written is left out; of a file that appeared as a `whole`, it is a damage.
    """
    if not os.path.lexists(path):
        return
    end = 0
    for number, line in enumerate(_content(path).splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            if whole:
                raise _damaged(f"{path}:{number}", "its last line is torn off")
            return
        end += len(line)
        yield _parse(line, f"{path}:{number}"), f"{path}:{number}", end


def _finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path} is not a file: put a copy of it back")
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _parse(text: bytes, where: str, way: str = LINE) -> Row:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        row = json.loads(text.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise _damaged(where, f"byte {error.start} is not UTF-8", way) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"not valid JSON: {' '.join(str(error).split())[:100]}", way) from error
    if not isinstance(row, dict):
        raise _damaged(where, "not a JSON object", way)
    return row


def _damaged(where: str, why: str, way: str = LINE) -> UserError:
    return UserError(f"{where} is damaged ({why}): {way}")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror or error}")
