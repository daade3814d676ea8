"""The health check of a run: faults, reported when they happen, computed from the metrics of its steps alone.

Metrics depend only on configuration and seed, and so do the findings: a resumed run that replays its metrics finds the
same. `metric_history` holds the input of the checks, `health_checks` the faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.runs.health_checks import CHECKS, FATAL, GOOD
from posttrain.runs.metric_history import HealthLimits, History


@dataclass(frozen=True)
class HealthFinding:
    """A fault, or a goal that was reached."""

    step: int
    name: str  # a key of CHECKS
    message: str  # the observation; the usual causes and remedies: two lines

    @property
    def fatal(self) -> bool:
        """Whether the run ends for any setting of --health: it would learn nothing more."""
        return self.name in FATAL

    @property
    def good(self) -> bool:
        return self.name in GOOD


class Health:
    """Checks each step of a run, in order. It reports a fault once, and again after it was absent."""

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self.history = History(limits or HealthLimits())
        self.findings: list[HealthFinding] = []  # all so far
        self._seen: dict[str, int] = {}  # finding -> last step with it

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[HealthFinding]:
        """Return the new findings after this step. `metrics`: those of metrics.jsonl; missing ones are not checked."""
        self.history.add(step, metrics)
        found = []
        for name, check in CHECKS.items():
            message = check(self.history)
            if message is None:
                continue
            if name not in self._seen or step - self._seen[name] > self.history.limits.again:
                found.append(HealthFinding(step, name, message))
            self._seen[name] = step
        self.findings += found
        return found

    @property
    def motionless(self) -> bool:
        """Return whether every update so far was skipped."""
        series = self.history.of("skipped", 1)
        return series is not None and min(series.values) == 1

    @classmethod
    def replay(cls, rows: Iterable[Mapping[str, Any]], limits: HealthLimits | None = None) -> Health:
        """Return the state after the rows of metrics.jsonl of a resumed run, in order, each with its "step"."""
        health = cls(limits)
        for row in rows:
            health.look(int(row["step"]), row)
        return health
