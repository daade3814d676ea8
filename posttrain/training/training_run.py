"""The run of any verb that trains: the verb builds the parts, and this module assembles them, from the lock to the
last file.

A verb is an entry of `config/verbs.py` and a function (`RunContext`) -> `RunParts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch

from posttrain.config.resolve import AnyTraining, validate
from posttrain.config.verbs import VERBS, load
from posttrain.core.batch import Stats
from posttrain.core.protocols import Learner, Objective, Source
from posttrain.core.rollouts import Outcome
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.free_memory import gpu_memory
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_folder import RunFolder
from posttrain.training.distributed_setup import open_world
from posttrain.training.full_memory import full_memory_in_words
from posttrain.training.gpu_assignment import gpu_assignment
from posttrain.training.hooks import Hooks
from posttrain.training.memory_advice import memory_lines, recomputation_lines, refuse_too_large, with_recomputation
from posttrain.training.memory_estimate import UpdateSize
from posttrain.training.memory_plan import planned, refuse_impossible
from posttrain.training.open_learner import recompute_layers
from posttrain.training.setup import microbatch_tokens, prepare
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.suite_check import suite_check
from posttrain.training.text_loss import forgetting
from posttrain.training.trainer import Measure, Run, Trainer


@dataclass(frozen=True)
class RunContext(Generic[AnyTraining]):
    """Input of the function that builds a run."""

    run: RunFolder[AnyTraining]  # its options, checkpoint and processes
    device: torch.device
    resources: ExitStack  # closed when the run ends
    rows: Any = None  # rows passed as objects from Python, in place of config.tasks
    env: Callable[..., Any] | None = None  # environment passed as an object, in place of config.env

    @property
    def config(self) -> AnyTraining:
        return self.run.config


@dataclass(frozen=True)
class RunParts:
    """Parts of a run, built by its verb."""

    source: Source
    objective: Objective
    learner: Learner
    tokenizer: Tokenizer
    steps: int  # the number of the last step
    sizes: list[str]  # lines on model, data, batch and so on: shown and recorded
    formula: list[str]  # the objective in plain mathematics: shown and recorded
    measure: Measure | None = None
    notifiers: tuple[Any, ...] = ()  # parts whose `say` shows a message to the user
    # called after the last step, in every process; returns lines that the first one prints
    finish: Callable[[Run], Sequence[str]] | None = None


def run_training(
    config: AnyTraining, rows: Any = None, env: Callable[..., Any] | None = None, hooks: Sequence[Any] = ()
) -> Run:
    """Train. `rows` and `env` may be objects; `config` then holds a name for each, for the record.

    `hooks`: further ones besides `config.hook`. Raises UserError for a mistake of the caller's.
    """
    build: Callable[[RunContext[AnyTraining]], RunParts] = load(VERBS[config.verb].function)
    if not config.resume:
        validate(config)  # first, as a command that lacks an option is no reason to delete the run in --out
    with (
        open_world(config) as world,
        full_memory_in_words(config),
        RunFolder(config, rows, env, world) as run,
        ExitStack() as resources,
    ):
        validate(run.config)
        watching = Hooks([*run.config.hook, *hooks])
        device = prepare(run.config)
        refuse_impossible(run.config, run.start, world.size, device)
        parts = build(RunContext(run, device, resources, rows, env))
        measured = forgetting(run, parts.learner, parts.tokenizer, device)
        sampled = suite_check(run, parts.learner, parts.tokenizer, device, resources)
        measure = _together([part for part in (sampled, measured) if part is not None], parts.measure)
        trainer = Trainer(run, parts.learner, parts.source, parts.tokenizer, measure, parts.steps, watching)
        for part in parts.notifiers:
            part.say = trainer.display.note
        sizes = [*parts.sizes, *gpu_assignment(run.config, world, device), *_memory(run, parts, device)]
        ended = trainer.run(parts.objective, sizes, parts.formula)
        finished = parts.finish(ended) if parts.finish is not None else ()
        if not world.rank:
            totals = [line for part in parts.notifiers if isinstance(part, TooLong) for line in part.total()]
            ended.notes = (*finished, *totals)
        return ended


def _together(before: Sequence[Callable[[Stats], None]], last: Measure | None) -> Measure | None:
    """Return the evaluation within training: the outcomes are those of the last part."""

    def measure(stats: Stats) -> Sequence[Outcome] | None:
        for part in before:
            part(stats)
        return last(stats) if last is not None else None

    return measure if before else last


def _memory(run: RunFolder[Any], parts: RunParts, device: torch.device) -> list[str]:
    """Describe the GPU memory that a process of the run takes; [] on a CPU, and for what the estimate does not know.

    Makes layers recompute where `--recompute auto` chooses it. Raises UserError if it cannot fit.
    """
    config, learner = run.config, parts.learner
    found = _sized(run, parts, device)
    if found is None:
        return []
    shaped, size = found
    # all processes alike, because layers of several processes exchange their weights when they are recomputed
    if config.recompute == "auto" and any(run.world.gather(size.recompute)):
        size = replace(size, recompute=True)
        assert isinstance(learner, LocalLearner), "the estimate is of one"
        recompute_layers(learner.model, learner.critic)
    return [*recomputation_lines(config, size), *memory_lines(shaped, size)]


def _sized(run: RunFolder[Any], parts: RunParts, device: torch.device) -> tuple[LocalLearner, UpdateSize] | None:
    """Return a learner of the run's shapes, and the size of its updates; None where there is no estimate. Raises UserError
    if it cannot fit.
    """
    config, learner = run.config, parts.learner
    decoder = parts.learner.model.decoder if isinstance(parts.learner, LocalLearner) else None
    if config.divisions or (decoder is not None and not decoder.native):
        # the estimate starts from whole weights, of which the learner may have parts, and for a model of transformers
        # from weights without numbers
        found = planned(config, run.start, run.world.size, device)
        if found is not None or (config.divisions and config.expert_parallel == 1):
            return found
    if device.type != "cuda" or not isinstance(learner, LocalLearner):
        return None
    tokens = microbatch_tokens(config, learner.model)
    size = UpdateSize.of(config, tokens, float(gpu_memory(device)), parts.objective.wants, run.world.size)
    refuse_too_large(learner, size)
    return learner, with_recomputation(config, learner, size)
