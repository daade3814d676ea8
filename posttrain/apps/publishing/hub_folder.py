"""The files of a repository of the hub: those of a checkpoint by name, never others, and what is written for them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from posttrain.apps.publishing.private_text import without_places
from posttrain.apps.publishing.published_run import Published
from posttrain.core import user_files
from posttrain.core.messages import clip, one_line
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_config import ADAPTER, ADAPTER_CONFIG, NOTE
from posttrain.models.json_files import read_json
from posttrain.models.tensor_files import open_tensors
from posttrain.models.weight_files import weight_files
from posttrain.runs.run_files import CURVES

CARD = "README.md"
PUBLISHED = (
    "config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", ADAPTER, ADAPTER_CONFIG, NOTE, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
"""Files of a checkpoint that are published, without optimizer state, rollouts and rows."""

JSON = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files in which libraries write paths of this machine."""

Files = dict[str, Path | bytes]
"""Name in the repository -> the file, or its content."""


def files_of(published: Published) -> Files:
    """Return the files of a checkpoint, without the card. Raises UserError for adapters of a base that others lack."""
    there = sorted(path for path in published.folder.iterdir() if path.is_file())
    named = [path for path in there if any(fnmatch(path.name, name) for name in PUBLISHED)]
    weights = _weights(published)
    found: Files = {path.name: _own(path) for path in named if path.suffix != ".safetensors" or path in weights}
    for name in JSON:
        if name in found and (content := _without_places(published.folder / name)) is not None:
            found[name] = content
    if published.adapter:
        found[ADAPTER_CONFIG] = _adapter_config(published)
    if published.run is not None and (published.run / CURVES).is_file():
        found[CURVES] = _own(published.run / CURVES)
    return found


def _weights(published: Published) -> list[Path]:
    """Return the files of weights. Raises UserError where there are none, or one is damaged."""
    files = [published.folder / ADAPTER] if published.adapter else weight_files(published.folder)
    for file in files:
        if not file.is_file():
            raise UserError(f"{published.folder} holds no {file.name}: nothing to publish")
        with open_tensors(file):
            pass
    return files


def _own(path: Path) -> Path:
    """Return a file that is stored in its folder, or in the hub's cache behind it. Raises UserError for a link to another
    place: what it names is nobody's to publish.
    """
    folder, real = path.parent.resolve(), path.resolve()
    cached = folder.parent.name == "snapshots" and real.parent == folder.parents[1] / "blobs"
    if real.parent != folder and not cached:
        raise UserError(
            f"{path} is a link to {real}, outside of its folder: put a copy of the file there, or remove it"
        )
    return path


def _without_places(path: Path) -> bytes | None:
    """Return a JSON file without the folders of this machine; None: it names none."""
    content = read_json(path)
    kept = without_places(content)
    return None if kept == content else (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()


def _adapter_config(published: Published) -> bytes:
    """Return adapter_config.json with the name of the base on the hub: a folder of this machine serves nobody."""
    told = read_json(published.folder / ADAPTER_CONFIG)
    if published.base is None:
        raise UserError(
            f"the base of this adapter is {told.get('base_model_name_or_path')}, a folder of this machine: push it first "
            "and name it with --base org/name, or merge the adapter with posttrain merge and push the result"
        )
    named = {"base_model_name_or_path": published.base.name, "revision": published.base.revision}
    return json.dumps({**told, **named}, indent=2).encode()


def size_of(content: Path | bytes) -> int:
    """Return the bytes of a file."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def write(files: Mapping[str, Path | bytes], out: Path) -> None:
    """Write the files into a new folder; those of weights are linked where the disk can. Raises UserError."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is there already: delete it, or choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if isinstance(content, bytes):
                with user_files.opened(out / name, "xb") as file:
                    file.write(content)
                continue
            if name.endswith(".safetensors"):
                with suppress(OSError):  # another disk
                    os.link(content, out / name)
                    continue
            shutil.copyfile(content, out / name)
    except (OSError, ValueError) as error:
        raise UserError(f"--out {clip(str(out))} cannot be written: {one_line(error)}") from error


def listed(files: Mapping[str, Path | bytes]) -> list[str]:
    """Return a line for each file, with its size."""
    widest = max(map(len, files))
    return [f"{name:<{widest}}  {readable(size_of(content)):>9}" for name, content in files.items()]


def readable(size: int) -> str:
    """ "9.9 MB"."""
    for unit, one in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= one:
            return f"{size / one:.1f} {unit}"
    return f"{size} B"
