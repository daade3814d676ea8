"""Reads the files of a run, during and after it. Needs no lock.

Decides which files are valid: a fault is a UserError of one line with the file and the line number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.core.extras import runnable
from posttrain.core.messages import clip
from posttrain.core.types import UserError
from posttrain.runs.jsonl import FILE, Row, checked, content_of, damaged, lines, parsed, unreadable
from posttrain.runs.run_files import EVALS, HEALTH, METRICS, ROLLOUTS, RUN, TIMING, Folder, kept_file, step_of


def read_run(folder: Folder) -> Row:
    """Return run.json of a run. Raises UserError if the folder holds none."""
    path = Path(folder) / RUN
    if not os.path.lexists(path):
        raise UserError(f"{folder} holds no run: {_where_runs_are(Path(folder))}")
    run = parsed(content_of(path), str(path), FILE)
    kinds: dict[str, type] = {
        **{"verb": str, "config": dict, "resumes": list, "final": dict, "inputs": dict},
        **{"objective": list, "sizes": list, "versions": dict},
    }
    for name, kind in kinds.items():
        if not isinstance(run.get(name, kind()), kind) or (name in ("verb", "config") and name not in run):
            raise damaged(str(path), f"no valid {name!r}", FILE)
    return run


def run_of(folder: Path) -> Path | None:
    """Return the run that a folder is, or is a checkpoint of; None without one."""
    return next((path for path in (folder, *list(folder.parents)[:2]) if os.path.isfile(path / RUN)), None)


def divides_by_sampler(run: Row) -> bool:
    """Return whether the run's ratio divides by the sampler's probabilities instead of those before the step's first
    update.
    """
    said = run.get("objective")
    return isinstance(said, list) and any(str(line).strip().startswith("old: the policy that sampled") for line in said)


def split_of(config: Mapping[str, Any]) -> tuple[float, int]:
    """Return (share, seed) of a run's held-out tasks, from run.json."""
    seed = config.get("split_seed")
    return float(config.get("held_out") or 0.0), int(config.get("seed") or 0) if seed is None else int(seed)


def _where_runs_are(folder: Path) -> str:
    """Return a hint for a user who named a folder without a run."""
    above = next((path for path in [*folder.absolute().parents][:3] if os.path.isfile(path / RUN)), None)
    if above is not None:
        return f"it is part of the run {os.path.relpath(above) if not folder.is_absolute() else above}: pass that"
    if os.path.isfile(folder):
        both = f"posttrain rollouts and {runnable('posttrain query')}"
        also = f"; {both} take files of rollouts" if folder.suffix == ".parquet" else ""
        table = folder.with_suffix(".rollouts.parquet")
        also = f"; its rollouts are in {table}" if table.is_file() and table != folder else also
        return f"it is a file, not a folder with a {RUN}{also}"
    if not os.path.exists(folder) and not os.path.isdir(folder.parent):
        return "there is no such folder"
    beside = folder if os.path.isdir(folder) else folder.parent
    with suppress(OSError):
        found = sorted((path for path in beside.iterdir() if (path / RUN).is_file()), key=_age)
        if found:
            names = ", ".join(str(path) for path in found[:4]) + (", ..." if len(found) > 4 else "")
            return f"{'there is no such folder; ' if beside != folder else ''}there are {names}"
    if os.path.exists(folder / "lock"):
        return "it has just begun: try again in a few seconds"
    return f"pass a folder with a {RUN} in it" if os.path.isdir(folder) else "there is no such folder"


def _age(folder: Path) -> float:
    """Return the seconds since a run was last written, for sorting."""
    return -(folder / RUN).stat().st_mtime


def read_metrics(folder: Folder) -> list[Row]:
    """Return one dict per step: {"step": 12, "reward": 0.5, ...}; None for non-finite values. Works during the run."""
    return [row for row, _ in read_steps(Path(folder) / METRICS)]


def read_timing(folder: Folder) -> list[Row]:
    """Return one dict per step: {"step": 12, "seconds/rollout": 1.5, ...}."""
    return [row for row, _ in read_steps(Path(folder) / TIMING)]


def read_health(folder: Folder) -> list[Row]:
    """Return one dict per finding: {"step": 52, "name": "entropy", "message": "..."}."""
    path = Path(folder) / HEALTH
    return [checked(row, _FINDING, where) for row, where, _ in lines(path)]


def rollout_steps(folder: Folder, held_out: bool = False) -> list[int]:
    """Return the steps with recorded rollouts, in order; `held_out`: those of evaluations during the run.

    Other files in the folder are ignored.
    """
    kind = EVALS if held_out else ROLLOUTS
    inside = Path(folder) / kind
    try:
        names = os.listdir(inside) if inside.is_dir() else []
    except OSError as error:
        raise unreadable(inside, error) from error
    steps = {step_of(name.partition(".")[0]) for name in names}
    return sorted(step for step in steps if step is not None and kept_file(Path(folder), kind, step) is not None)


def missing_steps(folder: Path, last: int) -> list[str]:
    """Return descriptions of the parts that this record lacks up to step `last`."""
    metrics = [row for row, _ in read_steps(folder / METRICS, last)]
    timed = {row["step"] for row, _ in read_steps(folder / TIMING, last)}
    every = set(range(1, last + 1))
    absent = {
        METRICS: every - {row["step"] for row in metrics},
        TIMING: every - timed,
        f"{ROLLOUTS}/": _unkept(folder, metrics),
    }
    return [f"{name} lacks {_in_words(sorted(steps))}" for name, steps in absent.items() if steps]


def missing_rollouts(folder: Path) -> str | None:
    """Return a description of the steps without rollouts, or None. In an active run, the last step may still be
    written.
    """
    steps = _unkept(folder, read_metrics(folder))
    if "end" not in read_run(folder):
        steps = {step for step in steps if step < max(rollout_steps(folder), default=0)}
    return f"{folder / ROLLOUTS} lacks {_in_words(sorted(steps))}" if steps else None


def _unkept(folder: Path, metrics: Iterable[Row]) -> set[int]:
    return {row["step"] for row in metrics if row.get("rollouts")} - set(rollout_steps(folder))


def read_steps(path: Path, last: int | None = None) -> Iterator[tuple[Row, int]]:
    """Yield (row, bytes until its end) of metrics.jsonl or timing.jsonl; with `last`: up to that step.

    Lines after step `last` are ignored, as a power failure may have left anything there. Raises UserError for a line
    that is not a row of figures, or whose step is not later than the previous one.
    """
    before = -1
    for row, where, end in lines(path):
        step = row.get("step")
        if type(step) is not int or step <= before:
            raise damaged(
                where, f"its step is {clip(repr(step), 40)}, after step {before}" if before >= 0 else "no valid step"
            )
        if wrong := [name for name, value in row.items() if value is not None and not _finite(value)]:
            raise damaged(where, f"{wrong[0]} is {clip(repr(row[wrong[0]]), 40)}, not a number")
        if last is not None and step > last:
            return
        yield row, end
        if step == last:
            return
        before = step


def _in_words(steps: list[int]) -> str:
    """Return "step 3", "steps 4 to 9", "17 steps from 4 on"."""
    first, last = steps[0], steps[-1]
    if len(steps) == 1:
        return f"step {first}"
    return f"steps {first} to {last}" if last - first == len(steps) - 1 else f"{len(steps)} steps from {first} on"


_FINDING: dict[str, type] = {"step": int, "name": str, "message": str}


def _finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
