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
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.core.coerce import convert
from posttrain.core.extras import installed
from posttrain.core.messages import near_or_all
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
SETTINGS = ("tools", "environment_factory", "max_tool_calling_iterations")
"""Arguments of TRL's agent training that a term may give."""


def sum_of(terms: Sequence[RewardTerm], spec: str, load: Load) -> Callable[..., Any]:
    """Return the sum of these terms; a single term without a weight is returned itself. `load` loads other names."""
    if len(terms) == 1 and terms[0].weight is None and not terms[0].spec.startswith(TRL):
        return _verifier(terms[0].spec) if terms[0].spec.startswith(PREFIX) else _of_verl(terms[0].spec)
    played = _of_agent(terms, spec)
    parts: dict[str, tuple[float, Callable[..., Any]]] = {}
    for term in terms:
        for name, function in _summands(term.spec, spec, load, "environment_factory" in played).items():
            parts[_part_name(name, parts)] = (1.0 if term.weight is None else term.weight, function)
    functions = [function for _, function in parts.values()]
    if played or any(map(is_group_reward, functions)):
        grouped: dict[str, Part] = {n: (w, f if is_group_reward(f) else each(f)) for n, (w, f) in parts.items()}
        if played:
            from posttrain.envs.play.trl_tools import trl_episodes  # see _of_trl

            return trl_episodes(grouped, **played)
        return refusing(group_sum(grouped), functions)
    from posttrain.verify.weighted import Weighted  # see _found

    return refusing(Weighted(parts), functions)


def _summands(term: str, spec: str, load: Load, environments: bool) -> dict[str, Callable[..., Any]]:
    """Return name -> function of a term; several if it lists functions written for TRL."""
    if term.startswith(PREFIX):
        return {_short(term): _verifier(term)}
    if term.startswith(TRL):
        return _of_trl(term, environments)
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


def _of_trl(term: str, environments: bool) -> dict[str, GroupReward]:
    """Return the functions of "trl:rewards.py:accuracy,format", by name."""
    from posttrain.envs.play.trl_rewards import trl_part  # imported here so that workers of other rewards start sooner

    target, names, _ = _trl_term(term)
    if target == TRL_MODULE and not installed("trl"):
        raise UserError(
            f"--env {term} is a function of TRL, and TRL is not installed: pip install trl, or name your file: "
            f"{TRL}rewards.py:{names[0]}"
        )
    return {name: trl_part(_named(target, name), f"{TRL}{target}:{name}", environments) for name in names}


def _of_agent(terms: Sequence[RewardTerm], spec: str) -> dict[str, Any]:
    """Return the settings of TRL's agent training in these terms: tools, their environment, rounds of calls."""
    found: dict[str, Any] = {}
    for term in (term.spec for term in terms if term.spec.startswith(TRL)):
        target, _, settings = _trl_term(term)
        for name, text in settings.items():
            if name in found:
                raise UserError(f"--env {spec:.80} gives {name} twice: give it once, for all terms")
            if name == "max_tool_calling_iterations":
                found[name] = convert(text, int, f"--env {term}: {name}")
            else:
                given = [_named(target, one.strip()) for one in text.split("+")]
                found[name] = given[0] if name == "environment_factory" else _flat(given)
    if found and not {"tools", "environment_factory"} & found.keys():
        raise UserError(f"--env {spec:.80} has no tools: name them too, {TRL}FILE.py:NAME,tools=f+g")
    return found


def _flat(given: Sequence[Any]) -> list[Any]:
    """Return functions, of which some may be in lists."""
    return [tool for one in given for tool in (one if isinstance(one, list | tuple) else [one])]


def _named(target: str, name: str) -> Any:
    module = import_target(target)
    own = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
    return named_in(module, name, target, own)


class TrlTerm(NamedTuple):
    """The parts of "trl:rewards.py:accuracy,format,tools=search+multiply"."""

    target: str  # file or module
    names: list[str]  # of reward functions
    settings: dict[str, str]  # of TRL's agent training


def _trl_term(term: str) -> TrlTerm:
    """Split a term; without a file its functions are TRL's own."""
    body = term.removeprefix(TRL)
    target, names = split_name(body, TRL) if ":" in body or body.endswith(".py") else (TRL_MODULE, body)
    given = [name.strip() for name in names.split(",")]
    pairs = [name.partition("=") for name in given if "=" in name]
    found, settings = [name for name in given if "=" not in name], {name: value for name, _, value in pairs}
    if unknown := next((name for name in settings if name not in SETTINGS), None):
        raise UserError(f"--env {term}: no option {unknown!r}{near_or_all(unknown, list(SETTINGS))}")
    if (strange := next((name for name in found if not name.isidentifier()), None)) is not None:
        raise UserError(
            f"--env {term}: {strange!r} is not the name of a function: write {TRL}rewards.py:accuracy,format; a weight "
            f"follows a term, {TRL}rewards.py:accuracy*0.5"
        )
    if twice := next((name for name in found if found.count(name) > 1), None):
        raise UserError(f"--env {term} has {twice} twice: give it once, with a weight: {TRL}{target}:{twice}*2")
    return TrlTerm(target, found, settings)


def _of_verl(term: str) -> Callable[..., Any]:
    """Return the function of "verl:score.py:compute_score,strict=true"."""
    from posttrain.envs.play.verl_rewards import further_options, own_parameters, read_value, verl_reward

    bare, options = split_options(term)
    target, name = split_name(bare.removeprefix(VERL), VERL, "compute_score")
    function, module = _named(target, name), import_target(target)
    settings: dict[str, Any] = {}
    if options and callable(function):
        further = further_options(function, options)
        settings = read_options(function, bare, options, {**own_parameters(function), **further}, module)
        settings |= {option: read_value(settings[option]) for option in further}
    return verl_reward(function, bare, **settings)


def target_of(term: str) -> str:
    """Return the file or module of a term written for TRL or verl."""
    return _trl_term(term).target if term.startswith(TRL) else split_name(term.removeprefix(VERL).partition(",")[0])[0]


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
