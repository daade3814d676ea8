"""Counted randomness: every random number of a run follows from what it is for, and nothing mutable is remembered."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """Return a seed in [0, 2^63) from what it is for, such as (run seed, "rollout", step, task, member)."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
