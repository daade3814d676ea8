"""Warnings before a run begins: held back until after the description of the run.

The twenty lines of a description would scroll an earlier warning off a small terminal. No warning is lost: those not
shown by the end of the block that holds them back are shown then, also after an exception. Outside of such a block,
warnings are shown at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.core.messages import safe
from posttrain.runs.terminal.output import Output, columns, wrapped

_held: list[list[str]] = []  # one list per block, the innermost last


def warn(text: str) -> None:
    """Warn the user."""
    tell(f"posttrain: warning: {text}")


def tell(text: str) -> None:
    """Print to standard error, or hold back in a `held` block."""
    if _held:
        _held[-1].append(text)
    else:
        _print(text)


def show() -> None:
    """Show the messages held back so far."""
    if _held:
        told, _held[-1] = _held[-1], []
        for text in told:
            _print(text)


@contextmanager
def held() -> Iterator[None]:
    """Context manager that holds messages back until `show` or its end."""
    _held.append([])
    try:
        yield
    finally:
        show()
        _held.pop()


def _print(text: str) -> None:
    print(wrapped(safe(text), columns(Output(sys.stderr))), file=sys.stderr)
