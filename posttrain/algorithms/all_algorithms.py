"""The algorithms of all tables together, for `posttrain algorithms` and the documentation."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.algorithms.algorithm_base import AlgorithmBase
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.preference import PreferenceAlgorithm
from posttrain.algorithms.preference_table import PREFERENCES
from posttrain.algorithms.reward_model_table import REWARD_MODELS, RewardModelAlgorithm
from posttrain.algorithms.settings import AnyAlgorithm, check_components
from posttrain.core.messages import near_or_where, short
from posttrain.core.types import UserError
from posttrain.system.user_code import load_named

EVERY: dict[str, AlgorithmBase] = {**TABLE, **PREFERENCES, **REWARD_MODELS}
MODULES: dict[type[AlgorithmBase], str] = {
    Algorithm: "posttrain.algorithms.policy",
    PreferenceAlgorithm: "posttrain.algorithms.preference",
    RewardModelAlgorithm: "posttrain.algorithms.reward_model_table",
}
"""Kind of algorithm -> the module from which a user's own imports it."""


def verb_of(algorithm: AlgorithmBase) -> str:
    """Return the command that trains with algorithms of this kind."""
    if isinstance(algorithm, RewardModelAlgorithm):
        return "reward-model"
    return "prefer" if isinstance(algorithm, PreferenceAlgorithm) else "rl"


def find_any(name: str) -> AlgorithmBase:
    """Return the algorithm of that name in any table, or the user's own "my.py:algorithm".

    Raises UserError, with the list of algorithms, if there is none."""
    return lookup(name, EVERY, *MODULES)


def beside(algorithm: AlgorithmBase) -> AlgorithmBase:
    """Return the algorithm with which the pages compare this one: one for each table."""
    if isinstance(algorithm, RewardModelAlgorithm):
        return REWARD_MODELS["bradley-terry"]
    return PREFERENCES["dpo"] if isinstance(algorithm, PreferenceAlgorithm) else TABLE["grpo"]


def find(name: str) -> Algorithm:
    """Return the policy-gradient algorithm of that name, or the user's own "my.py:algorithm".

    Raises UserError, with the list of algorithms, if there is none.
    """
    return lookup(name, TABLE, Algorithm)


def find_preference(name: str) -> PreferenceAlgorithm:
    """Return the preference algorithm of that name, or the user's own "my.py:algorithm".

    Raises UserError, with the list of algorithms, if there is none.
    """
    return lookup(name, PREFERENCES, PreferenceAlgorithm)


def find_reward_model(name: str) -> RewardModelAlgorithm:
    """Return the reward-model algorithm of that name, or the user's own "my.py:algorithm".

    Raises UserError, with the list of algorithms, if there is none.
    """
    return lookup(name, REWARD_MODELS, RewardModelAlgorithm)


def lookup(name: str, table: Mapping[str, AnyAlgorithm], *kinds: type[AnyAlgorithm]) -> AnyAlgorithm:
    """Return the algorithm of that name in a table, or the user's own "my.py:algorithm".

    Raises UserError, with the list of algorithms, if there is none.

    `kinds`: the classes allowed for a user's own algorithm.
    """
    if name in table:
        return table[name]
    if ":" in name:
        algorithm = load_named(name)
        if not isinstance(algorithm, kinds):
            made = " or ".join(f"{_article(kind)}(...) of {MODULES[kind]}" for kind in kinds)
            raise UserError(f"{name} is {short(algorithm)}, not an algorithm: make it {made}")
        assert isinstance(algorithm, AlgorithmBase)
        check_components(algorithm)
        return algorithm
    if name in EVERY:
        verb = verb_of(EVERY[name])
        raise UserError(f"{name} is an algorithm of another verb: run posttrain {verb} --algorithm {name}")
    told = near_or_where(name.lower(), table, "posttrain algorithms")
    raise UserError(f"unknown algorithm {name!r}{told}; your own is my.py:name")


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
