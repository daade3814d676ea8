"""Figures of a checkpoint for its model card: evaluations of the run at its step, and of posttrain eval, with intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.apps.publishing.published_run import Published
from posttrain.core import user_files
from posttrain.core.messages import clip, one_line
from posttrain.core.types import UserError
from posttrain.runs.metrics_table import HELD_OUT
from posttrain.runs.record.held_out_rewards import held_out_rewards, success_threshold
from posttrain.runs.run_files import REPORT
from posttrain.training.figures import summary

Figures = Mapping[str, Any]


class FigureRow(NamedTuple):
    """A figure of an evaluation, and its interval where there is one."""

    of: str  # held out, or the name of a file of figures
    name: str
    mean: float
    low: float | None = None
    high: float | None = None
    units: int | None = None  # tasks or prompts


def rows(published: Published, files: Sequence[str]) -> list[FigureRow]:
    """Return the figures of a checkpoint. `files`: what `posttrain eval --out` wrote about it. Raises UserError."""
    return [*_of_run(published), *(row for file in files for row in _of_file(file))]


def _row(of: str, name: str, figure: Figures, units: int | None = None) -> FigureRow:
    found = FigureRow(of, name, figure["mean"], figure.get("low"), figure.get("high"), figure.get("tasks", units))
    for value in (found.mean, *(value for value in found[3:] if value is not None)):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError(f"{name} is not a number")
    return found


def _of_run(published: Published) -> list[FigureRow]:
    """Return the held-out figures of the run at this step: its metrics, and intervals where its record has them."""
    logged = {n.removeprefix(HELD_OUT): v for n, v in published.metrics.items() if n.startswith(HELD_OUT)}
    named = {name: FigureRow("held out", name, value) for name, value in logged.items() if value is not None}
    named |= {row.name: row for row in _reported(published)}
    return list({**named, **{row.name: row for row in _recorded(published, named)}}.values())


def _reported(published: Published) -> list[FigureRow]:
    """Return the figures of a reward model's report, which is on the last checkpoint."""
    run = published.run
    if run is None or not (run / REPORT).is_file() or published.step != published.about.get("final", {}).get("step"):
        return []
    report = _data(run / REPORT)
    try:
        found = {name.replace(" ", "_"): figure for name, figure in report.get("figures", {}).items()}
        return [_row("held out", name, figure, report.get("prompts")) for name, figure in found.items()]
    except (AttributeError, LookupError, TypeError):
        raise UserError(f"{run / REPORT} is damaged: put a copy of it back, or delete it") from None


def _recorded(published: Published, known: Mapping[str, FigureRow]) -> list[FigureRow]:
    """Return reward and accuracy with intervals over tasks, from the recorded rollouts of the evaluation."""
    run, step = published.run, published.step
    rewards = {} if run is None or step is None else held_out_rewards(run, step)
    if not rewards:
        return []
    success = success_threshold(
        published.about,
        [reward for own in rewards.values() for reward in own],
        known["accuracy"].mean if "accuracy" in known else None,
    )
    figures = summary(list(rewards.values()), success=success if "accuracy" in known else None)
    return [_row("held out", name, figures[name]) for name in ("reward", "accuracy") if name in figures]


def _of_file(file: str) -> list[FigureRow]:
    content, of = _data(Path(file)), Path(file).stem
    try:
        found = [_row(of, name, figure) for name, figure in content["figures"].items() if isinstance(figure, dict)]
        rated = [(Path(one["model"]).name, one["win_rate"]) for one in content.get("against", ()) if "win_rate" in one]
        return found + [_row(of, f"win rate over {model}", rate) for model, rate in rated]
    except (AttributeError, LookupError, TypeError):
        raise UserError(f"--eval {clip(file)} has no figures: give a file that posttrain eval --out wrote") from None


def _data(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(user_files.content(path))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{clip(str(path))} cannot be read ({one_line(error)}): give the file again") from None
