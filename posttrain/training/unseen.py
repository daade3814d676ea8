"""Whether a checkpoint has learned from tasks that are held out here, by what the runs say that it goes back to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from posttrain.runs import fingerprint
from posttrain.runs.files import RUN
from posttrain.runs.lined import Row
from posttrain.runs.reading import read_run, split_of
from posttrain.types import UserError

OLDEST = 16  # runs that are followed back from a checkpoint


def seen(model: str, tasks: str, held_out: float, split_seed: int) -> str | None:
    """Why the tasks of this file that are held out may not be new to a checkpoint, in words; None where nothing says so.

    A run with the same seed that held out as much, or more, has not seen them: a share is part of every greater one.
    """
    file = Path(tasks)
    own = fingerprint.of_path(file) if file.is_file() else None
    if own is None or not held_out:
        return None
    for folder, run in _ancestry(Path(model)):
        share, seed = split_of(run["config"])
        given = run.get("inputs", {}).get("tasks")
        if not isinstance(given, Mapping) or given.get("digest") != own["digest"]:
            continue
        if not share:
            return f"{folder} was trained on all of {tasks}: what is held out here is not new to it"
        if seed != split_seed or share < held_out:
            whose = f"--held-out {share:g} --split-seed {seed}"
            return f"{folder} was trained on some of the tasks that are held out here: its own are {whose}"
    return None


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
