"""The rows of all tables together, for readers: `posttrain algorithms` and the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.preference import Preference
from posttrain.algorithms.preference_table import PREFERENCES
from posttrain.algorithms.reward_model_table import SCORINGS, Scoring
from posttrain.algorithms.row import Row
from posttrain.algorithms.settings import AnyRow, check_parts
from posttrain.core.messages import near_or_where, short
from posttrain.core.types import UserError
from posttrain.system.user_code import load_named

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


def find(name: str) -> Algorithm:
    """The row of that name, or the user's own "my.py:row". Raises UserError with the list of rows."""
    return lookup(name, TABLE, {Algorithm: "posttrain.algorithms.policy"})


def find_preference(name: str) -> Preference:
    """The row of that name, or the user's own "my.py:row". Raises UserError with the list of rows."""
    return lookup(name, PREFERENCES, {Preference: "posttrain.algorithms.preference"})


def find_scoring(name: str) -> Scoring:
    """The row of that name, or the user's own "my.py:row". Raises UserError with the list of rows."""
    return lookup(name, SCORINGS, {Scoring: "posttrain.algorithms.reward_model_table"})


def lookup(name: str, table: Mapping[str, AnyRow], kinds: Mapping[type[AnyRow], str]) -> AnyRow:
    """The row of that name, or the user's own "my.py:row". Raises UserError with the list of rows.

    `kinds`: the classes of which a row of one's own may be made, and where each is imported from.
    """
    if name in table:
        return table[name]
    if ":" in name:
        row = load_named(name)
        if not isinstance(row, tuple(kinds)):
            made = " or ".join(f"{_article(kind)}(...) of {module}" for kind, module in kinds.items())
            raise UserError(f"{name} is {short(row)}, not a row: make it {made}")
        assert isinstance(row, Row)
        check_parts(row)
        return cast(AnyRow, row)
    from posttrain.algorithms.all_algorithms import EVERY, verb_of  # which looks its own rows up here

    if name in EVERY:
        verb = verb_of(EVERY[name])
        raise UserError(f"{name} belongs to posttrain {verb}: posttrain {verb} --algorithm {name}")
    told = near_or_where(name.lower(), table, "posttrain algorithms")
    raise UserError(f"unknown algorithm {name!r}{told}; your own is my.py:name")


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
