"""Text streams whose failures never end a run.

Decides the treatment of a stream that is closed or full, or whose terminal has gone.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import textwrap
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO


class Output(io.TextIOBase):
    """A text stream that never fails: text that cannot be written is dropped, and characters that cannot be encoded are
    escaped.

    `stream` is None if it was closed before the process began.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.lost: Exception | None = None  # the reason why writing has stopped
        self.before: Callable[[], None] | None = None  # called before each write

    def write(self, text: str) -> int:
        if self.before is not None:
            self.before()
        if self.stream is not None and self.lost is None:
            try:
                self.stream.write(encodable(text, self.stream))
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if self.stream is not None and self.lost is None:
            try:
                self.stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def isatty(self) -> bool:
        try:
            return self.stream is not None and self.lost is None and self.stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        if self.stream is None:
            raise io.UnsupportedOperation("fileno")
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "errors", None) or "strict"

    def writable(self) -> bool:
        return True

    def _lose(self, error: Exception) -> None:
        """Stop writing for good. Python would otherwise try to flush the stream's buffer at its end."""
        self.lost = error
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)


def fancy(stream: TextIO | Output) -> bool:
    """Return whether the stream is a terminal that can redraw lines."""
    utf = (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
    return stream.isatty() and os.environ.get("TERM") != "dumb" and utf


def columns(stream: TextIO | Output) -> int:
    """Return the largest width of a line: a terminal's columns less one; 0: no limit."""
    return shutil.get_terminal_size().columns - 1 if stream.isatty() else 0


def wrapped(line: str, width: int, hanging: int = 4) -> str:
    """Return the line wrapped between words to `width` (0: unlimited); further lines are indented by `hanging` more."""
    if not width or len(line) <= width:
        return line
    indent = len(line) - len(line.lstrip())
    return textwrap.fill(
        line.strip(),
        max(width, indent + 20),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )


def encodable(text: str, stream: TextIO | Output) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
