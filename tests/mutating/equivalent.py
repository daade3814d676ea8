"""Mistakes that change nothing that could be noticed, each with the reason."""

from __future__ import annotations

from mutating.operators import Mutant

EQUIVALENT: dict[tuple[str, str, str, str], str] = {}
"""(module, statement, what is replaced, by what) -> why it is none."""


def reason(mutant: Mutant) -> str:
    """Why it is no mistake; "": it is one."""
    return EQUIVALENT.get((mutant.module, mutant.statement, mutant.before, mutant.after), "")
