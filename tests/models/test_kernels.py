"""What is computed in a way of its own for speed equals the plain way."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from heads import KINDS, new_head, plain_logits, tensors
from layouts import normal, segments
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from posttrain.core.types import Sampling
from posttrain.engines.local.kv_cache import attention, plain_attention
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.learners.adamw import AdamW
from posttrain.models.losses import divergence, likelihood
from posttrain.models.losses.likelihood import Hidden, token_logp, token_logp_entropy, token_logp_top
from posttrain.models.native import head as head_module
from posttrain.models.native.attention import SegmentAttention, filled
from posttrain.models.native.decoder import Decoder, causal, new_decoder
from posttrain.models.native.fused import norm_linear, rms_norm, swiglu, swiglu_linear
from posttrain.models.native.head import Head
from posttrain.models.native.linear import Linear, accumulating, in_blocks, narrowed, narrowed_rows, product
from posttrain.models.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads multiply numbers in bfloat16, as on a GPU under autocast, which has ended when gradients are computed."""

    def narrow_type(hidden: Tensor) -> torch.dtype | None:
        in_backward_pass = torch._C._current_graph_task_id() >= 0
        return None if in_backward_pass else torch.bfloat16

    for module in (head_module, likelihood, divergence):
        monkeypatch.setattr(module, "narrow_type", narrow_type)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [True, False], ids=["logits kept", "logits made again"])
@pytest.mark.parametrize("accumulated", [True, False])
@pytest.mark.usefixtures("narrow")
def test_a_head_in_bfloat16_rounds_what_it_multiplies_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, accumulated: bool, kept: bool, kind: str
) -> None:
    monkeypatch.setattr(likelihood, "BLOCK_LOGITS", 9 * 64)
    monkeypatch.setattr(likelihood, "KEPT_LOGITS", 1 << 20 if kept else 0)
    made, target = new_head(kind, 200, 5, torch.Generator().manual_seed(1), torch.float32), torch.arange(9) * 20
    head = replace(made, weight=nn.Parameter(made.weight.detach()))
    hidden = normal(9, 5).float().requires_grad_()
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (hidden, head.weight)]
    bias = None if head.bias is None else head.bias.detach().double().requires_grad_()
    exact = replace(head, weight=rounded[1], bias=bias)
    logs = (plain_logits(rounded[0], exact) / 0.7).log_softmax(-1)
    logp, entropy = token_logp_entropy(hidden, head, target, 0.7)
    wanted = logs.gather(-1, target[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    for found, right in zip((logp, entropy), wanted, strict=True):
        assert torch.allclose(found.double(), right, rtol=1e-4, atol=1e-4)
    inputs, others = (hidden, *tensors(head)), (*rounded, *([] if bias is None else [bias]))
    ours, theirs = ((a * normal(9, seed=2)).sum() + (b * normal(9, seed=3)).sum() for a, b in ((logp, entropy), wanted))
    if accumulated:
        with accumulating():
            ours.backward()
        gradients = [x.grad for x in inputs]
    else:
        gradients = list(torch.autograd.grad(ours, inputs))
    for found, right in zip(gradients, torch.autograd.grad(theirs, others), strict=True):
        assert found is not None and found.dtype == torch.float32
        assert (found - right).norm() <= 6e-3 * right.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("narrow")
def test_the_gradient_of_a_logit_is_rounded_once(kind: str) -> None:
    """Of one token: the gradient of a row of the weight is then that of its logit times the state."""
    head = new_head(kind, 200, 5, torch.Generator().manual_seed(1), torch.float32)
    hidden, target = normal(1, 5).float(), torch.tensor([20])
    rounded = [x.detach().bfloat16().double() for x in (hidden, head.weight)]
    exact = replace(head, weight=rounded[1].requires_grad_(), bias=None if head.bias is None else head.bias.double())
    wanted = (plain_logits(rounded[0], exact) / 0.7).log_softmax(-1)[0, 20]
    found, right = (
        torch.autograd.grad(logp.sum(), weight)[0]
        for logp, weight in ((token_logp(hidden, head, target, 0.7), head.weight), (wanted, exact.weight))
    )
    noise = 1e-6 * right.abs().max()  # of float32, where a cap is nearly reached
    assert ((found - right).abs() <= 1.01 * 2**-8 * right.abs() + noise).all()


@pytest.mark.usefixtures("narrow")
def test_logits_in_bfloat16_can_be_differentiated_twice() -> None:
    head = new_head("plain", 200, 5, torch.Generator().manual_seed(1), torch.float32)
    hidden, along = normal(9, 5).float().requires_grad_(), normal(200, 5, seed=4).float()
    found = []
    for logits in (head.logits(hidden), plain_logits(hidden, head)):
        (first,) = torch.autograd.grad(logits.softmax(-1).square().sum(), head.weight, create_graph=True)
        found.append(torch.autograd.grad((first * along).sum(), head.weight)[0])
    assert (found[0] - found[1]).norm() <= 5e-2 * found[1].norm()


@pytest.mark.parametrize("kept", [True, False], ids=["logits kept", "logits made again"])
@pytest.mark.usefixtures("narrow")
def test_a_divergence_of_heads_in_bfloat16_is_that_of_their_logits(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    monkeypatch.setattr(likelihood, "KEPT_LOGITS", 1 << 20 if kept else 0)
    generator = torch.Generator().manual_seed(1)
    both = [Hidden(normal(9, 5, seed=k).float(), new_head("plain", 200, 5, generator, torch.float32)) for k in (0, 1)]
    both[0].states.requires_grad_()
    p, q = (h.logits(slice(0, 9)).log_softmax(-1) for h in both)
    wanted = (p.exp() * (p - q)).sum(-1)
    _, found, *_ = divergence.measured_divergence(*both, torch.arange(9), divergence.REVERSE, (1.0, 1.0), False)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(x.sum(), both[0].states)[0] for x in (found, wanted))
    assert (ours - theirs).norm() <= 6e-3 * theirs.norm()


@pytest.mark.parametrize("kind", ["a view", "narrower", "kept"])
def test_rows_of_a_weight_are_converted_alone_unless_the_whole_is_kept(kind: str) -> None:
    """A head goes block by block: of a large vocabulary each would convert the whole of it."""
    weight = nn.Parameter(normal(100, 4).to(torch.bfloat16 if kind == "narrower" else torch.float32))
    dtype = torch.float32 if kind == "narrower" else torch.bfloat16
    given = weight.detach() if kind == "a view" else weight
    with accumulating():
        found = narrowed_rows(given, slice(10, 13), dtype)
        assert torch.equal(found, weight[10:13].to(dtype))
        if kind == "kept":
            assert found.untyped_storage().data_ptr() == narrowed(weight, dtype).data_ptr()
        else:
            assert found.untyped_storage().nbytes() == found.nbytes


@pytest.mark.parametrize("shape", [(32,), (6, 32)], ids=["of states", "of heads"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_norm_has_the_type_of_what_it_norms(device: str, shape: tuple[int, ...]) -> None:
    """Also under float32 weights: attention by flash kernels takes bfloat16 alone. Nothing is computed."""
    with FakeTensorMode():
        x, weight = torch.empty(7, *shape, dtype=torch.bfloat16, device=device), torch.empty(*shape, device=device)
        assert rms_norm(x, weight, 1e-5).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [True, False], ids=["logits kept", "logits made again"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_likelihood_in_blocks_equals_the_plain_softmax(
    monkeypatch: pytest.MonkeyPatch, kept: bool, temperature: float, kind: str
) -> None:
    monkeypatch.setattr(likelihood, "BLOCK_LOGITS", 9 * 64)  # blocks of 64, the last one of 8
    monkeypatch.setattr(likelihood, "KEPT_LOGITS", 1 << 20 if kept else 0)
    hidden, head = normal(9, 5).requires_grad_(), new_head(kind, 200, 5, torch.Generator().manual_seed(1))
    target = torch.tensor([0, 63, 64, 127, 128, 191, 192, 199, 5])
    weight, other = normal(9, seed=2), normal(9, seed=3)

    def plain() -> tuple[Tensor, Tensor]:
        logs = (plain_logits(hidden, head) / temperature).log_softmax(-1)
        return logs.gather(-1, target[:, None])[:, 0], -(logs.exp() * logs).sum(-1)

    for ours, theirs in (
        ((token_logp(hidden, head, target, temperature),), plain()[:1]),
        (token_logp_entropy(hidden, head, target, temperature), plain()),
    ):
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
        total, expected = (
            sum((part * w).sum() for part, w in zip(parts, (weight, other), strict=False)) for parts in (ours, theirs)
        )
        gradients, others = (torch.autograd.grad(x, (hidden, *tensors(head))) for x in (total, expected))
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(gradients, others, strict=True))


@pytest.mark.parametrize("entropies", ["none", "constant", "learned"])
def test_mass_of_the_most_likely_token_is_that_of_the_softmax_and_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, entropies: likelihood.Entropies
) -> None:
    monkeypatch.setattr(likelihood, "BLOCK_LOGITS", 9 * 64)
    hidden, head = normal(9, 5).requires_grad_(), new_head("tied", 200, 5, torch.Generator().manual_seed(1))
    target, added = torch.arange(9) * 22, likelihood._added

    def made() -> tuple[Tensor, list[Tensor]]:
        logp, entropy, top = token_logp_top(hidden, head, target, 0.7, entropies)
        assert not top.requires_grad and (entropy is None) == (entropies == "none")
        rest = [logp] if entropy is None else [logp, entropy]
        total = sum((part.square().sum() for part in rest if part.requires_grad), torch.zeros(()))
        return top, [*rest, *torch.autograd.grad(total, (hidden, *tensors(head)))]

    top, rest = made()
    expected = (plain_logits(hidden, head) / 0.7).softmax(-1).amax(-1)
    assert torch.allclose(top, expected, rtol=1e-12) and top.unique().numel() == 9
    monkeypatch.setattr(likelihood, "_added", lambda *given: (*added(*given)[:3], torch.full((9,), torch.nan)))
    assert all(map(torch.equal, rest, made()[1]))


@pytest.mark.parametrize("size", [50.0, 300.0])
def test_logits_hundreds_of_nats_apart_have_the_log_probabilities_of_float64(size: float) -> None:
    weight, target = torch.tensor([[0.0], [size], [-size], [size - 1]]), torch.tensor([1, 2])
    logp, entropy = token_logp_entropy(torch.ones(2, 1), Head(weight), target)
    expected = weight[:, 0].double().log_softmax(-1)
    assert logp.tolist() == pytest.approx(expected[target].tolist(), abs=1e-3)
    assert entropy.tolist() == pytest.approx([-(expected.exp() * expected).sum().item()] * 2, abs=1e-3)


def test_likelihood_of_no_token_is_empty_and_has_a_gradient_of_zero() -> None:
    hidden, head = normal(0, 5).requires_grad_(), normal(20, 5).requires_grad_()
    logp, entropy = token_logp_entropy(hidden, Head(head), torch.zeros(0, dtype=torch.int64))
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,) and head.grad is not None and not head.grad.any()


def test_norm_has_the_gradients_of_its_formula() -> None:
    x = normal(4, 3, 6).requires_grad_()
    for weight in (normal(6, seed=1).requires_grad_(), normal(3, 6, seed=1).requires_grad_()):
        with torch.no_grad():
            assert torch.allclose(
                rms_norm(x, weight, 0.1), functional.rms_norm(x, (6,), None, 0.1) * weight, rtol=1e-12
            )
        assert gradcheck(rms_norm, (x, weight, 0.1)) and gradgradcheck(rms_norm, (x, weight, 0.1))


def test_norm_of_narrow_numbers_is_computed_in_float32() -> None:
    x, weight = normal(5, 64).bfloat16(), normal(64, seed=1).bfloat16()
    wide = functional.rms_norm(x.float(), (64,), weight.float(), 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), wide.bfloat16())


@pytest.mark.parametrize("grad", [True, False])
def test_it_makes_no_difference_whether_the_numbers_of_a_row_lie_together(model: Decoder, grad: bool) -> None:
    layer, config = cast(Any, model.layers[0]), model.config
    states, halves = (normal(9, 2 * n).float()[:, ::2] for n in (config.hidden, 2 * config.intermediate))
    assert not (states.is_contiguous() or halves.is_contiguous())
    with accumulating(), torch.set_grad_enabled(grad):
        apart, together = (
            (norm_linear(x, layer.mlp_norm.weight, 1e-5, layer.gate_up), swiglu_linear(y, layer.down))
            for x, y in ((states, halves), (states.contiguous(), halves.contiguous()))
        )
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(apart, together, strict=True))


def test_gated_activation_has_the_gradients_of_its_formula() -> None:
    x = normal(4, 6).requires_grad_()
    gate, up = x.chunk(2, -1)
    assert torch.allclose(swiglu(x), functional.silu(gate) * up, rtol=1e-12)
    assert gradcheck(swiglu, x) and gradgradcheck(swiglu, x)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_of_every_device_gives_the_same_mass_and_mixture(dtype: torch.dtype, error: float) -> None:
    q, k, v = (normal(3, 2, n, 8, seed=n).to(dtype) for n in (4, 9, 9))
    mask = torch.zeros(3, 1, 1, 9, dtype=dtype)
    mask[0, :, :, 5:] = float("-inf")
    for ours, theirs in zip(attention(q, k, v, mask), plain_attention(q, k, v, mask), strict=True):
        assert ours.dtype == theirs.dtype and torch.allclose(ours.double(), theirs.double(), atol=error)


def test_attention_to_own_tokens_and_prefix_apart_equals_attention_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.models.native.attention.PREFIX_TOKENS", 1)
    layout = segments((9, -1), (30, 0), (3, 0), (31, 0), (1, 0), (14, -1), (12, 5), (2, -1), (29, 5), (30, 0))
    total = len(layout.tokens)
    q, k, v = (normal(total, heads, 8, seed=heads).requires_grad_() for heads in (4, 2, 2))
    attend, weight = SegmentAttention(layout), normal(total, 4, 8, seed=5)
    joined = attend(0, q, k, v)
    gradients = torch.autograd.grad((joined * weight).sum(), (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        masked = attend(0, q, k, v)
    others = torch.autograd.grad((masked * weight).sum(), (q, k, v))
    assert torch.allclose(joined, masked, rtol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(gradients, others, strict=True))


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_tokens_that_fill_up_a_layout_are_seen_by_nobody(model: Decoder, multiple: int) -> None:
    layout = segments((9, -1), (30, 0), (3, 0), (7, -1))
    layout = replace(layout, tokens=torch.arange(49) % 16, position=torch.cat([torch.arange(n) for n in layout.length]))
    full = filled(layout, multiple)
    assert len(full.tokens) % multiple == 0 and sum(full.length) == len(full.tokens)
    wide = copy.deepcopy(model).double()
    at = torch.tensor([0, 8, 38, 48])
    expected, found = (wide(part.tokens, part.position, SegmentAttention(part), at) for part in (layout, full))
    assert torch.allclose(expected, found, rtol=1e-12)


def test_hidden_states_in_bfloat16_are_those_of_float32_nearly(model: Decoder) -> None:
    """With rows filled up inside, and as many as were asked for."""
    layout = segments((9, -1), (30, 0), (3, 0), (7, -1))
    layout = replace(layout, tokens=torch.arange(49) % 16, position=torch.cat([torch.arange(n) for n in layout.length]))
    at = torch.tensor([0, 8, 38, 48, 48])
    expected = model.hidden(layout, at)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.hidden(layout, at)
        nothing = model.hidden(layout, at[:0])
    assert found.shape == expected.shape and nothing.shape == (0, expected.shape[1])
    assert ((found - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_gradients_added_where_they_lie_are_those_of_torch(
    model: Decoder, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two passes: an embedding that is the output head too, products with and without a bias, norms."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    monkeypatch.setattr("posttrain.models.native.kernels.build._used", False)  # compiled code rounds elsewhere
    mine, other = copy.deepcopy(model).to(dtype), copy.deepcopy(model).to(dtype)
    for number in (0, 1):
        tokens = torch.arange(3 + number, 12)
        for decoder, context in ((mine, accumulating), (other, nullcontext)):
            with context(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                hidden = decoder(tokens, torch.arange(len(tokens)), causal)
                token_logp(hidden, decoder.head, tokens).sum().backward()
    assert mine.embed.weight.grad is not None and mine.config.tied
    for ours, theirs in zip(mine.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < (1e-12 if precision == "float64" else 1e-3)


def test_weights_that_are_not_trained_get_no_gradient_where_others_do() -> None:
    layer = Linear(4, 3, bias=False)
    torch.nn.init.ones_(layer.weight).requires_grad_(False)
    x = normal(2, 4).float().requires_grad_()
    with accumulating():
        layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None and x.grad.eq(3).all()


def test_an_engine_without_requests_holds_no_cache(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = LocalEngine(model, tokenizer)
    engine.submit(0, [5, 6, 7], Sampling(max_tokens=3, seed=1))
    assert engine.poll() and not engine.running
    assert engine._cache.bytes == 0 and not engine.waiting.prefixes


def test_adamw_takes_the_steps_of_torch() -> None:
    ours, theirs = ([nn.Parameter(normal(3, 4)), nn.Parameter(normal(4, seed=1))] for _ in range(2))
    own = AdamW(
        [{"params": ours[:1], "weight_decay": 0.1}, {"params": ours[1:], "weight_decay": 0.0}], 0.01, (0.9, 0.95), 1e-8
    )
    peer = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    for step in range(5):
        for parameters in (ours, theirs):
            for number, parameter in enumerate(parameters):
                parameter.grad = normal(*parameter.shape, seed=10 * step + number)
                if step == 2 and number == 1:
                    parameter.grad = None  # is left alone, moments included
        own.step()
        peer.step()
        assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(ours, theirs, strict=True))


def test_rollouts_are_sampled_from_weights_that_were_replaced(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = LocalEngine(model, tokenizer)

    def logp() -> float:
        engine.submit(0, [5, 6, 7], Sampling(max_tokens=2, seed=1))
        (done,) = engine.poll()
        tokens = torch.tensor([5, 6, 7, *done.tokens])
        with torch.no_grad():
            logs = (model(tokens, torch.arange(5), causal) @ model.head.weight.T).log_softmax(-1)
        assert done.logp == pytest.approx([logs[i, tokens[i + 1]].item() for i in (2, 3)], abs=1e-5)
        return done.logp[1]

    before = logp()
    fresh = new_decoder(model.config, seed=99)
    for parameter, other in zip(model.parameters(), fresh.parameters(), strict=True):
        parameter.data = other.data * 3  # which no version of a tensor tells
    engine.load(model, 1)
    assert logp() != before


def test_a_first_update_imports_no_compiler() -> None:
    code = """
import sys, torch
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import DecoderConfig, new_decoder
from posttrain.training.sources.sft_source import LikelihoodObjective as Likelihood
from posttrain.core.transcripts import Transcript
from posttrain.models.native.kernels import build
from posttrain.training.sources.packing import collate
t = Transcript()
t.observe([1, 2])
t.imitate([3, 4])
batch = collate([[t]], [0], weight=torch.ones(1))
learner = LocalLearner(new_decoder(DecoderConfig(16, 8, 1, 2, 1, 4, 16, 16), 0), Optimization())
learner.update([batch], Likelihood())
print([m for m in ("torch._dynamo", "torch._inductor", "transformers") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_blocks_are_tried_as_many_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr("posttrain.models.native.linear._as_in_blocks", lambda *case: tried.append(case[:2]) or True)
    with torch.no_grad(), in_blocks(64):
        product(torch.zeros(192, 3), torch.zeros(5, 3), None)
    assert tried == [(3, 64)]


@pytest.mark.parametrize("library_agrees", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_of_a_product_as_in_blocks_depends_on_no_other_row(
    library_agrees: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, 48, generator=generator)
    weight, bias = torch.randn(96, 48, generator=generator), torch.randn(96, generator=generator)
    if not library_agrees:
        monkeypatch.setattr("posttrain.models.native.linear._as_in_blocks", lambda *_: False)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16), in_blocks(64):
        together = product(x, weight, bias)
        assert together.dtype == dtype
        for start in range(0, 320, 64):
            rows = slice(start, start + 64)
            assert torch.equal(together[rows], product(x[rows], weight, bias))
        assert torch.allclose(
            together.float(), x @ weight.t() + bias, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.3
        )
        with pytest.raises(AssertionError, match="whole blocks"):
            product(x[:63], weight, None)


def test_entropy_has_its_own_gradient_at_any_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    entropy = token_logp_entropy(hidden, Head(head), torch.arange(5), 0.6)[1]
    logp = (hidden @ head.t() / 0.6).log_softmax(-1)
    plain = -(logp.exp() * logp).sum(-1)
    (ours,), (theirs,) = (torch.autograd.grad(x.sum(), hidden) for x in (entropy, plain))
    assert torch.allclose(entropy, plain) and torch.allclose(ours, theirs)


def test_gradient_of_a_bias_is_the_same_where_gradients_are_accumulated() -> None:
    layer = Linear(3, 2, True)
    with torch.no_grad():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    x = torch.randn(7, 3)
    layer(x).square().sum().backward()
    plain = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    with accumulating():
        layer(x).square().sum().backward()
    assert all(p.grad is not None and torch.allclose(p.grad, g) for p, g in zip(layer.parameters(), plain, strict=True))
