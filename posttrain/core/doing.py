"""What is being done while a user waits: said by whoever does it, shown by whoever watches, and else by nobody.

It is for the seconds before a run, or a figure, is there to be seen: libraries, weights, tasks. Nothing follows from it.
"""

from __future__ import annotations

from collections.abc import Callable

_watcher: Callable[[str, bool], None] | None = None


def doing(text: str, done: int | None = None, of: int = 0) -> None:
    """This is being done now; `done` of so many parts of it are ready."""
    if _watcher is not None:
        _watcher(text if done is None else f"{text}: {done:,} of {of:,}", done is not None)


def watch(watcher: Callable[[str, bool], None] | None) -> None:
    """Whom it is told from now on: (text, whether it is only progress). None: nobody."""
    global _watcher
    _watcher = watcher
