"""The layout of a run's live display for a terminal of any size. Pure functions: no stream, no clock.

Decides the order in which lines are dropped if there is little room. The bar, the remaining time and the first figures
(reward, accuracy and entropy, if logged) are always kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from posttrain.core.messages import safe
from posttrain.runs.metrics_table import (
    BY_NAME,
    MEASURED,
    METRICS,
    OF_PARTS,
    SUITE,
    Metric,
    measured,
    metric_named,
    on_terminal,
)
from posttrain.runs.metrics_table import HELD_OUT as EVALUATED
from posttrain.runs.terminal.live_region import Line, cells, fitted

ESSENTIAL = 3  # number of figures shown at any size: reward, accuracy, entropy
GAP = "   "
HELD_OUT = "held-out"
MOST_HELD_OUT, MOST_PARTS = 4, 8  # held-out figures in a line of a step, and of parts: metrics.jsonl has all
EQUAL_GROUPS, ADVANTAGE = "groups/no_signal", "advantage/abs"
BARS = "▁▂▃▄▅▆▇█"
LONGEST_CURVE = 48
NARROWEST = 20  # columns needed for more than the steps and the remaining time


@dataclass(frozen=True)
class View:
    """The content of the display."""

    title: str
    number: int  # number of the last finished step
    steps: int
    left: str  # the remaining time, in words
    values: Mapping[str, float] = field(default_factory=dict)  # values of the last step, and the latest held-out ones
    history: Sequence[float] = ()  # of each step, the reward, or the loss if there is none


def compose(view: View, columns: int, rows: int) -> list[Line]:
    """Return the lines of the panel: fewer than `rows`, each narrower than `columns` cells, if there is any room."""
    width = max(1, columns - 1)
    if columns < NARROWEST or rows < 3:
        return [_progress(view, width)]
    held_out = {name: value for name, value in view.values.items() if name.startswith(MEASURED)}
    own = figures({name: value for name, value in view.values.items() if name not in held_out})
    essential, others = _rows(own[:ESSENTIAL], own[ESSENTIAL:], width)
    parts: list[tuple[int, list[Line]]] = [  # (rank, lines), in the order of drawing
        (5, [_rule(view.title, width)]),
        (0, [_progress(view, width)]),
        (1, essential),
        (2, others),
        (3, [_curve(view, width)] if view.history else []),
        (4, _held_out(held_out, width)),
    ]
    room, kept = max(1, rows - 1), dict.fromkeys(range(len(parts)), 0)
    for importance, lines in sorted(parts, key=lambda part: part[0]):
        kept[importance] = min(len(lines), room)
        room -= kept[importance]
    return [line for importance, lines in parts for line in lines[: kept[importance]]]


def figures(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (label, value) of the most informative figures."""
    shown = [
        (metric.terminal, _figure(values[metric.name], metric.form))
        for metric in METRICS
        if metric.terminal
        and metric.name in values
        and not metric.hidden(values)
        and not metric.name.startswith(MEASURED)
        if (values[metric.name] or not metric.silent) and not (metric.name == EQUAL_GROUPS and _of_one(values))
    ]
    held_out = _names_of_held_out(values)
    parts = [
        name for name in held_out if (metric := metric_named(name)) is not None and metric.panel in (OF_PARTS, SUITE)
    ]
    others = [name for name in held_out if name not in parts][:MOST_HELD_OUT]
    kept = [name for name in held_out if name in {*others, *parts[:MOST_PARTS]}]
    said = [f"{HELD_OUT} " if name.startswith(EVALUATED) else "" for name in kept]
    return shown + [(f"{x}{label}", value) for x, (label, value) in zip(said, _of_held_out(values, kept), strict=True)]


def _of_one(values: Mapping[str, float]) -> bool:
    """Return whether groups are equal because they have one rollout: these learn from another baseline."""
    return values[EQUAL_GROUPS] == 1 and values.get(ADVANTAGE, 0.0) > 0


def _names_of_held_out(values: Mapping[str, float]) -> list[str]:
    """Return the held-out figures to show: first those by which a run is judged, then those in the order of the table."""
    found = []
    for name in dict.fromkeys([*measured(values), *BY_NAME, *values]):
        metric = metric_named(name)
        evaluated = name.startswith(EVALUATED) or name in measured(values)  # of a suite, only the figure of each part
        if name not in values or not evaluated:
            continue
        if metric is not None and metric.hidden(values):
            continue
        if values[name] or not name.endswith("/invalid"):
            found.append(name)
    return found


def _of_held_out(values: Mapping[str, float], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (label without "held-out", value) pairs."""
    return [
        (on_terminal(name.removeprefix(EVALUATED)), _figure(values[name], (metric_named(name) or Metric).form))
        for name in names
    ]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the whole history in at most `width` bars, each a mean over equal numbers of steps."""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if abs(mean) < 1e300]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] if abs(mean) < 1e300 else " " for mean in means)


def _figure(value: float, form: str) -> str:
    return format(value, form if abs(value) < 1e7 else ".3g")


def _rows(first: list[tuple[str, str]], others: list[tuple[str, str]], width: int) -> tuple[list[Line], list[Line]]:
    """Return the rows of figures that contain some of the `first`, and all other rows."""
    needed = len(_flowed(first, width))
    lines = _flowed([*first, *others], width)
    return lines[:needed], lines[needed:]


def _flowed(shown: Sequence[tuple[str, str]], width: int) -> list[Line]:
    """Return rows of figures, as many per row as fit."""
    lines: list[list[tuple[str, str]]] = []
    used = 0
    for label, value in shown:
        size = cells(label) + 1 + cells(value)
        if not lines or used + len(GAP) + size > width:
            lines.append([])
            used = -len(GAP)
        gap = [(GAP, "")] if lines[-1] else []
        label = fitted(label, max(0, width - 1 - cells(value)))
        lines[-1] += [*gap, (f"{label} ", "dim"), (fitted(value, width), "bold")]
        used += len(GAP) + size
    return list(lines)


def _held_out(values: Mapping[str, float], width: int) -> list[Line]:
    """Return rows of the held-out figures, with a label at the left."""
    rows = _flowed(_of_held_out(values, _names_of_held_out(values)), width - len(HELD_OUT) - 1)
    return [[((HELD_OUT if i == 0 else " " * len(HELD_OUT)) + " ", "dim"), *row] for i, row in enumerate(rows)]


def _rule(title: str, width: int) -> Line:
    shown = fitted(safe(title).replace("\n", " "), max(1, width - 6))
    return [("── ", "dim"), (shown, ""), (" " + "─" * max(0, width - 4 - cells(shown)), "dim")]


def _progress(view: View, width: int) -> Line:
    place = f"step {view.number:>{len(str(view.steps))}}/{view.steps}"
    room = width - len(place) - len(view.left) - 4
    if room < 4:
        return [(fitted(f"{place}  {view.left}", width), "")]
    done = max(view.number > 0, room * min(view.number, view.steps) // max(1, view.steps))
    return [(f"{place}  ", ""), ("━" * done, "accent"), ("─" * (room - done), "dim"), (f"  {view.left}", "")]


def _curve(view: View, width: int) -> Line:
    name = "reward" if "reward" in view.values else "loss"
    return [(f"{name} ", "dim"), (sparkline(view.history, max(1, min(LONGEST_CURVE, width - len(name) - 1))), "accent")]
