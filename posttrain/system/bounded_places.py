"""Looks for the delimiter of steps in texts that a policy wrote, in a time that no regular expression exceeds."""

from __future__ import annotations

from posttrain.core.reply_steps import expression_of, places
from posttrain.system.bounded_process import BoundedProcess

SECONDS, GIB = 5.0, 1.0  # limits for one text

_LIMIT = (
    "--step-delimiter: its regular expression takes more than {limit} for a reply: repeat nothing that already repeats"
)
_process = BoundedProcess(
    places.__module__, late=_LIMIT.replace("{limit}", "{seconds:g} s"), large=_LIMIT.replace("{limit}", "{gib:g} GiB")
)


def bounded_places(delimiter: str, text: str) -> list[tuple[int, int]]:
    """Return what `places` returns. An expression is matched in another process, which is killed when it exceeds the
    limits: raises UserError then.
    """
    if expression_of(delimiter) is None:
        return places(delimiter, text)
    found: list[tuple[int, int]] = _process.call("places", delimiter, text, seconds=SECONDS, gib=GIB)
    return found
