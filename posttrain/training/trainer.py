"""The course of a run, from its first or resumed step to its end: record, evaluate, save, show.

Decides what a run leaves in its directory and when, how it goes on after a kill, and that nothing is lost when it ends
before its time. A run stands on the disk as its last checkpoint and what was recorded until then; a resumed one begins
there and repeats, byte for byte, what had come after.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.batch import Stats
from posttrain.config import AnyTraining, Training, as_dict, continued
from posttrain.models.tokenizer import Tokenizer
from posttrain.protocols import TRAINING, Learner, Objective, Source
from posttrain.runs import checkpoint as checkpoints
from posttrain.runs.display import Display
from posttrain.runs.health import Health
from posttrain.runs.record import Record, curves, read_metrics, read_run
from posttrain.training.loop import Trained, interruptible, train
from posttrain.types import UserError

RUN_FILES = (
    "run.json",
    "metrics.jsonl",
    "timing.jsonl",
    "health.jsonl",
    "rollouts",
    "tensorboard",
    "checkpoints",
    "curves.png",
)
"""What --overwrite deletes: what a run makes, and nothing else that may stand in the folder."""


@dataclass
class Run:
    """A finished (or interrupted) run."""

    path: Path
    checkpoint: Path | None  # the newest one: a Hugging Face folder
    interrupted: bool = False
    stopped: str | None = None  # what the health check found, if it ended the run

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, as in metrics.jsonl."""
        return read_metrics(self.path)

    @property
    def final(self) -> dict[str, Any]:
        """The final figures, as in run.json."""
        final: dict[str, Any] = read_run(self.path).get("final", {})
        return final


def begin(config: AnyTraining) -> tuple[AnyTraining, Path | None]:
    """The options as the run has them, and the checkpoint to go on from. Nothing is written or deleted yet.

    Raises UserError if --out holds a run and none is expected there, or the other way round.
    """
    folder = Path(config.out)
    if config.resume and config.overwrite:
        raise UserError("--resume continues the run in --out and --overwrite deletes it: give one of them")
    if not config.resume:
        if any((folder / name).exists() for name in RUN_FILES) and not config.overwrite:
            raise UserError(
                f"{folder} already holds a run: --resume continues it, --overwrite deletes it, or choose another --out"
            )
        return config, None
    if not (folder / "run.json").exists():
        raise UserError(f"{folder} holds no run to resume: leave out --resume, or give the --out of one")
    run, verb = read_run(folder), config.verb
    if run["verb"] != verb:
        raise UserError(f"{folder} is a run of posttrain {run['verb']}: resume it with that verb")
    newest = checkpoints.newest(folder, print)
    if newest is None:
        print(f"{folder} has no checkpoint yet: starting over")
    return continued(config, run["config"]), newest


def open_run(config: Training, resumed: Path | None, extra: dict[str, Any]) -> Record:
    """The run directory, ready to be written: new, or with what was recorded since the checkpoint taken out."""
    folder = Path(config.out)
    with writing(folder):
        if config.resume:
            return Record.resume(folder, checkpoints.step_of(resumed) if resumed else -1, as_dict(config))
        if config.overwrite:
            for inside in (config.model, config.tasks):
                if inside and Path(inside).resolve().is_relative_to(folder.resolve()):
                    raise UserError(f"--overwrite would delete {inside}, which this run needs: choose another --out")
            for name in RUN_FILES:
                shutil.rmtree(folder / name, ignore_errors=True)
                (folder / name).unlink(missing_ok=True)
        return Record.create(folder, as_dict(config), config.verb, extra)


def start_of(config: Training) -> Path | None:
    """The checkpoint that the run begins, or began, with (None: from scratch). A name may mean another one by now."""
    if config.resume:
        recorded: str | None = read_run(config.out)["initial"]
        return Path(recorded) if recorded else None
    return checkpoints.resolve(config.model) if config.model else None


class Trainer:
    """A run from its first or resumed step to its end: record, evaluate, save, show."""

    def __init__(
        self,
        config: Training,
        start: Path | None,
        resumed: Path | None,
        learner: Learner,
        source: Source,
        tokenizer: Tokenizer,
        measure: Callable[[Stats], None] | None,
        steps: int,
    ) -> None:
        self.config, self.learner, self.source, self.tokenizer = config, learner, source, tokenizer
        self.measure, self.steps, self.start = measure, steps, start
        self.verb, self.folder = config.verb, Path(config.out)
        self.display = Display(quiet=config.quiet)
        self.saved = resumed  # the newest checkpoint
        self.health = Health() if config.health != "off" else None
        self.ill: str | None = None  # what the health check stops the run for
        self.done = 0  # the last whole step: trained and recorded
        self.whole: tuple[int, dict[str, Any]] = (0, {})  # the learner's version and the source's state after that step

    def run(self, objective: Objective, sizes: list[str], formula: list[str]) -> Run:
        """Train to the end or to an interruption. `sizes` and `formula` say of what and how; shown and recorded."""
        told = {"initial": str(self.start) if self.start else None, "sizes": sizes, "objective": formula}
        self.record = open_run(self.config, self.saved, told)
        if self.saved:
            self.learner.load(self.saved)
            self.source.restore(checkpoints.load_state(self.saved / TRAINING)["source"])
            self.done = checkpoints.step_of(self.saved)
            self.display.note(f"resuming {self.folder} after step {self.done}")
        if self.health and self.saved:
            kept = [row for row in read_metrics(self.folder) if row["step"] <= self.done]
            self.health = Health.replay(kept)
        self.whole = (self.learner.version, self.source.state())
        self.display.start(f"{self.verb} {self.folder}", self.steps, [*sizes, *formula, *_options(self.config)])
        try:
            with interruptible(self.display.note) as interrupted:
                self._train(objective, interrupted)
                stopped = interrupted() and self.done < self.steps and self.ill is None
        except BaseException as error:
            self.display.close()
            outlook = self._rescue() if isinstance(error, UserError) else ""
            with suppress(Exception):  # it would hide what went wrong first
                self.record.close({})
            if isinstance(error, UserError):
                raise UserError(f"{error}; {outlook}") from error
            raise
        self.display.close()
        with writing(self.folder):
            self.record.close((read_metrics(self.folder) or [{}])[-1])
        try:
            curves(self.folder)
        except (UserError, OSError) as error:  # nothing to draw yet, or no room: the run itself is whole
            self.display.note(f"no curves were drawn: {error}")
        return Run(self.folder, self.saved, stopped, self.ill)

    def _train(self, objective: Objective, interrupted: Callable[[], bool]) -> None:
        if self.done == 0 and self.measure:
            stats = Stats()
            self.measure(stats)
            with writing(self.folder):
                self.record.metrics(0, stats.means())
                self._look(0, stats.means())
        if self.done < self.steps:
            first = self.done + 1
            train(
                self.learner,
                self.source,
                objective,
                [self._after],
                first=first,
                steps=self.steps,
                interrupted=interrupted,
            )

    def _after(self, trained: Trained) -> bool:
        """Record a step. Returns whether the run is to end here."""
        number, config = trained.step.number, self.config
        stats = trained.stats
        due = config.eval_every and number % config.eval_every == 0
        if self.measure and (due or number == self.steps):
            self.measure(stats)
        metrics = stats.means()
        timing = {f"seconds/{name}": value for name, value in trained.seconds.items()}
        timing["tokens_per_second"] = trained.step.tokens / max(1e-9, sum(trained.seconds.values()))
        with writing(self.folder):
            if trained.step.rollouts:
                self.record.rollouts(number, trained.step.rollouts)
            self.record.metrics(number, metrics)
            self.record.timing(number, timing)
            self._look(number, metrics)
        self.done, self.whole = number, (self.learner.version, self.source.state())
        self.display.step(number, metrics, timing)
        if trained.last or self.ill or number % config.save_every == 0:
            self._save()
        return self.ill is not None

    def _look(self, number: int, metrics: dict[str, float]) -> None:
        """Say, write down or stop for what the health check finds."""
        if self.health is None:
            return
        for finding in self.health.look(number, metrics):
            self.record.health(number, finding.name, finding.message)
            if self.config.health != "log":
                self.display.note(f"health, step {number}: {finding.message}")
            if self.config.health == "stop" and finding.name != "solved":  # good news is no reason to stop
                self.ill = finding.message

    def _save(self) -> None:
        with writing(self.folder):
            self.record.flush()
        self.saved = checkpoints.save(self.folder, self.done, self._write, self.config.keep)

    def _write(self, folder: Path) -> None:
        self.learner.save(folder)
        self.tokenizer.save(folder)
        checkpoints.save_state(folder / TRAINING, {"source": self.whole[1]})

    def _rescue(self) -> str:
        """After a mistake of the user's: save the last whole step, if no update came since. Returns how to go on."""
        saved = checkpoints.step_of(self.saved) if self.saved else 0
        if self.done > saved and self.learner.version == self.whole[0]:
            with suppress(UserError):  # the disk is full, which is perhaps why we are here
                self._save()
        if self.saved is None:
            return "no step was saved: mend it and begin again with --overwrite"
        step = checkpoints.step_of(self.saved)
        return f"mend it and continue after step {step} with posttrain {self.verb} --out {self.folder} --resume"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Within it, a disk that is full or not writable is a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def _options(config: Training) -> list[str]:
    """The whole configuration: the options that were chosen, then those at their default; a line each."""
    default, chosen = as_dict(type(config)()), as_dict(config)
    lines: dict[str, list[str]] = {"options": [], "defaults": []}
    for name, value in chosen.items():
        if value is None and default[name] is None:
            continue  # an axis left to the algorithm, whose parts are told beside
        if isinstance(value, dict):
            lines["options"] += [f"{place} {chosen}" for place, chosen in value.items()]
            continue
        lines["defaults" if value == default[name] else "options"].append(f"{name} {value}")
    return [f"{title}: {', '.join(named)}" for title, named in lines.items()]
