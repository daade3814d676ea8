"""What of a checkpoint is known without its weights: the tokenizer with its template, and how much the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.models.adapters.adapter_config import described_in
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.json_files import Fields, read_json
from posttrain.models.tokenizer.tokenizer import Tokenizer

CONTEXT = 2048  # where config.json does not say, as transformers has it


class Outline(NamedTuple):
    """Of a model: no torch is loaded for it."""

    tokenizer: Tokenizer
    context: int  # tokens of prompt and replies together
    ends: tuple[int, ...] = ()  # ids that end a reply, as far as they are known


def outline(folder: str | Path, chat_template: str | None = None) -> Outline:
    """Of a checkpoint folder. `chat_template`: see `Tokenizer.load`. Raises UserError for one that is none."""
    folder = checkpoint_folder(folder)
    described = described_in(folder)
    source = read_json(described / "config.json")
    tokenizer = Tokenizer.load(folder, chat_template)
    return Outline(tokenizer, context_of(described, source), ends_of(described, source, tokenizer))


def ends_of(folder: Path, source: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a reply; what of them is wrong is told where the model is loaded."""
    text = source.get("text_config")
    places = (
        read_json(folder / "generation_config.json", optional=True),
        source,
        text if isinstance(text, dict) else {},
    )
    found = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), tokenizer.eos_id)
    return tuple(id for id in (found if isinstance(found, list) else [found]) if isinstance(id, int))


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
