"""Options of an evaluation that follow from training: from a run's run.json, or from the table of a recipe.

A model is evaluated as it was trained, but for what is given: with the reward and its services, the limits and the
sampling of its replies, and on the tasks that the training held out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from posttrain.config.held_out_sets import held_out_sets
from posttrain.config.inference import Evaluation
from posttrain.config.resolve import chosen_options, filled
from posttrain.config.row_options import ChatTemplateGroup
from posttrain.config.service_options import SCORERS
from posttrain.config.shared_options import EnvLimitGroup, EpisodeGroup, SamplingGroup, StepRewardGroup
from posttrain.config.verbs import sampling
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.envs.play.load_env import task_set
from posttrain.runs.run_reading import read_run, run_of, split_of


def _names(*groups: type[Any]) -> frozenset[str]:
    return frozenset(f.name for group in groups for f in fields(group))


SAMPLED = _names(EpisodeGroup, SamplingGroup)
SHOWN = _names(ChatTemplateGroup) | {"chat", "system"}
"""Options about chat templates. The checkpoints of a run record their own."""
REWARD = _names(StepRewardGroup, EnvLimitGroup) | {"env", "success"}
COLUMNS = frozenset({"fields", "prompt_template", "too_long"})
FROM_PYTHON = re.compile(r"\d+ rows in memory|rows (?:made by|of) .+")
"""Names in run.json of rows that came from a program."""


def as_trained(config: Evaluation, rows_given: bool) -> tuple[Evaluation, list[str]]:
    """Return the evaluation with options of the run of rl or distill that its model belongs to, where none are given,
    and a line about them. `rows_given`: rows are given as objects.

    Raises UserError if there are no tasks that the run held out, and none are given.
    """
    run = run_of(Path(config.model)) if config.model else None
    recorded = read_run(run) if run is not None else None
    if recorded is None or recorded["verb"] not in sampling():
        return config, []
    given = {name: getattr(config, name) for name in config.given}
    if (config.harness is not None or getattr(config, "suite", None)) and not (rows_given or config.tasks):
        return config, []
    found = evaluation_options(recorded["config"], given | ({"tasks": ""} if rows_given else {}), str(run))
    found = {name: value for name, value in found.items() if name not in SHOWN}
    told = chosen_options(filled(Evaluation, found, f"{run}: "))
    line = [f"taken from {run}: {', '.join(told)}"] if told else []
    return filled(type(config), {**given, **found}, f"{run}: "), line


def evaluation_options(trained: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return options of an evaluation of what these options of rl or distill train, without those that are given.

    A reward that is given replaces the whole reward of the training, and tasks that are given replace its tasks. If both
    are, columns keep their own names. Raises UserError, which begins with `where`, if there are no held-out tasks.
    """
    if "tasks" not in given and task_set(given.get("env")) is not None:
        given = {**given, "tasks": ""}  # those of the environment
    names = SAMPLED | SHOWN
    rewarded = "env" in given or (not given.get("search") and any(name in given for name in SCORERS))
    if not rewarded:
        names |= REWARD
    if given.get("search"):  # its reward model scores the steps
        names -= {"reward_model", *(name for name in REWARD if name.startswith("step_"))}
    if not (rewarded and "tasks" in given):
        names |= COLUMNS
    found = {name: trained[name] for name in names & trained.keys()} | _held_out(trained, given, where)
    return {name: value for name, value in found.items() if value is not None and name not in given}


def _held_out(trained: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options that name the held-out tasks."""
    try:
        share, seed = split_of(trained)
        sets = held_out_sets(_listed(trained.get("eval_tasks")))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where}: held_out and seed must be numbers, eval_tasks names of files: {one_line(error)}"
        ) from error
    split = {"held_out": share, "split_seed": seed} if share else {}
    if "tasks" in given:
        return split if _same_rows(given["tasks"], trained.get("tasks")) else {}
    if len(sets) == 1:
        return {"tasks": next(iter(sets.values()))}
    if sets or trained.get("mixture"):
        each = ", ".join(f"{name} ({rows})" for name, rows in sets.items())
        several = (
            f"is evaluated on several sets, {each}: choose one" if sets else "learns a mixture: name tasks of one part"
        )
        raise UserError(f"{where} {several} with --tasks{'' if sets else ', and its --env'}")
    if not (share or "held_out" in given):
        raise UserError(f"{where} holds out no tasks: name some that it does not train on with --tasks")
    if not trained.get("tasks") or FROM_PYTHON.fullmatch(str(trained["tasks"])):
        raise UserError(f"{where} got its tasks from a program: give a file of them with --tasks")
    return {"tasks": trained["tasks"], **{name: trained.get(name) for name in ("split", "limit")}, **split}


def _listed(value: Any) -> Sequence[str]:
    """Return the values of an option that has one or more: a recipe may name one without brackets."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _same_rows(one: Any, other: Any) -> bool:
    """Return whether two options name the same rows: a file has several spellings."""
    texts = isinstance(one, str) and isinstance(other, str)
    return texts and bool(one) and (one == other or os.path.realpath(one) == os.path.realpath(other))
