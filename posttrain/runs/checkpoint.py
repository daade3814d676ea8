"""The whole mutable state of a run, in one folder per checkpoint, written atomically and checked when read.

    checkpoints/step-000120/            a Hugging Face model folder (config.json, model.safetensors, tokenizer)
    checkpoints/step-000120/training/   optimizer, counters, source, random generators
    checkpoints/step-000120/manifest.json   size and SHA-256 of every other file; written last

A folder takes its final name only when everything in it is on the disk, so a run killed at any moment leaves either a
whole checkpoint or none; one that was damaged later is recognised by its checksums, and the one before it is used.
Other files among the checkpoints are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.runs.run_files import CHECKPOINTS, RUN, step_name, sync
from posttrain.runs.run_files import step_of as step_of_name

MANIFEST = "manifest.json"
STATE = "state.json"


def save(run: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Make checkpoints/step-NNNNNN from what `write(folder)` puts there. See `Draft`."""
    return Draft(run, step, write).finish(keep)


class Draft:
    """A checkpoint in the making: written, and then made to last.

    The first is as quick as copying to memory, which is where the system keeps files at first; the second waits for the
    disk and may go on beside the next steps.
    """

    def __init__(self, run: Path, step: int, write: Callable[[Path], None]) -> None:
        """Put there what `write(folder)` does. Raises UserError if the disk is full or not writable."""
        self.run, self.step = run, step
        self.final = run / CHECKPOINTS / step_name(step)
        self.path = self.final.with_name(f".{self.final.name}.draft")
        with self._given_up():
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            write(self.path)

    def finish(self, keep: int, write: Callable[[Path], None] = lambda folder: None) -> Path:
        """Let it be a checkpoint, once `write(folder)` has put the rest there; leave only the newest `keep` up to it.

        Those of later steps go too: a run that saves this step has passed them over as damaged. Raises UserError if the
        disk is full or not writable: the checkpoints before it are untouched.
        """
        with self._given_up():
            self._finish(write)
        there = listed(self.run)
        number = there.index(self.final) + 1
        for old in [*there[: max(0, number - keep)], *there[number:]]:
            shutil.rmtree(old, ignore_errors=True)
        return self.final

    def _finish(self, write: Callable[[Path], None]) -> None:
        draft = self.path
        write(draft)
        files = sorted(p for p in draft.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(draft)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
        (draft / MANIFEST).write_text(json.dumps({"step": self.step, "files": manifest}, indent=1))
        for path in [*files, draft / MANIFEST, *(p for p in draft.rglob("*") if p.is_dir()), draft]:
            sync(path)
        if self.final.exists():  # a damaged one of the same step, left behind when an earlier one was resumed
            shutil.rmtree(self.final)
        draft.rename(self.final)
        sync(self.final.parent)

    @contextmanager
    def _given_up(self) -> Iterator[None]:
        """Delete the draft if anything fails within."""
        try:
            yield
        except Exception as error:
            shutil.rmtree(self.path, ignore_errors=True)
            if not is_disk_error(error):
                raise
            raise UserError(f"could not save checkpoint {self.final}: {error}") from error


def listed(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, whole or not."""
    folder = run / CHECKPOINTS
    try:
        there = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
    steps = [(step, path) for path in there if (step := step_of_name(path.name)) is not None and path.is_dir()]
    return [path for _, path in sorted(steps)]


def examined(run: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the checkpoints of a run, the newest first, each with its damage (None: none)."""
    return ((folder, damaged(folder)) for folder in reversed(listed(run)))


def newest(run: Path, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """Return the newest undamaged checkpoint; report those that are skipped, and why."""
    for folder, damage in examined(run):
        if damage is None:
            return folder
        say(f"checkpoint {folder} is damaged ({damage}): using the one before it, if there is one")
    return None


def damaged(folder: Path) -> str | None:
    """Return the damage of a checkpoint in words, or None."""
    try:
        manifest = json.loads(user_files.content(folder / MANIFEST))
        seen = {PurePosixPath(name): (int(file["bytes"]), file["sha256"]) for name, file in manifest["files"].items()}
        if folder.name != step_name(manifest["step"]):
            return f"{MANIFEST} belongs to another step"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return f"{MANIFEST} cannot be read"
    for name, (size, checksum) in seen.items():
        if name.is_absolute() or ".." in name.parts or "\0" in str(name):
            return f"{MANIFEST} names files outside of the checkpoint"
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or _sha256(path) != checksum:
                return f"{name} differs from its checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def resolve(model: str) -> Path:
    """Return the checkpoint folder that a name means: for a run directory, its newest undamaged checkpoint."""
    path = Path(model)
    if not os.path.lexists(path / RUN):
        return path
    found = newest(path, print)
    if found is not None:
        return found
    if listed(path):
        raise UserError(f"{path} is a run whose checkpoints are all damaged: put a copy of one back, or train it anew")
    raise UserError(f"{path} is a run without a checkpoint: let it train for --save-every steps first")


def step_of(folder: Path) -> int:
    """Return the step after which a checkpoint was made."""
    step = step_of_name(folder.name)
    assert step is not None, f"{folder} is not named as a checkpoint"
    return step


def save_state(state: dict[str, Any]) -> Callable[[Path], None]:
    """State that is not weights: the source's, the controllers', and torch's own random generator, as it is now.

    Returns a function that writes it into a folder, later. A value that is still being made then returns its JSON data from
    `plain()`, and may take its time.
    """
    import torch

    rng = torch.get_rng_state().numpy().tobytes().hex()

    def write(folder: Path) -> None:
        told = json.dumps({**state, "torch_rng": rng}, default=lambda made: made.plain())
        (folder / STATE).write_text(told)

    return write


def load_state(folder: Path) -> dict[str, Any]:
    """The inverse of `save_state`; sets torch's random generator. Raises UserError if the file holds something else."""
    import torch

    path = folder / STATE
    try:
        state: dict[str, Any] = json.loads(user_files.content(path))
        rng = bytes.fromhex(state.pop("torch_rng"))
        torch.set_rng_state(torch.frombuffer(bytearray(rng), dtype=torch.uint8))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        why = " ".join(str(error).split())[:100]
        raise UserError(f"{path} is damaged ({why}): delete its checkpoint to use the one before it") from error
    return state


def is_disk_error(error: BaseException) -> bool:
    """Whether writing failed because of the disk. safetensors reports it in its own exception's text."""
    return isinstance(error, OSError) or "I/O error" in str(error) or "No space left" in str(error)


def _sha256(path: Path) -> str:
    with user_files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
