"""From the file of a run of another trainer to the text of a recipe."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.apps.migration import openrlhf_recipe, trl_recipe, verl_recipe
from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.apps.migration.recognition import read
from posttrain.core.coerce import has_wide_integer
from posttrain.core.messages import clip, inline
from posttrain.core.types import UserError

Rules = Callable[[RecipeDraft, int | None, int | None], None]

_FRAMEWORKS: dict[str, tuple[Rules, Mapping[str, Mapping[str, Any]], Mapping[str, str], str]] = {
    "TRL": (trl_recipe.trl_recipe, trl_recipe.DEFAULTS, trl_recipe.VERBS_OF, "prefer"),
    "verl": (verl_recipe.verl_recipe, verl_recipe.DEFAULTS, {"sft_trainer": "sft", "fsdp_sft_trainer": "sft"}, "rl"),
    "OpenRLHF": (
        openrlhf_recipe.openrlhf_recipe,
        openrlhf_recipe.DEFAULTS,
        {"train_sft": "sft", "train_dpo": "prefer", "train_rm": "reward-model"},
        "rl",
    ),
}
"""Framework -> its rules, its defaults by trainer, the verbs of its trainers, and the verb of all others."""


def recipe_for(
    source: str, devices: int | None, rows: int | None, trainer: str | None, beside: str = ""
) -> RecipeDraft:
    """Return the recipe for the run in a file. Raises UserError where it cannot be read or has no counterpart.

    `beside`: beginning of the names of files that are written with the recipe, its folder included.
    """
    run = read(source, trainer, beside)
    for name, value in run.options.items():
        if has_wide_integer(value):
            raise UserError(
                f"{run.framework}'s {clip(name)} has an integer of more than 64 bits: correct it in {clip(source)}"
            )
    rules, defaults, verbs, other = _FRAMEWORKS[run.framework]
    draft = RecipeDraft(run, verbs.get(run.trainer, other), {**defaults[run.trainer], **run.defaults})
    rules(draft, devices, rows)
    draft.finish()
    _check(draft)
    return draft


def _check(draft: RecipeDraft) -> None:
    """Note what the command of the recipe would refuse before it reads rows or a model."""
    table: dict[str, Any] = tomllib.loads(draft.toml("", ""))[draft.verb]
    table.pop("track", None)  # perhaps it is not installed here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an optimizer that this machine lacks a card for
            _accept(draft.verb, table)
    except UserError as error:
        draft.run.notes.append(f"what posttrain {draft.verb} refuses in this recipe: {inline(str(error))}")


def _accept(verb: str, table: dict[str, Any]) -> None:
    from posttrain.algorithms.all_algorithms import EVERY
    from posttrain.algorithms.policy import Algorithm
    from posttrain.config.resolve import filled, validate
    from posttrain.config.training import RL
    from posttrain.config.verbs import VERBS
    from posttrain.training.adjust import adjust

    config = filled(VERBS[verb].options, table)
    validate(config)
    algorithm = EVERY.get(config.algorithm) if isinstance(config, RL) else None
    if isinstance(config, RL) and isinstance(algorithm, Algorithm):
        adjust(algorithm, config)
