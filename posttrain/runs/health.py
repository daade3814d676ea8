"""The health check of a run: faults, named when they happen, from the metrics of its steps and nothing else.

Metrics follow from configuration and seed alone, and so do the findings: a resumed run that replays its metrics finds
the same. `metric_history` holds the input of the checks, `health_checks` the faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.runs.health_checks import CHECKS, FATAL, GOOD
from posttrain.runs.metric_history import HealthLimits, History


@dataclass(frozen=True)
class HealthFinding:
    """A fault, or a goal that is reached."""

    step: int
    name: str  # a key of CHECKS
    message: str  # the observation; the usual causes and remedies: two lines

    @property
    def fatal(self) -> bool:
        """Whether the run ends whatever --health is set to: nothing more will be learned."""
        return self.name in FATAL

    @property
    def good(self) -> bool:
        return self.name in GOOD


class Health:
    """Looks at each step of a run, in order, reports each fault once, and again after an absence."""

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self.history = History(limits or HealthLimits())
        self.findings: list[HealthFinding] = []  # so far
        self._seen: dict[str, int] = {}  # finding -> the last step at which it held

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[HealthFinding]:
        """Return the new findings after this step, with metrics as in metrics.jsonl. Missing metrics are not judged."""
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
        """Whether every update of the run so far was skipped."""
        series = self.history.of("skipped", 1)
        return series is not None and min(series.values) == 1

    @classmethod
    def replay(cls, rows: Iterable[Mapping[str, Any]], limits: HealthLimits | None = None) -> Health:
        """Return the state after these steps, in order: the rows of metrics.jsonl, each with its "step", of a resumed
        run."""
        health = cls(limits)
        for row in rows:
            health.look(int(row["step"]), row)
        return health
