"""The rewards that every side scores with. As environments of posttrain they are `rewards.py:signal` and `:exact`.

`signal` spreads in every group, so every rollout teaches something. `exact` is the real check of GSM8K, which models of
this size practically never pass: in most groups all rewards are 0, as in the beginning of a real run on hard problems.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

REWARDS = {"signal": "signal", "sparse": "exact"}
"""The function behind each kind of step."""


def signal(task: dict[str, Any], reply: str) -> float:
    """A number in [0, 1) that follows from the reply alone and differs from one reply to the next."""
    return crc32(reply.encode()) % 1000 / 1000


def exact(task: dict[str, Any], reply: str) -> float:
    """1 if the number after the last #### is the answer."""
    said = reply.rpartition("####")[2].strip().split("\n")[0].replace(",", "").rstrip(".")
    return float("####" in reply and said == task["answer"])
