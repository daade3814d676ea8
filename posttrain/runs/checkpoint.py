"""Checkpoints: the whole mutable state of a run, one folder each, written atomically and checked when read.

    checkpoints/step-000120/            a Hugging Face model folder (config.json, model.safetensors, tokenizer)
    checkpoints/step-000120/training/   optimizer, counters, source, random generators
    checkpoints/step-000120/manifest.json   size and SHA-256 of every other file; written last

A folder gets its final name only when all its files are on disk, so a run killed at any moment leaves either a complete
checkpoint or none. A checkpoint that is damaged later is recognised by its checksums, and the previous one is used.
Other files among the checkpoints are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.runs.run_files import CHECKPOINTS, RUN, gone, step_name, sync
from posttrain.runs.run_files import step_of as step_of_name
from posttrain.runs.terminal.notices import warn

MANIFEST = "manifest.json"
STATE = "state.json"


class Draft:
    """A checkpoint that is being written: first its files are written, then they are synced to disk.

    The first is as fast as copying to memory, where the system buffers files; the second waits for the disk and may run
    during the next steps.
    """

    def __init__(self, run: Path, step: int, write: Callable[[Path], None]) -> None:
        """Create the draft, with `write(folder)` writing its files. Raises UserError if the disk is full or not
        writable.
        """
        self.run, self.step = run, step
        self.final = run / CHECKPOINTS / step_name(step)
        self.path = _draft_of(self.final)
        with self._given_up():
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.parent.mkdir(exist_ok=True)
            self.path.mkdir()
            write(self.path)

    def finish(self, keep: int, write: Callable[[Path], None] = lambda folder: None) -> Path:
        """Make it a checkpoint, after `write(folder)` has written the remaining files; keep only the newest `keep` up
        to it.

        Checkpoints of later steps are deleted too: a run that saves this step has skipped them as damaged. Raises
        UserError if the disk is full or not writable; earlier checkpoints do not change.
        """
        with self._given_up():
            self._finish(write)
        there = listed(self.run)
        number = there.index(self.final) + 1
        for old in [*there[: max(0, number - keep)], *there[number:]]:
            with suppress(OSError):
                old.rename(_draft_of(old))  # so that a kill during the deletion leaves no half of a checkpoint
        delete_drafts(self.run)
        return self.final

    def _finish(self, write: Callable[[Path], None]) -> None:
        draft = self.path
        write(draft)
        files = sorted(p for p in draft.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(draft)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
        (draft / MANIFEST).write_text(json.dumps({"step": self.step, "files": manifest}, indent=1))
        for path in [*files, draft / MANIFEST, *(p for p in draft.rglob("*") if p.is_dir()), draft]:
            sync(path)
        if self.final.exists():  # a damaged checkpoint of the same step, from before a resume
            shutil.rmtree(self.final)
        draft.rename(self.final)
        sync(self.final.parent)

    @contextmanager
    def _given_up(self) -> Iterator[None]:
        """Context manager that deletes the draft after an error."""
        try:
            yield
        except Exception as error:
            shutil.rmtree(self.path, ignore_errors=True)
            if not is_disk_error(error):
                raise
            raise UserError(gone(self.run) or f"could not save checkpoint {self.final}: {error}") from error


def delete_drafts(run: Path) -> None:
    """Delete checkpoints that are not whole: those whose writing or deletion a kill has interrupted."""
    for draft in (run / CHECKPOINTS).glob(_draft_of(Path("step-*")).name):
        shutil.rmtree(draft, ignore_errors=True)


def _draft_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.draft")


def listed(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, complete or not."""
    folder = run / CHECKPOINTS
    try:
        there = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
    steps = [(step, path) for path in there if (step := step_of_name(path.name)) is not None and path.is_dir()]
    return [path for _, path in sorted(steps)]


def examined(run: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the checkpoints of a run, newest first, each with a description of its damage (None: undamaged)."""
    return ((folder, damaged(folder)) for folder in reversed(listed(run)))


def newest(run: Path, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """Return the newest undamaged checkpoint; report skipped ones with the reason."""
    for folder, damage in examined(run):
        if damage is None:
            return folder
        say(f"checkpoint {folder} is damaged ({damage}): using the previous one, if any")
    return None


def damaged(folder: Path) -> str | None:
    """Return a description of a checkpoint's damage, or None."""
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
    """Return the checkpoint folder for a name: for a run's folder, its newest undamaged checkpoint."""
    path = Path(model)
    if not os.path.lexists(path / RUN):
        return path
    found = newest(path, warn)
    if found is not None:
        return found
    if listed(path):
        raise UserError(f"{path} is a run whose checkpoints are all damaged: put a copy of one back, or train again")
    raise UserError(f"{path} is a run without a checkpoint: wait until it has trained for --save-every steps")


def step_of(folder: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    step = step_of_name(folder.name)
    assert step is not None, f"{folder} is not named as a checkpoint"
    return step


def save_state(state: dict[str, Any]) -> Callable[[Path], None]:
    """Capture the state other than weights: that of the source, of controllers, and of torch's random generator, as it
    is now.

    Returns a function that writes the state into a folder later. For values that are still being computed, it calls
    `plain()`, which may wait and returns JSON data.
    """
    import torch

    rng = torch.get_rng_state().numpy().tobytes().hex()

    def write(folder: Path) -> None:
        told = json.dumps({**state, "torch_rng": rng}, default=lambda made: made.plain())
        (folder / STATE).write_text(told)

    return write


def load_state(folder: Path) -> dict[str, Any]:
    """Read the state that `save_state` wrote, and set torch's random generator. Raises UserError for other content."""
    import torch

    path = folder / STATE
    try:
        state: dict[str, Any] = json.loads(user_files.content(path))
        rng = bytes.fromhex(state.pop("torch_rng"))
        torch.set_rng_state(torch.frombuffer(bytearray(rng), dtype=torch.uint8))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        why = " ".join(str(error).split())[:100]
        raise UserError(f"{path} is damaged ({why}): delete its checkpoint to use the previous checkpoint") from error
    return state


def is_disk_error(error: BaseException) -> bool:
    """Return whether the disk caused an error in writing. safetensors reports it only in its own exception's text."""
    return isinstance(error, OSError) or "I/O error" in str(error) or "No space left" in str(error)


def _sha256(path: Path) -> str:
    with user_files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
