"""The course of a run, from its first or resumed step to its end: record, evaluate, save, show.

It decides which files a run writes and when, how it continues after a kill, and that nothing is lost if it ends early.
On disk a run is its last checkpoint and the record until then; a resumed run begins there and repeats, byte for byte,
the steps after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.resolve import chosen_options, profiled_steps
from posttrain.config.training import Training
from posttrain.core.batch import Stats
from posttrain.core.pictures import FOLDER, PICTURES
from posttrain.core.protocols import TRAINING, Learner, Objective, Source
from posttrain.core.rollouts import Outcome
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Invalid, UserError
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs import checkpoint as checkpoints
from posttrain.runs.curves import curves
from posttrain.runs.health import Health
from posttrain.runs.run_files import writing
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.run_reading import read_health, read_metrics, read_run
from posttrain.runs.terminal.display import Display
from posttrain.runs.terminal.notices import tell
from posttrain.runs.tracking.tracker import Status
from posttrain.runs.tracking.trackers import Trackers
from posttrain.system.worker_thread import WorkerThread
from posttrain.training.full_memory import full_memory_in_words
from posttrain.training.gpu_use import gpus_by_role, peaks, speed
from posttrain.training.hooks import Hooks
from posttrain.training.loop import FinishedStep, interruptible, train
from posttrain.training.step_profiler import StepProfiler

WAITING = 0.3  # share of the steps' time from which on waiting for environments is reported
RECENT_STEPS = 5  # steps over which waiting is measured
HOOK = "hook"  # name of the finding that a hook failed
IN_SIZES = {"out", "overwrite", "steps", "prompts", "group", "rows", "max_tokens"}
"""Options that the title of a run and the lines about its sizes show."""
HURRIED = 5.0  # seconds for trackers to finish after a second Ctrl-C
NOTICED = 1.0  # least seconds of these steps for a report, so that toy runs get none

Measure = Callable[[Stats], Sequence[Outcome] | None]
"""Evaluation within training: adds its metrics, and returns the outcomes of the rollouts that it sampled."""


@dataclass
class Run:
    """A finished (or interrupted) run."""

    path: Path
    checkpoint: Path | None  # the newest one: a Hugging Face folder
    interrupted: bool = False
    stopped: str | None = None  # the finding of the health check, or the reason of the hook, that ended the run
    notes: tuple[str, ...] = ()  # lines about the finished run, for the command line to print
    invalid: int = 0  # rollouts since the beginning or the resume whose reward was invalid
    held_out_tasks: int = 0  # tasks of the last evaluation; 0: unknown, or examples of another kind

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics, one dict per step, as in metrics.jsonl."""
        return read_metrics(self.path)

    @property
    def final(self) -> dict[str, Any]:
        """Final figures, as in run.json."""
        final: dict[str, Any] = read_run(self.path).get("final", {})
        return final


class Trainer:
    """Runs training from its first or resumed step to its end: records, evaluates, saves, shows."""

    def __init__(
        self,
        run: RunFolder[Any],
        learner: Learner,
        source: Source,
        tokenizer: Tokenizer,
        measure: Measure | None,
        steps: int,
        hooks: Hooks | None = None,
    ) -> None:
        """`measure`: evaluates on held-out tasks and returns the outcomes of its rollouts; `steps`: the number of the
        last step.
        """
        self.hooks = hooks or Hooks(())
        self.trackers: Trackers | None = None
        self.world = run.world
        self.run_folder, self.learner, self.source, self.tokenizer = run, learner, source, tokenizer
        self.config: Training = run.config
        self.measure, self.steps = measure, steps
        self.folder = run.path
        self.gpus = gpus_by_role(self.config, learner.device)
        self.trains_scores = False  # whether the objective reads one score of a reply instead of its tokens
        self.display = Display(quiet=self.config.quiet)
        self.saved = run.checkpoint  # the newest checkpoint
        self.saving: Future[Path] | None = None  # the checkpoint that is being written
        self._saver: WorkerThread | None = None
        self.health = Health() if self.config.health != "off" else None
        self.stop_reason: str | None = None  # why the health check or a hook stops the run
        self.done = 0  # the last complete step: trained and recorded
        # the learner's version and the source's state after that step
        self.last_state: tuple[int, dict[str, Any]] = (0, {})
        self.recent_seconds: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)  # seconds: waiting, the whole step
        self.noted_waiting = False  # whether a note on waiting was shown
        self.invalid = 0  # rollouts whose reward was invalid
        self.held_out_tasks = 0  # of the last evaluation; 0: unknown
        self.stopping = False  # whether any process was asked to stop

    def run(self, objective: Objective, sizes: list[str], formula: list[str]) -> Run:
        """Train to the end or to an interruption.

        `sizes` and `formula` describe the run; they are shown and recorded.
        """
        self.trains_scores = "score" in objective.wants
        if self.saved:
            self._restore(self.saved)
        self.record = self.run_folder.open({"sizes": sizes, "objective": formula, "steps": self.steps})
        self.world.gather(None)  # no process may read the record from before
        with writing(self.folder):
            PICTURES.keep(self.folder / FOLDER)
        try:
            chosen = [one for one in chosen_options(self.config) if one.split(" ")[0] not in IN_SIZES]
            self._begin([*_in_short(formula), f"options: {', '.join(chosen)}", *sizes])
            with interruptible(self.display.note) as interrupted, full_memory_in_words(self.config):
                self._train(objective, interrupted)
                self._wait_for_checkpoint()
                stopped = self.stopping and self.done < self.steps and self.stop_reason is None
        except BaseException as error:
            self.display.close()
            outlook = self._rescue() if isinstance(error, UserError) and not self.world.rank else ""
            with suppress(Exception):  # a second error would hide the first
                self.record.close({})
            if self.trackers is not None:
                self.trackers.finish("failed", *(() if isinstance(error, Exception) else (HURRIED,)))
            if isinstance(error, UserError):
                told = UserError(f"{error}; {outlook}" if outlook else str(error))
                told.code = error.code
                raise told from error
            raise
        finally:
            if self._saver is not None:
                self._saver.close(0)
        if self.stop_reason is None and self.health and self.health.motionless:
            self.stop_reason = (
                "no update was made, as no gradient was finite: check the model's weights, and --precision"
            )
        self.display.close()
        if not self.world.rank:
            self._close("stopped" if self.stop_reason else "interrupted" if stopped else "finished")
        saved = self.world.gather(self.saved)[0]
        return Run(
            self.folder, saved, stopped, self.stop_reason, invalid=self.invalid, held_out_tasks=self.held_out_tasks
        )

    def _close(self, status: Status) -> None:
        """Close the record, draw its curves, and let trackers finish their uploads."""
        with writing(self.folder):
            self.record.close((read_metrics(self.folder) or [{}])[-1])
        try:
            curves(self.folder)
        except (UserError, OSError) as error:  # nothing to draw yet, or a full disk: the run itself is complete
            self.display.note(f"no curves were drawn: {error}")
        if self.trackers is not None:
            self.trackers.finish(status)

    def _restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint."""
        try:
            self.learner.load(checkpoint)
            self.source.restore(checkpoints.load_state(checkpoint / TRAINING)["source"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            if isinstance(error, UserError):
                raise
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(
                f"{checkpoint / TRAINING} does not fit this run ({why}): delete {checkpoint} to use the previous checkpoint"
            ) from error
        self.done = checkpoints.step_of(checkpoint)
        if self.done > self.steps:
            raise UserError(
                f"{self.folder} has done {self.done} steps: it cannot end at {self.steps}: give a larger --steps"
            )

    def _begin(self, lines: list[str]) -> None:
        """Show the description of the run; for a resumed run, restore the health findings up to here."""
        self.last_state = (self.learner.version, self.source.state())
        if self.saved:
            found = []
            if self.health:
                self.health = Health.replay(row for row in read_metrics(self.folder) if row["step"] <= self.done)
                found = [(f.step, f.name, f.message) for f in self.health.findings]
            for row in read_health(self.folder):  # findings about hooks cannot be computed from the metrics
                if row["step"] <= self.done and (row["name"] == HOOK or not self.health):
                    found.append((row["step"], row["name"], row["message"]))
            with writing(self.folder):
                self.record.health(sorted(found, key=lambda finding: finding[0]), anew=True)
        if self.saved and not self.config.quiet:
            last = ", the last one; a larger --steps continues the run" if self.done == self.steps else ""
            tell(f"resumed from step {self.done}{last}: {self.saved}")
        self.display.start(f"{self.config.verb} {self.folder}", self.steps, lines, self.done)
        if self.config.track and not self.world.rank:
            with writing(self.folder):
                self.trackers = Trackers(self.config, self.folder, self.display.note)

    def _train(self, objective: Objective, interrupted: Callable[[], bool]) -> None:
        if self.done == 0 and self.measure:
            stats = Stats()
            self.display.note("evaluating before the first step ...")
            played = self.measure(stats)
            self.held_out_tasks = _tasks(played)
            with writing(self.folder):
                if played:
                    self.record.evaluated(0, played)
                self.record.metrics(0, stats.means())
                self._check_health(0, stats.means())
            self.display.before(stats.means())
            if self.hooks and not self.world.rank:
                self._note_failed(self.hooks.evaluation(0, stats.means(), [o.rollout for o in played or ()]))
        if self.done < self.steps:
            first = self.done + 1
            train(
                self.learner,
                self.source,
                objective,
                [lambda trained: self._after(trained, interrupted)],
                first=first,
                steps=self.steps,
                **({"phase": self._profiler().phase} if self.config.profile and not self.world.rank else {}),
            )

    def _profiler(self) -> StepProfiler:
        steps = profiled_steps(self.config.profile)
        return StepProfiler(self.folder / "profile", steps, self.learner, self.display.note)

    def _stop(self, asked: bool) -> bool:
        """Return whether to end after this step: if any process was interrupted, all end."""
        self.stopping = self.stopping or any(self.world.gather(asked))
        return self.stopping

    def _after(self, trained: FinishedStep, interrupted: Callable[[], bool]) -> bool:
        """Record a step; return whether the run ends here.

        A request to stop that arrives during the step's record, evaluation or hooks ends the run with this step.
        """
        number, config = trained.step.number, self.config
        stats = trained.stats
        if self.saving is not None and self.saving.done():
            self._wait_for_checkpoint()
        due = config.eval_every and number % config.eval_every == 0
        evaluated = self.measure is not None and (due or number == self.steps)
        held_out = self.measure(stats) if self.measure and evaluated else None
        self.held_out_tasks = _tasks(held_out) or self.held_out_tasks
        if trained.step.played:
            stats.add("rollouts", len(trained.step.played))
        metrics, timing = stats.means(), _timing(trained) | peaks(self.gpus, self.world)
        timing |= speed(self.learner, trained.work, trained.seconds["update"], self.world.size, self.trains_scores)
        with writing(self.folder):
            if trained.step.outcomes:
                self.record.rollouts(number, trained.step.outcomes, config.verb)
            if held_out:
                self.record.evaluated(number, held_out)
            self.record.metrics(number, metrics)
            self.record.timing(number, timing)
            self._check_health(number, metrics)
            self.run_folder.stepped()
        self.done, self.last_state = number, (self.learner.version, self.source.state())
        self.display.step(number, metrics, timing)
        self._note_invalid(trained)
        self._note_waiting(timing.get("seconds/waiting", 0.0), sum(trained.seconds.values()))
        if self.hooks:
            self._call_hooks(trained, metrics, (held_out or ()) if evaluated else None)
        if self.trackers is not None:
            self.trackers.look()
        last = number == self.steps or self._stop(interrupted())
        if last or self.stop_reason or number % config.save_every == 0:
            self._save()
        return last or self.stop_reason is not None

    def _check_health(self, number: int, metrics: dict[str, float]) -> None:
        """Check the run's health; show and record the findings, or mark the run to end."""
        if self.health is None:
            return
        found = self.health.look(number, metrics)
        self.record.health((f.step, f.name, f.message) for f in found)
        for finding in found:
            if self.config.health != "log" or finding.fatal:
                self.display.note(f"health, step {number}: {finding.message}")
            if finding.fatal or (self.config.health == "stop" and not finding.good):
                self.stop_reason = finding.message

    def _call_hooks(self, trained: FinishedStep, metrics: dict[str, float], held_out: Sequence[Outcome] | None) -> None:
        """Call the hooks in the first process. If a hook asks to stop, all processes end after this step."""
        number = trained.step.number
        if not self.world.rank:
            failed = self.hooks.step(number, metrics, [o.rollout for o in trained.step.outcomes])
            if held_out is not None:
                failed += self.hooks.evaluation(number, metrics, [o.rollout for o in held_out])
            self._note_failed(failed)
        asked = [reason for reason in self.world.gather(self.hooks.stop) if reason]
        if asked and number < self.steps:
            self.stop_reason = self.stop_reason or asked[0]

    def _note_failed(self, failed: list[str]) -> None:
        """Show and record messages about failed hooks."""
        with writing(self.folder):
            self.record.health((self.done, HOOK, message) for message in failed)
        for message in failed:
            self.display.note(f"step {self.done}: {message}")

    def _note_invalid(self, trained: FinishedStep) -> None:
        """Count invalid rewards, and show once why one was: a few do not end a run, and metrics show only their share."""
        reasons = [r.reward.reason for r in trained.step.played if isinstance(r.reward, Invalid)]
        self.invalid += len(reasons)
        if reasons and self.invalid == len(reasons):
            self.display.note(
                f"step {trained.step.number}: {len(reasons)} of {len(trained.step.played)} rewards are invalid; the first: "
                f"{reasons[0]}"
            )

    def _note_waiting(self, waiting: float, whole: float) -> None:
        """Show once that steps spend their time waiting for environments, with the option that helps."""
        self.recent_seconds.append((waiting, whole))
        waited, took = (sum(column) for column in zip(*self.recent_seconds, strict=True))
        if (
            not self.noted_waiting
            and len(self.recent_seconds) == RECENT_STEPS
            and took > NOTICED
            and waited > WAITING * took
        ):
            self.noted_waiting = True
            self.display.note(
                f"{waited / took:.0%} of the time of the last {RECENT_STEPS} steps was spent waiting for rewards and tools: "
                "raise --env-workers to run more at once"
            )

    def _save(self) -> None:
        if self.world.rank:
            self.learner.save(None)
            return
        self._wait_for_checkpoint()
        with writing(self.folder):
            self.record.flush()
        draft = checkpoints.Draft(self.folder, self.done, self._write)
        state = checkpoints.save_state({"source": self.last_state[1]})
        self._saver = self._saver or WorkerThread("saving")
        self.saving = self._saver.call(lambda: draft.finish(self.config.keep, lambda folder: state(folder / TRAINING)))

    def _wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is safely on disk."""
        saving, self.saving = self.saving, None
        if saving is not None:
            self.saved = saving.result()
            self._note_failed(self.hooks.checkpoint(self.saved))

    def _write(self, folder: Path) -> None:
        self.learner.save(folder)
        self.tokenizer.save(folder)

    def _rescue(self) -> str:
        """Save the last complete step after a user's mistake, if no update came since. Return how to continue."""
        with suppress(UserError):
            self._wait_for_checkpoint()
        saved = checkpoints.step_of(self.saved) if self.saved else 0
        here = not self.config.in_parts  # sharded weights need all processes
        if here and self.done > saved and self.learner.version == self.last_state[0]:
            with suppress(UserError):  # a full disk may be the original error
                self._save()
                self._wait_for_checkpoint()
        if self.saved is None:
            return f"no step was saved: fix it and start again{' with --overwrite' if self.done else ''}"
        step = checkpoints.step_of(self.saved)
        also = " (and --accept-changes, if you change the environment)" if self.config.env else ""
        return f"fix it and continue after step {step} with posttrain {self.config.verb} --out {self.folder} --resume{also}"


def _in_short(formula: list[str]) -> list[str]:
    """Return the name of an algorithm, and where its formulas are; a formula without a name as it is."""
    first, *more = formula
    return [first, f"formulas: posttrain algorithms {first.partition(':')[0]}"] if more else formula


def _tasks(played: Sequence[Outcome] | None) -> int:
    """Return the number of tasks of an evaluation."""
    return len({outcome.rollout.task["id"] for outcome in played or ()})


def _timing(trained: FinishedStep) -> dict[str, float]:
    """Return the row of timing.jsonl: everything in a step that depends on the clock."""
    seconds = {**trained.step.seconds, **trained.seconds}
    timing = {f"seconds/{name}": value for name, value in seconds.items()}
    taken = max(1e-9, sum(trained.seconds.values()))
    given = not trained.step.played  # given rows, whose prompts are read and responses trained
    speeds = {"learned": trained.step.tokens, "read": trained.work.fed} if given else {"sampled": trained.step.tokens}
    timing |= {f"tokens_per_second/{name}": tokens / taken for name, tokens in speeds.items()}
    took: dict[str, list[float]] = {"environment": [], "reply": []}
    for rollout in trained.step.played:
        for turn in rollout.turns:
            if turn.seconds:  # 0 if it was sampled before the run was resumed
                took["reply" if turn.kind is SpanKind.SAMPLED else "environment"].append(turn.seconds)
    for who, turns in took.items():
        timing |= (
            {f"seconds/turn/{who}": sum(turns) / len(turns), f"seconds/turn/{who}/max": max(turns)} if turns else {}
        )
    timing |= {"seconds/between": trained.between, "update/tokens": trained.work.fed}
    return {**timing, **trained.step.counts, **trained.step.work}
