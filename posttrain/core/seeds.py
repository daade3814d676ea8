"""Counted randomness: every random number of a run follows from its purpose, without mutable state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def seed_of(*parts: object) -> int:
    """Return a seed in [0, 2^63) that depends only on `parts`, the purpose, such as (run seed, "rollout", step, task,
    member).
    """
    return _number(_hash(parts))


def seeds_of(*parts: object, count: int) -> list[int]:
    """Return [seed_of(*parts, 0), seed_of(*parts, 1), ...], `count` of them."""
    begun, found = _hash((*parts, "")), []
    for place in range(count):
        whole = begun.copy()
        whole.update(str(place).encode())
        found.append(_number(whole))
    return found


def _hash(parts: Iterable[object]) -> hashlib.blake2b:
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8)


def _number(whole: hashlib.blake2b) -> int:
    return int.from_bytes(whole.digest(), "big") >> 1
