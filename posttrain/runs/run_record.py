"""Writes the files of a run: see `posttrain.runs.run_files`.

It decides when files are written and when they are safe on disk; the content of tables is defined in
`posttrain.runs.record`. It never reads a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from posttrain.config.verbs import sampling
from posttrain.core import user_files
from posttrain.core.json_text import json_document, json_line, number, plain
from posttrain.core.rollouts import Outcome
from posttrain.core.types import UserError
from posttrain.runs.events import Events
from posttrain.runs.jsonl import Row
from posttrain.runs.provenance import circumstances, now
from posttrain.runs.record.rollout_index import RolloutIndex
from posttrain.runs.record.rollout_tables import rollouts_table, seconds_table
from posttrain.runs.record.table_writer import write_table
from posttrain.runs.run_files import (
    EVALS,
    HEALTH,
    METRICS,
    ROLLOUTS,
    RUN,
    SECONDS,
    TENSORBOARD,
    TIMING,
    Folder,
    holds_run,
    naming,
    replace,
    step_of,
    sync,
    table_file,
)
from posttrain.runs.run_reading import read_run, read_steps
from posttrain.system.worker_thread import WorkerThread


class RunRecord:
    """The record of one run, open for writing by a single process, which has the folder's lock."""

    def __init__(self, folder: Path, run: Row, step: int) -> None:
        """Use `create` or `resume`. `run`: content of run.json; `step`: the last one that is kept, -1 in a new run."""
        self.folder = folder
        self._run = run
        self._metrics = _Journal(folder / METRICS, step)
        self._timing = _Journal(folder / TIMING, step)
        self._unsynced: list[Path] = []  # files that may not be on disk yet
        self._events: Events | None = None
        self._kept = step
        self._index = RolloutIndex(folder)
        self._beside: WorkerThread | None = None  # writes tables during training
        self._writing: Future[list[Path]] | None = None

    @classmethod
    def create(cls, folder: Folder, config: Mapping[str, Any], command: str, extra: Mapping[str, Any]) -> RunRecord:
        """Begin a run in `folder`, which is new or holds no run (otherwise UserError).

        `command` is the verb, such as "rl"; `config` all settings as resolved, with "seed"; `extra` further entries of
        run.json, such as {"objective": "the formula"}.
        """
        path = Path(folder)
        if holds_run(path):
            raise UserError(f"{path} already holds a run: pass --resume to continue it, or another --out")
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: pass a folder as --out")
        run = {"verb": command, "start": now(), **circumstances(), "seed": config.get("seed"), "config": config}
        assert not run.keys() & extra.keys(), f"extra repeats {sorted(run.keys() & extra.keys())}"
        path.mkdir(parents=True, exist_ok=True)
        run = plain({**run, **extra})
        replace(path / RUN, json_document(run))
        return cls(path, run, -1)

    @classmethod
    def resume(
        cls,
        folder: Folder,
        step: int,
        config: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        noted: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        """Continue a run from its checkpoint of `step`: records of later steps are deleted.

        `config`: all settings from now on, if some have changed; `extra` replaces that of `create`; `noted`: entries of
        run.json about this resume.
        """
        path = Path(folder)
        run = read_run(path)
        again = {"step": step, "start": now(), **circumstances(), **(noted or {})}
        kept = {name: value for name, value in run.items() if name not in ("end", "final", "resumes")}
        kept |= {**(extra or {}), "config": run["config"] if config is None else config}
        run = plain({**kept, "resumes": [*run.get("resumes", []), again]})
        replace(path / RUN, json_document(run))
        for folder in (ROLLOUTS, EVALS, SECONDS):
            unfinished = [p for p in path.glob(f"{folder}/*.tmp") if not p.is_dir()]
            later = [p for p in path.glob(f"{folder}/step-*") if (step_of(p.stem) or 0) > step and p.is_file()]
            for file in (*later, *unfinished):
                file.unlink()
        RolloutIndex(path).forget(step)
        return cls(path, run, step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl, once per step. Values that depend on the clock belong in `timing`."""
        self._metrics.append(step, values)
        self._draw(step, values)

    def timing(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line of timing.jsonl, once per step."""
        self._timing.append(step, values)
        self._draw(step, values)

    def health(self, findings: Iterable[tuple[int, str, str]], anew: bool = False) -> None:
        """Append findings (step, name, message) to health.jsonl. `anew`: replace its content."""
        path = self.folder / HEALTH
        listed = list(findings)
        content = b"".join(json_line({"step": s, "name": name, "message": told}) for s, name, told in listed)
        if anew:
            if content or path.exists():
                replace(path, content)
        elif content:
            with user_files.opened(path, "ab") as file:
                file.write(content)
            self._unsynced.append(path)
            for step, name, told in listed:
                self._opened_events().text(step, f"findings/{name}", told)

    def rollouts(self, step: int, outcomes: Sequence[Outcome], kind: str = "rl") -> None:
        """Write the outcomes of a step's rollouts, and the seconds of their turns in a second file.

        Both files appear completely or not at all, the seconds first, so that a reader of the rollouts finds them. A
        thread writes them in parallel; the next call, `flush` or `close` raises its error.
        """
        self._write(step, ROLLOUTS, outcomes, kind)

    def evaluated(self, step: int, outcomes: Sequence[Outcome]) -> None:
        """Write the rollouts of the held-out tasks after a step, in the same way."""
        self._write(step, EVALS, outcomes, "eval")

    def _write(self, step: int, where: str, outcomes: Sequence[Outcome], kind: str) -> None:
        path, times = table_file(self.folder, where, step), table_file(self.folder, SECONDS, step)
        timed = where == ROLLOUTS and kind in sampling() and any(o.rollout.seconds or o.rollout.turns for o in outcomes)

        def write() -> list[Path]:
            for file in (path, times) if timed else (path,):
                file.parent.mkdir(exist_ok=True)
            if timed:
                write_table(times, seconds_table(outcomes))
            table = rollouts_table(step, outcomes, kind)
            write_table(path, table)
            self._index.written(path, table, step, where == EVALS)
            return [times, path] if timed else [path]

        self._settle()
        self._beside = self._beside or WorkerThread("recording")
        self._writing = self._beside.call(write)

    def _settle(self) -> None:
        """Wait until all tables are written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._unsynced += writing.result()

    def flush(self) -> None:
        """Wait until everything written so far survives a power failure. Call it before saving a checkpoint."""
        self._settle()
        self._metrics.sync()
        self._timing.sync()
        if self._events:
            self._events.flush()
        for path in (*self._unsynced, *{path.parent for path in self._unsynced}, self.folder):
            sync(path)
        self._unsynced.clear()

    def close(self, final: Mapping[str, Any]) -> None:
        """Write the end of the run and its final figures into run.json."""
        self.flush()
        if self._beside:
            self._beside.close(0)
        self._index.close()
        self._metrics.close()
        self._timing.close()
        if self._events:
            self._events.close()
        replace(self.folder / RUN, json_document({**self._run, "end": now(), "final": final}))

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        """Pass values to TensorBoard."""
        self._opened_events().add(step, values)

    def _opened_events(self) -> Events:
        """Return TensorBoard's file, which hides an earlier attempt's values of the steps after the resume."""
        if self._events is None:
            # A suffix, because names contain only seconds, and two attempts may begin within one.
            suffix = f".{len(self._run.get('resumes', []))}"
            self._events = Events(self.folder / TENSORBOARD, self._kept + 1, suffix)
            options = json_document(self._run["config"]).decode()
            self._events.text(self._kept + 1, "configuration", f"```json\n{options}```")
        return self._events


class Unwritten(RunRecord):
    """The record in a process that writes nothing, because another process of the run does."""

    def __init__(self) -> None:
        pass

    def _write_nothing(self, *told: Any, **more: Any) -> None:
        pass

    metrics = timing = health = rollouts = evaluated = flush = close = _write_nothing


class _Journal:
    """A file with one JSON line per step, in order. Opening it removes the lines after step `last`."""

    def __init__(self, path: Path, last: int) -> None:
        self._last, size = -1, 0
        for row, end in read_steps(path, last) if last >= 0 else ():
            self._last, size = row["step"], end
        self._path, self._file = path, user_files.opened(path, "ab")
        self._file.truncate(size)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        assert step > self._last, f"a line for step {step} after step {self._last}: one line a step, in order"
        assert "step" not in values
        with naming(self._path):
            self._file.write(json_line({"step": step, **{name: number(values[name]) for name in sorted(values)}}))
            self._file.flush()
        self._last = step

    def sync(self) -> None:
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
