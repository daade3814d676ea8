"""The interface of a tracker, and the description of a run that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["finished", "stopped", "interrupted", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """Describes a run for a tracker."""

    name: str  # name of its folder
    group: str  # name of the parent folder
    project: str
    verb: str
    folder: str
    config: Mapping[str, Any]  # all options as resolved, and the other entries of run.json under "run"
    id: str | None = None  # id of the tracker's own run, to be continued; None: begin a new one
    address: str = ""  # the text after the tracker's name in --track


class Tracker:
    """Base class of trackers. Methods that are not overridden do nothing.

    All are called in the tracker's own process, one after the other. An exception is shown once and counted; the run
    continues.
    """

    project_variable = ""  # environment variable of the library that names the project

    def start(self, run: TrackedRun) -> Mapping[str, str] | None:
        """Begin, or continue `run.id` if it is set. Return "id", with which `--resume` continues, and "url", if they
        exist.
        """
        return {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite metrics and timings of a step. Called once per step, in order."""

    def finding(self, step: int, name: str, message: str) -> None:
        """Raise an alert for a finding of the health check, or for a hook that failed."""

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log some rollouts of an evaluation or of a saved step: "prompt", "reply" and "reward" of each."""

    def finish(self, status: Status) -> None:
        """End the tracking. Return when everything is delivered."""
