"""Small sums as rows of every kind, and the options of short runs on them."""

from __future__ import annotations

from typing import Any

import posttrain

SUMS = [{"id": f"{a}{b}", "prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)}
        for a in range(5) for b in range(5)]  # fmt: skip
PAIRS = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "7"} for row in SUMS if row["answer"] != "7"]
SMALL: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "context": 32, "tokenizer": "characters"}
QUICK: dict[str, Any] = {"threads": 1, "quiet": True, "held_out": 0.2, "tokens_per_microbatch": 24}


def nearness(task: posttrain.Task, reply: str) -> float:
    """Something to learn from even for a policy that knows nothing."""
    return sum(c.isdigit() for c in reply) / 4 + (reply == task["answer"])
