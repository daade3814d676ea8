"""Makes the order of the tasks of a run of `rl` from its options: see `--curriculum`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.config.training import RL
from posttrain.core.messages import clip, in_row
from posttrain.core.progress import doing
from posttrain.core.seeds import seed_of
from posttrain.core.types import Task, UserError
from posttrain.data.levels import Levels
from posttrain.data.mixed_tasks import AnyTasks, MixedTasks
from posttrain.data.rows import value_in
from posttrain.data.tasks import Integers, Stream, Tasks
from posttrain.runs.terminal.notices import warn
from posttrain.system.user_code import describe_error, load_named
from posttrain.training.sources.mixture import LearningProgress, Mixture
from posttrain.training.sources.task_order import ByLevel, SolveRate, Stages, TaskOrder, Uniform

MOST_STAGES = 1000
SHOWN_STAGES = 8  # most stages that are named, with their numbers of tasks


def task_order(config: RL, tasks: AnyTasks, success: float | None) -> TaskOrder:
    """Return the order in which a run visits its tasks. `success`: the success threshold, if there is one.

    Raises UserError if the tasks lack something that the curriculum needs.
    """
    if not isinstance(tasks, MixedTasks):
        return _order(config, tasks, success)
    sizes = {name: len(own) for name, own in tasks.parts.items()}
    orders = {
        name: _order(replace(config, seed=seed_of(config.seed, "part", name)), own, success)
        for name, own in zip(sizes, tasks.each(), strict=True)
    }
    if config.mixture_weights == "fixed":
        return Mixture(orders, tasks.ends, tasks.shares)
    if success is None:
        raise UserError(
            "--mixture-weights progress counts right replies: give the reward of a right reply with --success"
        )
    return Mixture(orders, tasks.ends, tasks.shares, LearningProgress(tasks.shares, config.mixture_floor))


def _order(config: RL, tasks: AnyTasks, success: float | None) -> TaskOrder:
    if config.curriculum == "uniform":
        return Uniform(len(tasks), config.seed)
    name = f"--curriculum {config.curriculum}"
    if not (config.env or config.mixture):
        raise UserError(f"{name} counts right replies, and nothing scores replies here: give --env, or leave it out")
    if success is None:
        raise UserError(f"{name} counts right replies: give the reward of a right reply with --success")
    least = config.prompts * config.group * (1 - config.curriculum_floor) / 2
    until = config.curriculum_decay, config.curriculum_accuracy, least
    if config.curriculum == "levels":
        if not isinstance(tasks, Levels):
            raise UserError(f"{name} needs --tasks my.py:tasks, a function tasks(seed, level) that returns rows")
        return ByLevel(tasks, config.curriculum_floor, *until)
    if isinstance(tasks, Stream):
        raise UserError(f"{name} needs to know all tasks, and these rows have no end: set their number with --limit")
    if config.curriculum == "solve-rate":
        how = config.curriculum_floor, config.curriculum_decay, config.curriculum_sharpness
        return SolveRate(tasks, config.seed, *how)
    assert isinstance(tasks, Tasks), "options refuse stages of a mixture"
    stages = stages_of(tasks, config.curriculum_column)
    for value, places in stages.items():
        if len(places) < config.prompts:
            raise UserError(
                f"the stage {config.curriculum_column} = {_shown(value)} has {len(places)} tasks, fewer than a step's "
                f"--prompts {config.prompts}: give --prompts {len(places)} or fewer, or merge stages"
            )
    names = list(map(_shown, stages))
    if len(names) == 1:
        raise UserError(
            f"{config.curriculum_column} is {names[0]} in every row, which is one stage: name another column"
        )
    if not all(isinstance(value, float | int) for value in stages):
        warn(
            f"the stages by {config.curriculum_column} are texts, in alphabetical order: {_listed(names)}; give numbers for "
            "another order"
        )
    return Stages(list(stages.values()), config.seed, config.curriculum_floor, *until, names)


def order_lines(config: RL, order: TaskOrder) -> list[str]:
    """Describe the order of the tasks; [] for the uniform order."""
    floor = f"{config.curriculum_floor:.0%} of the prompts"
    if isinstance(order, Mixture):
        shares = ", ".join(f"{name} {share:.1%}" for name, share in order.shares.items())
        which = f"{config.mixture_floor:.0%} of the prompts" if order.progress else "the prompts"
        rest = "; learning progress decides on the other prompts" if order.progress else ""
        return [f"mixture: {shares} of {which}{rest}", *order_lines(config, next(iter(order.orders.values())))]
    if isinstance(order, SolveRate):
        return [f"curriculum: tasks that are solved half of the time come first; {floor} are all tasks in turn"]
    if isinstance(order, ByLevel):
        return [
            f"curriculum: new tasks of a level until an accuracy of {config.curriculum_accuracy:g}, then of the next; "
            f"{floor} are of earlier levels"
        ]
    if isinstance(order, Stages):
        sizes = [f"{name} ({len(places)})" for name, places in zip(order.names, order.stages, strict=True)]
        return [
            f"curriculum: {len(sizes)} stages by {config.curriculum_column}: {_listed(sizes)}, each until an accuracy of "
            f"{config.curriculum_accuracy:g}; {floor} are tasks of earlier stages"
        ]
    return []


def _listed(stages: Sequence[str]) -> str:
    return ", ".join(stages[:SHOWN_STAGES]) + (", ..." if len(stages) > SHOWN_STAGES else "")


def stages_of(tasks: Tasks, column: str) -> dict[float | str, Integers]:
    """Return the values of a column, or of a function as my.py:stage, in ascending order, each with the places of its tasks.

    Texts are compared as numbers if all of them are numbers. Raises UserError, in one line that names the row, for a
    missing value, and for one that cannot be compared with the others.
    """
    doing(f"reading the column {column}")
    function = load_named(column) if re.fullmatch(r".+\.py:\w+", column) else None
    values = [_value(tasks, place, task, column, function) for place, task in enumerate(tasks)]
    numbers = [_number(value) for value in values]
    texts = [place for place, number in enumerate(numbers) if number is None]
    others = [place for place, value in enumerate(values) if not isinstance(value, str)]
    if texts and others:
        raise UserError(
            f"{tasks.where(texts[0])}: {column} is {clip(repr(values[texts[0]]))}, and {clip(repr(values[others[0]]))} in "
            f"{tasks.where(others[0])}: make all of them numbers, or all strings"
        )
    found: dict[Any, list[int]] = {}
    for place, value in enumerate(values if texts else numbers):
        found.setdefault(value, []).append(place)
    if len(found) > MOST_STAGES:
        raise UserError(
            f"the column {column!r} has {len(found):,} different values, and each would be a stage: round them, or name "
            "another column"
        )
    return {value: np.array(found[value]) for value in sorted(found)}


def _value(tasks: Tasks, place: int, task: Task, column: str, function: Callable[[Task], Any] | None) -> float | str:
    try:
        value = _in_row(tasks, place, task, column) if function is None else called(function, task, column)
        kept = isinstance(value, int | float | str) and value != ""
        if not kept or not (isinstance(value, str) or _number(value) is not None):
            raise UserError(f"{column} is {in_row(value)}: a stage must be a finite number or a string")
    except UserError as error:
        raise UserError(f"{tasks.where(place)}: {error}") from error
    return value


def _in_row(tasks: Tasks, place: int, task: Task, column: str) -> Any:
    """Return the value of a column of a task, or of its row, whose columns the error names."""
    try:
        return value_in(task, column)
    except UserError:
        return value_in(tasks.row(place), column)


def called(function: Callable[[Task], Any], task: Task, name: str) -> Any:
    """Return what a user's function returns for a task. Raises UserError if it fails."""
    try:
        return function(task)
    except Exception as error:
        raise UserError(f"{name} failed: {describe_error(error, None)}") from error


def _shown(value: float | str) -> str:
    return clip(value) if isinstance(value, str) else f"{value:g}"


def _number(value: float | str) -> float | None:
    """Return a value as a number; None for a text that is no number."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
