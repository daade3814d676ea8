"""Low-rank adapters: what they compute, how they learn, and in which form they are stored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch
from adapted import SHAPE, WAYS, adapt, compiled_and_plain, laid, loss_of
from conftest import tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from posttrain.core.batch import Layout
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_folder import fingerprint
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import TARGETS, LoRA, attach, begin
from posttrain.models.checkpoint_folder import load_backbone, load_model
from posttrain.models.native.attention import SegmentAttention
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import checkpoint_tensors, save_model
from posttrain.models.native.linear import Linear, accumulating
from posttrain.models.native.merged_weights import plain_weights
from posttrain.models.tokenizer.tokenizer import Tokenizer


def adapted(
    targets: tuple[str, ...] = TARGETS, dtype: torch.dtype = torch.float64, rank: int = 3, config: DecoderConfig = SHAPE
) -> Decoder:
    model = new_decoder(config, 0).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    adapt(model, LoRA(rank, 2.0 * rank), targets)
    return model


def plainly(model: Decoder, layout: Layout, at: Tensor, target: Tensor) -> Tensor:
    """The same loss, with W + scale * B A as one weight that torch's own operations make and differentiate."""
    other = new_decoder(model.config, 9).to(model.head.dtype)
    weights = {name: parameter.detach() for name, parameter in other.named_parameters()}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if f"{name}.{key}" in weights:
                weights[f"{name}.{key}"] = parameter
        if isinstance(module, Linear) and (adapter := module.adapter) is not None:
            shift = torch.zeros_like(module.weight)
            for place in adapter.places:
                product = adapter.scale * adapter.b[place.rows] @ adapter.a[place.inner]
                shift = torch.cat((shift[: place.outputs.start], product, shift[place.outputs.stop :]))
            weights[f"{name}.weight"] = module.weight + shift
    if model.output is not None:
        weights["output"] = model.output
    given = (layout.tokens, layout.position, SegmentAttention(layout), at)
    hidden = torch.func.functional_call(other, weights, given)
    return functional.cross_entropy(hidden @ weights["output"].t(), target)


@pytest.mark.parametrize("targets", WAYS, ids=" ".join)
def test_gradients_of_adapters_equal_those_of_the_formula_with_shared_prompts(targets: tuple[str, ...]) -> None:
    model = adapted(targets)
    learning = [p for p in model.parameters() if p.requires_grad]
    assert len(learning) == 2 * len(list(adapters(model))) > 0
    expected_loss = plainly(model, *laid())
    expected = torch.autograd.grad(expected_loss, learning)
    torch.testing.assert_close(loss_of(model, *laid()), expected_loss, rtol=1e-12, atol=0)
    for gradient, own in zip(expected, torch.autograd.grad(loss_of(model, *laid()), learning), strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-10, atol=1e-13)
    with accumulating():
        loss_of(model, *laid()).backward()
    for gradient, parameter in zip(expected, learning, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", WAYS, ids=" ".join)
def test_compiled_gradients_of_adapters_equal_those_of_torch(targets: tuple[str, ...], precision: str) -> None:
    rough = 0.05 if precision == "bfloat16" else 1e-4
    for one, other in compiled_and_plain(lambda: adapted(targets, torch.float32), precision):
        torch.testing.assert_close(one, other, rtol=rough, atol=rough * float(other.abs().max()))


def test_gradients_of_micro_batches_add_up_to_that_of_all() -> None:
    layout, at, target = laid()
    halves = [(at[:4], target[:4]), (at[4:], target[4:])]
    found = []
    for parts in ([(at, target)], halves):
        model = adapted()
        with accumulating():
            for places, tokens in parts:
                (loss_of(model, layout, places, tokens) * (len(places) / len(at))).backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_a_step_of_a_full_rank_adapter_is_a_step_of_the_full_weight() -> None:
    """With B = 0 and orthonormal A the gradient of B is s G A^T, so W - rate s^2 G A^T A = W - rate s^2 G for square A."""
    rate, scale = 0.05, 1.7
    square = DecoderConfig(vocab=40, hidden=24, layers=2, heads=4, kv_heads=4, head_size=6, intermediate=24, context=64)
    model = new_decoder(square, 0).to(torch.float64)
    whole = new_decoder(square, 0).to(torch.float64)
    attach(model, LoRA(24, 24 * scale), lambda name: True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in adapters(model):
            for place in adapter.places:
                drawn = torch.randn(24, 24, generator=generator, dtype=torch.float64)
                adapter.a[place.inner].copy_(torch.linalg.qr(drawn).Q)
            adapter.b.zero_()
    for one, step in ((model, rate / scale**2), (whole, rate)):
        with accumulating():
            loss_of(one, *laid()).backward()
        with torch.no_grad():
            for parameter in one.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=step)
    weights = dict(whole.named_parameters())
    for name, merged in plain_weights(model):
        if name.startswith("layers") and "norm" not in name:
            torch.testing.assert_close(merged, weights[name], rtol=0, atol=1e-9)


def test_new_adapters_change_nothing_and_begin_as_peft_has_it() -> None:
    model = new_decoder(SHAPE, 0)
    before = loss_of(model, *laid())
    attach(model, LoRA(3, 6.0), lambda name: True)
    begin(model, 1)
    assert torch.equal(loss_of(model, *laid()), before)
    bound = 1 / math.sqrt(24)
    for adapter in adapters(model):
        assert not adapter.b.any()
        low = 1 / math.sqrt(adapter.a.shape[1])
        assert 0.8 * low < adapter.a.abs().max() <= low <= bound
    begun = [adapter.a[place.inner, :8] for adapter in adapters(model) for place in adapter.places]
    assert all(not torch.equal(a, b) for a, b in combinations(begun, 2)), "each matrix begins elsewhere"
    some = new_decoder(SHAPE, 0)
    attach(some, LoRA(3, 6.0), lambda name: name.endswith("v_proj"))
    begin(some, 1)
    v = next(adapters(some))
    assert torch.equal(next(adapters(model)).a[6:9], v.a), "whichever others are adapted"


def test_merged_weights_are_one_product_and_compute_the_same() -> None:
    model, merged = adapted(), new_decoder(SHAPE, 9).to(torch.float64)
    merged.load_state_dict(dict(plain_weights(model)))
    torch.testing.assert_close(loss_of(merged, *laid()), loss_of(model, *laid()), rtol=1e-12, atol=0)


# -- storage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    folder = tmp_path / "base"
    tiny(tokenizer).save(folder)
    tokenizer.save(folder)
    return folder


def saved(base: Path, folder: Path) -> Decoder:
    """An adapted model of a folder, saved in another one."""
    model = load_model(base)
    assert isinstance(model, Decoder)
    adapt(model, LoRA(4, 6.0, base=str(base), digest=fingerprint(base)))
    model.save(folder)
    return model


def logits(model: Decoder, tokens: list[int]) -> Tensor:
    from posttrain.models.native.decoder import causal

    with torch.no_grad():
        return model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), causal))


Opened = Callable[[Path], Tensor]
TOKENS = [3, 7, 11, 5, 9, 20, 4]


def test_adapters_that_peft_saved_open_here_with_equal_logits(base: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM", use_rslora=True)
    theirs = peft.get_peft_model(theirs, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2, generator=generator)
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    assert isinstance(model, Decoder)
    torch.testing.assert_close(logits(model, TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_over_another_base_is_refused(base: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    saved(base, tmp_path / "adapter")
    load_model(tmp_path / "adapter")
    tiny(tokenizer, seed=1).save(base)
    with pytest.raises(UserError, match="trained on other weights"):
        load_model(tmp_path / "adapter")


def test_stored_tensors_of_an_adapted_model_are_those_of_the_merged_one(base: Path, tmp_path: Path) -> None:
    model = saved(base, tmp_path / "adapter")
    before = dict(checkpoint_tensors(load_model(base)))  # type: ignore[arg-type]
    found = dict(checkpoint_tensors(model))
    assert found.keys() == before.keys()
    name = "model.layers.1.self_attn.v_proj"
    stored = dict(_stored(tmp_path / "adapter"))
    a, b = (stored[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    torch.testing.assert_close(found[f"{name}.weight"], before[f"{name}.weight"] + 6 / 4 * b @ a)
    assert torch.equal(found["model.norm.weight"], before["model.norm.weight"])


def test_a_critic_begins_from_an_adapted_model_with_the_merged_weights_all_of_which_learn(
    base: Path, tmp_path: Path
) -> None:
    model = saved(base, tmp_path / "adapter")
    backbone, _ = load_backbone(tmp_path / "adapter")
    assert isinstance(backbone, Decoder) and backbone.lora is None and not list(adapters(backbone))
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    torch.testing.assert_close(logits(backbone, TOKENS), logits(model, TOKENS), rtol=1e-4, atol=1e-4)


def _stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


REFUSED = {
    "another kind": ({"peft_type": "LOHA"}, "only LORA"),
    "dora without lengths": ({"use_dora": True}, "lacks"),
    "ranks by name": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "biases": ({"bias": "all"}, "bias"),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "whole modules": ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
    "what names no module": ({"modules_to_save": [["score"]]}, "modules_to_save"),
    "no rank": ({"r": 0}, "r is 0"),
    "another rank": ({"r": 3}, "has shape"),
    "no base": ({"base_model_name_or_path": None}, "is empty"),
    "a base that is gone": ({"base_model_name_or_path": "/nowhere"}, "does not exist"),
    "a reward model": ({"task_type": "SEQ_CLS"}, "reward model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_are_none_of_ours_are_refused_in_one_line(base: Path, tmp_path: Path, name: str) -> None:
    changes, told = REFUSED[name]
    file = tmp_path / "adapter" / "adapter_config.json"
    saved(base, file.parent)
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(UserError) as error:
        load_model(file.parent)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("more", "holds"),
        ("less", "lacks"),
        ("nan", "not finite"),
        ("cut", "damaged"),
        ("whole numbers", "stored as I8"),
    ],
)
def test_damaged_adapters_are_refused_in_one_line(base: Path, tmp_path: Path, damage: str, told: str) -> None:
    saved(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = _stored(file.parent)
    first = min(tensors)
    if damage == "more":
        tensors["base_model.model.lm_head.lora_A.weight"] = tensors[first].clone()
    elif damage == "less":
        del tensors[first]
    elif damage == "nan":
        tensors[first][0, 0] = math.nan
    elif damage == "whole numbers":
        tensors[first] = tensors[first].to(torch.int8)
    save_file(tensors, file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=told):
        load_model(file.parent)


def test_ranks_for_which_there_is_no_memory_are_refused_before_it_is_taken(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(base)
    assert isinstance(model, Decoder)
    monkeypatch.setattr("posttrain.models.adapters.lora.available_memory", lambda device: 2.0**20)
    attach(model, LoRA(4, 8.0), lambda name: True)
    with pytest.raises(UserError, match="adapters of rank 65,536 need more than the 0.0 GiB of free memory"):
        attach(model, LoRA(65_536, 8.0), lambda name: True)


def test_a_fingerprint_is_of_the_numbers_and_not_of_how_they_are_divided_over_files(base: Path, tmp_path: Path) -> None:
    model = load_model(base)
    assert isinstance(model, Decoder)
    save_model(model, tmp_path / "parts", shard_bytes=5000)
    assert len(list((tmp_path / "parts").glob("model-*"))) > 1
    assert fingerprint(tmp_path / "parts") == fingerprint(base)
    with torch.no_grad():
        model.layers[1].o.weight[0, 0] += 1  # type: ignore[index, union-attr]
    save_model(model, tmp_path / "other")
    assert fingerprint(tmp_path / "other") != fingerprint(base)
