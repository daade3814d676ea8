"""A run that `view` has open: its folder, the content of its files, its rollouts in memory, its tokenizer."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.apps.view.rollout_files import RolloutPart, parts_of, rows
from posttrain.apps.view.rollout_store import Store, expecting
from posttrain.apps.view.sql_text import by_name, named_part
from posttrain.apps.view.token_texts import TokenPieces
from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.runs.lock import in_use
from posttrain.runs.record.held_out_rewards import threshold
from posttrain.runs.record.rollout_index import open_index
from posttrain.runs.run_files import CHECKPOINTS, step_of
from posttrain.runs.run_reading import read_health, read_metrics, read_run, read_timing

PAUSE = 1.0  # seconds between two reads of a run in progress
FIRST = 2.0  # seconds to wait for the first page before reading texts, which few pages need
LAST = 5.0  # seconds to wait for reads in progress when closing


class OpenRun:
    """An open run. `begin` reads its rollouts in a thread, and keeps reading while the run is in progress."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.about = read_run(folder)
        self.store = Store(folder)
        self.pieces = TokenPieces(folder, self.about)
        self.store.vocabulary = self.pieces.vocabulary
        self.problem: str | None = None  # why its rollouts cannot be read
        self.ready = threading.Event()  # set once the files present at the start have been read
        self.shown = threading.Event()  # set once a page has had an answer
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    @property
    def objective(self) -> list[str]:
        said = self.about.get("objective")
        return [line for line in said if isinstance(line, str)] if isinstance(said, list) else []

    @property
    def on(self) -> bool:
        """Whether the run is in progress: run.json records no end, and its process has not been killed."""
        return "end" not in self.about and in_use(self.folder)

    def begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the reading thread: a thread that is cut off in another library's code takes the process with it."""
        self._ended.set()
        self.shown.set()
        self.store.closed = True
        if self._thread.is_alive():
            self._thread.join(LAST)

    def read(self) -> None:
        """Read everything that is on disk now."""
        self.store.success = self._success()
        self.store.follow()
        if self.store.success is None and self._inferred():
            self.store.settle()
        self.ready.set()

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                self.about = read_run(self.folder)
                before = self.store.version
                self.read()
                self.problem = self.store.problem
                if self.store.version != before:
                    self.shown.wait(FIRST)
                    self.store.read_texts()
                    self._index()
            except UserError as error:
                self.problem = str(error)
            except FileNotFoundError:  # a step that a resume has deleted: the next read notices
                pass
            except Exception as error:  # other faults of a file: the pages show them, and the next read tries again
                self.problem = f"{self.folder} cannot be read: {one_line(error)[:200]}"
            self.ready.set()
            self._ended.wait(PAUSE if self.on else 5 * PAUSE)

    def _index(self) -> None:
        """Complete the index of a run that has ended, so that the next `view` of it opens faster."""
        if not self.on:
            with contextlib.suppress(OSError):
                open_index(self.folder)

    @property
    def stamp(self) -> list[Any]:
        """A value that changes when there is something new to draw."""
        sizes = []
        for name in ("run.json", "metrics.jsonl", "health.jsonl"):
            with contextlib.suppress(OSError):
                sizes.append((self.folder / name).stat().st_size)
        return [self.store.version, self.on, *sizes]

    # -- its files -----------------------------------------------------------------------------------------------------

    def series(self) -> tuple[list[int], dict[str, list[float | None]]]:
        """Return the steps, and for each metric its value at each step or None."""
        rows: dict[int, dict[str, float | None]] = {}
        for line in [*read_metrics(self.folder), *read_timing(self.folder)]:
            rows.setdefault(line["step"], {}).update({n: v for n, v in line.items() if n != "step"})
        steps = sorted(rows)
        names = {name for row in rows.values() for name in row}
        return steps, {name: [rows[step].get(name) for step in steps] for name in sorted(names)}

    def check_condition(self, condition: str) -> None:
        """Raise UserError unless `condition` is valid over the run's rollouts. The rollouts need not have been read."""
        names = {name.partition("/")[2] for line in read_metrics(self.folder) for name in line if name[:7] == "reward/"}
        files = parts_of(self.folder)
        for part in {*list(files)[:1], *list(files)[-1:]}:
            with contextlib.suppress(UserError):
                table = rows(files[part], names=["parts"])
                names |= {one["name"] for parts in table["parts"].to_pylist() for one in parts or ()}
        none = expecting(sorted(names))
        store = Store(self.folder)
        try:
            store.meant(none, by_name(condition, none.parts, named_part))
        finally:
            store.close()

    def health(self) -> list[dict[str, Any]]:
        return read_health(self.folder)

    def checkpoints(self) -> list[int]:
        inside = self.folder / CHECKPOINTS
        names = [p.name for p in inside.iterdir()] if inside.is_dir() else []
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def _success(self) -> float | None:
        """Return the reward from which on a reply succeeds, if the run has one."""
        given = self.about["config"].get("success", self.about.get("success"))
        known = isinstance(given, int | float) and not isinstance(given, bool) and abs(given) < sys.float_info.max
        return float(given) if known else self.store.success

    def _inferred(self) -> bool:
        """Set the success threshold that reproduces the run's own accuracy metric; return whether one was found."""
        known = [(row["step"], row["accuracy"]) for row in read_metrics(self.folder) if row.get("accuracy") is not None]
        if known and all(accuracy == 0 for _, accuracy in known):  # no reply ever succeeded
            self.store.success = self.store.rows.limit + 2  # beyond the greatest reward
            return True
        rows = self.store.rows
        for step, accuracy in reversed(known[-50:]):
            part = rows.of_part(RolloutPart(step, False))
            rewards = rows.outcome[part][~rows.baseline[part]]
            limit = threshold(rewards[~np.isnan(rewards)].tolist(), accuracy)
            if limit is not None:
                self.store.success = limit
                return True
        return False


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest distinct ends of the folders' paths, of two parts or more."""
    resolved = [user_files.real(folder) for folder in folders]
    for count in range(2, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-count:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in resolved]
