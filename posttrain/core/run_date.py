"""The date that chat templates use (`strftime_now`): fixed for a run, so that no prompt depends on the clock.

A run fixes the day on which it begins, or the day that its starting checkpoint was trained with. It is stored in run.json,
is used again when the run is resumed, and goes with the tokenizer into its checkpoints, so that these are asked as they
were trained. A file of rows that `sample` or `label` writes keeps the day on which it was begun too, for models without
a day of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, time

CONFIG_KEY = "posttrain_date"
"""The entry of a checkpoint's tokenizer_config.json that holds it, as 2026-11-24."""
_fixed: str | None = None
_begun: str | None = None


def today() -> str:
    """Return the day here and now, as 2026-11-24."""
    return datetime.now().date().isoformat()


def is_day(value: object) -> bool:
    """Whether it is a day as `today` writes it."""
    try:
        return isinstance(value, str) and date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


@contextmanager
def fixed(day: str | None) -> Iterator[None]:
    """A context in which templates use this day, whatever the clock or a checkpoint has; None: nothing is changed."""
    global _fixed
    before, _fixed = _fixed, day or _fixed
    try:
        yield
    finally:
        _fixed = before


@contextmanager
def begun(day: str) -> Iterator[None]:
    """A context in which this day replaces today: where no run fixes one, and no checkpoint has its own."""
    global _begun
    before, _begun = _begun, day
    try:
        yield
    finally:
        _begun = before


def fixed_day() -> str | None:
    """Return the day that is fixed now."""
    return _fixed


def template_date(own: str | None) -> datetime:
    """Return the date for a template, at midnight. `own`: the day that a checkpoint was trained with."""
    return datetime.combine(date.fromisoformat(_fixed or own or _begun or today()), time())
