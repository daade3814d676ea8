"""Parses rewards that are sums: "verify:exact_match*0.9 + verify:tags,only=false*0.1"."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from posttrain.core.types import VERIFIER_PREFIX as PREFIX
from posttrain.core.types import UserError

_SUM = re.compile(r"\s+\+(?:\s+|$)|\+(?=verify:)")
_WEIGHT = re.compile(r"(.+?)\s*\*\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)")


class RewardTerm(NamedTuple):
    """A summand: the name of a reward, and its weight; None: no weight is given."""

    spec: str
    weight: float | None


def names_verifiers(spec: str) -> bool:
    """Return whether the name is one of our verifiers, or a sum with one."""
    return any(term.startswith(PREFIX) for term in _SUM.split(spec.strip()))


def terms_of(spec: str) -> list[RewardTerm]:
    """Return the summands, in their order. Raises UserError for an empty one, or a weight that is not a number."""
    return [_term(text.strip(), spec) for text in _SUM.split(spec.strip())]


def _term(text: str, spec: str) -> RewardTerm:
    found = _WEIGHT.fullmatch(text)
    try:
        weight = float(found[2]) if found else None
    except ValueError:
        weight = math.nan
    if not text or (weight is not None and not math.isfinite(weight)):
        raise UserError(f'--env {spec:.80}: a sum is written "{PREFIX}exact_match*0.9 + {PREFIX}tags*0.1"')
    return RewardTerm(found[1] if found else text, weight)
