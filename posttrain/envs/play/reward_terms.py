"""Loads rewards by prefix (verifiers, functions written for TRL or verl) and sums of rewards.

A sum of rewards of one reply is a `Weighted`. If any summand scores whole groups, the sum does.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.extras import installed
from posttrain.core.types import VERIFIER_PREFIX as PREFIX
from posttrain.core.types import UserError
from posttrain.envs.play.env_options import read_options, split_options
from posttrain.envs.play.env_outputs import read_verdict
from posttrain.envs.play.group_rewards import GroupReward, Part, each, group_sum, is_group_reward, refusing
from posttrain.envs.reward_sums import TRL, VERL, RewardTerm
from posttrain.system.user_code import import_target, named_in, split_name

if TYPE_CHECKING:
    from posttrain.verify.named_verifiers import NamedVerifier

Load = Callable[[str], Callable[..., Any]]
TRL_MODULE = "trl.rewards"  # module of names without a file


def sum_of(terms: Sequence[RewardTerm], spec: str, load: Load) -> Callable[..., Any]:
    """Return the sum of these terms; a single term without a weight is returned itself. `load` loads other names."""
    if len(terms) == 1 and terms[0].weight is None and not terms[0].spec.startswith(TRL):
        return _verifier(terms[0].spec) if terms[0].spec.startswith(PREFIX) else _of_verl(terms[0].spec)
    parts: dict[str, tuple[float, Callable[..., Any]]] = {}
    for term in terms:
        for name, function in _summands(term.spec, spec, load).items():
            parts[_part_name(name, parts)] = (1.0 if term.weight is None else term.weight, function)
    functions = [function for _, function in parts.values()]
    if any(map(is_group_reward, functions)):
        grouped: dict[str, Part] = {n: (w, f if is_group_reward(f) else each(f)) for n, (w, f) in parts.items()}
        return refusing(group_sum(grouped), functions)
    from posttrain.verify.weighted import Weighted  # see _found

    return refusing(Weighted(parts), functions)


def _summands(term: str, spec: str, load: Load) -> dict[str, Callable[..., Any]]:
    """Return name -> function of a term; several if it lists functions written for TRL."""
    if term.startswith(PREFIX):
        return {_short(term): _verifier(term)}
    if term.startswith(TRL):
        return _of_trl(term)
    function = _of_verl(term) if term.startswith(VERL) else load(term)
    if is_group_reward(function):
        return {_short(term): function}
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner) or inspect.iscoroutinefunction(inner):
        raise UserError(
            f"--env {spec:.80}: {term} cannot be added to others: only a reward def reward(task, reply) or def "
            "reward(tasks, replies) can"
        )
    return {_short(term): functools.partial(_total, function)}


def _total(function: Callable[..., Any], task: Any, reply: Any) -> Any:
    """Return the total of a reward as a summand."""
    return read_verdict(function(task, reply)).reward


def _of_trl(term: str) -> dict[str, GroupReward]:
    """Return the functions of "trl:rewards.py:accuracy,format", by name."""
    from posttrain.envs.play.trl_rewards import trl_part  # imported here so that workers of other rewards start sooner

    target, names = _trl_names(term)
    if target == TRL_MODULE and not installed("trl"):
        raise UserError(
            f"--env {term} is a function of TRL, and TRL is not installed: pip install trl, or name your file: "
            f"{TRL}rewards.py:{names[0]}"
        )
    module = import_target(target)
    own = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
    return {name: trl_part(named_in(module, name, target, own), f"{TRL}{target}:{name}") for name in names}


def _trl_names(term: str) -> tuple[str, list[str]]:
    """Split "trl:rewards.py:accuracy,format" into the file and its functions; without a file they are TRL's own."""
    body = term.removeprefix(TRL)
    target, names = split_name(body, TRL) if ":" in body or body.endswith(".py") else (TRL_MODULE, body)
    found = [name.strip() for name in names.split(",")]
    if (strange := next((name for name in found if not name.isidentifier()), None)) is not None:
        raise UserError(
            f"--env {term}: {strange!r} is not the name of a function: write {TRL}rewards.py:accuracy,format; a weight "
            f"follows a term, {TRL}rewards.py:accuracy*0.5"
        )
    if twice := next((name for name in found if found.count(name) > 1), None):
        raise UserError(f"--env {term} has {twice} twice: give it once, with a weight: {TRL}{target}:{twice}*2")
    return target, found


def _of_verl(term: str) -> Callable[..., Any]:
    """Return the function of "verl:score.py:compute_score,strict=true"."""
    from posttrain.envs.play.verl_rewards import further_options, own_parameters, read_value, verl_reward

    bare, options = split_options(term)
    target, name = split_name(bare.removeprefix(VERL), VERL, "compute_score")
    module = import_target(target)
    own = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
    function = named_in(module, name, target, own)
    settings: dict[str, Any] = {}
    if options and callable(function):
        further = further_options(function, options)
        settings = read_options(function, bare, options, {**own_parameters(function), **further}, module)
        settings |= {option: read_value(settings[option]) for option in further}
    return verl_reward(function, bare, **settings)


def target_of(term: str) -> str:
    """Return the file or module of a term written for TRL or verl."""
    return _trl_names(term)[0] if term.startswith(TRL) else split_name(term.removeprefix(VERL).partition(",")[0])[0]


def _found(spec: str) -> NamedVerifier:
    """Return the verifier of a name. The import is here so that workers of other rewards start sooner."""
    from posttrain.verify.named_verifiers import find_verifier

    return find_verifier(spec.removeprefix(PREFIX))


def _verifier(spec: str) -> Callable[..., Any]:
    bare, options = split_options(spec)
    return _found(bare).reward(options)


def _short(spec: str) -> str:
    """Return the name of a summand in records: that of the verifier or function; for FILE:reward, the file's."""
    name = spec.partition(",")[0].removeprefix(PREFIX)
    return Path(name.partition(":")[0]).stem if name.endswith(":reward") else name.rpartition(":")[2]


def _part_name(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number if it is already taken."""
    free = (f"{name}-{number}" for number in count(2))
    return name if name not in taken else next(one for one in free if one not in taken)


def full_marks(terms: Sequence[RewardTerm], success: Callable[[str], float | None]) -> float | None:
    """Return the reward of a reply that succeeds in every term; None if a term has no success threshold.

    `success`: returns the threshold of a term that is no verifier.
    """
    best = [_best(term.spec) if term.spec.startswith(PREFIX) else success(term.spec) for term in terms]
    if any(one is None or (term.weight or 1.0) < 0 for term, one in zip(terms, best, strict=True)):
        return None
    return math.fsum(
        (1.0 if term.weight is None else term.weight) * (one or 0.0) for term, one in zip(terms, best, strict=True)
    )


def _best(spec: str) -> float | None:
    return _found(spec.partition(",")[0]).success


def about_verifier(spec: str) -> str:
    """Return a line about a verifier with its settings."""
    from posttrain.verify.named_verifiers import sentence

    bare, options = split_options(spec)
    return f"{spec}: {sentence(_found(bare), options)}"
