"""Runs of a tiny model with a reward from which nothing can be learned, which the health check finds at step 10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import tiny

import posttrain
from posttrain.envs.builtin import arithmetic
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.trainer import Run


def same(task: Any, reply: str) -> float:
    """Ignore the reply."""
    return 1.0


def constant(place: Path, tokenizer: Tokenizer, out: str, **options: Any) -> Run:
    """Run in place/out, from a model that is written once a place."""
    if not (place / "start").exists():
        save_model(tiny(tokenizer), place / "start", tokenizer)
    given: dict[str, Any] = {
        "algorithm": "dr-grpo",
        "prompts": 1,
        "group": 2,
        "max_tokens": 2,
        "threads": 1,
        "steps": 14,
    }
    sums = arithmetic.tasks(20, seed=0, digits=1)
    start = str(place / "start")
    return posttrain.rl(sums, same, start, out=str(place / out), env_workers=0, **{**given, **options})
