"""The figures of a run that its page in a terminal shows, from its record. A damaged part is reported, and left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from statistics import fmean, median
from typing import Any, TypeVar

from posttrain.config.verbs import sampling
from posttrain.core.messages import one_line
from posttrain.core.types import UserError, succeeds
from posttrain.runs import checkpoint as checkpoints
from posttrain.runs.health_checks import FATAL
from posttrain.runs.jsonl import Row
from posttrain.runs.lock import in_use
from posttrain.runs.metrics_table import HELD_OUT, measured
from posttrain.runs.record.held_out_rewards import held_out_rewards, success_threshold
from posttrain.runs.record.rollout_reading import read_table
from posttrain.runs.run_files import RUN
from posttrain.runs.run_options import changed
from posttrain.runs.run_reading import read_health, read_metrics, read_run, read_timing, rollout_steps
from posttrain.training.figures import differences

Part = TypeVar("Part")

OF_STEP = ("seconds/rollout", "seconds/update", "seconds/between")
"""The parts of a step's time that do not overlap."""
TRAINED = ("divergence", "reward", "margin", "nll", "loss")
"""Figures of training, of which a run's first is shown."""
RECENT = 5  # steps whose replies count as recent
ANY_FAULT = (TypeError, ValueError, AttributeError, LookupError, OverflowError)


@dataclass
class RunSummary:
    """A run, as far as it can be read."""

    folder: Path
    name: str
    about: Row
    metrics: list[Row] = field(default_factory=list)
    timing: list[Row] = field(default_factory=list)
    findings: list[Row] = field(default_factory=list)
    best: Row | None = None  # of the recent replies: step, task, reward, text
    worst: Row | None = None
    checkpoint: Path | None = None  # the newest
    problems: list[str] = field(default_factory=list)  # parts that cannot be read, and why

    @classmethod
    def read(cls, folder: Path, name: str = "", replies: bool = True) -> RunSummary:
        """Read a run, running or not. `replies`: with the best and the worst. Raises UserError without a valid run.json."""
        run = cls(folder, name or str(folder), read_run(folder))
        run.metrics = run._part(lambda: read_metrics(folder), [])
        run.timing = run._part(lambda: read_timing(folder), [])
        run.findings = run._part(lambda: read_health(folder), [])
        run.checkpoint = run._part(lambda: next(reversed(checkpoints.listed(folder)), None), None)
        if replies and run.verb in sampling():
            found: list[Row] = run._part(lambda: _replies(folder), [])
            if found:
                run.best, run.worst = found[-1], found[0]
        return run

    def _part(self, read: Callable[[], Part], otherwise: Part) -> Part:
        try:
            return read()
        except UserError as error:
            self.problems.append(str(error))
        except (OSError, *ANY_FAULT) as error:
            self.problems.append(f"{self.folder} has invalid values: {one_line(error)}")
        return otherwise

    @property
    def verb(self) -> str:
        return str(self.about["verb"])

    @property
    def config(self) -> Row:
        config: Row = self.about["config"]
        return config

    @property
    def kind(self) -> str:
        """The verb, and the algorithm where there are several."""
        algorithm = self.config.get("algorithm")
        return f"{self.verb} {algorithm}" if algorithm else self.verb

    @property
    def model(self) -> str:
        return str(self.config.get("model") or "a new model")

    @property
    def on(self) -> bool:
        """Whether the run is in progress: run.json records no end, and its process has not been killed."""
        return "end" not in self.about and in_use(self.folder)

    @property
    def done(self) -> int:
        last = self.about.get("final", {}).get("step")
        return max((row["step"] for row in self.metrics), default=last if isinstance(last, int) else 0)

    @property
    def planned(self) -> int | None:
        steps = self.about.get("steps", self.config.get("steps"))
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def state(self) -> str:
        if "end" not in self.about:
            return "running" if self.on else "killed: it recorded no end"
        if not self.about.get("final"):
            return "failed"
        if self.planned is None or self.done >= self.planned:
            return "ended"
        ill = [one for one in self.findings if one["step"] == self.done]
        if any(one["name"] in FATAL or self.config.get("health") == "stop" for one in ill):
            return "stopped by the health check"
        return "interrupted"

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, the median."""
        rows = [[row[name] for name in OF_STEP if row.get(name) is not None] for row in self.timing]
        return median(map(sum, filter(None, rows))) if any(rows) else None

    def tenths(self, name: str) -> dict[str, Any] | None:
        """Return the means of a metric over the first and the last tenth of its steps; None if it is not logged."""
        values = [row[name] for row in self.metrics if row.get(name) is not None]
        count = max(1, len(values) // 10)
        return {"name": name, "first": fmean(values[:count]), "last": fmean(values[-count:])} if values else None

    def trained(self) -> list[dict[str, Any]]:
        """Return what the run trained on, as `tenths`: its reward or loss, its accuracy, and the stage of a curriculum."""
        found = next(filter(None, map(self.tenths, TRAINED)), None)
        return [one for one in (found, *map(self.tenths, ("accuracy", "curriculum/stage"))) if one is not None]

    @property
    def no_signal(self) -> float | None:
        """Share of the rollouts in groups with equal rewards, the mean over all steps."""
        values = [row["groups/no_signal"] for row in self.metrics if row.get("groups/no_signal") is not None]
        return fmean(values) if values else None

    def held_out(self) -> list[dict[str, Any]]:
        """Return each held-out figure: before and after, their steps, and the change with its interval over tasks."""
        found: list[dict[str, Any]] = []
        for name in measured({name for row in self.metrics for name in row}):
            rows = [row for row in self.metrics if row.get(name) is not None]
            if rows:
                steps = [rows[0]["step"], rows[-1]["step"]]
                figure = {"name": name.removeprefix(HELD_OUT), "steps": steps, "after": rows[-1][name]}
                found.append({**figure, "before": rows[0][name] if len(rows) > 1 else None, "change": None})
        for first, last in {(one["steps"][0], one["steps"][1]) for one in found if one["before"] is not None}:
            own = change((self, first), (self, last))
            for figure in found:
                if figure["steps"] == [first, last]:
                    figure["change"] = own.get(figure["name"])
        return found

    def rewards(self, step: int) -> dict[str, list[float]]:
        """Return task -> rewards of the evaluation after a step; {} if there are none."""
        return self._part(lambda: held_out_rewards(self.folder, step), {})

    def as_data(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        about = self.about
        return {
            "run": str(self.folder),
            **{name: about.get(name) for name in ("verb", "start", "end", "seed", "sizes", "objective", "versions")},
            "model": self.config.get("model"),
            "options": changed(about),
            "state": self.state,
            "steps": self.done,
            "planned": self.planned,
            "seconds_per_step": self.seconds,
            "held_out": self.held_out(),
            "training": self.trained(),
            "no_signal": self.no_signal,
            "findings": self.findings,
            "best": self.best,
            "worst": self.worst,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "problems": self.problems,
        }

    def commands(self) -> dict[str, str]:
        """Return the command that continues the run, if it is not complete, and the one that uses its model."""
        place, found = quote(str(self.folder)), {}
        if self.checkpoint is not None and self.state not in ("ended", "running"):
            found["continue"] = f"posttrain {self.verb} --out {place} --resume"
        if self.checkpoint is not None and self.verb in sampling():
            held = self.config.get("held_out") or self.config.get("eval_tasks")
            found["evaluate"] = f"posttrain eval --model {place}{'' if held else ' --tasks FILE'}"
        elif self.checkpoint is not None and self.verb != "reward-model":
            found["evaluate"] = f"posttrain eval --model {place} --tasks FILE --env FILE:reward"
        return found


def change(before: tuple[RunSummary, int], after: tuple[RunSummary, int]) -> dict[str, dict[str, Any]]:
    """Return the changes in reward and accuracy between two evaluations (run, step), paired by task; {} if there are
    none.
    """
    own, other = after[0].rewards(after[1]), before[0].rewards(before[1])
    pairs = [(own[task], other[task]) for task in own if task in other]
    if not pairs:
        return {}
    return differences(pairs, _success([(*after, own), (*before, other)]))


def _success(evaluations: Sequence[tuple[RunSummary, int, Mapping[str, Sequence[float]]]]) -> float | None:
    """Return the reward from which on a reply is right, if it gives the recorded accuracy of each evaluation (run, step,
    rewards by task).
    """
    sides: list[tuple[list[float], float, float | None]] = []
    for run, step, by_task in evaluations:
        accuracy = next((row.get("eval/accuracy") for row in run.metrics if row["step"] == step), None)
        if accuracy is None:
            return None
        rewards = [reward for own in by_task.values() for reward in own]
        sides.append((rewards, accuracy, success_threshold(run.about, rewards, accuracy)))
    success = min((limit for _, _, limit in sides if limit is not None), default=None)
    if success is None:
        return None
    fits = (abs(fmean(succeeds(r, success) for r in own) - accuracy) < 1e-9 for own, accuracy, _ in sides)
    return success if all(fits) else None


def _replies(folder: Path) -> list[Row]:
    """Return the valid replies of the last recorded steps, the worst first; of equal ones the newest last."""
    rows: list[Row] = []
    for step in rollout_steps(folder)[-RECENT:]:
        rows += read_table(folder, step, ["step", "task", "reward", "text"]).to_pylist()
    return sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"])


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder and in its subfolders, the last written first."""
    if not os.path.isdir(folder):
        return []
    places = [path.parent for pattern in (f"*/{RUN}", f"*/*/{RUN}") for path in folder.glob(pattern)]
    own = [place for place in places if not any(part.startswith(".") for part in place.relative_to(folder).parts)]
    return sorted(own, key=written, reverse=True)


def written(folder: Path) -> float:
    """Return the time at which a run last wrote a figure or its end."""
    return max(path.stat().st_mtime for path in (folder / RUN, folder / "metrics.jsonl") if path.exists())


def compared(a: RunSummary, b: RunSummary) -> Mapping[str, Any]:
    """Return the change of the last held-out figures from run A to run B, paired by task; {} if there is none."""
    steps = [[f["steps"][1] for f in run.held_out() if f["name"] in ("reward", "accuracy")] for run in (a, b)]
    return change((a, steps[0][0]), (b, steps[1][0])) if all(steps) else {}


def names_of_figures(runs: Iterable[RunSummary]) -> Sequence[str]:
    """Return the names of all held-out figures of these runs, the most important first."""
    return list(dict.fromkeys(figure["name"] for run in runs for figure in run.held_out()))
