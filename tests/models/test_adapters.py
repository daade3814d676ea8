"""Adapters of native and backed models: PEFT's, number by number; merged, shared and copied; and runs that train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import adapt, base_of, logits, opened, stir
from digit_tasks import TASKS, digits, goes_on_exactly
from safetensors.torch import load_file
from sampled import complete
from tiny_models import make
from torch.nn import functional

import posttrain
from posttrain.cli.main import main
from posttrain.core.batch import Layout
from posttrain.core.types import Sampling, UserError
from posttrain.engines.local.backed_engine import BackedEngine
from posttrain.engines.local.engine_weights import own_copy
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import LoRA, attach, begin, frozen_copy, merge, sharing, targets_of
from posttrain.models.backbone import Backbone
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.backed_writer import stored_tensors
from posttrain.models.native.decoder import Decoder
from posttrain.models.tokenizer.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
KINDS = ("phi", "phi3", "gemma3_text", "qwen3_moe", "mamba2", "deepseek_v3", "lfm2")
Q_V, ALL = ("q_proj", "v_proj"), ()
CASES: list[tuple[str, tuple[str, ...], dict[str, bool]]] = [
    *((kind, ALL, {}) for kind in ("native", *KINDS)),
    *(("native", targets, {"rslora": True}) for targets in (Q_V, ALL)),
    *((kind, ALL, {"dora": True}) for kind in ("native", "gemma3_text", "phi", "phi3")),
]


@pytest.mark.parametrize(("kind", "targets", "how"), CASES)
def test_peft_opens_what_is_saved_learns_as_it_does_here_and_what_it_saves_opens_here(
    kind: str, targets: tuple[str, ...], how: dict[str, bool], tmp_path: Path
) -> None:
    base = base_of(kind, tmp_path / "base")
    model = adapt(opened(base), LoRA(3, 6.0, base=str(base), **how), targets)
    model.save(tmp_path / "ours")
    assert not (tmp_path / "ours" / "model.safetensors").exists()
    assert torch.equal(logits(opened(tmp_path / "ours")), logits(model))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    theirs = (
        pytest.importorskip("peft").PeftModel.from_pretrained(plain, str(tmp_path / "ours"), is_trainable=True).eval()
    )
    tokens = torch.arange(3, 15)
    wanted = theirs(input_ids=tokens[None], use_cache=False).logits[0]
    assert (logits(model) - wanted).abs().max() < 1e-4 < (logits(sharing(model)) - wanted).abs().max()
    functional.cross_entropy(wanted[:-1], tokens[1:]).backward()
    layout = Layout(tokens, torch.arange(12), (0,), (12,), (-1,))
    functional.cross_entropy(model.head.logits(model.hidden(layout, torch.arange(11))), tokens[1:]).backward()
    check_gradients(model, {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters()})
    theirs.save_pretrained(tmp_path / "theirs")
    again = opened(tmp_path / "theirs")
    assert again.lora is not None and again.lora.dora == how.get("dora", False)
    assert torch.allclose(logits(again), logits(model), atol=1e-5)


def check_gradients(model: Backbone, expected: dict[str, Any]) -> None:
    """`expected`: PEFT's, by its names."""
    for adapter in adapters(model):
        for name, place in zip(adapter.names, adapter.places, strict=True):
            own = {"lora_A": adapter.a.grad[place.inner], "lora_B": adapter.b.grad[place.rows]}  # type: ignore[index]
            if adapter.magnitude is not None:
                own["lora_magnitude_vector"] = adapter.magnitude.grad[place.rows]  # type: ignore[index]
            for part, gradient in own.items():
                other = expected[f"base_model.model.{name}.{part}.weight"]
                torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("quantize", ["", "int8"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["native", "gemma3_text"])
def test_merged_shared_and_copied_models_compute_what_they_should(
    kind: str, dora: bool, quantize: str, tmp_path: Path
) -> None:
    base = base_of(kind, tmp_path / "base")
    model = adapt(opened(base), LoRA(3, 6.0, base=str(base), dora=dora, quantize=quantize))
    before, copied, engine, other = logits(model), frozen_copy(model), own_copy(model), sharing(model)
    assert isinstance(copied, Decoder | Backed) and isinstance(engine, Decoder | Backed)
    assert torch.equal(logits(copied), before) and not any(p.requires_grad for p in copied.parameters())
    assert torch.allclose(logits(engine), before, atol=1e-4) and engine.lora is None
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    assert {id(p) for p in other.parameters()} <= frozen and not list(adapters(other)) and other.lora is None
    assert quantize or torch.equal(logits(other), logits(opened(base)))
    stir(model, 6)
    after = logits(model)
    assert torch.equal(logits(copied), before) and not torch.allclose(after, before, atol=1e-2)
    merge(model)
    assert model.lora is None and torch.allclose(logits(model), after, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_compute_the_same_wherever_they_go(kind: str, tmp_path: Path) -> None:
    base = make(kind, tmp_path / "base")
    model = adapt(opened(base), LoRA(3, 6.0, base=str(base)))
    copied, before = own_copy(model), logits(model)
    assert isinstance(copied, Backed) and copied.lora is None and torch.allclose(logits(copied), before, atol=1e-4)
    named = {name: tensor.clone() for name, tensor in stored_tensors(model)}
    merge(model)
    assert torch.allclose(logits(model), before, atol=1e-4)
    model.save(tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(named[name], tensor) for name, tensor in stored.items() if name in named)
    assert stored.keys() == load_file(base / "model.safetensors").keys()


def test_router_that_is_more_than_a_product_is_left_as_it_is(tmp_path: Path) -> None:
    model = adapt(opened(make("phimoe", tmp_path)), LoRA(3, 6.0))
    assert targets_of(model) == ("q_proj", "k_proj", "v_proj", "o_proj")
    before = logits(model)
    merge(model)
    assert torch.allclose(logits(model), before, atol=1e-4)


def test_engine_samples_with_the_adapter(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = adapt(opened(make("gemma2", tmp_path, vocab_size=tokenizer.vocab_size)), LoRA(3, 6.0))
    prompts, sampling = [[5, 6, 7]] * 4, [Sampling(max_tokens=6, seed=n) for n in range(4)]
    own = complete(BackedEngine(model, tokenizer), prompts, sampling)
    copied = own_copy(model)
    assert isinstance(copied, Backed)
    merged = complete(BackedEngine(copied, tokenizer, own=True), prompts, sampling)
    for id, completion in own.items():
        assert merged[id].tokens == completion.tokens
        assert merged[id].logp == pytest.approx(completion.logp, abs=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_a_run_learns_goes_on_exactly_and_is_merged(dora: bool, tmp_path: Path, tokenizer: Tokenizer) -> None:
    start = make("gemma3_text", tmp_path / "start", vocab_size=tokenizer.vocab_size)
    tokenizer.save(start)
    whole = goes_on_exactly(
        tmp_path, 4, 2, model=str(start), prompts=3, group=4, max_tokens=5, lr=5e-2, threads=1, env_workers=0,
        save_every=2, quiet=True, kl=0.01, lora=2, dora=dora, lora_targets=("q_proj", "down_proj"), minibatches=2,
    )  # fmt: skip
    assert whole.metrics[0]["ratio/first"] == 1.0 and whole.metrics[-1]["kl"] > 0
    last, merged = tmp_path / "whole" / "checkpoints" / "step-000004", tmp_path / "merged"
    assert not (last / "model.safetensors").exists()
    tensors, weights = (load_file(place) for place in (last / "adapter_model.safetensors", start / "model.safetensors"))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in tensors} == {"q_proj", "down_proj"}
    lengths = {name: tensor for name, tensor in tensors.items() if name.endswith("magnitude_vector")}
    assert len(lengths) == 4 * dora
    for name, length in lengths.items():
        stored = name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")
        assert not torch.allclose(length, weights[stored].norm(dim=1), atol=1e-4)
    assert main(["merge", str(tmp_path / "whole"), "--out", str(merged)]) == 0
    assert opened(merged).lora is None and torch.allclose(logits(opened(last)), logits(opened(merged)), atol=1e-5)


def test_dora_without_adapters_is_refused(tmp_path: Path) -> None:
    start = base_of("native", tmp_path / "start")
    with pytest.raises(UserError, match="--dora has no effect without --lora RANK"):
        posttrain.rl(TASKS, digits, model=str(start), out=str(tmp_path / "never"), steps=1, dora=True)


def test_model_without_linear_layers_is_refused_in_one_line(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer.save(make("gpt2", tmp_path / "start", vocab_size=tokenizer.vocab_size))
    capsys.readouterr()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    words = "sft --tasks rows.jsonl --model start --steps 1 --threads 1 --out run --lora 2".split()
    assert main(words) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and "--lora adapts linear layers, and gpt2 has none" in told[0]


def test_weight_that_layers_share_is_not_adapted_in_one_of_them(tmp_path: Path) -> None:
    model = load_model(make("gemma3_text", tmp_path / "base"))
    assert isinstance(model, Backed)
    one, other = model.inner.model.layers
    other.mlp.up_proj = one.mlp.up_proj
    with pytest.raises(UserError, match=r"--lora: model.layers.0.mlp.up_proj of Gemma3ForCausalLM shares its weight"):
        attach(model, LoRA(3, 6.0), lambda name: "mlp" in name)
    attach(model, LoRA(3, 6.0), lambda name: "self_attn" in name)
    other.mlp.up_proj = torch.nn.Linear(32, 48, bias=False)
    other.mlp.up_proj.weight = one.mlp.up_proj.weight  # as transformers ties
    with pytest.raises(UserError, match="shares its weight with other layers"):
        attach(model, LoRA(3, 6.0), lambda name: "mlp" in name)


def begin_away_from_nothing(model: Backed) -> None:
    begin(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)


def test_block_that_several_layers_are_is_adapted_once_and_merges(tmp_path: Path) -> None:
    model = load_model(make("gemma3_text", tmp_path / "base"))
    assert isinstance(model, Backed)
    one, other = model.inner.model.layers
    other.mlp = one.mlp
    attach(model, LoRA(3, 6.0), lambda name: True)
    begin_away_from_nothing(model)
    before = logits(model)
    merge(model)
    assert torch.allclose(logits(model), before, atol=1e-4)


@pytest.mark.parametrize("kind", ["zamba2", "falcon_h1"])
def test_last_product_of_a_state_space_mixer_is_left_to_its_kernels(kind: str, tmp_path: Path) -> None:
    model = load_model(make(kind, tmp_path / "base"))
    assert isinstance(model, Backed) and "out_proj" not in targets_of(model) and "in_proj" in targets_of(model)
    targets = set(targets_of(model))
    if kind == "zamba2":  # its blocks of attention share their weights
        with pytest.raises(UserError, match="shared_transformer.* of Zamba2ForCausalLM shares its weight"):
            attach(model, LoRA(3, 6.0), lambda name: name.rpartition(".")[2] in targets)
        model, targets = load_model(tmp_path / "base"), {"in_proj"}
        assert isinstance(model, Backed)
    attach(model, LoRA(3, 6.0, base=str(tmp_path / "base")), lambda name: name.rpartition(".")[2] in targets)
    begin_away_from_nothing(model)
    before = logits(model)
    model.save(tmp_path / "ours")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = pytest.importorskip("peft").PeftModel.from_pretrained(plain, str(tmp_path / "ours")).eval()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.arange(3, 15)[None], use_cache=False).logits[0]
    assert (before - wanted).abs().max() < 1e-3
    merge(model)
    assert torch.allclose(logits(model), before, atol=1e-3)
