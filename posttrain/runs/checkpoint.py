"""The whole mutable state of a run, in one folder per checkpoint, written atomically and checked when read.

    checkpoints/step-000120/            a Hugging Face model folder (config.json, model.safetensors, tokenizer)
    checkpoints/step-000120/training/   optimizer, counters, source, random generators
    checkpoints/step-000120/manifest.json   size and SHA-256 of every other file; written last

A folder takes its final name only when everything in it is on the disk, so a run killed at any moment leaves either a
whole checkpoint or none; one that was damaged later is told by its checksums and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from posttrain.types import UserError

MANIFEST = "manifest.json"


def save(run: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Make checkpoints/step-NNNNNN from what `write(folder)` puts there, then leave only the newest `keep` up to it.

    Those of later steps go too: a run that saves this step has passed them over as damaged. Raises UserError if the
    disk is full or not writable: the checkpoints before it are untouched.
    """
    final = run / "checkpoints" / _name(step)
    draft = final.with_name(f".{final.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        write(draft)
        files = sorted(p for p in draft.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(draft)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
        (draft / MANIFEST).write_text(json.dumps({"step": step, "files": manifest}, indent=1))
        for path in [*files, draft / MANIFEST, *(p for p in draft.rglob("*") if p.is_dir()), draft]:
            _sync(path)
        if final.exists():  # a damaged one of the same step, left behind when an earlier one was resumed
            shutil.rmtree(final)
        draft.rename(final)
        _sync(final.parent)
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        if not _disk(error):
            raise
        raise UserError(f"could not save checkpoint {final}: {error}") from error
    there = listed(run)
    number = there.index(final) + 1
    for old in [*there[: max(0, number - keep)], *there[number:]]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def listed(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or not."""
    folder = run / "checkpoints"
    return sorted(p for p in folder.glob("step-*") if p.is_dir()) if folder.is_dir() else []


def newest(run: Path, say: Callable[[str], None] = lambda text: None) -> Path | None:
    """The newest undamaged checkpoint; says which ones were passed over and why."""
    for folder in reversed(listed(run)):
        damage = damaged(folder)
        if damage is None:
            return folder
        say(f"checkpoint {folder} is damaged ({damage}): using the one before it")
    return None


def damaged(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        seen = {name: (file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
        if folder.name != _name(manifest["step"]):
            return f"{MANIFEST} is that of another step"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    for name, (size, checksum) in seen.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or _sha256(path) != checksum:
            return f"{name} differs from its checksum"
    return None


def resolve(model: str) -> Path:
    """The checkpoint folder that a name means: a run directory stands for its newest undamaged checkpoint."""
    path = Path(model)
    if (path / "run.json").exists():
        found = newest(path, print)
        if found is None:
            raise UserError(f"{path} is a run without a checkpoint: let it train for --save-every steps first")
        return found
    return path


def step_of(folder: Path) -> int:
    return int(json.loads((folder / MANIFEST).read_text())["step"])


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """State that is not weights: the source's, the controllers', and torch's own random generator."""
    rng = torch.get_rng_state().numpy().tobytes().hex()
    (folder / "state.json").write_text(json.dumps({**state, "torch_rng": rng}))


def load_state(folder: Path) -> dict[str, Any]:
    """The inverse of `save_state`; sets torch's random generator."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    rng = bytes.fromhex(state.pop("torch_rng"))
    torch.set_rng_state(torch.frombuffer(bytearray(rng), dtype=torch.uint8))
    return state


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _disk(error: BaseException) -> bool:
    """Whether writing failed because of the disk. safetensors reports it in its own exception's text."""
    return isinstance(error, OSError) or "I/O error" in str(error) or "No space left" in str(error)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
