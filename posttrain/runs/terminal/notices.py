"""Warnings before a run begins: held back until the run has been described, so that they come last.

A description of twenty lines would push a warning above it off a small terminal. Nothing is lost: a warning that has
not been shown when the block ends that holds it back is shown then, however the block ends. Outside of such a block it
is shown at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.core.messages import safe
from posttrain.runs.terminal.output import Output, columns, wrapped

_held: list[list[str]] = []  # of each block, the innermost last


def warn(text: str) -> None:
    """Warn the user."""
    tell(f"posttrain: warning: {text}")


def tell(text: str) -> None:
    """Print to standard error, as soon as it is time."""
    if _held:
        _held[-1].append(text)
    else:
        _print(text)


def show() -> None:
    """Show the messages that were held back."""
    if _held:
        told, _held[-1] = _held[-1], []
        for text in told:
            _print(text)


@contextmanager
def held() -> Iterator[None]:
    """Hold messages back until `show`, or the end of this block."""
    _held.append([])
    try:
        yield
    finally:
        show()
        _held.pop()


def _print(text: str) -> None:
    print(wrapped(safe(text), columns(Output(sys.stderr))), file=sys.stderr)
