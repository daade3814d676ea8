"""DoRA (arXiv 2402.09353): rows whose lengths learn by themselves, as its formula and PEFT have it, native and backed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import SHAPE, WAYS, compiled_and_plain, laid, loss_of
from digit_tasks import TASKS, digits
from judged import own_pad
from safetensors.torch import load_file
from tiny_models import make
from torch import Tensor
from torch.nn import functional

import posttrain
from posttrain.cli.main import main
from posttrain.core.batch import Layout
from posttrain.core.types import UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import LoRA, attach, begin, frozen_copy, merge, sharing, targets_of
from posttrain.models.backbone import Backbone
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.native.attention import SegmentAttention
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.linear import Linear, accumulating
from posttrain.models.native.merged_weights import plain_weights
from posttrain.models.tokenizer.tokenizer import Tokenizer

NATIVE = DecoderConfig(
    vocab=48, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, intermediate=48, context=64, qkv_bias=True
)


def dora(model: Backbone, base: str = "", targets: tuple[str, ...] = (), quantize: str = "") -> Backbone:
    """A model with adapters that are far from nothing, and lengths that have moved."""
    names = targets or targets_of(model)
    lora = LoRA(3, 6.0, base=base, dora=True, quantize=quantize)
    attach(model, lora, lambda name: name.rpartition(".")[2] in names)
    begin(model, 1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for adapter in adapters(model):
            assert adapter.magnitude is not None
            adapter.b.normal_(0.0, 0.3, generator=generator)
            adapter.magnitude.mul_(1 + 0.3 * torch.randn(adapter.magnitude.shape, generator=generator))
    return model


def native(dtype: torch.dtype = torch.float64, targets: tuple[str, ...] = (), config: DecoderConfig = SHAPE) -> Decoder:
    model = new_decoder(config, 0).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.ndim == 2 else parameter.add_(0.1)
    dora(model, targets=targets)
    return model


def plainly(model: Decoder, layout: Layout, at: Tensor, target: Tensor) -> Tensor:
    """The loss with each weight as the formula has it, made and differentiated by torch's own operations."""
    other = new_decoder(model.config, 9).to(model.head.dtype)
    weights = {name: p for name, p in model.named_parameters() if "adapter" not in name}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and (adapter := module.adapter) is not None:
            assert adapter.magnitude is not None
            rows = list(module.weight.detach())
            for place in adapter.places:
                direction = (
                    module.weight[place.outputs] + adapter.scale * adapter.b[place.rows] @ adapter.a[place.inner]
                )
                length = direction.norm(dim=1).detach()  # section 4.3
                rows[place.outputs] = list((adapter.magnitude[place.rows] / length)[:, None] * direction)
            weights[f"{name}.weight"] = torch.stack(rows)
    given = (layout.tokens, layout.position, SegmentAttention(layout), at)
    hidden = torch.func.functional_call(other, weights, given)
    return functional.cross_entropy(hidden @ weights["output"].t(), target)


@pytest.mark.parametrize("targets", WAYS, ids=" ".join)
def test_gradients_of_lengths_and_adapters_equal_those_of_the_formula(targets: tuple[str, ...]) -> None:
    model = native(targets=targets)
    learning = [p for p in model.parameters() if p.requires_grad]
    assert len(learning) == 3 * len(list(adapters(model))) > 0
    wanted = plainly(model, *laid())
    expected = torch.autograd.grad(wanted, learning)
    torch.testing.assert_close(loss_of(model, *laid()), wanted, rtol=1e-12, atol=0)
    for gradient, own in zip(expected, torch.autograd.grad(loss_of(model, *laid()), learning), strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-9, atol=1e-12)
    with accumulating():
        for _ in range(2):  # micro-batches
            loss_of(model, *laid()).backward()
    for gradient, parameter in zip(expected, learning, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_gradients_equal_those_of_torch(precision: str) -> None:
    rough = 0.05 if precision == "bfloat16" else 1e-4
    for ours, theirs in compiled_and_plain(lambda: native(torch.float32), precision):
        assert (ours - theirs).norm() <= rough * theirs.norm()


def test_it_begins_as_the_model_itself() -> None:
    model = new_decoder(SHAPE, 0)
    before = logits(model)
    attach(model, LoRA(3, 6.0, dora=True), lambda name: True)
    begin(model, 1)
    for adapter in adapters(model):
        adapter.requires_grad_(False)
    assert torch.equal(logits(model), before)
    weights = dict(new_decoder(SHAPE, 0).named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in plain_weights(model))


def logits(model: Backbone) -> Tensor:
    layout = Layout(torch.arange(3, 15), torch.arange(12), (0,), (12,), (-1,))
    with torch.no_grad():
        return model.head.logits(model.hidden(layout, torch.arange(12)))


def base_of(kind: str, folder: Path) -> Path:
    if kind != "native":
        return make(kind, folder)
    save_model(new_decoder(NATIVE, 3), folder, own_pad())
    return folder


@pytest.mark.parametrize("kind", ["native", "gemma3_text", "phi", "phi3"])
def test_peft_opens_what_is_saved_learns_as_it_does_here_and_opens_here(kind: str, tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = base_of(kind, tmp_path / "base")
    model = load_model(base)
    assert isinstance(model, Decoder | Backed)
    dora(model, str(base)).save(tmp_path / "ours")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "ours"), is_trainable=True).eval()
    tokens = torch.arange(3, 15)
    wanted = theirs(input_ids=tokens[None], use_cache=False).logits[0]
    assert (logits(model) - wanted).abs().max() < 1e-4 < (logits(sharing(model)) - wanted).abs().max()
    functional.cross_entropy(wanted[:-1], tokens[1:]).backward()
    layout = Layout(tokens, torch.arange(12), (0,), (12,), (-1,))
    functional.cross_entropy(model.head.logits(model.hidden(layout, torch.arange(11))), tokens[1:]).backward()
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for adapter in adapters(model):
        for name, place in zip(adapter.names, adapter.places, strict=True):
            stem = f"base_model.model.{name}."
            for end, own in (
                ("lora_A.weight", adapter.a.grad[place.inner]),  # type: ignore[index]
                ("lora_B.weight", adapter.b.grad[place.rows]),  # type: ignore[index]
                ("lora_magnitude_vector.weight", adapter.magnitude.grad[place.rows]),  # type: ignore[index, union-attr]
            ):
                torch.testing.assert_close(own, gradients[stem + end], rtol=1e-3, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    assert isinstance(again, Decoder | Backed) and again.lora is not None and again.lora.dora
    assert torch.allclose(logits(again), logits(model), atol=1e-5)


@pytest.mark.parametrize("quantize", ["", "int8"])
@pytest.mark.parametrize("kind", ["native", "gemma3_text"])
def test_merged_shared_and_copied_models_compute_what_they_should(kind: str, quantize: str, tmp_path: Path) -> None:
    base = base_of(kind, tmp_path / "base")
    model = load_model(base)
    assert isinstance(model, Decoder | Backed)
    dora(model, str(base), quantize=quantize)
    before, copied, engine = logits(model), frozen_copy(model), own_copy(model)
    assert isinstance(copied, Decoder | Backed) and isinstance(engine, Decoder | Backed)
    assert torch.equal(logits(copied), before) and torch.allclose(logits(engine), before, atol=1e-4)
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    other = sharing(model)
    assert {id(p) for p in other.parameters()} <= frozen and not list(adapters(other))
    merge(model)
    assert model.lora is None and torch.allclose(logits(model), before, atol=1e-4)


def test_a_run_learns_lengths_goes_on_exactly_and_is_merged(tmp_path: Path, tokenizer: Tokenizer) -> None:
    start = make("gemma3_text", tmp_path / "start", vocab_size=tokenizer.vocab_size)
    tokenizer.save(start)
    how: dict[str, Any] = dict(
        model=str(start), prompts=3, group=4, max_tokens=5, lr=5e-2, threads=1, env_workers=0, save_every=2, quiet=True,
        kl=0.01, lora=2, dora=True, lora_targets=("q_proj", "down_proj"),
    )  # fmt: skip
    whole = posttrain.rl(TASKS, digits, steps=4, out=str(tmp_path / "whole"), **how)
    posttrain.rl(TASKS, digits, steps=2, out=str(tmp_path / "parts"), **how)
    rest = posttrain.rl(TASKS, digits, out=str(tmp_path / "parts"), resume=True, steps=4, **how)
    assert rest.metrics == whole.metrics and whole.metrics[0]["ratio/first"] == 1.0 and whole.metrics[-1]["kl"] > 0
    last = tmp_path / "whole" / "checkpoints" / "step-000004"
    lengths = {n: t for n, t in load_file(last / "adapter_model.safetensors").items() if n.endswith("magnitude_vector")}
    weights = load_file(start / "model.safetensors")
    assert len(lengths) == 4
    for name, length in lengths.items():
        stored = name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")
        assert not torch.allclose(length, weights[stored].norm(dim=1), atol=1e-4)
    assert main(["merge", str(tmp_path / "whole"), "--out", str(tmp_path / "merged")]) == 0
    one, other = load_model(last), load_model(tmp_path / "merged")
    assert isinstance(one, Backed) and isinstance(other, Backed)
    assert torch.allclose(logits(one), logits(other), atol=1e-5)
    with pytest.raises(UserError, match="--dora has no effect without --lora RANK"):
        posttrain.rl(TASKS, digits, model=str(start), out=str(tmp_path / "never"), steps=1, dora=True)
