"""Offloading leaves all bits as they are, and takes less memory of the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from second_device import bytes_held, peak, second_device
from sharded import micro_batches
from torch import Tensor

from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.learners import host_memory, optimizer_chunks
from posttrain.learners.devices import moved
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.critic import ValueModel
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.training import memory_estimate
from posttrain.training.memory_estimate import UpdateSize, estimate_memory

SECOND = second_device()
SHAPE = DecoderConfig(41, 16, 1, 2, 1, 8, 24, 64, qk_norm=True)


class Loss:
    """Likelihood, values and the exact distance from a reference."""

    def __init__(self, *wants: str) -> None:
        self.wants = frozenset(wants)

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        loss = -(batch.weight * outputs.logp).sum()
        if outputs.kl is not None:
            loss = loss + 0.1 * (batch.weight * outputs.kl).sum()
        return loss if outputs.value is None else loss + (batch.weight * (outputs.value - 1) ** 2).sum()


def learner(
    offload: Collection[str] = (), optimizer: str = "adamw", shape: DecoderConfig = SHAPE, recompute: bool = False
) -> LocalLearner:
    """A learner on the second device."""
    model: Any = new_decoder(shape, 0).to(SECOND)
    if recompute:
        model.recompute_layers()
    others: Any = {REFERENCE: new_decoder(shape, 1).to(SECOND).requires_grad_(False)}
    critic = ValueModel(shape.hidden, new_decoder(shape, 5), 0).to(SECOND)
    plan = Optimization(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, optimizer=optimizer)
    return LocalLearner(model, plan, others=others, critic=critic, offload=offload)


def batches(count: int = 2) -> list[Batch]:
    return [moved(batch, SECOND) for batch in micro_batches(count)]


def updated(of: LocalLearner, times: int = 3, loss: Loss | None = None) -> list[Tensor]:
    """Update, and return all weights."""
    for _ in range(times):
        stats = of.update(batches(), loss or Loss("value", "kl"))
        assert stats["skipped"][0] == 0
    return weights(of)


def weights(of: LocalLearner) -> list[Tensor]:
    return [p.detach().cpu() for part in of.parts for p in part.parameters.values()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.fixture(scope="module")
def whole() -> dict[str, list[Tensor]]:
    """Weights after updates with everything on the device, by optimizer."""
    return {name: updated(learner(optimizer=name)) for name in OPTIMIZERS}


OPTIMIZERS = ("adamw", "muon", "radam", "torch.optim:SGD")


@pytest.mark.parametrize(
    ("optimizer", "chunk"), [("adamw", 1), ("adamw", 1 << 28), ("muon", 1), ("radam", 1), ("torch.optim:SGD", 1)]
)
def test_moments_on_the_host_take_the_same_steps(
    optimizer: str, chunk: int, whole: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_chunks, "CHUNK", chunk)
    ours = learner(["optimizer"], optimizer)
    assert same(updated(ours), whole[optimizer])
    kept = [
        value for part in ours.parts for p in part.parameters.values() for value in ours.optimizer.state[p].values()
    ]
    assert {x.device.type for x in kept if isinstance(x, Tensor)} <= {"cpu"}
    assert bool(kept) == (optimizer != "torch.optim:SGD")


def test_a_step_fetches_the_moments_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {}
    for chunk in (1, 1 << 28):
        monkeypatch.setattr(optimizer_chunks, "CHUNK", chunk)
        ours = learner(["optimizer"])
        ours.update(batches(), Loss())  # makes the moments
        for parameter in (parameters := [p for part in ours.parts for p in part.parameters.values()]):
            parameter.grad = torch.ones_like(parameter)
        before = bytes_held()
        with peak() as found:
            ours.optimizer.step()
        moments = 2 * sum(p.nbytes for p in parameters)
        assert found[0] <= 1.01 * (before + moments), "no moments are there twice"
        most[chunk] = found[0] - before
    largest = 2 * max(p.nbytes for p in parameters)
    assert largest <= most[1] < 1.5 * largest and most[1] < most[1 << 28] / 4 and most[1 << 28] >= moments


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_activations_on_the_host_give_the_same_gradients(
    recompute: bool, whole: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "LEAST", 1)
    assert same(updated(learner(["activations"], recompute=recompute)), whole["adamw"])


def test_activations_leave_the_device_until_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "LEAST", 1)
    deep = DecoderConfig(41, 16, 8, 2, 1, 8, 24, 64)
    batch = batches()[0]
    kept = {}
    for how in ("device", "host", "recomputed", "recomputed, host"):
        ours = learner(["activations"] * ("host" in how), shape=deep, recompute="recomputed" in how)
        before = bytes_held()
        outputs = ours._tapped(batch, frozenset())
        kept[how] = bytes_held() - before
        assert outputs.logp.requires_grad
    assert kept["host"] < kept["device"] / 5 and kept["recomputed, host"] < kept["recomputed"] / 2, kept


def test_small_and_expanded_tensors_and_weights_stay() -> None:
    layer = torch.nn.Linear(256, 256).to(SECOND)
    x = torch.ones(256, 256).to(SECOND).requires_grad_()
    moved_ones: list[Any] = []
    to_host = host_memory.to_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "to_host", lambda x, place=None: moved_ones.append(x) or to_host(x, place))
        with host_memory.activations_on_host([layer]):
            product = x * layer.weight  # keeps x and the weight
            both = product * product.exp()  # keeps the product, its exponential twice
            small = x[:1] * x[:1]
            wide = x[:, :1].expand(256, 256) * both
        (wide.sum() + small.sum()).backward()
    assert len(moved_ones) == 4, "x, product, exponential, both"
    assert layer.weight.grad is not None and x.grad is not None


class Kept(torch.autograd.Function):
    """x -> x, which keeps x and notes with which strides it comes back."""

    strides: list[tuple[int, ...]] = []  # noqa: RUF012  # of the test below

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        Kept.strides.append(x.stride())
        return grads[0] * x


@pytest.mark.parametrize(
    "cut", [lambda x: x[:, 2:5], lambda x: x.t()[::3], lambda x: x.t(), lambda x: x[::2, ::2], lambda x: x[:, 0]]
)
def test_a_strided_activation_takes_its_own_bytes_of_the_host_and_returns_with_its_strides(
    cut: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "LEAST", 1)
    copies: list[Tensor] = []
    to_host = host_memory.to_host
    monkeypatch.setattr(host_memory, "to_host", lambda x: copies.append(to_host(x)) or copies[-1])
    x = torch.arange(64.0).view(8, 8).to(SECOND).requires_grad_()
    own = cut(x)
    Kept.strides.clear()
    with host_memory.activations_on_host([]):
        out = Kept.apply(own)
    out.sum().backward()
    assert [copy.untyped_storage().nbytes() for copy in copies] == [4 * own.numel()]
    assert Kept.strides == [own.stride()]
    expected = torch.zeros(8, 8)
    cut(expected).copy_(cut(torch.arange(64.0).view(8, 8)))
    assert x.grad is not None and torch.equal(x.grad.cpu(), expected)


def test_a_frozen_model_is_on_the_device_while_it_is_used(whole: dict[str, list[Tensor]]) -> None:
    ours, theirs = learner(["reference"]), learner()
    reference: Any = ours.others[REFERENCE]
    own = sum(p.nbytes for p in theirs.others[REFERENCE].parameters())
    assert {p.device.type for p in reference.parameters()} == {"cpu"}
    before = bytes_held()
    with peak() as most:
        found = ours.evaluate(batches(), of=REFERENCE)
    assert most[0] - before > own and bytes_held() - before < own
    expected = theirs.evaluate(batches(), of=REFERENCE)
    assert all(torch.equal(a.logp.cpu(), b.logp.cpu()) for a, b in zip(found, expected, strict=True))
    assert {p.device.type for p in reference.parameters()} == {"cpu"}
    assert same(updated(ours), whole["adamw"])


@pytest.mark.parametrize("where", ["device", "host", "another device"])
@pytest.mark.parametrize("wants", [("value",), ("value", "kl")], ids=["evaluated", "compared"])
def test_the_memory_estimate_with_a_reference_is_within_a_tenth_of_the_peak(
    where: str, wants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, found = DecoderConfig(600, 96, 2, 2, 1, 48, 384, 64, qk_norm=True), batches(3)
    gc.collect()
    before = bytes_held()
    offload = ["reference"] * (where == "host")
    ours = learner(offload, shape=shape)
    if where == "another device":
        ours.others[REFERENCE] = new_decoder(shape, 1).requires_grad_(False)
    ours.update(found, Loss(*wants))  # makes the moments
    with peak() as most:
        ours.evaluate(found, of=REFERENCE)
        ours.update(found, Loss(*wants))
    logits = max(batch.target.numel() for batch in found) * shape.vocab
    monkeypatch.setattr(memory_estimate, "GPU_LOGITS", logits)  # all of a micro-batch are computed at once
    tokens = max(batch.layout.tokens.numel() for batch in found)
    elsewhere = {REFERENCE: "cpu"} if where == "another device" else {}
    size = UpdateSize(
        tokens, False, None, 1e12, offload=frozenset(offload), elsewhere=elsewhere, wants=frozenset(wants)
    )
    estimate, measured = estimate_memory(ours, size), most[0] - before
    assert estimate is not None and abs(estimate.total - measured) < 0.1 * measured, (str(estimate.parts), measured)
    if "kl" in wants:  # what only a comparison takes
        alone = estimate_memory(ours, replace(size, wants=frozenset({"value"})))
        assert alone is not None and (where == "device" or estimate.total - alone.total > 4 * 600 * 96)


def test_a_large_teacher_of_the_host_is_counted_while_it_is_evaluated() -> None:
    small, large = DecoderConfig(41, 16, 1, 2, 1, 8, 24, 64), DecoderConfig(41, 96, 3, 2, 1, 48, 384, 64)
    gc.collect()
    before, found = bytes_held(), batches(2)
    others: Any = {"teacher": new_decoder(large, 1).to(SECOND).requires_grad_(False)}
    model: Any = new_decoder(small, 0).to(SECOND)
    ours = LocalLearner(model, Optimization(), others=others, offload=["reference"])
    del others
    ours.update(found, Loss())
    with peak() as most:
        ours.evaluate(found, of="teacher")
        ours.update(found, Loss())
    size = UpdateSize(30, False, None, 1e12, offload=frozenset(["reference"]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory_estimate, "GPU_LOGITS", 30 * 41)
        estimate, measured = estimate_memory(ours, size), most[0] - before
    assert estimate is not None and abs(estimate.total - measured) < 0.1 * measured, (str(estimate.parts), measured)


def test_buffers_and_shared_weights_of_a_frozen_model_are_there_in_a_pass() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval()
    model[1].weight = model[0].weight
    x = torch.linspace(-1, 1, 12).view(3, 4)
    expected = model(x)
    held = host_memory.HostModel(model, SECOND)
    for _ in range(2):
        with held.on(SECOND):
            assert torch.equal(model(x.to(SECOND)).cpu(), expected)
            assert model[1].weight is model[0].weight
        assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_reference_that_moves_on_the_host_moves_as_on_the_device() -> None:
    ours, theirs = learner(["reference"]), learner()
    for of in (ours, theirs):
        updated(of, 1)
        of.move(REFERENCE, 0.3)
        updated(of, 1)
    assert {p.device.type for p in ours.others[REFERENCE].parameters()} == {"cpu"}
    mine, other = ([p.detach().cpu() for p in of.others[REFERENCE].parameters()] for of in (ours, theirs))
    assert same(mine, other) and same(weights(ours), weights(theirs))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("before", "after"), [((), ("optimizer",)), (("optimizer",), ()), (("optimizer", "reference"),) * 2]
)
def test_a_run_continues_with_or_without(
    optimizer: str, before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path, whole: dict[str, list[Tensor]]
) -> None:
    saved, loaded = learner(before, optimizer), learner(after, optimizer)
    updated(saved, 2)
    saved.save(tmp_path)
    with torch.no_grad():
        for own, other in zip(loaded.model.parameters(), saved.model.parameters(), strict=True):
            own.copy_(other)
    loaded.load(tmp_path)
    assert same(updated(loaded, 1), whole[optimizer])
