"""Prompts with pictures for vLLM: token ids with one placeholder for each picture, and the pictures beside them.

vLLM's processor of the model writes each picture's own tokens, and returns the ids of the whole prompt, which have to be
those of the run. It gets each picture as the run decodes it (upright, in RGB), so that both sides make the same pixels.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from posttrain.core.pictures import PICTURES, decoded, png
from posttrain.core.transcripts import Media
from posttrain.models.image_processor import PLACE, placeholder_ids
from posttrain.models.tokenizer.tokenizer import Tokenizer

REMEMBERED = 64  # encoded pictures
NEVER = -100.0
"""Bias of the logits of placeholders, to which the learner gives probability 0. vLLM accepts no lower value."""


def placeholder_bias(tokenizer: Tokenizer) -> dict[str, float]:
    """Return the logit bias that keeps a vision-language model from sampling placeholders."""
    return {} if tokenizer.pictures is None else {str(id): NEVER for id in placeholder_ids(tokenizer.pictures.source)}


def with_single_placeholders(
    tokenizer: Tokenizer, prompt: Sequence[int], media: Sequence[Media]
) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the prompt with one placeholder for the tokens of each picture, and vLLM's parts with the pictures, in order.
    Raises PictureError for a picture that cannot be read.
    """
    pictures = tokenizer.pictures
    assert pictures is not None, "a prompt with pictures was tokenized with an image processor"
    found, parts, done = list[int](), [], 0
    for m in sorted(media, key=lambda m: m.start):
        text = pictures.pixels(m.digest).text
        around = text.partition(PLACE)[0], text.rpartition(PLACE)[2]
        first, last = (len(tokenizer.encode(part)) for part in around)
        found += [*prompt[done : m.start - first], pictures.id]
        done = m.start + m.length + last
        parts.append({"type": "image_url", "url": _data_url(m.digest), "uuid": m.digest})
    return [*found, *prompt[done:]], parts


@lru_cache(maxsize=REMEMBERED)
def _data_url(digest: str) -> str:
    image = decoded(PICTURES.read(digest), f"the picture sha256:{digest[:12]}...")
    return f"data:image/png;base64,{base64.b64encode(png(np.asarray(image))).decode()}"
