"""Runs whose KV cache is too small for all of their replies at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from rl_sources import TASKS, digits

import posttrain
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.kernels import binder
from posttrain.models.tokenizer.tokenizer import Tokenizer

needs_compiler = pytest.mark.skipif(binder.decode() is None, reason="needs a C compiler")
QUICK: dict[str, Any] = {
    **{"prompts": 2, "group": 8, "max_tokens": 150, "lr": 1e-2, "save_every": 1, "keep": 9, "seed": 1},
    **{"env_workers": 0, "threads": 1, "quiet": True},
}


@needs_compiler
def test_a_run_has_the_same_bits_with_another_cache_and_may_be_resumed_with_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = tiny(tokenizer, context=256)
    save_model(model, tmp_path / "model")
    tokenizer.save(tmp_path / "model")

    def trained(name: str, steps: int, **how: Any) -> Any:
        return posttrain.rl(
            TASKS, digits, str(tmp_path / "model"), out=str(tmp_path / name), steps=steps, **QUICK, **how
        )

    def record(name: str) -> list[bytes]:
        weights = tmp_path / name / "checkpoints/step-000003/model.safetensors"
        return [(tmp_path / name / "metrics.jsonl").read_bytes(), weights.read_bytes()]

    def preempted(name: str) -> list[float]:
        rows = map(json.loads, (tmp_path / name / "timing.jsonl").read_text().splitlines())
        return [row["decoding/preempted"] for row in rows]

    trained("whole", 3)
    assert preempted("whole") == [0, 0, 0]
    page = LocalEngine(model, tokenizer)._cache.size(1, 0) / 2**30
    trained("small", 1, engine_cache=5 * page)
    with pytest.raises(
        posttrain.UserError, match=r"--engine-cache is .*: raise it.*; .*continue after step 1 .*--resume"
    ):
        trained("small", 3, engine_cache=page, resume=True)
    trained("small", 3, engine_cache=6 * page, resume=True)
    assert record("small") == record("whole")
    assert preempted("small")[0] > 0
