"""Counted randomness: every random number of a run follows from its purpose, without mutable state."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """Return a seed in [0, 2^63) from its purpose, such as (run seed, "rollout", step, task, member)."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
