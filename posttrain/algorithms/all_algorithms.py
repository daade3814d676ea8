"""The rows of all tables together, for readers: `posttrain algorithms` and the documentation."""

from __future__ import annotations

from posttrain.algorithms.lookup import lookup
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.preference import Preference
from posttrain.algorithms.preference_table import PREFERENCES
from posttrain.algorithms.reward_model_table import SCORINGS, Scoring
from posttrain.algorithms.row import Row

EVERY: dict[str, Row] = {**TABLE, **PREFERENCES, **SCORINGS}


def verb_of(row: Row) -> str:
    """The verb that trains with rows of this kind."""
    return "prefer" if isinstance(row, Preference) else "reward-model" if isinstance(row, Scoring) else "rl"


def find_any(name: str) -> Row:
    """The row of that name in any table, or the user's own "my.py:row". Raises UserError with the list of rows."""
    kinds: dict[type[Row], str] = {
        Algorithm: "posttrain.algorithms.policy",
        Preference: "posttrain.algorithms.preference",
        Scoring: "posttrain.algorithms.reward_model_table",
    }
    return lookup(name, EVERY, kinds)


def beside(row: Row) -> Row:
    """The row that others of its table are compared with."""
    if isinstance(row, Scoring):
        return SCORINGS["bradley-terry"]
    return PREFERENCES["dpo"] if isinstance(row, Preference) else TABLE["grpo"]
