"""The display of an active run: a small live panel on a terminal, plain lines elsewhere.

It decides how often a line is printed, and which events are printed at once. No failure of the stream ends the run.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from posttrain.core.messages import safe
from posttrain.core.progress import watch
from posttrain.runs.metrics_table import MEASURED
from posttrain.runs.terminal.live_region import Line, Region, size
from posttrain.runs.terminal.notices import show
from posttrain.runs.terminal.output import Output, fancy, wrapped
from posttrain.runs.terminal.panel import View, compose, figures

SECONDS_BETWEEN_LINES = 2.0
READ, LEARNED = "tokens_per_second/read", "tokens_per_second/learned"  # a line has the second, or the first alone


class Display:
    """The progress display of one run. With `quiet` it shows nothing."""

    def __init__(
        self, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet = quiet
        self._stream = Output(stream or sys.stdout)
        self._clock = clock
        self._region: Region | None = None
        self._lock = threading.Lock()  # `note` may be called from another thread
        self._title, self._steps = "", 0
        self._began = self._stepped = self._printed = 0.0  # times, in seconds of the clock
        self._first = self._number = 0
        self._values: dict[str, float] = {}  # values of the last step, and the latest held-out ones
        self._history: list[float] = []  # the reward, or the loss if there is none
        self._waiting: str | None = None  # the last line while it has not been printed

    def start(self, title: str, steps: int, lines: Sequence[str], done: int = 0) -> None:
        """Begin the display. `title`: the run; `steps`: number of its last step; `lines`: description, printed once.

        Messages that were held back (`notices`) follow at the end, where users see them.

        `done`: number of finished steps of a resumed run.
        """
        self._title, self._steps, self._number = title, steps, done
        self._began = self._clock()
        on_terminal = fancy(self._stream)
        if self._quiet or on_terminal:  # elsewhere lines about a long first step may follow
            watch(None)
        if self._quiet:
            show()
            return
        self._print("\n".join([title, *(f"  {line}" for line in lines)]))
        show()
        if on_terminal:
            self._region = Region(self._stream, self._panel)
            self._region.start()

    def before(self, held_out: Mapping[str, float]) -> None:
        """Show the figures of the evaluation before the first step."""
        self._values |= held_out
        if shown := figures(held_out):
            self.note("  ".join(["before training", *(f"{label} {value}" for label, value in shown)]))

    def step(self, number: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Show a finished step. The first number of a resumed run is above 1."""
        if not self._first:
            self._first = number
            watch(None)
        self._number, self._stepped = number, self._clock()
        held_out = {name: value for name, value in self._values.items() if name.startswith(MEASURED)}
        self._values = {**held_out, **metrics, **timing}
        if (value := metrics.get("reward", metrics.get("loss"))) is not None:
            self._history.append(value)
        if self._quiet or self._region:
            return
        with self._lock:
            self._waiting = self._plain({**metrics, **timing})
            due = self._stepped - self._printed >= SECONDS_BETWEEN_LINES
            evaluated = any(name.startswith(MEASURED) for name in metrics)
            if due or evaluated or number in (self._first, self._steps):
                self._print_waiting()

    def note(self, text: str) -> None:
        """Print permanent lines, such as findings of the health check, wrapped between words."""
        if self._region:
            self._region.print(self._fitting(text))
        elif not self._quiet:
            with self._lock:
                self._print_waiting()
                self._print(text)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._print_waiting()
        if self._region:
            self._region.stop()
            self._region = None

    def _fitting(self, text: str) -> str:
        """Return text whose lines are wrapped between words to the terminal's columns, if there is a terminal."""
        width = size(self._stream)[0] - 1 if self._stream.isatty() else 0
        return "\n".join(wrapped(line, width) for line in safe(text).split("\n"))

    def _print(self, text: str) -> None:
        self._stream.write(self._fitting(text) + "\n")
        self._stream.flush()

    def _print_waiting(self) -> None:
        if self._waiting is not None:
            self._print(self._waiting)
            self._waiting, self._printed = None, self._clock()

    def _plain(self, values: Mapping[str, float]) -> str:
        place = f"step {self._number:>{len(str(self._steps))}}/{self._steps}"
        values = {name: value for name, value in values.items() if name != READ or LEARNED not in values}
        shown = [
            f"{value} {label}" if label.startswith("tok/s") else f"{label} {value}" for label, value in figures(values)
        ]
        return "  ".join([place, *shown, self._left()])

    def _left(self) -> str:
        """Return the remaining time, at the pace of this process; it does not count the steps before a resume."""
        if not self._first:
            return f"{_duration(self._clock() - self._began)} elapsed"
        taken = self._stepped - self._began
        if self._number >= self._steps:
            return f"done in {_duration(taken)}"
        pace = taken / (self._number - self._first + 1)
        left = pace * (self._steps - self._number) - (self._clock() - self._stepped)
        return f"{_duration(max(left, 0.0))} left"

    def _panel(self, columns: int, rows: int) -> list[Line]:
        """Return the live panel. Another thread draws it twice a second, so this changes nothing."""
        view = View(self._title, self._number, self._steps, self._left(), self._values, list(self._history))
        return compose(view, columns, rows)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
