"""Merges an adapter and its base model into one checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

import torch

from posttrain.apps.publishing.hub_folder import readable
from posttrain.core.messages import one_line
from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_config import ADAPTER_CONFIG, CLASSIFIER, is_adapter, read_adapter_config
from posttrain.models.adapters.lora import decoder_of, merge
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.gguf.gguf_file import is_gguf
from posttrain.models.reward_model import load_reward_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import is_disk_error, resolve
from posttrain.runs.run_files import writing


def merge_adapter(adapter: str, out: Path, dtype: str | None = None) -> None:
    """Write a checkpoint that computes the same as an adapter on its base. `dtype`: type of its weights, by name.

    Raises UserError for a wrong base, for a folder in use, and if the disk is full or not writable.
    """
    folder = checkpoint_folder(resolve(adapter))
    if not is_adapter(folder):
        if not is_gguf(folder) and not (folder / "config.json").exists():
            raise UserError(
                f"{adapter} holds no {ADAPTER_CONFIG}: give the folder of an adapter, or copy the file into it"
            )
        raise UserError(f"{adapter} is a whole model, not an adapter: use it as it is")
    if out.name in ("", ".."):
        raise UserError(f"--out {out} is a folder with other folders: give a new folder")
    with writing(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is there already: choose another --out")
    model: Model
    scores = read_adapter_config(folder).task == CLASSIFIER
    if scores:
        model = load_reward_model(folder)
        merge(model.backbone)
    else:
        model = load_model(folder)
        merge(decoder_of(model))
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    tokenizer = Tokenizer.load(folder)
    with _draft_of(out) as draft:
        model.save(draft)
        tokenizer.save(draft)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"checkpoint  {out}, {readable(size)} in {str(model.head.dtype).removeprefix('torch.')}")
    if not scores:
        print(
            f"serve it    posttrain serve-policy --model {quote(str(out))}",
            f"or          vllm serve {quote(str(out))}",
            sep="\n",
        )


@contextmanager
def _draft_of(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` when it is complete. After an error, nothing is left of it."""
    draft = out.with_name(f".{out.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        if out.exists():
            out.rmdir()
        draft.rename(out)
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        if not is_disk_error(error):
            raise
        raise UserError(f"cannot write {out}: {one_line(error)}") from error
