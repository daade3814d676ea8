"""Steps that are profiled leave a table and traces, and the numbers of the run as they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from digit_tasks import TASKS, digits

import posttrain
from posttrain.config.resolve import profiled_steps
from posttrain.core.types import UserError
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.step_profiler import KINDS, OTHER, by_kind, kind_of, table


def test_a_profile_has_the_steps_asked_for_and_changes_no_number(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    how: dict[str, Any] = {
        "model": str(tmp_path / "start"), "prompts": 2, "group": 4, "max_tokens": 5, "steps": 3, "threads": 1,
        "env_workers": 0, "quiet": True, "algorithm": "grpo",
    }  # fmt: skip
    plain = posttrain.rl(TASKS, digits, out=str(tmp_path / "plain"), **how)
    run = posttrain.rl(TASKS, digits, out=str(tmp_path / "run"), profile="2:3", **how)
    assert run.metrics == plain.metrics
    traces = sorted(file.name for file in (run.path / "profile").glob("*.json.gz"))
    assert traces == [f"step-{step}-{phase}.json.gz" for step in (2, 3) for phase in ("rollout", "update")]
    trace = gzip.decompress((run.path / "profile" / traces[0]).read_bytes())
    assert json.loads(trace)["traceEvents"]
    page = (run.path / "profile" / "profile.md").read_text()
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles == [f"## step {step}, {phase}" for step in (2, 3) for phase in ("rollout", "update")]
    assert "| `aten::mm` | matrix products |" in page and not (plain.path / "profile").exists()


@pytest.mark.parametrize(("text", "steps"), [("3", range(3, 4)), ("2:2", range(2, 3)), ("1:10", range(1, 11))])
def test_a_range_of_steps_is_read(text: str, steps: range) -> None:
    assert profiled_steps(text) == steps


@pytest.mark.parametrize("text", ["0:2", "3:2", "x", "1:", ":3", "1-3", "1:2:3", "-1", "1" * 30])
def test_other_texts_are_no_range_of_steps(text: str) -> None:
    with pytest.raises(UserError, match="write FIRST:LAST, such as 3:5"):
        profiled_steps(text)


def test_kernels_are_counted_by_kind_and_the_longest_are_listed() -> None:
    names = {
        "void pytorch_flash::flash_bwd_kernel<64>": "attention", "nvjet_sm90_tst_128x224": "matrix products",
        "triton_poi_fused__to_copy_mul_silu_0": "elementwise, norms", "Memcpy HtoD": "copies, gather, scatter",
        "aten::_fused_adamw_": "optimizer", "nameless": OTHER,
    }  # fmt: skip
    assert {name: kind_of(name) for name in names} == names
    found = [(name, 0.01 * place, 3) for place, name in enumerate(names, 1)]
    assert by_kind(found) == {**dict.fromkeys(KINDS, 0.0), **{k: 0.01 * i for i, k in enumerate(names.values(), 1)}}
    lines = table("step 1, update", 0.42, [("a|b`c", 0.2, 3)], gpu=True)
    assert (
        lines[2] == "420 ms, of which the GPU's kernels took 200." and "| `a/b'c` | other | 200.0 | 100 | 3 |" in lines
    )
