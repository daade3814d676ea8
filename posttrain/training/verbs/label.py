"""`posttrain label`: a reward model, a judge or a function scores the responses of preference examples.

Responses that could not be scored are null, with the reason beside them. If a block of preference examples gets not a
single score, the command ends before it is written, so that an outage costs no labels. Files of best responses and of
pairs are written at the end, from all labelled rows.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from posttrain.config.inference import Label
from posttrain.config.resolve import validate
from posttrain.core import run_date, user_files
from posttrain.core.seeds import seed_of
from posttrain.core.types import Invalid, Reply, StopReason, Task, UserError
from posttrain.data.labels import best_rows, flip, pair_row, to_labelled, to_responses
from posttrain.data.tasks import Stream, Tasks
from posttrain.runs import fingerprint
from posttrain.runs.checkpoint import resolve
from posttrain.runs.jsonl_writer import Lines, write_rows
from posttrain.training.playground import count_lines, service_counts
from posttrain.training.reply_scorer import ReplyScorer
from posttrain.training.setup import choose_device, load_tasks, use_threads
from posttrain.training.verbs.sample import digest_of, scored_columns

BLOCK = 64  # preference examples that are labelled and written together
Row = dict[str, Any]


@dataclass(frozen=True)
class LabelSummary:
    """Summary of a labelling."""

    path: Path | None  # file of the labels; None: the rows already had labels
    items: int
    best: int | None = None  # number of rows in each file, if requested
    pairs: int | None = None
    notes: tuple[str, ...] = ()


def label(config: Label, rows: Any = None, env: Callable[..., Any] | None = None) -> LabelSummary:
    """Write labels, and the files derived from them. `rows`, `env`: objects in place of the names in the options.

    Raises UserError for a mistake of the caller's.
    """
    validate(config)
    assert not config.human and config.agreement is None, "these need a terminal"
    check_outputs(config)
    use_threads(config.threads)
    by_service = bool(config.with_) or env is not None
    tasks = load_items(config, rows, with_labels=not by_service)
    if not by_service and not config.flip:
        best, pairs = derive(config, tasks)
        return LabelSummary(None, len(tasks), best, pairs)
    with ExitStack() as opened:
        labeller = _Labeller(config, env, opened) if by_service else None
        lines = opened.enter_context(
            Lines(Path(config.out), _follows_from(config, tasks, labeller, env), config.resume, config.overwrite)
        )
        opened.enter_context(run_date.begun(lines.day))
        check_continued(lines, tasks)
        for first in range(lines.count, len(tasks), BLOCK):
            block = [tasks[place] for place in range(first, min(len(tasks), first + BLOCK))]
            found = labeller.label(block, first) if labeller is not None else block
            lines.write([flip(row, config.flip, config.seed) if config.flip else row for row in found])
        notes = [*count_lines(service_counts(labeller.services) if labeller is not None else {}), *_notes(lines)]
        best, pairs = derive(config, lines)
        return LabelSummary(lines.path, lines.count, best, pairs, tuple(notes))


def load_items(config: Label, rows: Any, with_labels: bool) -> Tasks:
    """Load the preference examples, with or without their existing labels."""
    tasks = load_tasks(config, rows, convert=to_labelled if with_labels else to_responses)
    if isinstance(tasks, Stream):
        raise UserError("these rows have no end: set the number to label with --limit")
    return tasks


def check_outputs(config: Label) -> None:
    """Raise UserError, before any work, if an output file already exists, or two are the same."""
    derived = [("--best", config.best), ("--pairs", config.pairs)]
    out = config.out if config.with_ or config.flip or config.human else None
    named = [(name, Path(file)) for name, file in [*derived, ("--out", out), ("--items", config.tasks)] if file]
    for place, (name, file) in enumerate(named):
        if other := next((n for n, f in named[:place] if user_files.real(f) == user_files.real(file)), None):
            raise UserError(f"{other} and {name} are both {file}: give different files")
    for name, maybe in derived:
        if maybe and os.path.exists(maybe) and not (config.overwrite or config.resume):
            raise UserError(f"{name} {maybe} exists already: choose another name, or replace it with --overwrite")


def check_continued(lines: Lines, tasks: Tasks) -> None:
    """Raise UserError if a file that is continued holds labels of other preference examples."""
    last = lines.last()
    if last is not None and (lines.count > len(tasks) or last.get("id") != tasks[lines.count - 1]["id"]):
        raise UserError(f"{lines.path} has labels of other rows than {tasks.where(0)} and so on: use --overwrite")


def derive(config: Label, rows: Tasks | Lines) -> tuple[int | None, int | None]:
    """Write --best and --pairs from labelled rows; return the number of rows of each."""
    best = pairs = None
    replace = config.overwrite or config.resume
    if config.best:
        made = [row for each in rows for row in best_rows(each, config.top, config.at_least)]
        if not made:
            least = "" if config.at_least is None else f" of at least {config.at_least:g} (--at-least)"
            raise UserError(f"--best {config.best} would be empty: no response has a score{least}")
        best = write_rows(Path(config.best), made, replace)
    if config.pairs:
        found = (pair_row(each, config.pair == "random", config.margin, config.seed) for each in rows)
        made = [row for row in found if row is not None]
        if not made:
            least = f" by at least {config.margin:g} (--margin)" if config.margin else ""
            raise UserError(
                f"--pairs {config.pairs} would be empty: no two responses to a prompt differ in score{least}"
            )
        pairs = write_rows(Path(config.pairs), made, replace)
    return best, pairs


class _Labeller:
    """Labels blocks of preference examples by a service or a function that scores or compares."""

    def __init__(self, config: Label, env: Callable[..., Any] | None, opened: ExitStack) -> None:
        """`opened`: closes its services and its environment."""
        self.config = config
        self.name = config.with_ or getattr(env, "__qualname__", "function")
        self.scorer = ReplyScorer(config.labeller, config, choose_device(config.device), opened, env)
        self.services = self.scorer.services
        if config.comparisons is not None and not self.scorer.pairwise:
            raise UserError("--comparisons needs a pairwise judge: leave it out, or give the recipe of one with --with")

    def label(self, block: Sequence[Task], first: int) -> list[Row]:
        """Return the labelled rows of these preference examples. Raises UserError if none could be labelled."""
        self.services.begin(first)  # another block may repeat requests without an answer
        rows, reasons, valid = self._compared(block) if self.scorer.pairwise else self._scored(block)
        if reasons and not valid:
            raise UserError(
                f"none of rows {first + 1} to {first + len(block)} could be labelled, and they are not written: "
                f"{reasons[0]}; continue there with --resume"
            )
        return [{**row, "labeller": self.name} for row in rows]

    def _scored(self, block: Sequence[Task]) -> tuple[list[Row], list[str], int]:
        done = iter(self.scorer.score([(task, reply) for task in block for reply in _replies(task)]))
        rows, reasons, valid = [], [], 0
        for task in block:
            own = [next(done) for _ in task["responses"]]
            rows.append({**task, **scored_columns([(d.reward, d.rewards) for d in own])})
            reasons += [d.reward.reason for d in own if isinstance(d.reward, Invalid)]
            valid += sum(not isinstance(d.reward, Invalid) for d in own)
        return rows, reasons, valid

    def _compared(self, block: Sequence[Task]) -> tuple[list[Row], list[str], int]:
        """Return (rows with comparisons by a pairwise judge, reasons of invalid ones, number of valid ones)."""
        asked = [(task, task["responses"][i], task["responses"][j]) for task in block for i, j in self._pairs(task)]
        answers = iter(self.scorer.compare(asked))
        rows, reasons, valid = [], [], 0
        for task in block:
            row: Row = {**task, "comparisons": [], "ties": [], "invalid": []}
            for i, j in self._pairs(task):
                answer = next(answers)
                if isinstance(answer, Invalid):
                    row["invalid"].append([i, j, answer.reason])
                    reasons.append(answer.reason)
                    continue
                valid += 1
                value, margin = (answer["reward"], None) if isinstance(answer, dict) else (float(str(answer)), 0.0)
                margin = abs(2 * value - 1) if margin is None else margin
                if value == 0.5:
                    row["ties"].append([i, j])
                else:
                    row["comparisons"].append([*((i, j) if value > 0.5 else (j, i)), 1.0, margin])
            rows.append({name: v for name, v in row.items() if v or name not in ("ties", "invalid")})
        return rows, reasons, valid

    def _pairs(self, task: Task) -> list[tuple[int, int]]:
        """Return the pairs of responses to compare."""
        texts = task["responses"]
        pairs = [(i, j) for i, j in combinations(range(len(texts)), 2) if texts[i] != texts[j]]
        most = self.config.comparisons
        if most is None or len(pairs) <= most:
            return pairs
        return sorted(random.Random(seed_of(self.config.seed, "comparisons", task["id"])).sample(pairs, most))


def _replies(task: Task) -> list[Reply]:
    """Return the responses, with their stop reasons if the row has them, like rows of `posttrain sample`."""
    texts, known = task["responses"], [str(stop) for stop in StopReason]
    stops = [note.get("stop") for note in task.get("samples") or () if isinstance(note, dict)]
    if len(stops) != len(texts):
        return [Reply(text) for text in texts]
    return [Reply(text, StopReason(s) if s in known else StopReason.EOS) for text, s in zip(texts, stops, strict=True)]


def _notes(lines: Lines) -> Iterator[str]:
    """Yield notes for the reader of the labels."""
    invalid = flipped = 0
    reason = ""
    for row in lines:
        invalid += len(row.get("invalid") or ())
        flipped += len(row.get("flipped") or ())
        reason = reason or next((str(each[-1]) for each in row.get("invalid") or ()), "")
    if invalid:
        yield f"{invalid} labels are invalid and were left out; the first: {reason}"
    if flipped:
        yield f"{flipped} comparisons flipped (--flip)"


def _follows_from(
    config: Label, tasks: Tasks, labeller: _Labeller | None, env: Callable[..., Any] | None
) -> dict[str, Any]:
    found: dict[str, Any] = {"verb": "label", "items": digest_of(tasks)}
    found |= {name: getattr(config, name) for name in ("with_", "flip", "seed", "comparisons")}
    for service in labeller.services.named.values() if labeller is not None else ():
        found["labeller"] = service.identity
    for folder in config.labeller.reward_model:
        found["reward model"] = fingerprint.path_digest(resolve(folder))
    return {**found, "code": fingerprint.code_digest(env or config.env) if labeller is not None else None}
