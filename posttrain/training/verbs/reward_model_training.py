"""Assembles a run of `reward-model`: rows -> preference examples, head on a backbone, learner, source, trainer,
report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.algorithms.all_algorithms import find_reward_model
from posttrain.algorithms.describe import describe
from posttrain.algorithms.links import CrossEntropy, SquaredError
from posttrain.algorithms.reward_model_table import RewardModelAlgorithm, RewardModelObjective
from posttrain.algorithms.settings import change, check_ranges
from posttrain.config.mixture_options import parts_of
from posttrain.config.training import RewardModelling
from posttrain.core import user_files
from posttrain.core.batch import Stats
from posttrain.core.intervals import told
from posttrain.core.json_text import json_document
from posttrain.core.seeds import seed_of
from posttrain.core.types import Task, UserError
from posttrain.data.mixed_tasks import AnyTasks
from posttrain.data.preference_examples import to_item
from posttrain.models.adapters.adapter_config import is_adapter
from posttrain.models.checkpoint_summary import outline
from posttrain.models.reward_model import RewardModel, ScoreShape, load_reward_model, new_reward_model, settle
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.chat_choice import chatting
from posttrain.runs.run_files import REPORT, replace, writing
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.terminal.notices import warn
from posttrain.training.open_learner import adapt, new_learner, refuse_packed_shards
from posttrain.training.passes import check, compared_rows, example_recording, must_end, sizes, updates
from posttrain.training.reward_model_evaluation import Scored
from posttrain.training.row_warnings import warn_unread
from posttrain.training.setup import (
    end_tokens,
    microbatch_tokens,
    optimization,
    watch_lengths,
)
from posttrain.training.sources.packing import Read
from posttrain.training.sources.preferences import PreferenceExamples
from posttrain.training.sources.reward_examples import RewardExamples
from posttrain.training.trainer import Run
from posttrain.training.training_run import RunContext, RunParts
from posttrain.training.weight_types import frozen_type, trained_type

MOST_READ = 100_000  # rows whose labels are read to find out whether they are all equal


def reward_model(context: RunContext[RewardModelling]) -> RunParts:
    """Train a reward model: scores of responses, or of their steps."""
    config, run, device = context.config, context.run, context.device
    algorithm = change(find_reward_model(config.algorithm), config.settings)
    check_ranges(algorithm)
    train_tasks, held_out = compared_rows(config, context.rows, to_item)

    def check_task(task: Task) -> None:
        _check_labels(algorithm, task, config)

    must_end(config, train_tasks)
    check_task(train_tasks[0])
    if (same := only_label(train_tasks)) is not None:
        warn(f"all labels are {same:g}, so the model can learn nothing else: add rows with other labels")
    shape = ScoreShape(config.pooling, config.head)
    model, tokenizer = _started(run, shape, device)
    told = run.chat.lines(train_tasks)
    train_tasks, held_out = run.chat.of(train_tasks), run.chat.of(held_out) if held_out else None
    warn_unread(tokenizer, train_tasks)
    too_long = watch_lengths(config, model.config.context)

    def made(tasks: AnyTasks) -> PreferenceExamples:
        return PreferenceExamples(tasks, tokenizer, model.eos_ids, model.config.vocab, too_long, check_task)

    items, read = made(train_tasks), _read(shape)
    unseen = made(held_out) if held_out else None
    check(items, unseen)
    steps = updates(config, items)
    learner = new_learner(config, model, optimization(config, steps), run.world)
    tokens = microbatch_tokens(config, model)
    shown = example_recording(config, learner, tokens, read)
    source = RewardExamples(items, algorithm, config.rows, tokens, config.seed, device, read, shown)
    objective = RewardModelObjective(algorithm, mean=shape.pooling == "mean")
    scored = Scored(source, unseen, learner, objective, model)
    said = [*sizes(config, model, (train_tasks, held_out), steps, "prompts", device), *told]
    if model.classifier is None:
        said.append("transformers has no such reward model: only posttrain opens its checkpoints")

    def finish(ended: Run) -> Sequence[str]:
        if ended.interrupted or ended.stopped is not None or unseen is None:  # a report needs the last step
            return ()
        if not scored.report:  # the run was killed between its last checkpoint and its report
            scored(Stats())
        if run.world.rank:
            return ()
        with writing(run.path):
            replace(run.path / REPORT, json_document(scored.report))
        use = f"for steps   posttrain rl --env my.py:reward --reward-model {run.path} --step-delimiter line ..."
        return [*lines(read_report(run.path)), f"report      {run.path / REPORT}", *[use] * _of_steps(train_tasks[0])]

    return RunParts(
        source, objective, learner, tokenizer, steps, said, describe(algorithm), scored, (too_long,), finish
    )


def _started(run: RunFolder[RewardModelling], shape: ScoreShape, device: Any) -> tuple[RewardModel, Tokenizer]:
    """Return the model, new or from a checkpoint, and a tokenizer whose padding differs from the end of a reply."""
    folder = run.checkpoint or run.start
    assert folder
    tokenizer, _, ends = outline(folder, run.config.chat_template, run.config.chat_template_kwargs)
    run.chat = chatting(run.config, folder, tokenizer, ends, parts=parts_of(run.config))
    adapted = run.config.lora is not None or is_adapter(folder)
    matrices = frozen_type(run.config) if adapted else trained_type(run.config)
    if adapted:
        refuse_packed_shards(run.config, folder)
    if run.checkpoint:
        model = load_reward_model(folder, device, matrices)
    else:
        packed = run.config.quantize or ""
        model = new_reward_model(folder, shape, seed_of(run.config.seed, "score"), device, matrices, packed)
    if matrices is not None and not adapted:
        model.requires_grad_(True)
    tokenizer = settle(model, tokenizer, end_tokens(model, tokenizer))
    adapt(run.config, model.backbone, folder)
    return model, tokenizer


def _read(shape: ScoreShape) -> Read:
    return "each" if shape.pooling == "mean" else "last"


def _check_labels(algorithm: RewardModelAlgorithm, example: Task, config: RewardModelling) -> None:
    """Raise UserError if a row lacks the labels or comparisons that the link reads."""
    labels = [label for own in example["labels"] for label in own]
    if labels and not algorithm.link.reads_labels:
        raise UserError(
            f"{algorithm.name} compares responses to one prompt, and these rows label single responses: choose "
            "--algorithm outcome (good or bad) or regression (scores)"
        )
    if not labels and isinstance(algorithm.link, SquaredError):
        raise UserError(
            f"{algorithm.name} learns scores, and these rows compare responses: choose --algorithm bradley-terry or k-wise"
        )
    if isinstance(algorithm.link, CrossEntropy) and not all(0 <= label <= 1 for label in labels):
        raise UserError(
            f"{algorithm.name} learns probabilities, and a row has the score {max(labels, key=abs):g}: choose "
            "--algorithm regression"
        )
    if _of_steps(example) and config.pooling == "mean":
        raise UserError("steps are scored at their last token: leave out --pooling mean")


def _of_steps(example: Task) -> bool:
    """Return whether the responses of a row are lists of steps."""
    return any(isinstance(said, list) for said in example["responses"])


def only_label(tasks: AnyTasks) -> float | None:
    """Return the label of all responses, and of all their steps; None if they differ, or the rows compare responses."""
    found: set[float] = set()
    for task in islice(tasks, MOST_READ):
        found.update(label for own in task["labels"] for label in own)
        if len(found) != 1:
            return None
    return found.pop() if found else None


def read_report(folder: Path) -> dict[str, Any]:
    """Read the report of the run's last evaluation."""
    found: dict[str, Any] = json.loads(user_files.content(folder / REPORT))
    return found


def lines(report: dict[str, Any]) -> Sequence[str]:
    """Return the lines of the report."""
    said = []
    for name, figure in report.get("figures", {}).items():
        said.append(f"{name:<22} {told(figure) if 'low' in figure else format(figure['mean'], '.3f')}")
    if gain := report.get("gain"):
        beside = f"{told(gain, '+.3f')} in accuracy beside always the commoner label"
        better = gain["low"] is not None and gain["low"] > 0
        advice = "" if better else "; before you reward with it, train longer or on more labels"
        said.append(
            f"verdict                {'' if better else 'not shown to be '}better than a guess: {beside}{advice}"
        )
    if parts := report.get("by_margin"):
        said.append(
            "accuracy by margin     " + ", ".join(f"{p['accuracy']:.2f} (up to {p['most']:.2f})" for p in parts)
        )
    return said
