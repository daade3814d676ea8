"""Requests of many lengths, and the replies that an engine gives to them."""

from __future__ import annotations

from posttrain.core.protocols import Engine
from posttrain.core.types import Completion, Sampling


def complete(engine: Engine, prompts: list[list[int]], sampling: list[Sampling]) -> dict[int, Completion]:
    for id, (prompt, how) in enumerate(zip(prompts, sampling, strict=True)):
        engine.submit(id, prompt, how)
    done: dict[int, Completion] = {}
    while len(done) < len(prompts):
        done.update({c.id: c for c in engine.poll()})
    assert engine.poll() == []
    return done


def ragged(count: int, **how: object) -> tuple[list[list[int]], list[Sampling]]:
    """Prompts of three groups with four or more members each, and budgets of all sizes."""
    prompts = [[5 + (i % 3) * 7 + j for j in range(2 + 3 * (i % 3))] for i in range(count)]
    return prompts, [Sampling(seed=100 + i, max_tokens=3 + i % 17, **how) for i in range(count)]  # type: ignore[arg-type]
