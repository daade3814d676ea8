"""Assembles a run of `prefer`: rows -> preference examples, reference log-probabilities, learner, source, trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from posttrain.algorithms.describe import describe
from posttrain.algorithms.preference import PreferenceAlgorithm, PreferenceObjective
from posttrain.config.mixture_options import parts_of
from posttrain.config.training import Prefer
from posttrain.core.batch import Outputs, Packed, Stats
from posttrain.core.component import Need
from posttrain.core.types import UserError
from posttrain.data.mixed_tasks import AnyTasks, MixedTasks
from posttrain.data.preference_examples import to_compared, to_judged
from posttrain.data.tasks import Stream
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.adapters.lora import is_adapted
from posttrain.models.checkpoint_summary import outline
from posttrain.models.native.fused import compiles
from posttrain.models.native.kernels import build
from posttrain.runs import fingerprint
from posttrain.runs.chat_choice import chatting
from posttrain.runs.run_folder import RunFolder
from posttrain.training.open_learner import new_learner, policy, reference
from posttrain.training.passes import check, compared_rows, example_recording, must_end, sizes, updates
from posttrain.training.preference_choice import chosen_preference
from posttrain.training.row_warnings import warn_unread
from posttrain.training.setup import (
    end_tokens,
    microbatch_tokens,
    optimization,
    watch_lengths,
)
from posttrain.training.sources.example_stream import examples_of_step, steps_per_epoch
from posttrain.training.sources.preferences import Comparisons, PreferenceExamples
from posttrain.training.sources.reference_cache import MovingReferenceLogps, Reference, reference_logps
from posttrain.training.training_run import RunContext, RunParts

EVALUATED = 256  # held-out preference examples packed into micro-batches together


def prefer(context: RunContext[Prefer]) -> RunParts:
    """Learn from preferences: DPO and its family."""
    config, run, device = context.config, context.run, context.device
    algorithm = chosen_preference(config)
    train_tasks, held_out = compared_rows(config, context.rows, to_judged if algorithm.reads_labels else to_compared)
    must_end(config, train_tasks)
    if isinstance(train_tasks, Stream) and Need.REFERENCE in algorithm.needs and algorithm.moving is None:
        raise UserError(
            f"{algorithm.name} needs reference log-probabilities of every row, and these rows have no end: give --limit, or "
            "choose an algorithm without a reference (simpo, cpo, orpo) or with one that moves (tr-dpo)"
        )
    folder = run.checkpoint or run.start
    assert folder
    tokenizer, _, ends = outline(folder, config.chat_template, config.chat_template_kwargs)
    run.chat = chatting(config, folder, tokenizer, ends, parts=parts_of(config))
    told = run.chat.lines(train_tasks)
    train_tasks, held_out = run.chat.of(train_tasks), run.chat.of(held_out) if held_out else None
    model = policy(config, folder, device, run.world)
    warn_unread(tokenizer, train_tasks)
    too_long = watch_lengths(config, model.config.context)

    def made(tasks: AnyTasks) -> PreferenceExamples:
        return PreferenceExamples(tasks, tokenizer, end_tokens(model, tokenizer), model.config.vocab, too_long)

    items, unseen = made(train_tasks), made(held_out) if held_out else None
    check(items, unseen)
    steps = updates(config, items)
    others = {}
    if algorithm.moving is not None:
        assert run.start
        others[REFERENCE] = reference(config, model, run.start, run.world, moves=True)
    learner = new_learner(config, model, optimization(config, steps), run.world, others=others)
    tokens = microbatch_tokens(config, model)
    recording = example_recording(config, learner, tokens)
    source = Comparisons(items, algorithm, learner, config.rows, tokens, config.seed, recording=recording)
    visited = [] if algorithm.moving is not None else _places(items, config, steps)
    seen = _Reference(run, algorithm, learner, device)
    source.reference = seen.of(items, visited, drift=Need.DRIFT in algorithm.needs)
    objective = PreferenceObjective(algorithm)
    evaluated = _HeldOutEvaluation(source, unseen, seen, objective) if unseen is not None else None
    lines = [*sizes(config, model, (train_tasks, held_out), steps, "prompts", device), *told]
    return RunParts(
        source, objective, learner, tokenizer, steps, lines, describe(algorithm), evaluated, notifiers=(too_long,)
    )


def _places(items: PreferenceExamples, config: Prefer, steps: int) -> list[int]:
    """Return the places of all rows that the run will visit, in ascending order."""
    found: set[int] = set()
    last = steps if isinstance(items.tasks, MixedTasks) else min(steps, steps_per_epoch(items, config.rows))
    for step in range(1, last + 1):
        found |= {place for place, _ in examples_of_step(items, config.rows, config.seed, step)}
        if len(found) == len(items):
            break
    return sorted(found)


class _Reference:
    """Log-probabilities of preference examples under the run's reference, the model at its start."""

    def __init__(
        self, run: RunFolder[Prefer], algorithm: PreferenceAlgorithm, learner: LocalLearner, device: torch.device
    ) -> None:
        self.run, self.algorithm, self.learner, self.device = run, algorithm, learner, device

    def of(
        self, items: PreferenceExamples, places: Sequence[int], drift: bool = False
    ) -> Reference | MovingReferenceLogps | None:
        if Need.REFERENCE not in self.algorithm.needs:
            return None
        config = self.run.config
        tokens = microbatch_tokens(config, self.learner.model)
        if self.algorithm.moving is not None:
            return MovingReferenceLogps(items, partial(self.learner.evaluate, of=REFERENCE), tokens, self.device, drift)
        found = reference_logps(items, places, self._weights, self._evaluate, tokens, self.device, drift)
        if self.run.checkpoint is not None:
            self.learner.others.pop(REFERENCE, None)
        return found

    @property
    def _weights(self) -> str:
        """A fingerprint of the reference and of everything else that its numbers depend on."""
        config, start = self.run.config, self.run.start
        assert start
        backend = build.backend(compiles()) if self.device.type == "cpu" else str(self.device)
        held = config.weights, config.frozen_weights, config.quantize, config.float8
        return f"{fingerprint.path_digest(start)} {config.precision} {held} {backend} {torch.__version__}"

    def _evaluate(self, batches: Sequence[Packed]) -> list[Outputs]:
        """Evaluate with the learner itself before its first update; a resumed run loads the starting model again."""
        if self.run.checkpoint is None:
            return self.learner.evaluate(batches)
        if REFERENCE not in self.learner.others:
            config = self.run.config
            assert self.run.start
            whole = replace(config, shard=config.shard and is_adapted(self.learner.model))
            self.learner.others[REFERENCE] = reference(whole, self.learner.model, self.run.start, self.run.world)
        return self.learner.evaluate(batches, of=REFERENCE)


class _HeldOutEvaluation:
    """Evaluation on held-out preference examples: accuracy, margin, and log-probabilities of both sides."""

    def __init__(
        self, source: Comparisons, items: PreferenceExamples, reference: _Reference, objective: PreferenceObjective
    ) -> None:
        self.places = [place for place in range(len(items)) if items[place] is not None]
        known = reference.of(items, self.places)
        measured = replace(source.algorithm, transport=None)  # no loss is computed
        self.source = Comparisons(
            items, measured, source.learner, source.rows, source.tokens_per_microbatch, source.seed, known
        )
        self.objective = objective

    def __call__(self, stats: Stats) -> None:
        for first in range(0, len(self.places), EVALUATED):
            places = self.places[first : first + EVALUATED]
            items = [item for place in places for item in (self.source.items[place],) if item is not None]
            if self.source.reference is not None:
                self.source.reference.prepare(places)
            for batch in self.source.batches(places, items, {}):
                (outputs,) = self.source.learner.evaluate([batch], want=self.objective.wants)
                self.objective.measure(outputs, batch, stats, "eval/")
        stats.add("eval/tasks", len(self.places))
