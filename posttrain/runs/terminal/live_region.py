"""Temporary lines of a terminal: one with the current activity, and a few at the bottom that are redrawn while other
text scrolls above them.

The module is independent of runs: a function of the terminal's size returns the lines. It is called at every drawing,
so that the lines fit a window that was resized.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from posttrain.core.messages import safe
from posttrain.runs.terminal.output import Output

SECONDS_BETWEEN_DRAWINGS = 0.5
SECONDS_BETWEEN_REPORTS = 15.0

Line = Sequence[tuple[str, str]]
"""Pieces of a line: (text, name in STYLES or "")."""

STYLES = {"dim": "\x1b[2m", "bold": "\x1b[1m", "accent": "\x1b[36m"}
PLAIN, ERASE_LINE, ERASE_BELOW, HIDE_CURSOR, SHOW_CURSOR = "\x1b[0m", "\x1b[K", "\x1b[J", "\x1b[?25l", "\x1b[?25h"


class Passing:
    """One line with the current activity, which is erased before anything else is written to the streams."""

    def __init__(
        self, stream: Output, others: Sequence[Output] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`stream`: where the line is drawn; `others`: streams on the same terminal."""
        self._stream, self._clock = stream, clock
        self._shown = False
        self._when = -SECONDS_BETWEEN_DRAWINGS
        self._lock = threading.RLock()  # another thread may write
        for each in (stream, *others):
            each.before = self.erase

    def show(self, text: str, progress: bool = False) -> None:
        """Replace the line. `progress`: skip this text if the line was just drawn."""
        now = self._clock()
        if progress and now - self._when < SECONDS_BETWEEN_DRAWINGS:
            return
        line = fitted(f"{safe(text)} ...".replace("\n", " "), size(self._stream)[0] - 1)
        with self._lock:
            self.erase()
            self._stream.write(line if os.environ.get("NO_COLOR") else f"{STYLES['dim']}{line}{PLAIN}")
            self._stream.flush()
            self._shown, self._when = True, now

    def erase(self) -> None:
        with self._lock:
            if self._shown:
                self._shown = False
                # nothing is below it; and some terminals save a whole screen that is erased
                self._stream.write("\r" + ERASE_LINE)
                self._stream.flush()


class Reports:
    """Lines about a long activity, for a stream that is no terminal."""

    def __init__(self, stream: Output, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._when = stream, clock, clock()

    def show(self, text: str, progress: bool = False) -> None:
        """Print the activity, unless the last line is recent."""
        if self._clock() - self._when >= SECONDS_BETWEEN_REPORTS:
            self._when = self._clock()
            self._stream.write(f"{safe(text)} ...\n")
            self._stream.flush()


class Region:
    """The bottom lines, drawn from `start` to `stop`. Text printed meanwhile, by `print` or to sys.stdout, goes above
    them.
    """

    def __init__(self, stream: Output, compose: Callable[[int, int], Sequence[Line]]) -> None:
        """`compose`: (columns, rows of the terminal) -> lines, all shorter than a row."""
        self._stream, self._compose = stream, compose
        self._colours = not os.environ.get("NO_COLOR")
        self._lock = threading.RLock()
        self._drawn: list[int] = []  # width of each line on the screen, in cells
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw_often, name="display", daemon=True)
        self._instead: dict[str, _OutputAbove] = {}

    def start(self) -> None:
        for name in ("stdout", "stderr"):
            if _same_terminal(self._stream, before := getattr(sys, name)):
                self._instead[name] = _OutputAbove(self, before)
                setattr(sys, name, self._instead[name])
        self._stream.write(HIDE_CURSOR)
        self.print("")
        self._thread.start()

    def print(self, text: str) -> None:
        """Print text above the region, if there is any, and redraw the region."""
        with self._lock:
            lines = self._compose(*size(self._stream))
            painted = "\n".join("".join(self._paint(*piece) for piece in line) for line in lines)
            self._stream.write(self._erase() + (text + "\n" if text else "") + painted)
            self._stream.flush()
            self._drawn = [sum(cells(text) for text, _ in line) for line in lines]

    def stop(self) -> None:
        """Leave the lines on the screen unchanged."""
        self._ended.set()
        self._thread.join()
        for name, above in self._instead.items():
            setattr(sys, name, above.instead_of)
        self.print("\n".join(above.unended for above in self._instead.values() if above.unended))
        self._stream.write("\n" + SHOW_CURSOR)
        self._stream.flush()

    def _erase(self) -> str:
        """Move to the first row of the region and erase from there on, also rows wrapped by a window that became
        narrower.
        """
        columns = max(1, size(self._stream)[0])
        above = sum(max(1, -(-width // columns)) for width in self._drawn) - 1
        return "\r" + (f"\x1b[{above}A" if above > 0 else "") + ERASE_BELOW

    def _paint(self, text: str, style: str) -> str:
        return f"{STYLES[style]}{text}{PLAIN}" if style and self._colours else text

    def _draw_often(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_DRAWINGS) and self._stream.lost is None:
            self.print("")


class _OutputAbove(io.TextIOBase):
    """A stream for other output while the region is drawn: it writes complete lines above the region."""

    def __init__(self, region: Region, instead_of: TextIO) -> None:
        self._region, self.instead_of, self.unended = region, instead_of, ""

    def write(self, text: str) -> int:
        *whole, self.unended = (self.unended + text).split("\n")
        if whole:
            self._region.print("\n".join(whole))
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.instead_of.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.instead_of.encoding


def cells(text: str) -> int:
    """Return the columns that a text occupies: Chinese characters occupy two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fitted(text: str, width: int) -> str:
    """Return the text, cut to this number of columns."""
    from rich.cells import set_cell_size

    if cells(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 1 else ""


def size(stream: Output) -> tuple[int, int]:
    """Return (columns, rows)."""
    try:
        found = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        found = shutil.get_terminal_size()
    return found.columns or 80, found.lines or 24


def _same_terminal(stream: Output, other: TextIO | None) -> bool:
    try:
        return (
            other is not None
            and other.isatty()
            and os.fstat(stream.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
        )
    except (OSError, ValueError):
        return False
