"""A channel for progress before a run shows metrics, such as the loading of libraries, weights and tasks.

The working code reports, and a display that watches shows the reports. Nothing else depends on them.
"""

from __future__ import annotations

from collections.abc import Callable

_watcher: Callable[[str, bool], None] | None = None


def doing(text: str, done: int | None = None, of: int = 0) -> None:
    """Report the current activity, with `done` of `of` parts finished. None: without a count."""
    if _watcher is not None:
        _watcher(text if done is None else f"{text}: {done:,} of {of:,}", done is not None)


def watch(watcher: Callable[[str, bool], None] | None) -> None:
    """Send all further reports to `watcher`: (text, whether the report only updates a count). None: discard them."""
    global _watcher
    _watcher = watcher
