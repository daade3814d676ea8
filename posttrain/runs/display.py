"""What a person sees while a run goes on: a small live panel on a terminal, plain lines anywhere else.

It decides which metrics are worth a glance, how often a line is printed, and how text that a model wrote is made safe
to print: it may hold anything, terminal control codes included.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from posttrain.types import Invalid, Rollout

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

SHOWN = {
    "reward": ("reward", ".3f"),
    "loss": ("loss", ".4f"),
    "accuracy": ("accuracy", ".3f"),
    "length": ("length", ".1f"),
    "entropy": ("entropy", ".2f"),
    "kl": ("KL", ".4f"),
    "invalid": ("invalid", ".3g"),
    "tokens_per_second": ("tok/s", ",.0f"),
}
"""Metric -> (label, format), in the order in which they are shown; held-out metrics follow."""

SECONDS_BETWEEN_LINES = 2.0
BARS = "▁▂▃▄▅▆▇█"


class Display:
    """The progress of one run. `quiet` shows nothing at all."""

    def __init__(
        self, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet = quiet
        self._stream = stream or sys.stdout
        self._clock = clock
        self._live: Live | None = None
        self._title, self._steps, self._lines = "", 0, [""]
        self._began = self._stepped = self._printed = 0.0  # when, in seconds of the clock
        self._first = self._number = 0
        self._values: dict[str, float] = {}  # of the last step, and the last held-out ones
        self._history: list[float] = []  # reward, or loss where there is none
        self._waiting: str | None = None  # the last line, as long as it was not printed

    def start(self, title: str, steps: int, lines: Sequence[str]) -> None:
        """Begin: what runs, the number of its last step, and some lines on what it was asked to do."""
        self._title, self._steps, self._lines = title, steps, list(lines)
        self._began = self._clock()
        if self._quiet:
            return
        if not _fancy(self._stream):
            self._print("\n".join([title, *("  " + line for line in lines)]))
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream)
        self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=2)
        self._live.start()

    def step(self, number: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """One step is done. A resumed run begins with a number above 1."""
        if not self._first:
            self._first = number
        self._number, self._stepped = number, self._clock()
        held_out = {name: value for name, value in self._values.items() if name.startswith("eval/")}
        self._values = {**held_out, **metrics, **timing}
        if (value := metrics.get("reward", metrics.get("loss"))) is not None:
            self._history.append(value)
        if self._quiet or self._live:
            return
        self._waiting = self._plain({**metrics, **timing})
        due = self._stepped - self._printed >= SECONDS_BETWEEN_LINES
        evaluated = any(name.startswith("eval/") for name in metrics)
        if due or evaluated or number in (self._first, self._steps):
            self._print_waiting()

    def note(self, text: str) -> None:
        """A line that stays, such as where a checkpoint was saved."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        elif not self._quiet:
            self._print_waiting()
            self._print(text)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._print_waiting()
        if self._live:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        print(_encodable(text, self._stream), file=self._stream, flush=True)

    def _print_waiting(self) -> None:
        if self._waiting is not None:
            self._print(self._waiting)
            self._waiting, self._printed = None, self._clock()

    def _plain(self, values: Mapping[str, float]) -> str:
        place = f"step {self._number:>{len(str(self._steps))}}/{self._steps}"
        figures = [f"{value} {label}" if label == "tok/s" else f"{label} {value}" for label, value in _figures(values)]
        return "  ".join([place, *figures, self._left()])

    def _left(self) -> str:
        """Time left, at the pace of this process: the steps before a resume took it no time."""
        if not self._first:
            return f"{_duration(self._clock() - self._began)} elapsed"
        taken = self._stepped - self._began
        if self._number >= self._steps:
            return f"done in {_duration(taken)}"
        pace = taken / (self._number - self._first + 1)
        left = pace * (self._steps - self._number) - (self._clock() - self._stepped)
        return f"{_duration(max(left, 0.0))} left"

    def _panel(self) -> RenderableType:
        """The live panel. Drawn twice a second by another thread, so it reads and changes nothing."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = Table.grid(padding=(0, 2), expand=True)
        progress.add_column(no_wrap=True)
        progress.add_column(ratio=1)
        progress.add_column(no_wrap=True)
        bar = ProgressBar(total=max(self._steps, 1), completed=self._number)
        progress.add_row(f"step {self._number}/{self._steps}", bar, self._left())
        values = self._values  # replaced whole by the next step, never changed
        held_out = {name: value for name, value in values.items() if name.startswith("eval/")}
        figures = [
            Text("   ").join(Text.assemble((label + " ", "dim"), (value, "bold")) for label, value in _figures(part))
            for part in ({name: value for name, value in values.items() if name not in held_out}, held_out)
            if part
        ]
        history = list(self._history)
        name = "reward" if "reward" in values else "loss"
        curve = [Text.assemble((name + " ", "dim"), (_sparkline(history, 48), "cyan"))] if history else []
        about = [Text(line, style="dim") for line in self._lines]
        return Panel(Group(*about, progress, *curve, *figures), title=Text(self._title), title_align="left")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], stream: TextIO | None = None) -> None:
    """Print a table: numbers to the right with four digits, None as a dash."""
    out = stream or sys.stdout
    cells = [[_cell(value) for value in row] for row in rows]
    right = [any(_numeric(row[i]) for row in rows) for i in range(len(columns))]
    if _fancy(out):
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
        for name, at_right in zip(columns, right, strict=True):
            drawn.add_column(Text(name), justify="right" if at_right else "left")
        for row in cells:
            drawn.add_row(*map(Text, row))
        Console(file=out).print(drawn)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [title]
    for row in [list(columns), *cells]:
        places = zip(row, widths, right, strict=True)
        lines.append(
            "  ".join(f"{cell:{'>' if at_right else '<'}{width}}" for cell, width, at_right in places).rstrip()
        )
    print(_encodable("\n".join(lines), out), file=out, flush=True)


def sample(rollouts: Sequence[Rollout | Mapping[str, Any]], count: int, stream: TextIO | None = None) -> None:
    """Print the first `count` rollouts: prompt, reply, reward. Takes them played or as `read_rollouts` has them."""
    out = stream or sys.stdout
    for rollout in rollouts[:count]:
        line = rollout if isinstance(rollout, Mapping) else _as_line(rollout)
        reward = f"invalid: {line['invalid']}" if "invalid" in line else f"reward {_cell(line['reward'])}"
        head = f"── {line['group']} ── {reward} ── {line['stop']} "
        parts = [("prompt", line["prompt"]), ("reply", line["text"])]
        if line.get("answer") is not None:
            parts.append(("answer", str(line["answer"])))
        text = "\n".join([_safe(head).ljust(80, "─"), *(_beside(name, part) for name, part in parts), ""])
        print(_encodable(text, out), file=out, flush=True)


def _as_line(rollout: Rollout) -> dict[str, Any]:
    verdict = {"invalid": rollout.reward.reason} if isinstance(rollout.reward, Invalid) else {"reward": rollout.reward}
    answer = rollout.task.get("answer", rollout.task.get("answers"))
    about = {"group": rollout.group, "stop": rollout.stop, "answer": answer}
    return {**about, **verdict, "prompt": rollout.prompt, "text": rollout.text}


def _beside(name: str, text: str) -> str:
    """The text with its name to the left of the first line and a bar to the left of all."""
    lines = _safe(text).split("\n")
    return "\n".join(f"{name if i == 0 else '':<7}│ {line}".rstrip() for i, line in enumerate(lines))


def _figures(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, value) of what is worth a glance."""
    hidden = {"loss"} if "reward" in values else set()  # in RL the loss says nothing of progress
    if not values.get("invalid"):
        hidden.add("invalid")
    figures = [
        (label, format(values[name], form))
        for name, (label, form) in SHOWN.items()
        if name in values and name not in hidden
    ]
    held_out = [name for name in values if name.startswith("eval/")]
    return figures + [(f"held-out {name.removeprefix('eval/')}", format(values[name], ".3f")) for name in held_out]


def _sparkline(values: Sequence[float], width: int) -> str:
    """The whole history in at most `width` bars, each the mean of its share of the steps."""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] if abs(mean) < float("inf") else " " for mean in means)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _numeric(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if _numeric(value) else _safe(str(value))


def _safe(text: str) -> str:
    """The text with control codes made visible: printed as they stand they could rewrite the screen."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _fancy(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can draw over itself."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    return stream.isatty() and os.environ.get("TERM") != "dumb" and encoding.startswith("utf")
