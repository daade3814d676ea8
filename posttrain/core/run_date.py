"""The date that chat templates use (`strftime_now`): fixed for a run, so that no prompt depends on the clock.

A run fixes the day on which it begins, or the day that its starting checkpoint was trained with. The day is stored in
run.json, used again when the run is resumed, and written with the tokenizer into the run's checkpoints, so that prompts
for these are those of training. A file of rows from `sample` or `label` also keeps the day on which it was begun, for
models without a day of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, time

CONFIG_KEY = "posttrain_date"
"""The key of the day in a checkpoint's tokenizer_config.json. Its value is like 2026-11-24."""
_fixed: str | None = None
_begun: str | None = None


def today() -> str:
    """Return the current local day, such as 2026-11-24."""
    return datetime.now().date().isoformat()


def is_day(value: object) -> bool:
    """Return whether it is a day such as 2026-11-24."""
    try:
        return isinstance(value, str) and date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


@contextmanager
def fixed(day: str | None) -> Iterator[None]:
    """Context manager in which templates use this day, whatever the clock or a checkpoint has. None changes nothing."""
    global _fixed
    before, _fixed = _fixed, day or _fixed
    try:
        yield
    finally:
        _fixed = before


@contextmanager
def begun(day: str) -> Iterator[None]:
    """Context manager in which this day replaces today, where neither a run nor a checkpoint fixes a day."""
    global _begun
    before, _begun = _begun, day
    try:
        yield
    finally:
        _begun = before


def fixed_day() -> str | None:
    """Return the fixed day, or None."""
    return _fixed


def template_date(own: str | None) -> datetime:
    """Return the date for a template, at midnight. `own`: the day with which a checkpoint was trained."""
    return datetime.combine(date.fromisoformat(_fixed or own or _begun or today()), time())
