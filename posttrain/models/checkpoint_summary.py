"""Summary of a checkpoint that needs no weights: the tokenizer with its template, and the context length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.models.adapters.adapter_config import described_in
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.json_files import Fields, read_json
from posttrain.models.tokenizer.tokenizer import Tokenizer

CONTEXT = 2048  # default of transformers where config.json has none


class Outline(NamedTuple):
    """Summary of a model; computing it does not import torch."""

    tokenizer: Tokenizer
    context: int  # maximum of tokens of prompt and replies together
    ends: tuple[int, ...] = ()  # ids that end a reply; () if unknown


def outline(
    folder: str | Path, chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Outline:
    """Summarise a checkpoint folder. `chat_template`, `chat_template_kwargs`: see `Tokenizer.load`. Raises UserError if
    it is not a checkpoint.
    """
    folder = checkpoint_folder(folder)
    described = described_in(folder)
    source = read_json(described / "config.json")
    tokenizer = Tokenizer.load(folder, chat_template, chat_template_kwargs)
    return Outline(tokenizer, context_of(described, source), ends_of(described, source, tokenizer))


def ends_of(folder: Path, source: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a reply. Invalid ids are skipped: loading the model reports them."""
    text = source.get("text_config")
    places = (
        read_json(folder / "generation_config.json", optional=True),
        source,
        text if isinstance(text, dict) else {},
    )
    found = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), tokenizer.eos_id)
    return tuple(id for id in (found if isinstance(found, list) else [found]) if isinstance(id, int))


def context_of(folder: Path, source: Mapping[str, Any]) -> int:
    """Return the context length in tokens, stored in config.json under one of several names.

    LongRoPE (Phi-3) uses other angles for all tokens of a text that exceeds the original context length. A batch or a
    cache cannot switch between the angles, so the original context length is the limit.
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
                own = Fields(folder / "config.json", place if first in place else scaling)  # default of transformers
                return min(found, own.whole(first, 1, 2**31, found))
    return CONTEXT
