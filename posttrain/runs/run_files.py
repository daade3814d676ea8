"""The files of a run's folder, and their writing: whole or not at all, and safe from a power cut.

run.json                    verb, options, machine, begin and end, and the final figures
metrics.jsonl               one line a step, of configuration and seed alone: a resumed run repeats every byte
timing.jsonl                one line a step, of all that depends on the clock
health.jsonl                findings of the health check, and their steps
answers.jsonl               answers of services: see `posttrain.envs.play.answer_journal`
rollouts/step-000012.parquet  the rollouts of a step and their fates: see `posttrain.runs.record.schema`
evals/step-000012.parquet   the same of the held-out tasks after that step
seconds/step-000012.parquet a row for each of these rollouts: the seconds that each of its turns took, and its reward
index/000000-000049.parquet the short columns of all of them, in pieces of 50 steps: can be made again at any time
pictures/                   those of tasks and turns, each named by the hash of its content
checkpoints/step-000012/    see `posttrain.runs.checkpoint`
tensorboard/                metrics and timing as event files
weight-sync/weights-0-12    for servers that ran already, while it runs: see `posttrain.engines.servers.server_pool`
tracking/wandb.json         of a tracker: the id of its run, and its last step; its output is in wandb.log
curves.png                  drawn by `posttrain.runs.curves`
lock                        there while a process writes: see `posttrain.runs.lock`
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain.core import user_files
from posttrain.core.pictures import FOLDER
from posttrain.core.types import UserError
from posttrain.envs.play.answer_journal import ANSWERS, EVERYBODYS

Folder = str | os.PathLike[str]

RUN, METRICS, TIMING, HEALTH = "run.json", "metrics.jsonl", "timing.jsonl", "health.jsonl"
ROLLOUTS, EVALS, SECONDS, INDEX = "rollouts", "evals", "seconds", "index"
CHECKPOINTS, TENSORBOARD, TRACKING, CURVES = "checkpoints", "tensorboard", "tracking", "curves.png"
WEIGHT_SYNC = "weight-sync"
PICTURES = FOLDER
REPORT = "report.json"  # figures of a reward model on held-out rows, beside baselines

MADE = (RUN, METRICS, TIMING, HEALTH, ANSWERS, CURVES, REPORT, ROLLOUTS, EVALS, SECONDS, INDEX, CHECKPOINTS,
        TENSORBOARD, TRACKING, WEIGHT_SYNC, PICTURES)  # fmt: skip
"""The names that a run creates in its folder."""

ASIDE, MOVING = ".overwritten", ".overwritten.draft"
"""Subfolder with the run that another one replaces, and its name while files are moved."""

_STEP = re.compile(r"step-(\d{6,})")
_INSIDE = {
    **dict.fromkeys((ROLLOUTS, EVALS, SECONDS), re.compile(r"step-\d{6,}\.(parquet|jsonl)(\.tmp)?")),
    INDEX: re.compile(r"\d{6,}-\d{6,}\.parquet(\.\d+\.tmp)?"),
    CHECKPOINTS: re.compile(r"step-\d{6,}|\.step-\d{6,}\.draft"),
    TENSORBOARD: re.compile(r"events\..*"),
    TRACKING: re.compile(r"[\w-]+\.(json|log|json\.tmp)"),
    WEIGHT_SYNC: re.compile(r"(weights|adapter)-\d+-\d+"),
    PICTURES: re.compile(r"[0-9a-f]{64}(\.\d+\.tmp)?"),
}
"""Subfolder of a run -> names of the run's files in it."""


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step of a `step_name`; None for any other name, also one with extra zeros or beyond 32 bits."""
    found = _STEP.fullmatch(name)
    step = int(found[1]) if found else -1
    return step if 0 <= step < 1 << 31 and step_name(step) == name else None


def table_file(folder: Path, kind: str, step: int) -> Path:
    """Return the path of the table of a step. `kind`: ROLLOUTS, EVALS or SECONDS."""
    return folder / kind / f"{step_name(step)}.parquet"


def kept_file(folder: Path, kind: str, step: int) -> Path | None:
    """Return the table of a step if it exists, else None."""
    table = table_file(folder, kind, step)
    return table if table.is_file() else None


def holds_run(folder: Path) -> bool:
    """Return whether a folder contains a run or any of its files. Empty folders and unfinished files do not count."""
    return any((p.name not in _INSIDE or p.is_symlink()) and p.suffix != ".tmp" for p in made_by_run(folder))


def made_by_run(folder: Path) -> list[Path]:
    """Return a run's own files in a folder: run.json first, folders last.

    A link in place of a run's folder is listed itself; its target does not belong to the run.
    """
    found = []
    for name in MADE:
        path = folder / name
        inside = _INSIDE.get(name)
        if inside is not None and path.is_dir() and not path.is_symlink():
            found += sorted(entry for entry in path.iterdir() if inside.fullmatch(entry.name))
            found.append(path)
        else:
            others = sorted(folder.glob(EVERYBODYS)) if name == ANSWERS else ()
            found += dict.fromkeys(p for p in (path, path.with_name(name + ".tmp"), *others) if os.path.lexists(p))
    return found


def delete_run(folder: Path) -> None:
    """Delete a run's own files. Subfolders that contain other files are kept, with these files.

    Raises UserError, before deleting anything, if there is a folder in place of a run's file.
    """
    for path in _own(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    _remove_empty(folder)


def _own(folder: Path) -> list[Path]:
    """Return what a run has made in a folder, without its subfolders that may contain other files: run.json first.

    Raises UserError if there is a folder in place of a run's file.
    """
    made = made_by_run(folder)
    folders = {path for path in made if path.is_dir() and not path.is_symlink()}
    whole = {path for path in folders if path.parent.name in (CHECKPOINTS, WEIGHT_SYNC)}
    if strange := sorted(path for path in folders - whole if path.name not in _INSIDE):
        raise UserError(f"{strange[0]} is a folder where a run has a file: move it away, or choose another --out")
    return [path for path in made if path not in folders or path in whole]


def _remove_empty(folder: Path) -> None:
    for name in _INSIDE:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            with suppress(OSError):  # not empty: it contains files of others
                (folder / name).rmdir()


# -- a run that another one replaces -----------------------------------------------------------------------------------


def set_aside(folder: Path) -> None:
    """Move a run's own files into a subfolder, until the run that replaces it has written its first step.

    Raises UserError, before moving anything, if there is a folder in place of a run's file.
    """
    if _own(folder):
        _move(folder, folder / MOVING)
        (folder / MOVING).rename(folder / ASIDE)


def delete_aside(folder: Path) -> None:
    """Delete the run that was set aside, if there is one."""
    shutil.rmtree(folder / ASIDE, ignore_errors=True)


def put_back(folder: Path) -> bool:
    """Put the run back that was set aside, in place of the one that was to replace it. Return whether there is one.

    Wherever setting aside or putting back was interrupted, this completes it.
    """
    if (folder / ASIDE).is_dir():
        delete_run(folder)
        (folder / ASIDE).rename(folder / MOVING)
    if not (folder / MOVING).is_dir():
        return False
    _move(folder / MOVING, folder)
    (folder / MOVING).rmdir()
    return True


def _move(source: Path, target: Path) -> None:
    """Move a run's own files from one folder to another of the same file system."""
    target.mkdir(exist_ok=True)
    for path in _own(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        path.rename(place)
    _remove_empty(source)


# -- writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Context manager that turns errors of a full or write-protected disk, and of a missing folder, into a UserError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and (missing := gone(folder)) is not None:
            raise UserError(missing) from error
        where = error.filename if isinstance(error.filename, str | os.PathLike) else folder
        way = "; make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise UserError(f"cannot write to {os.fspath(where)}: {error.strerror or error}{way}") from error


def gone(folder: Path) -> str | None:
    """Return the message about a run's folder that was moved away or deleted; None if it is there."""
    return None if folder.is_dir() else f"{folder} is no longer there: put it back"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager that adds this file's name to an OSError without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def replace(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new one, also after a crash."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with naming(path), user_files.opened(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:  # no room: an incomplete file is useless
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
