"""A channel for progress before a run, or a figure, is there to be seen: libraries, weights, tasks.

The code at work reports, and a display that watches shows it. Nothing else depends on it.
"""

from __future__ import annotations

from collections.abc import Callable

_watcher: Callable[[str, bool], None] | None = None


def doing(text: str, done: int | None = None, of: int = 0) -> None:
    """Report the current activity; `done` of so many parts of it are ready."""
    if _watcher is not None:
        _watcher(text if done is None else f"{text}: {done:,} of {of:,}", done is not None)


def watch(watcher: Callable[[str, bool], None] | None) -> None:
    """Send reports from now on to this watcher: (text, whether it is only progress). None: to nobody."""
    global _watcher
    _watcher = watcher
