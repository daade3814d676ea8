"""Finds a checkpoint: a folder, a GGUF file, or a Hugging Face model by name."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.core import user_files
from posttrain.core.messages import near, one_line
from posttrain.core.types import UserError
from posttrain.models.gguf.gguf_file import SUFFIX, read_gguf, require_package
from posttrain.models.hub_download import downloaded
from posttrain.system.hub import HubName, hub_name, name_in_address


def checkpoint_folder(name: str | Path) -> Path:
    """Return the local folder of a checkpoint, given as a path or as a Hugging Face model name, which is downloaded.
    The path of a GGUF file is returned unchanged: `read_json`, `open_tensors` and `Tokenizer.load` read its content.

    Raises UserError if it is neither.
    """
    found = find_checkpoint(name)
    if isinstance(found, HubName):
        return _downloaded(found, Path(name).expanduser())
    if found.suffix == SUFFIX and not found.is_dir():
        require_package(found)
        read_gguf(found)  # checks the header, and caches it
    return found


def find_checkpoint(name: str | Path) -> Path | HubName:
    """Return the folder or GGUF file of a checkpoint, or its name on the hub. Nothing is read or downloaded.

    Raises UserError for what is none of these.
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
            raise UserError(f"{name}: no such GGUF file{_similar(folder) or ': correct the path'}")
        return folder
    if there:
        raise UserError(f"{name} is a file: give the checkpoint folder that holds it")
    named = hub_name(str(name))
    if of_hub := name_in_address(str(name)):
        raise UserError(f"{name}: write a model of the hub as its name alone, {of_hub}")
    if str(name).startswith(("http:", "https:")):
        raise UserError(
            f"{name} is an address, and a model's weights are read from this machine: give a folder, or org/name"
        )
    if named is None:
        raise UserError(
            f"{name}: no such folder{_similar(folder)}: give a folder with config.json, model.safetensors and "
            "tokenizer.json, a .gguf file, or a model of the Hugging Face hub (org/name, org/name@revision)"
        )
    return named


def _downloaded(named: HubName, folder: Path) -> Path:
    """Return the folder of a model of the hub. `folder`: the place on this machine that the name may have meant."""
    try:
        return downloaded(named)
    except UserError as error:
        raise UserError(f"{_not_here(folder)}{error}") from None


def _not_here(folder: Path) -> str:
    """Return the beginning of the message about a folder that is missing where others are: its path is the likelier
    meaning of such a name than a model of the hub.
    """
    if not folder.parent.is_dir():
        return ""
    known = _similar(folder) or " (a model is a folder, a .gguf file, or org/name of the hub)"
    return f"there is no folder {folder}{known}; and on the hub: "


def _similar(folder: Path) -> str:
    """Return "; did you mean ...?" if a folder or GGUF file beside a missing one has a similar name, else ""."""
    try:
        beside = [other.name for other in folder.parent.iterdir() if other.suffix == SUFFIX or other.is_dir()]
    except OSError:  # no folder either, or one that cannot be read
        return ""
    return near(folder.name, beside).replace("mean '", f"mean '{str(folder).removesuffix(folder.name)}")


def pinned(path: Path) -> Path:
    """Download a model of the hub and return its name with the commit, org/name@commit; return a local path unchanged.

    A resumed run then begins with the same weights, even if the branch on the hub has moved.
    """
    named = hub_name(str(path))
    if named is None or os.path.lexists(path):  # unlike Path.exists it never raises
        return path
    return Path(str(HubName(named.name, _downloaded(named, path).name)))
