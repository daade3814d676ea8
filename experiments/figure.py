"""How findings are drawn: panels of lines with bands, or of bars, in the colours of the run's curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posttrain.runs.curves import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTERS_PER_INCH = 13  # of the legend
MOST_BANDS = 4  # in a panel: more would hide the lines, and the table has the intervals


@dataclass(frozen=True)
class Series:
    """One line of a plot, or its bars; the label "" is in no legend.

    `low` and `high`, if given, are the ends of a band around it.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False  # what was published or is expected, not measured


@dataclass(frozen=True)
class Panel:
    """One plot of a figure. `names`: labels at x = 0, 1, ... where x is no number; bars are then drawn."""

    title: str
    x: str
    series: Sequence[Series]
    names: Sequence[str] = ()
    log_x: bool = False
    log_y: bool = False


def draw(panels: Sequence[Panel], out: Path, title: str) -> Path:
    """Write the panels to the PNG `out`, at most three in a row; a label has the same colour in all of them."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    labels = list(dict.fromkeys(s.label for p in panels for s in p.series if s.label))
    colours = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (max(6.5, 4.4 * columns), 3.1 * rows + 0.9)
    figure = Figure(size, 150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color="#222222")
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        if panel.names:
            _bars(axes, panel, colours)
        else:
            banded = sum(bool(line.low) for line in panel.series) <= MOST_BANDS
            for number, line in enumerate(panel.series):
                _line(axes, line, colours.get(line.label, COLOURS[0]), number, banded)
        _dress(axes, panel)
    lines = {str(h.get_label()): h for axes in figure.axes for h in axes.get_legend_handles_labels()[0]}
    if len(lines) > 1:
        fit = int(size[0] * LETTERS_PER_INCH / (max(map(len, lines)) + 8))
        figure.legend(
            lines.values(), lines.keys(), loc="outside lower left", ncols=max(1, fit), frameon=False, fontsize=9
        )
    figure.savefig(out)
    return out


def _line(axes: Axes, line: Series, colour: str, number: int, banded: bool) -> None:
    few = len(line.x) < 30
    style = {"linestyle": "--", "linewidth": 1.2} if line.dashed else {"linewidth": 1.6}
    if few and not line.dashed:
        style |= {"marker": "osD^v"[number % 5], "markersize": 4}
    axes.plot(line.x, line.y, color=colour, label=line.label, **style)
    if banded and line.low:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)


def _bars(axes: Axes, panel: Panel, colours: dict[str, str]) -> None:
    width = 0.8 / len(panel.series)
    for number, line in enumerate(panel.series):
        at = np.asarray(line.x) + (number - (len(panel.series) - 1) / 2) * width
        height = np.asarray(line.y)
        axes.bar(
            at,
            height,
            width * 0.9,
            color=colours.get(line.label, COLOURS[0]),
            label=line.label,
            alpha=0.4 if line.dashed else 1,
        )
        if line.low:
            spread = np.abs(np.stack([height - np.asarray(line.low), np.asarray(line.high) - height]))
            axes.errorbar(at, height, spread, fmt="none", ecolor="#444444", elinewidth=1, capsize=2.5)
    axes.set_xticks(range(len(panel.names)), panel.names)
    if any(len(name) > 8 for name in panel.names):
        axes.tick_params(axis="x", labelrotation=30)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")


def _dress(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10, color="#222222")
    axes.set_xlabel(panel.x, fontsize=9, color="#555555")
    axes.grid(linewidth=0.5, color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8, labelcolor="#555555")
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color="#999999", linewidth=0.6)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
