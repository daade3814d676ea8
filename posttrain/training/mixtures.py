"""Tasks of a mixture: each part is read and split as the tasks of a run are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.config.mixture_options import parts_of
from posttrain.config.training import RL
from posttrain.core.types import UserError
from posttrain.data.mixed_tasks import MixedTasks
from posttrain.data.tasks import Stream
from posttrain.training.setup import split_tasks


def mixed_tasks(config: RL, rows: Any, env: Callable[..., Any] | None) -> tuple[MixedTasks, MixedTasks | None]:
    """Return the tasks of a mixture to train on, and those to evaluate on: up to `--eval-limit` of each part.

    Raises UserError, with the name of the part, for rows that cannot be read or have no end.
    """
    if rows is not None or env is not None:
        raise UserError("--mixture names rows and environments by itself: leave out those that were passed as objects")
    if config.eval_tasks:
        raise UserError(
            "--eval-tasks is one set of rows, and --mixture has several: use --held-out, a share of each part"
        )
    train, held_out = {}, {}
    for name, own in parts_of(config).items():
        try:
            found, unseen = split_tasks(own, None)
        except UserError as error:
            raise UserError(f"part {name} of the mixture: {error}") from error
        if isinstance(found, Stream):
            raise UserError(f"part {name} of the mixture has rows without end: set --mixture.{name}.limit")
        train[name] = found
        if unseen is not None:
            held_out[name] = unseen.first(config.eval_limit)
    return MixedTasks(train), MixedTasks(held_out) if held_out else None
