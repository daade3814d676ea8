"""Figures with their spread, tables on the screen and in Markdown, goals beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Figure:
    """One value for each round."""

    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> Figure:
        return Figure(tuple(values))

    @property
    def median(self) -> float:
        return median(self.values)

    def over(self, other: Figure) -> Figure:
        """The ratio within each round, since drift moves both sides of it; of the medians if they had other rounds."""
        if len(self.values) != len(other.values):
            return Figure((self.median / other.median,))
        return Figure(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def __str__(self) -> str:
        if len(self.values) == 1:
            return number(self.median)
        return f"{number(self.median)} [{number(min(self.values))}-{number(max(self.values))}]"


def number(value: float) -> str:
    """Three digits that matter; all of them from a thousand on."""
    if not math.isfinite(value) or value == 0:
        return str(value)
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


@dataclass(frozen=True)
class Goal:
    """What a figure is to reach."""

    bound: float
    least: bool = True  # at least, or at most
    unit: str = "x"

    def judge(self, value: float) -> str:
        met = value >= self.bound if self.least else value <= self.bound
        sign = ">=" if self.least else "<="
        return f"{sign} {self.bound:g}{self.unit}: {'met' if met else 'NOT met'}"


@dataclass
class Table:
    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append([str(cell) for cell in cells])

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _row(self.columns), _row(["---"] * len(self.columns)), *map(_row, self.rows)]
        return "\n".join([*lines, *(["", *(f"- {note}" for note in self.notes)] if self.notes else []), ""])

    def show(self, display: Callable[[object], None]) -> None:
        from rich import box
        from rich.table import Table as Rich

        table = Rich(title=self.title, box=box.SIMPLE, title_justify="left")
        for place, name in enumerate(self.columns):
            table.add_column(name, justify="left" if place == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        display(table)
        for note in self.notes:
            display(f"  {note}")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
