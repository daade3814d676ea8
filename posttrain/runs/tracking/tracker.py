"""The interface of a tracker, and the run as it sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["finished", "stopped", "interrupted", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it."""

    name: str  # that of its folder
    group: str  # that of the folder above
    project: str
    verb: str
    folder: str
    config: Mapping[str, Any]  # all options as resolved, and under "run" the rest of run.json
    id: str | None = None  # of the tracker's own run, which goes on; None: a new one
    address: str = ""  # behind its name in --track


class Tracker:
    """Base class of trackers. Methods that are not overridden do nothing.

    All are called in a process of its own, one after the other. An exception is shown once and counted; the run goes on.
    """

    project_variable = ""  # environment variable of its library that names the project

    def start(self, run: TrackedRun) -> Mapping[str, str] | None:
        """Begin, or go on where `run.id` is set. Return "id", by which `--resume` goes on, and "url", if there are any."""
        return {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite metrics and timings of a step: once a step, in order."""

    def finding(self, step: int, name: str, message: str) -> None:
        """Raise an alert: a finding of the health check, or a hook that failed."""

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a sample of the rollouts of an evaluation or of a saved step: "prompt", "reply" and "reward" of each."""

    def finish(self, status: Status) -> None:
        """End. Return once everything is delivered."""
