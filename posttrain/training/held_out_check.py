"""Checks that a checkpoint was not trained on the held-out tasks, by the records of the runs that it descends from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from posttrain.core.types import UserError
from posttrain.data.tasks import Tasks, in_both
from posttrain.runs import fingerprint
from posttrain.runs.jsonl import Row
from posttrain.runs.run_reading import read_run, run_of, split_of

OLDEST = 16  # most ancestors of a checkpoint that are read


def overlap(model: str, tasks: str, held_out: float, split_seed: int) -> str | None:
    """Return why held-out tasks of this file may have been trained on by a checkpoint or its ancestors; None if they
    were not.

    A run with the same seed that held out the same share, or more, did not train on them: a share is part of every
    greater one.
    """
    own = _digest(tasks)
    if own is None or not held_out:
        return None
    for folder, run in _ancestry(Path(model)):
        share, seed = split_of(run["config"])
        if not _learned(run, own):
            continue
        if not share:
            return f"{folder} was trained on all of {tasks}, also on the tasks held out here: evaluate on other tasks"
        if seed != split_seed or share < held_out:
            whose = f"--held-out {share:g} --split-seed {seed}"
            return f"{folder} was trained on some of the tasks held out here: evaluate with its own split, {whose}"
    return None


def trained_on(tasks: Tasks, sets: Mapping[str, Tasks], seed: int) -> list[str]:
    """Return a line for each set of held-out tasks whose prompts are among those to train on. `sets`: by name."""
    lines = []
    for name, own in sets.items():
        if shared := in_both(tasks, own, seed):
            which = " ".join(filter(None, ("--eval-tasks", name)))
            lines.append(f"{which}: {shared} of its {len(own)} prompts are trained on too, so they do not measure what "
                         "is new: leave them out of --tasks")  # fmt: skip
    return lines


def split_seed_of(model: str, tasks: str) -> tuple[Path, int] | None:
    """Return (folder, split seed) of the checkpoint's run, or of its nearest ancestor that held out tasks; None
    without one.

    A run that trained on this very file comes first, as the same prompts in another file are held out alike.
    """
    own, found = _digest(tasks), [(folder, run) for folder, run in _ancestry(Path(model)) if split_of(run["config"])[0]]
    alike = [one for one in found if own is not None and _learned(one[1], own)]
    return next(((folder, split_of(run["config"])[1]) for folder, run in [*alike, *found]), None)


def _digest(tasks: str) -> str | None:
    """Return the digest of a file of tasks."""
    known = fingerprint.of_path(Path(tasks)) if Path(tasks).is_file() else None
    return None if known is None else str(known["digest"])


def _learned(run: Row, digest: str) -> bool:
    """Return whether the run's tasks, or those of a part of its mixture, are this file."""
    given = [value for name, value in run.get("inputs", {}).items() if name.split(" ")[-1] == "tasks"]
    return any(isinstance(one, Mapping) and one.get("digest") == digest for one in given)


def _ancestry(model: Path) -> Iterator[tuple[Path, Row]]:
    """Yield the checkpoint's run, the run of the checkpoint that it began with, and so on, as far as they exist."""
    for _ in range(OLDEST):
        folder = run_of(model)
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
