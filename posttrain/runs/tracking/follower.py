"""The process of a tracker: it follows the record of a run and passes it to the tracker.

The record is the queue between run and tracker. So a slow tracker loses nothing, and one that hangs does not delay the
run. The last step passed on is stored beside the record: after a resume, the tracker continues from there.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.known_trackers import TRACKERS, tracker_class
from posttrain.core import user_files
from posttrain.core.json_text import json_line
from posttrain.runs.run_files import EVALS, HEALTH, METRICS, ROLLOUTS, TIMING, TRACKING, kept_file
from posttrain.runs.tracking.tracker import TrackedRun, Tracker
from posttrain.system.user_code import describe_error

LOOK_SECONDS = 0.5  # between two checks of the record
SAMPLE = 8  # rollouts of a step that are passed on


def label(spec: str) -> str:
    """Return the name for a tracker's files."""
    known = spec.partition(":")[0]
    return known if known in TRACKERS else re.sub(r"\W+", "-", spec)


def state_file(folder: Path, spec: str) -> Path:
    """Return the file with a tracker's run id and its last step."""
    return folder / TRACKING / f"{label(spec)}.json"


def read_state(folder: Path, spec: str) -> dict[str, Any]:
    """Return the stored state of a tracker: "id", "url", "step" (the last one), "findings" (their number); {} without
    one.
    """
    try:
        found = json.loads(user_files.text(state_file(folder, spec)))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Follower:
    """Passes the record of a run to a tracker."""

    def __init__(self, tracker: Tracker, spec: str, folder: Path, save_every: int, say: Callable[[str], None]) -> None:
        self.tracker, self.spec, self.folder, self.save_every, self.say = tracker, spec, folder, save_every, say
        self.state = {"step": -1, "findings": 0, **read_state(folder, spec)}
        self.failed: Counter[str] = Counter()
        self._metrics, self._timing, self._health = (_Tail(folder / name) for name in (METRICS, TIMING, HEALTH))
        self._waiting: list[dict[str, Any]] = []  # steps whose timing is not recorded yet
        self._timed: dict[int, dict[str, Any]] = {}
        self._sampled: int | None = None  # step whose rollouts are passed on when they are recorded
        self._found = 0  # number of findings read

    def start(self, run: TrackedRun) -> None:
        """Start the tracker, and store the id of its run."""
        told = self.tracker.start(run) or {}
        if not isinstance(told, Mapping):
            raise TypeError(f"start returned {told!r:.60}: return a dict with id and url, or nothing")
        self.state |= {name: value for name, value in told.items() if value}
        self._store()
        if self.state.get("url"):
            self.say(f"{self.spec}: {self.state['url']}")

    def look(self, last: bool = False) -> None:
        """Pass on everything recorded since the last call. `last`: nothing will follow."""
        self._timed |= {row["step"]: row for row in self._timing.rows()}
        self._waiting += self._metrics.rows()
        while self._waiting and (last or self._waiting[0]["step"] in {0, *self._timed}):
            row = self._waiting.pop(0)
            step = row["step"]
            values = {**row, **self._timed.pop(step, {})}
            if step > self.state["step"]:
                self._sample(False)
                numbers = {name: value for name, value in values.items() if name != "step" and value is not None}
                self._call("log", step, numbers)
                self.state["step"] = self._sampled = step
        for row in self._health.rows():
            self._found += 1
            if self._found > self.state["findings"]:
                self._call("finding", row["step"], row["name"], row["message"])
                self.state["findings"] = self._found
        if last:
            self._sample(True)
        self._store()

    def finish(self, status: str) -> None:
        """Pass on all remaining records, and end the tracker."""
        self.look(last=True)
        self._call("finish", status)
        if self.failed:
            counts = ", ".join(f"{count} of {name}" for name, count in self.failed.items())
            self.say(
                f"{self.spec}: calls that failed: {counts}; see {state_file(self.folder, self.spec).with_suffix('.log')}"
            )

    def _sample(self, last: bool) -> None:
        """Pass on rollouts of the previous step, whose table is written by now."""
        from posttrain.runs.record.rollout_reading import read_table

        step, self._sampled = self._sampled, None
        if step is None:
            return
        held_out = kept_file(self.folder, EVALS, step) is not None
        due = held_out or (step and (last or step % self.save_every == 0))
        if not due or kept_file(self.folder, EVALS if held_out else ROLLOUTS, step) is None:
            return
        table = read_table(self.folder, step, ("prompt", "text", "reward"), held_out).slice(0, SAMPLE)
        rows = [{"prompt": r["prompt"], "reply": r["text"], "reward": r["reward"]} for r in table.to_pylist()]
        if rows:
            self._call("rollouts", step, rows)

    def _call(self, name: str, *args: Any) -> None:
        try:
            getattr(self.tracker, name)(*args)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self.failed[name] += 1
            if self.failed[name] == 1:
                self.say(f"{self.spec}: {name} failed, and the run continues: {describe_error(error, None)}")

    def _store(self) -> None:
        path = state_file(self.folder, self.spec)
        unfinished = path.with_name(path.name + ".tmp")
        with user_files.opened(unfinished, "wb") as file:
            file.write(json_line(self.state))
        os.replace(unfinished, path)


class _Tail:
    """Reads the lines that are appended to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        try:
            with user_files.opened(self._path) as file:
                file.seek(self._place)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._place += len(whole)
        yield from map(json.loads, whole.splitlines())


def serve(descriptor: int) -> None:
    """Run the process. The first line received defines the run to track, the second how it ended."""
    end = socket.socket(fileno=descriptor)
    lines = end.makefile("rb", buffering=0)  # else the second line may be in a buffer, invisible to select
    told = json.loads(lines.readline())
    spec, folder = told["tracker"], Path(told["run"]["folder"])

    def say(text: str) -> None:
        end.sendall(json_line(text))

    try:
        kind = tracker_class(spec)
        tracker = kind()
        follower = Follower(tracker, spec, folder, told["save_every"], say)
        project = told["run"]["project"] or os.environ.get(getattr(kind, "project_variable", "")) or "posttrain"
        follower.start(TrackedRun(**{**told["run"], "project": project, "id": follower.state.get("id")}))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return say(f"{spec} could not start, and the run continues without it: {describe_error(error, None)}")
    while not select.select([end], [], [], LOOK_SECONDS)[0]:
        follower.look()
    if status := lines.readline():
        follower.finish(json.loads(status))
