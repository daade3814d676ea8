"""What a device decides: the size of micro-batches, and how its sums are added up."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny
from tiny_models import make

import posttrain
from posttrain.config.training import RL
from posttrain.core.trust_region import TrustRegion
from posttrain.learners import repeated_bits as bits
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training import setup
from posttrain.training.setup import microbatch_tokens, tokens_of_activations

QWEN_1B = DecoderConfig(
    vocab=151936, hidden=1536, layers=28, heads=12, kv_heads=2, head_size=128, intermediate=8960, context=4096,
)  # fmt: skip
GIB = 1 << 30


def test_micro_batches_of_a_gpu_take_a_share_of_its_memory(tokenizer: Tokenizer) -> None:
    # a token keeps in each layer two float32 states, and in bfloat16 gate and up, q, k, v and what attention returns
    of_token = 28 * (2 * 4 * 1536 + 2 * (2 * 8960 + (12 + 2 + 2 + 12) * 128))
    for room in (4 * GIB, 15.5 * GIB):
        tokens = tokens_of_activations(QWEN_1B, room)
        assert tokens % 1024 == 0 and tokens * of_token <= room < (tokens + 1024) * of_token
    assert [tokens_of_activations(QWEN_1B, 5120 * of_token - less) for less in (0, 1)] == [5120, 4096]
    assert tokens_of_activations(QWEN_1B, 0.1 * GIB) == 1024
    assert tokens_of_activations(replace(QWEN_1B, layers=2), 80 * GIB) == 32_768
    assert microbatch_tokens(RL(), tiny(tokenizer)) == 1024
    assert microbatch_tokens(RL(tokens_per_microbatch=77), tiny(tokenizer)) == 77


def test_micro_batches_of_large_models_are_smaller_and_those_of_transformers_the_smallest(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    model, backed = tiny(tokenizer), load_model(make("gemma3_text", tmp_path / "gemma"))
    assert microbatch_tokens(RL(), backed) == 1024
    monkeypatch.setattr(setup, "LARGE_MODEL", 1)
    assert (microbatch_tokens(RL(), model), microbatch_tokens(RL(), backed)) == (768, 384)


@pytest.mark.parametrize("wanted", [True, False])
def test_sums_have_one_order_within_updates_alone_and_only_if_wanted(
    wanted: bool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bits, "_wanted", False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with warnings.catch_warnings():
        bits.repeat_bits(wanted)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ["CUBLAS_WORKSPACE_CONFIG"])
    seen: list[bool] = []
    learner = LocalLearner(tiny(tokenizer), Optimization(trust_region=TrustRegion()))
    for part in ("_accumulate", "_natural_step"):
        monkeypatch.setattr(learner, part, lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()))
    learner.update([], SimpleNamespace(wants=frozenset()))  # type: ignore[arg-type]
    assert seen == [wanted, wanted] and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("strict", [True, False, None])
def test_after_an_update_sums_are_added_up_as_before_it(strict: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: in no fixed order; strict: what torch knows no fixed order of is an error."""
    monkeypatch.setattr(bits, "_wanted", True)
    before = torch.get_deterministic_debug_mode()
    chosen = {None: 0, False: 1, True: 2}[strict]
    try:
        torch.set_deterministic_debug_mode(chosen)
        with bits.repeated_bits():
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_deterministic_debug_mode() == chosen
    finally:
        torch.set_deterministic_debug_mode(before)


def test_a_new_model_takes_the_tokenizer_of_a_run(tmp_path: Path) -> None:
    small = {"hidden": 16, "layers": 1, "heads": 2, "context": 16, "steps": 1, "rows": 2, "threads": 1, "quiet": True}
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(4)]
    first = posttrain.sft(rows, tokenizer="characters", out=str(tmp_path / "first"), **small)
    other = [{"prompt": "1+1=", "response": "2"}]
    second = posttrain.sft(other, tokenizer=str(first.path), out=str(tmp_path / "second"), **small)
    found = [Tokenizer.load(run.checkpoint).vocabulary for run in (first, second) if run.checkpoint]
    assert found[0] == found[1] and "6" in found[1]


@pytest.mark.parametrize(
    ("listed", "fast"),
    [
        ("flags\t\t: fpu avx2 fma\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16 fma\n", True),
        ("flags\t\t: fpu avx2 amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("", True),  # the processor's instructions are not listed
    ],
)
def test_bfloat16_on_a_processor_without_such_products_is_warned_of(
    listed: str, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: avx512_bf16\n" * bool(listed) + listed)
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    for precision in ("bfloat16", "float32"):
        setup.prepare(RL(precision=precision, device="cpu"))
        told = "has no bfloat16 products" in " ".join(capsys.readouterr().err.split())
        assert told == (precision == "bfloat16" and not fast)
