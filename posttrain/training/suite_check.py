"""The suite of `--eval-suite`: within training, its parts are sampled with the current weights at every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from posttrain.config.inference import Evaluation
from posttrain.config.suite_file import Part, read_suite
from posttrain.config.training import RewardModelling, Training
from posttrain.core.batch import Stats
from posttrain.core.protocols import Learner, Model
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Task, UserError
from posttrain.data.tasks import Stream, hold_out
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.open_engine import open_engine
from posttrain.envs.play.env_pool import default_workers
from posttrain.envs.play.load_env import success_of
from posttrain.models.adapters.adapter_config import is_adapter
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.terminal.notices import warn
from posttrain.training.evaluation_figures import figures_of
from posttrain.training.held_out_check import split_seed_of
from posttrain.training.playground import Playground, open_playground
from posttrain.training.reply_scorer import RolloutScorer, ScorerResults
from posttrain.training.rollout_figures import headline, rates, repeated, rewards_by_task
from posttrain.training.row_warnings import warn_unknown_tokens
from posttrain.training.setup import fitting, load_tasks, split_seed
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.weight_types import frozen_type

OPTION = "--eval-suite"
OF_THE_RUN = ("search", "replicas", "chat_template", "chat_template_kwargs", "forget", "price")
"""Options of a part that the run itself decides, or that need more than its weights."""


@dataclass(frozen=True)
class _OpenPart:
    """A part whose tasks are read and whose environment has started."""

    name: str
    config: Evaluation
    tasks: Sequence[Task]  # as this model is shown them
    ground: Playground
    success: float | None  # reward from which a reply counts as right; None: there is none
    scorer: RolloutScorer | None  # of the process that writes metrics
    first: list[Rollout] = field(default_factory=list)  # of the model that the run starts from, if there is a scorer


def suite_check(
    run: RunFolder[Any], learner: Learner, tokenizer: Tokenizer, device: torch.device, opened: ExitStack
) -> Callable[[Stats], None] | None:
    """Return a function that samples the suite of `--eval-suite`, and adds its figures; None without one. `opened`:
    closes the environments.

    Its random numbers follow from the seeds of the parts alone, so training is the same with and without it, and a
    part's figures are those of `posttrain eval --suite` on a checkpoint. Raises UserError for a suite that cannot be
    sampled here.
    """
    config: Training = run.config
    if config.eval_suite is None:
        return None
    if isinstance(config, RewardModelling):
        raise UserError(f"{OPTION} samples replies, and a reward model gives none: leave it out")
    given = {"model": config.model or config.out, "against": [str(run.start)] if run.start else []}
    parts = read_suite(config.eval_suite, given, OPTION)
    context = learner.weights().config.context
    open_parts = [_opened(part, run, tokenizer, context, device, len(parts), opened) for part in parts]

    def played(parts: Sequence[_OpenPart], model: Model, version: int) -> list[list[Rollout]]:
        options = EngineOptions(getattr(config, "slots", Evaluation().slots), config.precision)
        with closing(open_engine("local", model, tokenizer, options, own=config.in_parts)) as engine:
            engine.load(model, version)
            players = [part.ground.player(engine, tokenizer, context) for part in parts]
            asked = [repeated(part.tasks, part.config.samples, part.config.seed) for part in parts]
            return [player.play(episodes) for player, episodes in zip(players, asked, strict=True)]

    def sampled(stats: Stats) -> None:
        means = []
        every = played(open_parts, learner.weights(), learner.version)
        scored = [place for place, part in enumerate(open_parts) if part.config.scorer]
        if scored and run.start and not open_parts[scored[0]].first:
            begun = [every[place] for place in scored]
            if run.checkpoint is not None:  # a resumed run has no rollouts of its beginning
                alone = is_adapter(run.start)  # its model is merged in float32
                matrices, packed = (None, "") if alone else (frozen_type(config), config.quantize or "")
                start = load_model(run.start, device=device, matrices=matrices, packed=packed)
                begun = played([open_parts[place] for place in scored], start, 0)
            for place, rollouts in zip(scored, begun, strict=True):
                open_parts[place].first.extend(rollouts)
        for part, rollouts in zip(open_parts, every, strict=True):
            means += (found := _add(stats, part, rollouts))
            if not found and not run.world.rank:
                warn(f"{OPTION} [{part.name}] no reward was valid: this evaluation has no suite/mean")
        if len(means) == len(open_parts):  # a mean over fewer parts could not be compared with earlier ones
            stats.add("suite/mean", sum(means) / len(means))

    return sampled


def _opened(
    part: Part,
    run: RunFolder[Any],
    tokenizer: Tokenizer,
    context: int,
    device: torch.device,
    parts: int,
    opened: ExitStack,
) -> _OpenPart:
    """Read the tasks of a part, and start its environment."""
    config = part.config
    if wrong := next((name for name in OF_THE_RUN if name in config.given), None):
        instead = "give the run --forget ROWS instead" if wrong == "forget" else "leave it out, or use eval --suite"
        raise UserError(f"{OPTION} [{part.name}] {wrong} has no place within training: {instead}")
    if config.env_workers is None:
        config = replace(config, env_workers=max(1, default_workers() // parts))
    try:
        tasks = _tasks(config, run.config)
        chat = replace(
            run.chat,
            on=run.chat.on if config.chat is None else config.chat,
            system=run.chat.system if config.system is None else config.system,
        )
        shown = chat.of(tasks)
        resumed = run.checkpoint is not None
        ground = opened.enter_context(open_playground(config, None, shown, device, None, resumed, (), run.world))
        warn_unknown_tokens(tokenizer, shown)
        fit = fitting(shown, ground.pool, tokenizer, TooLong(config.too_long, context, warn))
        if not fit:
            raise UserError("no prompt fits into the context of the model")
        scored = bool(config.scorer) and not run.world.rank
        scorer = RolloutScorer(config, device, opened) if scored else None
    except UserError as error:
        raise UserError(f"{OPTION} [{part.name}] {error}") from None
    return _OpenPart(part.name, config, fit, ground, success_of(config.env, config.success), scorer)


def _tasks(config: Evaluation, run: Training) -> Any:
    """Return the tasks of a part; with a held-out share, by the split of the run, or of the run it starts from."""
    tasks = load_tasks(config)
    if config.held_out:
        seed = config.split_seed
        if seed is None and run.held_out:
            seed = split_seed(run)
        elif seed is None:
            known = split_seed_of(run.model, config.tasks) if run.model else None
            seed = 0 if known is None else known[1]
        tasks = hold_out(tasks, config.held_out, seed)[1]
    if isinstance(tasks, Stream):
        raise UserError("these rows have no end: set the number to evaluate on with limit")
    return tasks


def _add(stats: Stats, part: _OpenPart, rollouts: Sequence[Rollout]) -> list[float]:
    """Add the metrics of a part; return its accuracy, or its reward if nothing defines a right reply; [] without any."""
    name = part.name
    for key, value in rates(rollouts).items():
        if key != "total_tokens":
            metric = f"reward/{key.removeprefix('part/')}" if key.startswith("part/") else key
            stats.add(f"suite/{name}/{metric}", value)
    if not any(rewards_by_task(rollouts).values()):
        return []
    scored = _scored(part, rollouts)
    own = replace(scored, scores=scored.scores[:1])
    [figures] = figures_of(part.config, [rollouts], part.success, own, _unsaid)
    stats.add(f"suite/{name}/tasks", figures["tasks"])
    for key, figure in [*figures.items(), *(("win_rate", rate) for rate in scored.win_rates)]:
        if isinstance(figure, dict) and figure:
            stats.add(f"suite/{name}/{key}", figure["mean"])
    return [headline(figures)["mean"]]


def _scored(part: _OpenPart, rollouts: Sequence[Rollout]) -> ScorerResults:
    """Return the results of a part's scorer, against the model that the run starts from; none if it fails throughout."""
    if part.scorer is None:
        return ScorerResults([], [])
    try:
        return part.scorer.results([rollouts, part.first] if part.first else [rollouts], _unsaid)
    except UserError as error:
        warn(f"{OPTION} [{part.name}] {error}")
        return ScorerResults([], [])


def _unsaid(note: str) -> None:
    """Leave out a note, as each evaluation would repeat it."""
