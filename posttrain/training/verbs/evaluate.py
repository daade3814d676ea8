"""Evaluation: several rollouts of every task, figures with intervals, comparison with other checkpoints task by task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.config.harness_tasks import harness_tasks
from posttrain.config.inference import Evaluation
from posttrain.config.resolve import validate
from posttrain.core import run_date, user_files
from posttrain.core.batch import Stats
from posttrain.core.json_text import json_document
from posttrain.core.rollouts import Outcome, Rollout
from posttrain.core.types import Invalid, UserError, succeeds
from posttrain.data.tasks import Stream, Tasks, hold_out
from posttrain.envs.play.load_env import success_of
from posttrain.runs.checkpoint import resolve
from posttrain.runs.record.rollout_tables import rollouts_table
from posttrain.runs.record.table_writer import write_table
from posttrain.runs.run_files import replace
from posttrain.runs.run_folder import day_of
from posttrain.runs.terminal.notices import warn
from posttrain.runs.trained_options import as_trained
from posttrain.training.evaluated_model import EvaluatedModel, invalid_notes, sampled
from posttrain.training.evaluation_figures import figures_of
from posttrain.training.harness_figures import Figures, harness_figures
from posttrain.training.held_out_check import overlap, split_seed_of
from posttrain.training.inspect_log import LoggedModel, file_of_each, write_inspect_log
from posttrain.training.model_comparison import ModelComparison, Played, compare, with_verdicts
from posttrain.training.playground import count_lines, open_playground, service_counts
from posttrain.training.reply_scorer import RolloutScorer, ScorerResults
from posttrain.training.rollout_figures import outcomes_by_task, rewards_by_task, task_of_each
from posttrain.training.search_setup import warn_large_search
from posttrain.training.setup import (
    load_tasks,
    prepare,
)
from posttrain.training.text_loss import TEXT_LOSS, forget_texts


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation."""

    # from `figures.summary`: mean, low, high of reward and, with a success threshold, accuracy, pass@k
    figures: dict[str, Any]
    rewards: dict[str, list[float]]  # task id (and side, if there are several) -> valid rewards of its samples
    rollouts: list[Rollout] = field(repr=False)
    invalid: int = 0  # number of invalid rewards of the first checkpoint
    notes: tuple[str, ...] = ()  # remarks, such as figures left out and why
    against: tuple[ModelComparison, ...] = ()  # with the other checkpoints, in the order of --against
    harness: dict[str, Figures] = field(default_factory=dict)  # checkpoint -> figures of `--harness`
    services: dict[str, dict[str, float]] = field(default_factory=dict)  # counts of each: see `service_counts`

    @property
    def cost(self) -> float | None:
        """The cost of all judges, by the prices in their recipes; None: they have none, or were not asked."""
        costs = [own["cost"] for own in self.services.values() if "cost" in own]
        return sum(costs) if costs else None

    @property
    def examples(self) -> dict[str, int]:
        """Return places of rollouts worth reading: "worst", "median" and "best" by their rewards, equal ones in their
        order.

        Two valid rewards have no median, and one has no best.
        """
        ranked = sorted((r.reward, n) for n, r in enumerate(self.rollouts) if not isinstance(r.reward, Invalid))
        places = [place for _, place in ranked]
        best = {"best": places[-1]} if places[1:] else {}
        median = {"median": places[(len(places) - 1) // 2]} if places[2:] else {}
        return {"worst": places[0], **median, **best}


def evaluate(config: Evaluation, rows: Any = None, env: Callable[..., Any] | None = None) -> Evaluated:
    """Sample `samples` rollouts of every task. Checkpoints of `against` get the same tasks with the same seeds.

    Options that are not given are those of the model's run: see `as_trained`.
    """
    config, told = as_trained(config, rows is not None)
    return evaluate_as_given(config, rows, env, told)


def evaluate_as_given(
    config: Evaluation, rows: Any = None, env: Callable[..., Any] | None = None, told: Sequence[str] = ()
) -> Evaluated:
    """Evaluate with these options alone, whatever the run of the model was. `told`: the first notes of the result."""
    validate(config)
    began = datetime.now(UTC)
    if config.harness is not None:
        harness_tasks(config.harness)  # raises before anything is sampled
    device = prepare(config)
    success, data = read(config, rows, env)
    said: list[str] = [*told]
    if config.temperature == 0 and config.samples > 1 and not (config.search or config.temperature_column):
        warn(
            f"at --temperature 0 the {config.samples} samples of a task are the same reply, unless the environment draws "
            "what it shows: give --samples 1, or a higher --temperature for pass@k"
        )
    warn_large_search(config)
    if config.held_out:
        data = _held_out(config, data, rows is None, said.append)
    if isinstance(data, Stream):
        raise UserError("these rows have no end: set the number to evaluate on with --limit")
    paths = [resolve(folder) for folder in (config.model, *config.against)]
    day = next(filter(None, map(day_of, paths)), None)  # all checkpoints get the same date
    with (
        run_date.fixed(day),
        ExitStack() as opened,
        open_playground(config, env, data, device, models=paths) as ground,
    ):
        said.extend(ground.about)
        texts = None if config.forget is None else forget_texts(config.forget)
        scorer = RolloutScorer(config, device, opened) if config.scorer else None
        sides = [
            sampled(config, place, path, data, ground, texts, device, said.append) for place, path in enumerate(paths)
        ]
        counts = service_counts(ground.services)
        scored = ScorerResults([], [{} for _ in sides[1:]])
        if scorer is not None:
            scored = scorer.results([side.rollouts for side in sides], said.append)
    counts |= scored.counts
    said.extend(count_lines(counts))
    figures = _figures(config, sides, success, scored, said.append)
    against = _comparisons(sides, figures, success, scored, said.append)
    notes = [
        *dict.fromkeys(said),
        *(note for each in zip(sides, figures, strict=True) for note in invalid_notes(*each)),
    ]
    harness = harness_figures(config) if config.harness is not None else {}
    if config.inspect_log is not None:
        _write_logs(Path(config.inspect_log), config, sides, figures, scored, success, began)
    first = sides[0]
    return Evaluated(
        figures[0],
        rewards_by_task(first.rollouts),
        first.rollouts,
        first.n_invalid,
        tuple(notes),
        against,
        harness,
        counts,
    )


def _figures(
    config: Evaluation,
    sides: Sequence[EvaluatedModel],
    success: float | None,
    scored: ScorerResults,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return the figures of each model."""
    figures = figures_of(config, [side.rollouts for side in sides], success, scored, say)
    for side, own in zip(sides, figures, strict=True):
        own |= side.search
        if side.losses is not None:
            own[TEXT_LOSS] = side.losses.figure
    return figures


def _write_logs(
    log: Path,
    config: Evaluation,
    sides: Sequence[EvaluatedModel],
    figures: Sequence[dict[str, Any]],
    scored: ScorerResults,
    success: float | None,
    began: datetime,
) -> None:
    """Write the log of each model for Inspect, into `log` or files named after it."""
    for place, path in enumerate(file_of_each(log, log.suffix, len(sides))):
        scores = scored.scores[place] if scored.scores else ()
        logged = LoggedModel(sides[place].name, sides[place].rollouts, figures[place], scores)
        write_inspect_log(path, config, logged, success, began)


def _comparisons(
    sides: Sequence[EvaluatedModel],
    figures: Sequence[dict[str, Any]],
    success: float | None,
    scored: ScorerResults,
    say: Callable[[str], None],
) -> tuple[ModelComparison, ...]:
    """Return the comparison of the first model with each of the others."""
    every = [side.rollouts for side in sides]
    earned = [Played(rewards_by_task(own), outcomes_by_task(own), task_of_each(own)) for own in every]
    compared = [compare(earned[0], other, success) for other in earned[1:]]
    wins = with_verdicts([won for _, won in compared])
    gaps = [gaps for gaps, _ in compared]
    for side, differences in zip(sides[1:], gaps, strict=True):
        if sides[0].losses is None or side.losses is None:
            continue
        gap = sides[0].losses.minus(side.losses)
        if gap is None:
            say(f"no difference in {TEXT_LOSS} from {side.name}: its tokens of the texts of --forget are others")
        else:
            differences[TEXT_LOSS] = gap
    names = [side.name for side in sides[1:]]
    found = zip(names, figures[1:], gaps, wins, scored.win_rates, every[1:], strict=True)
    return tuple(ModelComparison(*one) for one in found)


def read(
    config: Evaluation, rows: Any = None, env: Callable[..., Any] | None = None
) -> tuple[float | None, Tasks | Stream]:
    """Return the reward from which a reply counts as right, and the tasks. Raises UserError for mistakes in either."""
    success = success_of(env or config.env, config.success)
    if config.forget is not None:
        forget_texts(config.forget)
    for name in ("k", "maj", "best"):
        if success is None and name in config.given:
            raise UserError(
                f"--{name} needs to know which replies are right: give the reward of a right reply with --success"
            )
    return success, load_tasks(config, rows, env)


def _held_out(config: Evaluation, data: Tasks | Stream, of_a_file: bool, say: Callable[[str], None]) -> Tasks | Stream:
    """Return the held-out tasks: by the split of the checkpoint's run, unless options define another."""
    folders = (config.model, *config.against)
    tasks, seed = config.tasks if of_a_file else "", config.split_seed
    if seed is None:
        known = next(filter(None, (split_seed_of(folder, tasks) for folder in folders)), None)
        seed = 0 if known is None else known[1]
        if known is not None:
            say(f"the held-out tasks are those of {known[0]} (--split-seed {seed})")
    for folder in folders if of_a_file else ():
        if why := overlap(folder, tasks, config.held_out, seed):
            say(why)
    return hold_out(data, config.held_out, seed)[1]


def save(found: Evaluated, path: Path) -> list[Path]:
    """Write the figures as JSON to `path`, and the rollouts of each checkpoint as a table beside it; return the
    tables' files: NAME.rollouts.parquet, NAME.against.rollouts.parquet, NAME.against-2.rollouts.parquet ... Those of an
    older evaluation are deleted.

    Raises UserError if one of the files cannot be written.
    """
    content = {
        "figures": found.figures,
        "against": [comparison.as_dict() for comparison in found.against],
        "harness": found.harness,
        "services": found.services,
        "rewards": found.rewards,
        "examples": {name: _example(found.rollouts[place], place) for name, place in found.examples.items()},
    }
    written = rf"{re.escape(path.stem)}(\.against(-\d+)?)?\.rollouts\.parquet"
    sides = [found.rollouts, *(one.rollouts for one in found.against)]
    files: list[Path] = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in [file for file in path.parent.iterdir() if re.fullmatch(written, file.name)]:
            old.unlink()  # of an evaluation that had more sides
        write_figures(path, content)
        for file, rollouts in zip(file_of_each(path, ".rollouts.parquet", len(sides)), sides, strict=True):
            if rollouts:
                table = rollouts_table(0, [Outcome(rollout) for rollout in rollouts], "eval")
                files.append(file)
                write_table(file, table)
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from error
    return files


def write_figures(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of figures as JSON, wholly or not at all. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(user_files.real(path), json_document(content))
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from error


def _example(rollout: Rollout, place: int) -> dict[str, Any]:
    """Return a rollout as an example; `place`: its row in the table of rollouts."""
    told = {"place": place, "task": rollout.task["id"], "reward": rollout.reward}
    return {**told, "prompt": rollout.prompt, "reply": rollout.text}


def measured(rollouts: Sequence[Rollout], success: float | None, stats: Stats, rewarded: bool = True) -> None:
    """Add the metrics of an evaluation within training. `rewarded`: whether anything gives rewards."""
    for rollout in rollouts:
        stats.add("eval/invalid", isinstance(rollout.reward, Invalid))
        if isinstance(rollout.reward, Invalid):
            continue
        if success is not None:
            stats.add("eval/accuracy", succeeds(rollout.outcome, success))
        if rewarded:
            stats.add("eval/reward", rollout.reward)
            if rollout.side:
                stats.add(f"eval/reward/{rollout.side}", rollout.reward)
        stats.add("eval/length", rollout.n_sampled)
    if success is not None and (tasks := {r.task["id"] for r in rollouts if not isinstance(r.reward, Invalid)}):
        stats.add("eval/tasks", len(tasks))
