"""The file of a critic in a checkpoint."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.protocols import TRAINING
from posttrain.core.types import UserError

STORED = "critic.safetensors"  # in the folder TRAINING of a checkpoint


def critic_file(folder: Path) -> Path:
    """Return the file of a checkpoint's critic. Raises UserError if there is none."""
    file = folder / TRAINING / STORED
    if not file.exists():
        raise UserError(
            f"{folder} has no critic ({TRAINING}/{STORED}): give a run of an algorithm that learns one, such as ppo"
        )
    return file
