"""Adapters over packed weights: what is computed is what these say when unpacked, and runs remember how they were packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import adapt
from conftest import tiny
from digit_tasks import goes_on_exactly
from safetensors.torch import load_file
from tiny_models import make
from torch.nn import functional

from posttrain.cli.main import main
from posttrain.core.batch import Layout
from posttrain.models.adapters.lora import LoRA, shared_copy, sharing
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.losses.likelihood import token_logp
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.linear import Linear, accumulating
from posttrain.models.native.merged_weights import plain_weights
from posttrain.models.native.quantized import KINDS, QuantizedLinear
from posttrain.models.tokenizer.tokenizer import Tokenizer

TREE = Layout(
    torch.arange(3, 14), torch.tensor([0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]), (0, 3, 6), (3, 3, 5), (-1, 0, 0)
)  # fmt: skip


def unpacked(model: Decoder | Backed, plain: Decoder | Backed) -> Decoder | Backed:
    """The plain model with the weights that the packed ones stand for, adapters merged."""
    own = dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in plain_weights(model):
            own.pop(name).copy_(weight)
    assert not own
    return plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backed", [False, True], ids=["native", "backed"])
def test_products_and_gradients_are_those_of_the_unpacked_weights(
    kind: str, backed: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def fresh() -> Any:
        return load_model(make("gemma3_text", tmp_path / "m", vocab_size=64)) if backed else tiny(tokenizer)

    model, at = adapt(fresh(), LoRA(2, 4.0, quantize=kind)), torch.arange(10)
    logp = token_logp(model.hidden(TREE, at), model.head, TREE.tokens[1:])
    with accumulating():
        token_logp(model.hidden(TREE, at), model.head, TREE.tokens[1:]).sum().backward()
    learned = [p for p in model.parameters() if p.requires_grad]
    collected = [p.grad for p in learned]
    plain = torch.autograd.grad(logp.sum(), learned)
    for one, two in zip(collected, plain, strict=True):
        assert one is not None and torch.allclose(one, two, rtol=1e-4, atol=1e-5 * float(two.abs().max()))
    same = unpacked(model, fresh())
    wanted = token_logp(same.hidden(TREE, at), same.head, TREE.tokens[1:])
    assert torch.allclose(logp, wanted, atol=2e-4)
    assert not torch.allclose(logp, token_logp(fresh().hidden(TREE, at), model.head, TREE.tokens[1:]), atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_those_of_the_published_formats(kind: str) -> None:
    linear = Linear(128, 24, bias=True)
    with torch.no_grad():
        linear.weight.normal_(0.0, 0.1)
        linear.bias.normal_()  # type: ignore[union-attr]
    packed, x = QuantizedLinear(linear, kind), torch.randn(5, 128)
    if kind == "nf4":
        theirs = pytest.importorskip("bitsandbytes").nn.Linear4bit(128, 24, compress_statistics=False, quant_type="nf4")
        theirs.load_state_dict({"weight": linear.weight.detach(), "bias": linear.bias.detach()})  # type: ignore[union-attr]
        theirs = theirs.to("cpu")
        assert torch.allclose(packed(x), theirs(x), atol=1e-5)
    else:
        scale = linear.weight.detach().abs().amax(1) / 127
        whole = torch.stack([(row / s).round() * s for row, s in zip(linear.weight.detach(), scale, strict=True)])
        assert torch.allclose(packed(x), functional.linear(x, whole, linear.bias), atol=1e-5)
    held = sum(buffer.nbytes for buffer in packed.buffers())
    assert held <= (0.15 if kind == "nf4" else 0.27) * linear.weight.nbytes
    assert not any(name.endswith("weight") for name, _ in packed.named_parameters())
    error = (packed.weight - linear.weight).abs().max() / linear.weight.abs().max()
    assert 0 < error < (0.2 if kind == "nf4" else 0.005)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_packed_as_they_are_read_have_the_same_bits(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(tiny(tokenizer), tmp_path, tokenizer)
    how = LoRA(2, 4.0, quantize=kind)
    ours, theirs = adapt(load_model(tmp_path, packed=kind), how), adapt(load_model(tmp_path), how)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys() and any(name.endswith("packed") for name in mine)
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert not any(p.is_meta for p in ours.parameters()) and {p.device for p in ours.parameters()} == {ours.head.device}


def test_models_that_share_weights_share_the_packed_ones(tokenizer: Tokenizer) -> None:
    model = adapt(tiny(tokenizer), LoRA(2, 4.0, quantize="nf4"))
    for other in (sharing(model), shared_copy(model)):
        packed = [[m.packed for m in one.modules() if isinstance(m, QuantizedLinear)] for one in (model, other)]
        assert len(packed[0]) == 8 and all(one is two for one, two in zip(*packed, strict=True))
    before = sharing(model)
    assert all(m.adapter is None for m in before.modules() if isinstance(m, Linear))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backed", [False, True], ids=["native", "backed"])
def test_run_over_packed_weights_goes_on_exactly_and_is_opened_and_merged_as_it_was_trained(
    kind: str, backed: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    start = tmp_path / "start"
    if backed:
        make("phi3", start, vocab_size=tokenizer.vocab_size)
        tokenizer.save(start)
    else:
        save_model(tiny(tokenizer), start, tokenizer)
    whole = goes_on_exactly(
        tmp_path, 3, 2, model=str(start), prompts=2, group=3, max_tokens=5, lr=5e-2, threads=1, env_workers=0,
        save_every=2, quiet=True, kl=0.01, lora=2, quantize=kind,
    )  # fmt: skip
    assert whole.metrics[0]["ratio/first"] == 1.0 and whole.metrics[0]["sampler/gap/max"] < 1e-4
    assert whole.metrics[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    last = tmp_path / "whole" / "checkpoints" / "step-000003"
    assert json.loads((last / "posttrain_adapter.json").read_text())["quantize"] == kind
    assert main(["merge", str(tmp_path / "whole"), "--out", str(tmp_path / "merged")]) == 0
    one, other = load_model(last), load_model(tmp_path / "merged")
    assert any(isinstance(m, QuantizedLinear) for m in one.modules())  # type: ignore[attr-defined]
    at = torch.arange(11)
    with torch.no_grad():
        found = [m.head.logits(m.hidden(TREE, at)) for m in (one, other)]
    assert torch.allclose(*found, atol=1e-4)
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert names == load_file(start / "model.safetensors").keys()


def test_options_without_effect_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    words = ["sft", "--tasks", str(tmp_path / "rows.jsonl"), "--model", str(tmp_path / "start"), "--steps", "1"]
    capsys.readouterr()
    assert main([*words, "--threads", "1", "--out", str(tmp_path / "run"), "--quantize", "nf4"]) == 2
    assert "--quantize has no effect without --lora RANK" in " ".join(capsys.readouterr().err.split())
