"""Writes a model of transformers to a checkpoint folder, with transformers' own conversion of names."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.models.json_files import write_json
from posttrain.models.native.merged_weights import plain_weights
from posttrain.models.row_shards import is_sharded, whole

if TYPE_CHECKING:
    from posttrain.models.hf.backed import Backed


def save_backed(model: Backed, folder: Path) -> None:
    """Write config.json, generation_config.json and weights, the latter through transformers' own conversion."""
    folder.mkdir(parents=True, exist_ok=True)
    state = _state(model) if any(map(is_sharded, model.parameters())) else None
    with quiet():
        model.inner.save_pretrained(folder, state_dict=state)
    write_generation(model, folder)


def write_generation(model: Backed, folder: Path) -> None:
    """Write generation_config.json with the ids that end a reply."""
    ends = model.eos_ids if len(model.eos_ids) != 1 else model.eos_ids[0]
    write_json(folder / "generation_config.json", {**model.generation, **({"eos_token_id": ends} if ends else {})})


def stored_tensors(model: Backed) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights as a checkpoint stores them, by name."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        yield from revert_weight_conversion(model.inner, _state(model)).items()


def stored_name(model: Backed, weight: Tensor) -> str:
    """Return the name of one of the model's parameters in a checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    own = next(name for name, parameter in model.inner.named_parameters() if parameter is weight)
    (found,) = revert_weight_conversion(model.inner, {own: torch.empty(0)})
    return str(found)


def _state(model: Backed) -> dict[str, Tensor]:
    """Return the weights by their names in transformers' model, gathered if sharded, with adapters merged."""
    return {name.removeprefix("inner."): whole(weight) for name, weight in plain_weights(model)}


@contextmanager
def quiet() -> Iterator[None]:
    """Context without progress bars and warnings of transformers: this package makes its own checks."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
