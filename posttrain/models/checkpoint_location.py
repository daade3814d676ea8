"""Finds a checkpoint: a folder, a GGUF file, or a Hugging Face model by name."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.models.gguf.gguf_file import SUFFIX, read_gguf, require_package
from posttrain.system.hub import as_far_as_reached


def checkpoint_folder(name: str | Path) -> Path:
    """Return the local folder of a checkpoint: a path, or else a Hugging Face model name, downloaded if that is
    possible. A GGUF file is returned itself: `read_json`, `open_tensors` and `Tokenizer.load` know its content.

    Raises UserError if it is neither.
    """
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return user_files.readable_folder(folder)
        there = folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a user that does not exist, a pipe in it
        place = getattr(error, "filename", None) or str(name)
        raise UserError(f"{place!r:.80} is not a checkpoint, or part of one: {one_line(error)}") from None
    if folder.suffix == SUFFIX:
        if not there:
            raise UserError(f"{name}: no such GGUF file: correct the path")
        require_package(folder)
        read_gguf(folder)  # its header is checked, and kept
        return folder
    if there:
        raise UserError(f"{name} is a file: give the checkpoint folder that holds it")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)):
        raise UserError(
            f"{name}: no such folder: give a folder with config.json, model.safetensors and tokenizer.json, or a .gguf file"
        )
    import huggingface_hub

    with as_far_as_reached() as unreached:
        try:
            return Path(huggingface_hub.snapshot_download(str(name)))
        except Exception as error:  # no network, no such model, no access, disk full: the fix is the same
            raise UserError(
                f"{name}: no such folder, and as a Hugging Face model it cannot be downloaded here "
                f"({unreached or type(error).__name__}): give a local checkpoint folder"
            ) from None
