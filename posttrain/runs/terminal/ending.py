"""Figures at the end of a run: held-out ones before and after, and the share of rollouts that taught nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.messages import several
from posttrain.runs.metric_history import equal_groups
from posttrain.runs.metrics_table import LEARNING, MEASURED, METRICS, measured
from posttrain.runs.terminal.panel import figures

LOST = 0.5  # share of rollouts in groups with equal rewards from which the end mentions it: half of the work is lost


def outcome(rows: Sequence[Mapping[str, Any]], tasks: int = 0) -> list[str]:
    """Return figures as text, the held-out ones first: "held-out accuracy 0.154 -> 0.385 (13 tasks)", "reward 0.125".

    `rows`: of metrics.jsonl; `tasks`: number of the held-out tasks, 0 if unknown. Training figures are of the last step.
    """
    last = rows[-1] if rows else {}
    own = [m.name for m in METRICS if m.group == LEARNING and not m.hidden(last) and last.get(m.name) is not None]
    shown, seen = list[str](), dict[str, list[float]]()
    for row in rows:
        for name in measured(row):
            if row.get(name) is not None:
                seen.setdefault(name, []).append(row[name])
    for name, values in seen.items():
        [(label, after)] = figures({name: values[-1]})
        [(_, before)] = figures({name: values[0]})
        shown.append(f"{label} {before} -> {after}" if len(values) > 1 else f"{label} {after}")
    if shown and tasks:
        shown[0] += f" ({several(tasks, 'task')})"
    for name in (name for name in own if not name.startswith(MEASURED)):
        shown += [f"{label} {value}" for label, value in figures({name: last[name]})] or [f"{name} {last[name]:.4g}"]
    return shown


def lost_signal(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line if most groups of the run had equal rewards, else []."""
    equal = equal_groups(rows, LOST)
    return [f"signal      {equal}"] if equal is not None else []
