"""A script of TRL's agent training, and replies to play with it: what its author wrote, unchanged.

`benchmarks/peers/trl_tools.py` plays it with TRL itself.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

SUCCESS = 1.0


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def add_later(a: int, b: int) -> int:
    """Adds two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    await asyncio.sleep(0)
    return a + b


def search(query: str) -> list[tuple[str, int]]:
    """Finds names and numbers.

    Args:
        query: What is searched.
    """
    if not query:
        raise ValueError("an empty query\nfinds nothing")
    return [(query, 1), ("other", 2)]


class Counter:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.counter = -100

    def reset(self, target: int, **kwargs: Any) -> str | None:
        self.counter, self.target = 0, target
        return f" Reach {target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """Increments the counter.

        Args:
            step: Value to add to the counter.
        """
        self._add(step)
        return self.counter

    def _add(self, step: int) -> None:
        self.counter += step


class Quiet:
    """An environment without a reward and without a text of its own."""

    def reset(self, **kwargs: Any) -> None:
        self.asked = kwargs["prompt"][-1]["content"]

    def look(self) -> str:
        """Repeats the question."""
        return self.asked


environments = {"counter": Counter, "quiet": Quiet}
SEEN: list[dict[str, Any]] = []


def seen(prompts: Any, completions: Any, log_extra: Any, **kwargs: Any) -> list[float]:
    SEEN.extend({"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True))
    log_extra("turns", [len(c) for c in completions])
    return [0.25 * sum("tool_calls" in m for m in c) for c in completions]


def counted(completions: Any, environments: Any, **kwargs: Any) -> list[float]:
    return [float(environment.counter) for environment in environments]


async def later(completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(ids)) for ids in completion_ids]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PROMPT = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Go."}]
CASES: dict[str, dict[str, Any]] = {
    "results, errors and an unknown tool": {
        "tools": ["multiply", "search"],
        "replies": [
            f"Let me see.\n{call('multiply', a=6, b=7)}\n{call('divide', a=1, b=2)}",
            f"{call('search', query='x')}\n{call('search', query='')}",
            f"{call('multiply', a=6)}\n{call('multiply', a=6, b=7, c=8)}\n{call('multiply', a='y', b=2)}",
            "It is 42.",
        ],
    },
    "no call": {"tools": ["multiply"], "replies": ["42"]},
    "rounds are limited": {
        "tools": ["multiply"],
        "most": 1,
        "replies": [call("multiply", a=2, b=3), call("multiply", a=6, b=3)],
    },
    "a call that cannot be read": {"tools": ["multiply"], "replies": ["<tool_call>\n{nothing}\n</tool_call>"]},
    "reasoning": {
        "tools": ["multiply"],
        "replies": [f"<think>\nhm\n</think>\n\nSo:\n{call('multiply', a=2, b=3)}", "<think>\n\n</think>\n\n6"],
    },
    "an environment": {
        "tools": ["multiply"],
        "environment": "Counter",
        "replies": [call("increment", step=2), f"{call('increment')}\n{call('multiply', a=2, b=3)}",
                    call("increment", step=3), "done"],
    },
}  # fmt: skip
