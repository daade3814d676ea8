"""The files of a repository of the hub: those of a checkpoint by name, never others, and what is written for them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from posttrain.apps.publishing.published_run import Published
from posttrain.core import user_files
from posttrain.core.messages import clip, one_line
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_config import ADAPTER, ADAPTER_CONFIG, NOTE
from posttrain.models.json_files import read_json
from posttrain.runs.run_files import CURVES

CARD = "README.md"
PUBLISHED = (
    "config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", ADAPTER, ADAPTER_CONFIG, NOTE, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
"""Files of a checkpoint that are published: neither optimizer state, nor rollouts, nor rows are among them."""

Files = dict[str, Path | bytes]
"""Name in the repository -> the file, or its content."""


def files_of(published: Published) -> Files:
    """Return the files of a checkpoint, without the card. Raises UserError for adapters of a base that others lack."""
    there = sorted(path for path in published.folder.iterdir() if path.is_file())
    found: Files = {path.name: path for path in there if any(fnmatch(path.name, name) for name in PUBLISHED)}
    if published.adapter:
        found[ADAPTER_CONFIG] = _adapter_config(published)
    if not any(name.endswith(".safetensors") for name in found):
        raise UserError(f"{published.folder} holds no model.safetensors and no {ADAPTER}: nothing to publish")
    if published.run is not None and (published.run / CURVES).is_file():
        found[CURVES] = published.run / CURVES
    return found


def _adapter_config(published: Published) -> bytes:
    """Return adapter_config.json with the name of the base on the hub: a folder of this machine serves nobody."""
    told = read_json(published.folder / ADAPTER_CONFIG)
    if published.base is None:
        raise UserError(
            f"the base of this adapter is {told.get('base_model_name_or_path')}, a folder of this machine: push it first "
            "and name it with --base org/name, or posttrain merge the adapter and push the result"
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
