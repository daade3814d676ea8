"""Decides whether a reply matches a regular expression, in a process with limits: a match may take unbounded time."""

from __future__ import annotations

import re

from posttrain.core.types import Invalid
from posttrain.verify.limited_process import limited_verdict

LONGEST = 2**20  # most characters searched in a reply


def matches(
    reply: str, pattern: str, *, whole: bool = False, wanted: bool = True, flags: int = 0, timeout: float = 0.5
) -> float | Invalid:
    r"""1.0 if the pattern (of Python's `re`) is found in the reply, else 0.0. `wanted=False` inverts the verdict.

    `whole`: the pattern must match the whole reply. `timeout`: seconds of processor time. A reply that takes longer
    gets 0.0 in both cases: a policy must neither win nor leave its group by a text that is slow to search. Invalid if
    the pattern itself cannot be compiled.

    >>> matches("call me on 555-1234", r"\d{3}-\d{4}")
    1.0
    """
    try:
        re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        return Invalid(f"pattern {pattern[:80]!r} cannot be read: {error}")
    asked = pattern, reply[:LONGEST], int(flags), whole, wanted
    return limited_verdict("posttrain.verify.pattern:search", *asked, seconds=timeout)


def search(pattern: str, text: str, flags: int, whole: bool, wanted: bool) -> bool:
    """Search, in a process with limits; return whether the result is the wanted one."""
    compiled = re.compile(pattern, flags)
    return ((compiled.fullmatch(text) if whole else compiled.search(text)) is not None) is wanted
