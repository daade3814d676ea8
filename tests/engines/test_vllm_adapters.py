"""An adapter that is handed to vLLM alone is what it samples with, or the run stops. See `make test-vllm`."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from rl_sources import digits
from tiny_models import make
from vllm_samples import GAP, complete, gap, needs_vllm, opened, ragged, small

import posttrain
from posttrain.core.types import UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.servers.adapter_sync import AdapterFiles, rank_for
from posttrain.engines.vllm.vllm_setup import VLLMSetup
from posttrain.models.adapters.adapter_writer import adapters, save_adapter
from posttrain.models.adapters.lora import LoRA, attach, begin, decoder_of, targets_of
from posttrain.models.backbone import Backbone
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(1800)  # vLLM takes half a minute to start, and minutes on a busy machine


ALONE = EngineOptions(weight_sync="adapter", restarts=0)


def adapted(model: Any, rank: int = 4, **how: Any) -> Backbone:
    decoder = decoder_of(model)
    targets = targets_of(decoder)
    attach(decoder, LoRA(rank, 2.0 * rank, **how), lambda name: name.rpartition(".")[2] in targets)
    begin(decoder, 0)
    return decoder


def move(model: Backbone, version: int) -> None:
    """An update of the adapters."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for adapter in adapters(model):
            adapter.b.add_(0.05 * torch.randn(adapter.b.shape, generator=generator))


def of_transformers(tokenizer: Tokenizer, folder: Path) -> Any:
    return load_model(
        make(
            "gemma3_text", folder, vocab_size=tokenizer.vocab_size, hidden_size=64, head_dim=32, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
        )
    )  # fmt: skip


@needs_vllm
@pytest.mark.parametrize("kind", ["native", "native, packed", "gemma3_text"])
def test_vllm_samples_with_the_newest_adapter_and_gets_nothing_else(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = of_transformers(tokenizer, tmp_path) if kind == "gemma3_text" else small(tokenizer)
    adapted(model, quantize="int8" if "packed" in kind else "")
    prompts, how = ragged(12)
    with closing(opened(model, tokenizer, options=ALONE)) as engine:
        assert engine.counts()["probe_gap"] < GAP
        engine.members[0].place.transport.base.put = None  # type: ignore[attr-defined]  # the base never goes over again
        stale = complete(engine, prompts, how)
        for version in range(1, 6):
            move(model, version)
            engine.load(model, version)
            assert engine.counts()["probe_gap"] < GAP < 0.01
        done = complete(engine, prompts, how)
        assert {c.version for c in done} == {5} and gap(model, prompts, done, 1.0).abs().max() < GAP
        assert gap(model, prompts, stale, 1.0).abs().max() > 0.1  # the change is one that shows


@needs_vllm
@pytest.mark.parametrize("what", ["some are missing", "the ones before", "other bytes"])
def test_hand_over_of_an_adapter_that_binds_less_than_it_should_stops_the_run(
    tokenizer: Tokenizer, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(tokenizer)
    adapted(model)
    before, put = copy.deepcopy(model), AdapterFiles.put

    def wrong(self: AdapterFiles, weights: Any, version: int) -> None:
        put(self, before if what == "the ones before" else weights, version)
        assert self.offer is not None
        if what == "other bytes":
            save_adapter(before, Path(self.offer["adapter"]))
        elif what == "some are missing":
            some = small(tokenizer)
            attach(some, LoRA(4, 8.0), lambda name: "layers.0" in name)
            begin(some, 0)
            save_adapter(some, Path(self.offer["adapter"]))

    with closing(opened(model, tokenizer, slots=4, options=ALONE)) as engine:
        for version in (1, 2, 3, 4):
            move(model, version)
        monkeypatch.setattr(AdapterFiles, "put", wrong)
        message = {
            "some are missing": "it has adapters in 7 of 14 matrices",
            "the ones before": "nats off the learner's log-probabilities.* after it loaded version 1",
            "other bytes": "version 1 with checksum .*, not ",
        }
        with pytest.raises(UserError, match=message[what]):
            engine.load(model, 1)


@needs_vllm
def test_a_run_learns_with_adapters_handed_over_alone_and_logs_the_mismatch(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(small(tokenizer), tmp_path / "start", tokenizer)
    tasks = [{"id": str(i), "prompt": f"{i}+1="} for i in range(6)]
    run = posttrain.rl(
        tasks, env=digits, model=str(tmp_path / "start"), out=str(tmp_path / "run"), engine="vllm", weight_sync="adapter",
        slots=64, lora=4, algorithm="grpo", kl=0.0, lr=2e-2, steps=6, prompts=6, group=16, max_tokens=8, quiet=True,
    )  # fmt: skip
    rows = run.metrics
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.2
    for row in rows:
        assert row["ratio/first"] == 1.0 and row["sampler/gap/max"] < 1e-3 and row["sampler/kl"] < 1e-6


def test_what_cannot_be_handed_over_alone_is_refused_in_one_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="requires a model with adapters: give --lora"):
        rank_for(tiny(tokenizer), VLLMSetup)
    with pytest.raises(UserError, match="vLLM does not support DoRA: leave it out, so that adapters are merged"):
        rank_for(adapted(tiny(tokenizer), dora=True), VLLMSetup)
    with pytest.raises(UserError, match="vLLM does not support ranks above 512"):
        rank_for(adapted(tiny(tokenizer), rank=600), VLLMSetup)


def test_room_is_made_for_the_next_rank_that_vllm_knows(tokenizer: Tokenizer) -> None:
    for rank, room in ((1, 1), (3, 8), (8, 8), (65, 128)):
        assert rank_for(adapted(tiny(tokenizer), rank=rank), VLLMSetup) == room
