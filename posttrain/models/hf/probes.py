"""Short texts for the checks of a model when it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.models.hf.backed import Backed


PROBES = ((11, 3, 7, 2, 5, 1, 13), (4, 9))
"""Two texts with a common prefix, as token ids before they are taken modulo the vocabulary."""


BEGINNING = (2, 8, 6, 10, 3)


def probe_ids(model: Backed, numbers: tuple[int, ...]) -> list[int]:
    taken = model.vision.placeholders if model.vision is not None else ()
    found = [(37 * number + 11) % model.config.vocab for number in numbers]
    return [model.filler if id in taken else id for id in found]
