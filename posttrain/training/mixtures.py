"""Tasks of a mixture: each part is read and split like the tasks of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posttrain.config.held_out_sets import ONLY, held_out_sets
from posttrain.config.mixture_options import of_part, parts_of, weights_of
from posttrain.config.training import RL, Passes
from posttrain.core.types import UserError
from posttrain.data.mixed_tasks import AnyTasks, MixedTasks
from posttrain.data.tasks import Stream, Tasks
from posttrain.runs.terminal.notices import warn
from posttrain.training.held_out_check import trained_on
from posttrain.training.setup import load_tasks, split_seed, split_tasks


def rows_of(config: Passes, rows: Any, **reading: Any) -> tuple[AnyTasks, Tasks | MixedTasks | None]:
    """Return the rows to train on, and the held-out rows. `reading`: see `setup.split_tasks`."""
    if config.mixture:
        return mixed_tasks(config, rows, None, **reading)
    found, unseen = split_tasks(config, rows, **reading)
    return found, separate_tasks(config, found, **reading) or unseen


def separate_tasks(
    config: RL | Passes, train: Tasks | Stream, env: Callable[..., Any] | None = None, **reading: Any
) -> Tasks | MixedTasks | None:
    """Return the tasks of `--eval-tasks`, up to `--eval-limit` of each set; None if there are none.

    Warns of prompts that are among those to train on. Raises UserError for rows that cannot be read or have no end.
    """

    def read(file: str) -> Tasks:
        found = load_tasks(replace(config, tasks=file, limit=None, split=None), None, env, **reading)
        limit = getattr(config, "eval_limit", None)
        if limit is None and isinstance(found, Stream):
            raise UserError(f"--eval-tasks {file} has rows without end: give a finite file")
        return found.first(len(found) if limit is None else limit)

    sets = {name: read(file) for name, file in held_out_sets(config.eval_tasks).items()}
    if isinstance(train, Tasks) and not config.resume:
        for line in trained_on(train, sets, split_seed(config)):
            warn(line)
    return (sets[ONLY] if ONLY in sets else MixedTasks(sets)) if sets else None


def mixed_tasks(
    config: RL | Passes, rows: Any, env: Callable[..., Any] | None, **reading: Any
) -> tuple[MixedTasks, MixedTasks | None]:
    """Return a mixture's tasks to train on, and those to evaluate on: up to `--eval-limit` of each part.

    Raises UserError, with the name of the part, for rows that cannot be read or have no end.
    """
    if rows is not None or env is not None:
        raise UserError("--mixture already names rows and environments: leave out tasks and env passed as objects")
    if config.eval_tasks:
        raise UserError("--eval-tasks does not go with --mixture: use --held-out, a share of each part")
    train: dict[str, Tasks] = {}
    held_out: dict[str, Tasks] = {}
    for name, own in parts_of(config).items():
        try:
            found, unseen = split_tasks(own, None, **reading)
        except UserError as error:
            raise of_part(name, error) from error
        if isinstance(found, Stream):
            raise UserError(f"part {name} of the mixture has rows without end: set --mixture.{name}.limit")
        train[name] = found
        if unseen is not None:
            held_out[name] = unseen.first(getattr(config, "eval_limit", len(unseen)))
    shares = weights_of(config, {name: len(own) for name, own in train.items()})
    return MixedTasks(train, shares), MixedTasks(held_out) if held_out else None


def share_lines(tasks: AnyTasks, noun: str) -> list[str]:
    """Describe the shares of the parts of a mixture. `noun`: the unit of the shares."""
    if not isinstance(tasks, MixedTasks):
        return []
    return [f"mixture: {', '.join(f'{name} {share:.1%}' for name, share in tasks.shares.items())} of the {noun}"]
