"""What of a checkpoint is known without its weights: the tokenizer with its template, and how much the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.models.adapters.adapter_config import described_in
from posttrain.models.json_files import Fields, read_json
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.tokenizer.tokenizer_files import checkpoint_folder

CONTEXT = 2048  # where config.json does not say, as transformers has it


class Outline(NamedTuple):
    """Of a model: no torch is loaded for it."""

    tokenizer: Tokenizer
    context: int  # tokens of prompt and replies together


def outline(folder: str | Path, chat_template: str | None = None) -> Outline:
    """Of a checkpoint folder. `chat_template`: see `Tokenizer.load`. Raises UserError for one that is none."""
    folder = checkpoint_folder(folder)
    described = described_in(folder)
    source = read_json(described / "config.json")
    return Outline(Tokenizer.load(folder, chat_template), context_of(described, source))


def context_of(folder: Path, source: Mapping[str, Any]) -> int:
    """Most tokens of one sequence, as config.json says under one of the names that are in use.

    LongRoPE (Phi-3) has other angles in a text longer than those it first learned from, for all of its tokens. What is
    computed beside other texts, or sampled with a cache, cannot change at once: such texts are too long.
    """
    text = source.get("text_config")
    for place in (source, text if isinstance(text, dict) else {}):
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            if place.get(name) is not None:
                fields = Fields(folder / "config.json", place)
                found: int = fields.whole(name, 1, 2**31, CONTEXT)
                scaling = place.get("rope_parameters") or place.get("rope_scaling")
                if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in (
                    "longrope",
                    "su",
                ):
                    return found
                first = "original_max_position_embeddings"
                own = Fields(folder / "config.json", place if first in place else scaling)  # as transformers has it
                return min(found, own.whole(first, 1, 2**31, found))
    return CONTEXT
