"""Adapters of models that transformers computes: PEFT's, number by number, and runs that train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from digit_tasks import TASKS, digits
from safetensors.torch import load_file
from sampled import complete
from tiny_models import make

import posttrain
from posttrain.cli.main import main
from posttrain.core.batch import Layout
from posttrain.core.types import Sampling, UserError
from posttrain.engines.local.backed_engine import BackedEngine
from posttrain.engines.local.engine_weights import own_copy
from posttrain.models.adapters.lora import LoRA, attach, begin, frozen_copy, merge, sharing, targets_of
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.backed_writer import stored_tensors
from posttrain.models.native.linear import Linear
from posttrain.models.tokenizer.tokenizer import Tokenizer

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
WITH = ("phi", "phi3", "gemma3_text", "qwen3_moe", "mamba2", "deepseek_v3", "lfm2")


def moved(folder: Path, rank: int = 3) -> Backed:
    """The model of a folder with adapters that are far from nothing."""
    model = load_model(folder)
    assert isinstance(model, Backed)
    attach(model, LoRA(rank, 2.0 * rank, base=str(folder)), lambda name: name.rpartition(".")[2] in targets_of(model))
    begin(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


def logits(model: Backed) -> torch.Tensor:
    layout = Layout(torch.arange(3, 15), torch.arange(12), (0,), (12,), (-1,))
    with torch.no_grad():
        return model.head.logits(model.hidden(layout, torch.arange(12)))


@pytest.mark.parametrize("kind", WITH)
def test_peft_opens_what_is_saved_and_what_it_saves_opens_here(kind: str, tmp_path: Path) -> None:
    base = make(kind, tmp_path / "base")
    model = moved(base)
    model.save(tmp_path / "ours")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "ours")).eval()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.arange(3, 15)[None], use_cache=False).logits[0]
    assert (logits(model) - wanted).abs().max() < 1e-4 < (logits(sharing(model)) - wanted).abs().max()  # type: ignore[arg-type]
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    assert isinstance(again, Backed) and torch.allclose(logits(again), logits(model), atol=1e-5)


@pytest.mark.parametrize("kind", WITH)
def test_merged_weights_compute_the_same_wherever_they_go(kind: str, tmp_path: Path) -> None:
    base = make(kind, tmp_path / "base")
    model = moved(base)
    copied, before = own_copy(model), logits(model)
    assert isinstance(copied, Backed) and copied.lora is None and torch.allclose(logits(copied), before, atol=1e-4)
    named = {name: tensor.clone() for name, tensor in stored_tensors(model)}
    merge(model)
    assert torch.allclose(logits(model), before, atol=1e-4)
    model.save(tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(named[name], tensor) for name, tensor in stored.items() if name in named)
    assert stored.keys() == load_file(base / "model.safetensors").keys()


def test_what_is_frozen_is_shared_with_the_model_before_and_has_no_gradient(tmp_path: Path) -> None:
    base = make("gemma3_text", tmp_path / "base")
    model, plain = moved(base), load_model(base)
    other = sharing(model)
    assert isinstance(other, Backed) and isinstance(plain, Backed) and other.lora is None
    assert torch.equal(logits(other), logits(plain)) and not torch.allclose(logits(model), logits(plain), atol=0.1)
    own = {name: p for name, p in model.named_parameters() if "adapter" not in name}
    assert all(own[name] is p for name, p in other.named_parameters()) and not any(
        p.requires_grad for p in own.values()
    )
    assert not any(module.adapter for module in other.modules() if isinstance(module, Linear))


def test_router_that_is_more_than_a_product_is_left_as_it_is(tmp_path: Path) -> None:
    model = moved(make("phimoe", tmp_path / "base"))
    assert targets_of(model) == ("q_proj", "k_proj", "v_proj", "o_proj")
    before = logits(model)
    merge(model)
    assert torch.allclose(logits(model), before, atol=1e-4)


def test_frozen_copy_computes_the_same_and_stays_while_the_adapters_move(tmp_path: Path) -> None:
    model = moved(make("gemma2", tmp_path / "base"))
    copied, before = frozen_copy(model), logits(model)
    assert isinstance(copied, Backed) and torch.equal(logits(copied), before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
    assert torch.equal(logits(copied), before) and not torch.allclose(logits(model), before, atol=1e-2)
    assert not any(parameter.requires_grad for parameter in copied.parameters())


def test_engine_samples_with_the_adapter(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = moved(make("gemma2", tmp_path / "base", vocab_size=tokenizer.vocab_size))
    prompts, sampling = [[5, 6, 7]] * 4, [Sampling(max_tokens=6, seed=n) for n in range(4)]
    own = complete(BackedEngine(model, tokenizer), prompts, sampling)
    copied = own_copy(model)
    assert isinstance(copied, Backed)
    merged = complete(BackedEngine(copied, tokenizer, own=True), prompts, sampling)
    for id, completion in own.items():
        assert merged[id].tokens == completion.tokens
        assert merged[id].logp == pytest.approx(completion.logp, abs=1e-4)


def test_adapter_of_a_backed_model_learns_goes_on_exactly_and_is_merged(tmp_path: Path, tokenizer: Tokenizer) -> None:
    start = make("gemma3_text", tmp_path / "start", vocab_size=tokenizer.vocab_size)
    tokenizer.save(start)
    how: dict[str, Any] = dict(
        model=str(start), prompts=3, group=4, max_tokens=5, lr=5e-2, threads=1, env_workers=0, save_every=2, quiet=True,
        kl=0.01, lora=2, lora_targets=("q_proj", "down_proj"), minibatches=2,
    )  # fmt: skip
    whole = posttrain.rl(TASKS, digits, steps=4, out=str(tmp_path / "whole"), **how)
    before = posttrain.rl(TASKS, digits, steps=2, out=str(tmp_path / "parts"), **how).metrics
    rest = posttrain.rl(TASKS, digits, out=str(tmp_path / "parts"), resume=True, steps=4, **how)
    assert rest.metrics == whole.metrics and before == whole.metrics[:2]
    assert whole.metrics[0]["ratio/first"] == 1.0 and whole.metrics[-1]["kl"] > 0
    last = tmp_path / "whole" / "checkpoints" / "step-000004"
    assert not (last / "model.safetensors").exists()
    tensors = load_file(last / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in tensors} == {"q_proj", "down_proj"}
    assert main(["merge", str(tmp_path / "whole"), "--out", str(tmp_path / "merged")]) == 0
    one, other = load_model(last), load_model(tmp_path / "merged")
    assert isinstance(one, Backed) and isinstance(other, Backed) and other.lora is None
    assert torch.allclose(logits(one), logits(other), atol=1e-5)


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
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "ours")).eval()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.arange(3, 15)[None], use_cache=False).logits[0]
    assert (before - wanted).abs().max() < 1e-3
    merge(model)
    assert torch.allclose(logits(model), before, atol=1e-3)
