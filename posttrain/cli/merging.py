"""An adapter and its base as one checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from posttrain.models.adapter_config import CLASSIFIER, is_adapter, read_adapter_config
from posttrain.models.folder import load_model
from posttrain.models.lora import decoder_of, merge
from posttrain.models.reward import load_reward_model
from posttrain.models.tokenizer import Tokenizer, checkpoint_folder
from posttrain.protocols import Model
from posttrain.runs.checkpoint import resolve
from posttrain.runs.files import writing
from posttrain.types import UserError


def merge_adapter(adapter: str, out: Path) -> None:
    """Write what a folder of adapters and its base compute together.

    Raises UserError for a wrong base, and for a folder in use.
    """
    folder = checkpoint_folder(resolve(adapter))
    if not is_adapter(folder):
        raise UserError(f"{adapter} holds no adapter, but a model that is whole: use it as it is")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already: choose another --out")
    model: Model
    if read_adapter_config(folder).task == CLASSIFIER:
        model = load_reward_model(folder)
        merge(model.backbone)
    else:
        model = load_model(folder)
        merge(decoder_of(model))
    tokenizer = Tokenizer.load(folder)
    draft = out.with_name(f".{out.name}.draft")
    with writing(out):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        model.save(draft)
        tokenizer.save(draft)
        if out.exists():
            out.rmdir()
        draft.rename(out)
    print(f"checkpoint  {out}")
