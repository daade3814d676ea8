"""Reward functions written for TRL, unchanged: `f(prompts, completions, completion_ids, **columns) -> list[float |
None]`.

TRL's `GRPOTrainer` calls such a function with all completions of a step; here it gets those of one group, so a function
that compares completions of a prompt sees the same ones (TRL 1.16, `GRPOTrainer._calculate_rewards`). It gets TRL's
arguments: prompts and completions as messages if the row's prompt is messages, else as text; the sampled token ids with
the end-of-sequence token; each further column of the rows; `log_extra` and `log_metric`, which become notes of the
rollouts. `trainer_state` does not exist here: a function that requires it is refused before the run. With tools or an
environment, a group's completions are episodes of several replies: see `trl_tools`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.core.messages import short
from posttrain.core.types import Invalid, InvalidKind, Reply, Task, UserError
from posttrain.envs.play.call_recording import NOTING
from posttrain.envs.play.group_rewards import GroupReward, group_sum, refusing
from posttrain.envs.play.trl_tools import LastReply, trl_episodes
from posttrain.system.user_code import describe_error, is_of_kind, required, source_file, takes_any_name

UNKNOWN = {
    "trainer_state": "which TRL's trainer passes and posttrain does not: give the parameter a default, trainer_state=None",
    "environments": "which TRL passes with environment_factory: name it too, trl:FILE.py:NAME,environment_factory=CLASS",
}
"""Parameters of TRL that may not exist here -> what to do."""
LOGS = ("log_extra", "log_metric")
OURS = ("prompt", "messages", "completion", *UNKNOWN)
"""Columns that are not passed, as TRL passes prompts under its own names."""


def trl_reward(
    *functions: Callable[..., Any],
    weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    max_tool_calling_iterations: int | None = None,
) -> Callable[..., Any]:
    """Return the weighted sum of functions written for TRL, as a reward: `posttrain.rl(rows, trl_reward(f, g))`.

    `weights`: TRL's `reward_weights`; None: 1 each. A function that returns None for a reply does not count for it; if
    all do, the reply is invalid. `tools`, `environment_factory`, `max_tool_calling_iterations`: TRL's; with one of the
    first two, the result is an environment. Raises UserError for anything else than such functions, and for another
    number of weights.
    """
    if not functions and environment_factory is None:
        raise UserError("trl_reward needs a function, such as those in TRL's reward_funcs")
    if max_tool_calling_iterations is not None and environment_factory is None and not tools:
        raise UserError("max_tool_calling_iterations has no effect without tools or environment_factory: leave it out")
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if len(weights) != len(functions):
        raise UserError(f"trl_reward has {len(functions)} functions and {len(weights)} weights: give one for each")
    parts: dict[str, tuple[float, GroupReward]] = {}
    for function, weight in zip(functions, weights, strict=True):
        name = getattr(function, "__name__", type(function).__name__)
        number = sum(known.partition("-")[0] == name for known in parts) + 1
        part = trl_part(function, name, environment_factory is not None)
        parts[name if number == 1 else f"{name}-{number}"] = (float(weight), part)
    if tools or environment_factory is not None:
        return trl_episodes(parts, tools, environment_factory, max_tool_calling_iterations)
    return refusing(group_sum(parts), [part for _, part in parts.values()])


def trl_part(function: Callable[..., Any], label: str, environments: bool = False) -> GroupReward:
    """Return a function written for TRL as a part of a reward of groups. `label`: its name in messages.

    `environments`: whether episodes have an environment, which the function may read.
    Raises UserError if it is not a function, takes no completions, or requires an argument that only TRL's trainer has.
    """
    taken = _parameters(function, label, environments)

    def given(tasks: Sequence[Task], replies: Sequence[Reply]) -> dict[str, Any] | Invalid:
        return _arguments(taken, tasks, replies)

    def failed(error: BaseException, count: int) -> list[Any]:
        if isinstance(error, MemoryError):
            raise error
        return [Invalid(describe_error(error, source_file(function)), InvalidKind.RAISED)] * count

    if is_of_kind(function, inspect.iscoroutinefunction):

        async def part(tasks: Sequence[Task], replies: Sequence[Reply]) -> Any:
            arguments = given(tasks, replies)
            try:
                return [arguments] * len(replies) if isinstance(arguments, Invalid) else await function(**arguments)
            except (Exception, SystemExit) as error:  # the user's code
                return failed(error, len(replies))

    else:

        def part(tasks: Sequence[Task], replies: Sequence[Reply]) -> Any:  # type: ignore[misc]
            arguments = given(tasks, replies)
            try:
                return [arguments] * len(replies) if isinstance(arguments, Invalid) else function(**arguments)
            except (Exception, SystemExit) as error:  # the user's code
                return failed(error, len(replies))

    part.stands_for = function  # type: ignore[attr-defined]
    part.problem_of_row = functools.partial(_problem_of_row, taken, label)  # type: ignore[attr-defined]
    return part


def _parameters(function: Callable[..., Any], label: str, environments: bool) -> Mapping[str, inspect.Parameter]:
    """Return the parameters by name. Raises UserError if this is no reward function of TRL."""
    if isinstance(function, str) or not callable(function) or inspect.isclass(function):
        kind = "a class" if inspect.isclass(function) else short(function)
        hint = "; a reward model is given with --reward-model FOLDER" if isinstance(function, str) else ""
        raise UserError(f"{label} is {kind}, not a reward function of TRL: def f(completions, **kwargs) -> list{hint}")
    taken = inspect.signature(function).parameters
    unknown = [name for name in UNKNOWN if not (environments and name == "environments")]
    if takes := next((n for n, p in taken.items() if n in unknown and p.default is p.empty), None):
        raise UserError(f"{label} needs {takes}, {UNKNOWN[takes]}")
    if {"solution_str", "solution_strs"} & taken.keys():
        raise UserError(
            f"{label} takes ({', '.join(taken)}), as functions for verl do: give it as verl:{label.removeprefix('trl:')}"
        )
    if not ({"completions", "completion_ids"} & taken.keys() or takes_any_name(taken)):
        raise UserError(
            f"{label} takes ({', '.join(taken)}), not TRL's completions: name a reward of (task, reply) without trl:"
        )
    return taken


def _arguments(
    taken: Mapping[str, inspect.Parameter], tasks: Sequence[Task], replies: Sequence[Reply]
) -> dict[str, Any] | Invalid:
    """Return the arguments by name, each a list with a value for each reply.

    They are copies that a function may change.
    """
    tasks = copy.deepcopy(list(tasks))
    given = _of_episodes(replies) if isinstance(replies[0], LastReply) else _of_replies(tasks, replies)
    given |= {"log_extra": _log_extra, "log_metric": _log_metric}
    sampled = given.pop("completion_ids")
    if None not in sampled:
        given["completion_ids"] = sampled
    elif "completion_ids" in taken:
        return Invalid(
            "it reads completion_ids, and these replies have no tokens: give posttrain check a --model FOLDER"
        )
    for column in tasks[0]:
        if column not in OURS:
            given[column] = [task.get(column) for task in tasks]
    if not takes_any_name(taken):
        given = {name: value for name, value in given.items() if name in taken}
    if missing := _missing(taken, {*given, "completion_ids"}):
        return Invalid(_lacks(missing, tasks[0]))
    return given


def _of_replies(tasks: Sequence[Task], replies: Sequence[Reply]) -> dict[str, Any]:
    chat = [not isinstance(task.get("prompt"), str) for task in tasks]
    return {
        "prompts": [task["messages"] if own else task["prompt"] for task, own in zip(tasks, chat, strict=True)],
        "completions": [
            [{"role": "assistant", "content": str(reply)}] if own else str(reply)
            for reply, own in zip(replies, chat, strict=True)
        ],
        "completion_ids": [None if reply.sampled is None else list(reply.sampled.tokens) for reply in replies],
    }


def _of_episodes(replies: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of whole episodes."""
    found: dict[str, Any] = {
        "prompts": copy.deepcopy([last.prompt for last in replies]),
        "completions": copy.deepcopy([last.completion for last in replies]),
        "completion_ids": [last.sampled_ids for last in replies],
    }
    environments = [last.environment for last in replies]
    return found if None in environments else {**found, "environments": environments}


def _problem_of_row(taken: Mapping[str, inspect.Parameter], label: str, task: Task) -> str | None:
    """Return why a function cannot score this row, in words, or None."""
    missing = _missing(
        taken, {"prompts", "completions", "completion_ids", "environments", *LOGS, *(set(task) - set(OURS))}
    )
    return f"{label}: {_lacks(missing, task)}" if missing else None


def _missing(taken: Mapping[str, inspect.Parameter], given: set[str]) -> str | None:
    return next((name for name in required(taken) if name not in given), None)


def _lacks(missing: str, task: Task) -> str:
    has = ", ".join(name for name in task if name not in (*OURS, "id")) or "no further column"
    return f"it reads the column {missing!r}, and the row has {has}: rename one with --fields.{missing} COLUMN"


def _log_extra(column: str, values: Sequence[Any]) -> None:
    journal = NOTING.get()
    if journal is not None:
        journal.note_each(str(column), values)


def _log_metric(name: str, value: Any) -> None:
    journal = NOTING.get()
    if journal is not None:
        journal.note_or_text(str(name), value.item() if hasattr(value, "item") else value)
