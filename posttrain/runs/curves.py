"""Plots metrics over the steps of one run or several: those with `plotted` in the table of metrics.

A curve equal to an earlier one is left out, such as the accuracy where the reward is 1 or 0. For several runs under one
label, their mean is drawn with its 95% interval. Findings of the health check are marked on the axis of steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posttrain.core import user_files
from posttrain.core.intervals import student_interval
from posttrain.core.messages import inline
from posttrain.core.types import UserError
from posttrain.runs.metrics_table import BY_NAME, METRICS, REWARDS
from posttrain.runs.run_files import CURVES, Folder
from posttrain.runs.run_reading import read_health, read_metrics, read_timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PARTS = 6

WIDTH, HEIGHT = 4.2, 2.5  # inches, of a panel with its margins
LEFT, TOP, BOTTOM = 0.6, 0.3, 0.2  # inches, for the labels of an axis, for a legend, for the axis title

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, for the colour-blind
FOUND = "#aa3377"  # findings of the health check

Points = tuple[np.ndarray, np.ndarray]  # steps, values


@dataclass
class _LabelledRuns:
    """The runs under one label: for each metric the points of each run that has it, and the findings."""

    label: str
    series: dict[str, list[Points]] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)  # finding -> its first step


def curves(runs: Folder | Mapping[str, Folder | Sequence[Folder]], out: Folder | None = None) -> Path:
    """Plot the recorded metrics over the steps, one panel for each.

    `runs` is the folder of a run, or label -> folder for several in the same panels, or label -> folders, such as those
    of several seeds. Writes `out`, a PNG; by default curves.png in the folder of the run, the first of several.
    """
    folders = {name: _listed(given) for name, given in (runs if isinstance(runs, Mapping) else {"": runs}).items()}
    lines = [_read(label, own) for label, own in folders.items()]
    names = _panels(lines)
    if not names:
        told = ", ".join(str(folder) for own in folders.values() for folder in own)
        raise UserError(f"{told}: no metric was recorded yet, so nothing can be drawn")
    path = Path(out) if out is not None else Path(next(iter(folders.values()))[0]) / CURVES
    figure = _figure(lines, names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it draws a box
        figure.savefig(user_files.writable(path))
    return path


def _figure(lines: Sequence[_LabelledRuns], names: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    columns = 2 if len(names) == 4 else min(len(names), 3)
    rows = math.ceil(len(names) / columns)
    found = _findings(lines)
    above = TOP if len(lines) > 1 else 0.0
    below = BOTTOM + (0.2 if found else 0.0)
    width, height = WIDTH * columns, HEIGHT * rows + above + below
    figure = Figure((width, height), 150)
    # Fixed sizes: measuring them, matplotlib draws everything twice, which takes longer than many a short run.
    figure.subplots_adjust(
        LEFT / width, (below + 0.3) / height, 1 - 0.15 / width, 1 - (above + 0.25) / height,
        wspace=LEFT / (WIDTH - LEFT), hspace=0.28,
    )  # fmt: skip
    axes: Axes | None = None
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, place, sharex=axes)
        if name == REWARDS:
            _parts(axes, lines[0])
        else:
            for number, line in enumerate(lines):
                if name in line.series:
                    _curve(axes, line.series[name], COLOURS[number % len(COLOURS)], line.label)
        _mark(axes, found)
        _dress(axes, name, bottom=place + columns > len(names))
    if found:
        told = "health: " + ", ".join(f"{name} at step {step}" for name, step in sorted(found.items(), key=_second))
        figure.text(0.1 / width, 0.06 / height, told, fontsize=8, color=FOUND)
    if len(lines) > 1:
        drawn = {str(line.get_label()): line for panel in figure.axes for line in panel.get_legend_handles_labels()[0]}
        figure.legend(drawn.values(), drawn.keys(), loc="upper left", ncols=6, frameon=False, fontsize=9)
    return figure


# -- content -----------------------------------------------------------------------------------------------------------


def _listed(given: Folder | Sequence[Folder]) -> list[Folder]:
    return list(given) if isinstance(given, list | tuple) else [given]  # type: ignore[list-item]


def _read(label: str, folders: Sequence[Folder]) -> _LabelledRuns:
    line = _LabelledRuns(label)
    for folder in folders:
        for name, points in _series(folder).items():
            line.series.setdefault(name, []).append(points)
        for row in read_health(folder):
            line.found[row["name"]] = min(row["step"], line.found.get(row["name"], row["step"]))
    return line


def _series(folder: Folder) -> dict[str, Points]:
    """Return name -> (steps, values), with recorded finite values only."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(folder) + read_timing(folder):
        for name, value in row.items():
            if name != "step" and value is not None:
                points.setdefault(name, []).append((row["step"], value))
    return {name: (np.array(pairs)[:, 0], np.array(pairs)[:, 1]) for name, pairs in points.items()}


def _panels(lines: Sequence[_LabelledRuns]) -> list[str]:
    """Return the names to draw, in the order of the table."""
    there = {name for line in lines for name in line.series}
    drawn: list[str] = []
    for metric in METRICS:
        name = metric.name
        if not metric.plotted:
            continue
        if name == REWARDS:
            # with several runs, colours distinguish runs; a single part is nearly the reward
            if len(lines) == 1 and len(_names_of_parts(lines[0])) > 1:
                drawn.append(name)
        elif name in there and not metric.hidden(there):
            before = [
                shown for other in drawn for shown in (_names_of_parts(lines[0]) if other == REWARDS else [other])
            ]
            silent = metric.silent and not any(_moved(line, name) for line in lines)
            if not silent and not any(_same(lines, name, other) for other in before):
                drawn.append(name)
    return drawn


def _names_of_parts(line: _LabelledRuns) -> list[str]:
    parts = BY_NAME[REWARDS].pattern
    return sorted(name for name in line.series if name not in BY_NAME and parts.fullmatch(name))[:MOST_PARTS]


def _same(lines: Sequence[_LabelledRuns], name: str, other: str) -> bool:
    """Return whether two metrics have the same curves."""
    pairs = [(line.series.get(name, []), line.series.get(other, [])) for line in lines]
    return all(len(one) == len(two) and all(_equal(a, b) for a, b in zip(one, two, strict=True)) for one, two in pairs)


def _equal(one: Points, other: Points) -> bool:
    return np.array_equal(one[0], other[0]) and np.allclose(one[1], other[1], rtol=1e-9, atol=1e-12)


def _moved(line: _LabelledRuns, name: str) -> bool:
    return any(bool(np.any(values)) for _, values in line.series.get(name, []))


def _findings(lines: Sequence[_LabelledRuns]) -> dict[str, int]:
    """Return finding -> the first step at which any run has it."""
    found: dict[str, int] = {}
    for line in lines:
        for name, step in line.found.items():
            found[name] = min(step, found.get(name, step))
    return found


def _second(pair: tuple[str, int]) -> int:
    return pair[1]


# -- how ---------------------------------------------------------------------------------------------------------------


def _dress(axes: Axes, name: str, bottom: bool) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    metric = BY_NAME[name]
    axes.set_title(metric.panel if name == REWARDS else metric.label, loc="left", fontsize=10, color="#222222")
    axes.grid(linewidth=0.5, color="#e6e6e6")
    axes.tick_params(length=0, labelsize=8, labelcolor="#555555")
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color="#999999", linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if metric.unit == "tokens per second":
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_ylim(bottom=0)  # so that noise does not look like a trend
    axes.set_xlabel("step" if bottom else "", fontsize=9, color="#555555")


def _mark(axes: Axes, found: Mapping[str, int]) -> None:
    """Draw triangles on the axis of steps, at findings of the health check."""
    if found:
        where = axes.get_xaxis_transform()
        axes.plot(sorted(found.values()), [0.0] * len(found), linestyle="", marker="^", markersize=5, color=FOUND,
                  clip_on=False, transform=where, zorder=5)  # fmt: skip


def _parts(axes: Axes, line: _LabelledRuns) -> None:
    """Draw all parts of the reward into one panel."""
    for number, name in enumerate(_names_of_parts(line)):
        _curve(axes, line.series[name], COLOURS[number % len(COLOURS)], name.partition("/")[2])
    axes.legend(frameon=False, fontsize=8, loc="best", handlelength=1.2)


def _curve(axes: Axes, runs: Sequence[Points], colour: str, label: str) -> None:
    """Draw a run's points: few as they are; many as a running mean, with the raw values faintly behind it.

    For several runs: their mean over the steps that all have, with its interval.
    """
    label = _as_written(label)
    if len(runs) > 1:
        steps = sorted(set.intersection(*(set(own.tolist()) for own, _ in runs)))
        smooth = [_smoothed(values) for _, values in runs]
        picked = np.array([values[np.isin(own, steps)] for (own, _), values in zip(runs, smooth, strict=True)])
        bounds = np.array([tuple(student_interval(column)) for column in picked.T]).reshape(-1, 2)
        if picked.min() >= 0:
            bounds = bounds.clip(min=0.0)  # a norm or a length is never negative
        axes.fill_between(steps, bounds[:, 0], bounds[:, 1], color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, picked.mean(0), color=colour, linewidth=1.6, label=label)
        return
    ((where, values),) = runs
    if len(values) < 30:
        axes.plot(where, values, color=colour, linewidth=1.5, marker="o", markersize=2.5, label=label)
        return
    axes.plot(where, values, color=colour, linewidth=0.7, alpha=0.25)
    axes.plot(where, _smoothed(values), color=colour, linewidth=1.6, label=label)


def _as_written(label: str) -> str:
    """Return a label for matplotlib, which would read formulas in it, and leave it out for an underscore in front."""
    text = inline(label).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return the running mean of many values; few values unchanged."""
    if len(values) < 30:
        return values
    window = np.ones(2 * (len(values) // 50) + 3)  # about a twenty-fifth of the run, centred: it does not lag
    found: np.ndarray = np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
    return found
