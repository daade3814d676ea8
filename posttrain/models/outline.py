"""What of a checkpoint is known without its weights: the tokenizer with its template, and how much the model reads."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from posttrain.models.adapter_config import described_in
from posttrain.models.json_files import Fields, read_json
from posttrain.models.tokenizer import Tokenizer, checkpoint_folder

CONTEXT = 2048  # where config.json does not say, as transformers has it


class Outline(NamedTuple):
    """Of a model: no torch is loaded for it."""

    tokenizer: Tokenizer
    context: int  # tokens of prompt and replies together


def outline(folder: str | Path, chat_template: str | None = None) -> Outline:
    """Of a checkpoint folder. `chat_template`: see `Tokenizer.load`. Raises UserError for one that is none."""
    folder = checkpoint_folder(folder)
    described = described_in(folder)
    fields = Fields(described / "config.json", read_json(described / "config.json"))
    context: int = fields.whole("max_position_embeddings", 1, 2**31, CONTEXT)
    return Outline(Tokenizer.load(folder, chat_template), context)
