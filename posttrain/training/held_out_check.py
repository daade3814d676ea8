"""Whether a checkpoint has learned from tasks that are held out here, by what the runs say that it goes back to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from posttrain.core.types import UserError
from posttrain.runs import fingerprint
from posttrain.runs.jsonl import Row
from posttrain.runs.run_files import RUN
from posttrain.runs.run_reading import read_run, split_of

OLDEST = 16  # runs that are followed back from a checkpoint


def seen(model: str, tasks: str, held_out: float, split_seed: int) -> str | None:
    """Why the tasks of this file that are held out may not be new to a checkpoint, in words; None where nothing says so.

    A run with the same seed that held out as much, or more, has not seen them: a share is part of every greater one.
    """
    own = _digest(tasks)
    if own is None or not held_out:
        return None
    for folder, run in _ancestry(Path(model)):
        share, seed = split_of(run["config"])
        if not _learned(run, own):
            continue
        if not share:
            return f"{folder} was trained on all of {tasks}: what is held out here is not new to it"
        if seed != split_seed or share < held_out:
            whose = f"--held-out {share:g} --split-seed {seed}"
            return f"{folder} was trained on some of the tasks that are held out here: its own are {whose}"
    return None


def split_seed_of(model: str, tasks: str) -> tuple[Path, int] | None:
    """The run that a checkpoint is of, or the next before it that held out tasks, and the seed that decided which.

    The first that learned from this very file, if there is one: the same prompts in another file are held out alike.
    """
    own, found = _digest(tasks), [(folder, run) for folder, run in _ancestry(Path(model)) if split_of(run["config"])[0]]
    alike = [one for one in found if own is not None and _learned(one[1], own)]
    return next(((folder, split_of(run["config"])[1]) for folder, run in [*alike, *found]), None)


def _digest(tasks: str) -> str | None:
    """Of a file of tasks."""
    known = fingerprint.of_path(Path(tasks)) if Path(tasks).is_file() else None
    return None if known is None else str(known["digest"])


def _learned(run: Row, digest: str) -> bool:
    """Whether its tasks are those of this file."""
    given = run.get("inputs", {}).get("tasks")
    return isinstance(given, Mapping) and given.get("digest") == digest


def _ancestry(model: Path) -> Iterator[tuple[Path, Row]]:
    """The run that a checkpoint is of, the run whose checkpoint that one began with, and so on, as far as they are there."""
    for _ in range(OLDEST):
        folder = next((path for path in (model, *list(model.parents)[:2]) if (path / RUN).is_file()), None)
        if folder is None:
            return
        try:
            run = read_run(folder)
        except UserError:
            return
        yield folder, run
        before = run["config"].get("model")
        if not isinstance(before, str) or not before:
            return
        model = Path(before)
