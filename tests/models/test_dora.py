"""DoRA (arXiv 2402.09353): rows whose lengths learn by themselves, as its formula has it."""

from __future__ import annotations

import pytest
import torch
from adapted import SHAPE, WAYS, adapt, compiled_and_plain, laid, logits, loss_of
from torch import Tensor
from torch.nn import functional

from posttrain.core.batch import Layout
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.native.attention import SegmentAttention
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.linear import Linear, accumulating
from posttrain.models.native.merged_weights import plain_weights


def native(dtype: torch.dtype = torch.float64, targets: tuple[str, ...] = (), config: DecoderConfig = SHAPE) -> Decoder:
    model = new_decoder(config, 0).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.ndim == 2 else parameter.add_(0.1)
    adapt(model, LoRA(3, 6.0, dora=True), targets)
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
