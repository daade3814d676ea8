"""Makes of a recipe the checks that its own command makes before it reads rows or a model."""

from __future__ import annotations

import tomllib
import warnings
from typing import Any

from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.core.messages import inline
from posttrain.core.types import UserError


def check_recipe(draft: RecipeDraft) -> None:
    """Note what the command of a recipe would refuse."""
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
