"""Parses rewards that are sums: "verify:exact_match*0.9 + verify:tags,only=false*0.1 + trl:rewards.py:short*0.2"."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from posttrain.core.types import VERIFIER_PREFIX as PREFIX
from posttrain.core.types import UserError

TRL, VERL = "trl:", "verl:"
PREFIXES = (PREFIX, TRL, VERL)
"""Prefixes of rewards that are not functions of (task, reply)."""
_SUM = re.compile(r"\s+\+(?:\s+|$)|\+(?=(?:verify|trl|verl):)")
_WEIGHT = re.compile(r"(.+?)\s*\*\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)")


class RewardTerm(NamedTuple):
    """A summand: the name of a reward, and its weight; None if no weight is given."""

    spec: str
    weight: float | None


def is_sum(spec: str) -> bool:
    """Return whether a name has one of the prefixes, or is a sum with a summand that has."""
    return any(term.startswith(PREFIXES) for term in _SUM.split(spec.strip()))


def terms_of(spec: str) -> list[RewardTerm]:
    """Return the summands, in their order. Raises UserError for an empty one, or a weight that is not a number."""
    return [_term(text.strip(), spec) for text in _SUM.split(spec.strip())]


def own_name(term: str) -> str:
    """Return the name of a term without the prefix "trl:" or "verl:"."""
    return term.removeprefix(TRL).removeprefix(VERL)


def _term(text: str, spec: str) -> RewardTerm:
    found = _WEIGHT.fullmatch(text)
    try:
        weight = float(found[2]) if found else None
    except ValueError:
        weight = math.nan
    if not text or (weight is not None and not math.isfinite(weight)):
        raise UserError(f'--env {spec:.80} is not a sum of rewards: write "{PREFIX}exact_match*0.9 + {PREFIX}tags*0.1"')
    for name in text[: found.end(1) if found else None].split(",") if text.startswith(TRL) else ():
        if _WEIGHT.fullmatch(name):
            fix = " + ".join(f"{TRL}FILE:{one}" for one in ("f*0.5", "g*0.2"))
            raise UserError(f"--env {spec:.80}: give each function with a weight as a term of its own: {fix}")
    return RewardTerm(found[1] if found else text, weight)
