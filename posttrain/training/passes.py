"""Common parts of `sft`, `prefer` and `reward-model`, which train on given responses in passes over the rows."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.config.training import Passes, RewardModelling
from posttrain.core.messages import several
from posttrain.core.protocols import Learner, Model
from posttrain.core.types import UserError
from posttrain.data.mixed_tasks import AnyTasks, MixedTasks
from posttrain.data.tasks import Stream, Tasks
from posttrain.data.tasks_from_rows import Convert
from posttrain.models.native.fused import compiles
from posttrain.models.native.kernels import build
from posttrain.training.mixtures import rows_of, share_lines
from posttrain.training.row_warnings import warn_repeated_prompts
from posttrain.training.setup import (
    amount,
    held_out_number,
    microbatch_tokens,
    size_of,
)
from posttrain.training.sources.example_recording import ExampleRecording
from posttrain.training.sources.example_stream import ExampleStream, steps_per_epoch
from posttrain.training.sources.packing import Read
from posttrain.training.sources.token_recording import TokenRecording

WITHOUT_LABELS = "without a label or comparison of different responses that are not empty"


def compared_rows(config: Passes, rows: Any, convert: Convert) -> tuple[AnyTasks, Tasks | MixedTasks | None]:
    """Return preference examples to train on, and held-out ones, without those that lack comparison and label."""
    found = rows_of(config, rows, convert=convert, left_out=WITHOUT_LABELS)
    warn_repeated_prompts(found[0])
    return found


def must_end(config: Passes, tasks: AnyTasks) -> None:
    """Raise UserError for rows without end if the run's length is given in passes over them."""
    if isinstance(tasks, Stream) and config.steps is None:
        raise UserError("--epochs has no meaning for rows without end: give --steps")


def check(items: ExampleStream[Any], held_out: ExampleStream[Any] | None) -> None:
    """Raise UserError if no row fits, before a run's folder is created."""
    for made in filter(None, (items, held_out)):
        made.check()


def updates(config: Passes, made: ExampleStream[Any]) -> int:
    """Return the number of the run's optimizer updates."""
    return config.steps or max(1, round(steps_per_epoch(made, config.rows) * config.epochs))


def example_recording(
    config: Passes, learner: Learner, tokens_per_microbatch: int, read: Read = "next"
) -> ExampleRecording:
    """Return the recorder of some of the rows."""
    return ExampleRecording(_recording(config), learner, tokens_per_microbatch, read)


def _recording(config: Passes) -> TokenRecording:
    return TokenRecording(config.record, config.record_after, config.seed)


def sizes(
    config: Passes,
    model: Model,
    tasks: tuple[AnyTasks, Tasks | MixedTasks | None],
    steps: int,
    noun: str,
    device: torch.device,
) -> list[str]:
    """Describe the sizes of the run. `tasks`: (to train on, held out); `noun`: the unit of `--rows`."""
    held_out = tasks[1].sizes if isinstance(tasks[1], MixedTasks) else len(tasks[1] or ())
    between = f", {build.backend(compiles())} between matrix products" if device.type == "cpu" else ""
    return [
        f"model {size_of(model)}, context {model.config.context}, vocabulary {model.config.vocab}",
        f"{amount(tasks[0])}, {held_out_number(config, held_out)}",
        *share_lines(tasks[0], noun),
        f"{several(steps, 'step')} of {several(config.rows, noun.removesuffix('s'))}, "
        f"micro-batches of {microbatch_tokens(config, model)} tokens{between}",
        *([] if isinstance(config, RewardModelling) else _recording(config).describe(frozenset(), reference=True)),
    ]
