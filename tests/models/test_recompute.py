"""Layers that are computed again in the backward pass: the same bits, with less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import SHAPE, adapt, base_of, laid, loss_of
from sums import PAIRS, SUMS, nearness
from torch import Tensor, nn

import posttrain
from posttrain.core.batch import Layout
from posttrain.core.types import UserError
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.adapters.lora import LoRA
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.kernels import build
from posttrain.models.native.linear import accumulating

KINDS: dict[str, Callable[[], Decoder]] = {
    "untied": lambda: new_decoder(SHAPE, 0),
    "tied, norms of q and k": lambda: new_decoder(replace(SHAPE, tied=True, qk_norm=True, qkv_bias=False), 0),
    "biases": lambda: new_decoder(replace(SHAPE, o_bias=True, mlp_bias=True, family="llama"), 0),
    "lora": lambda: _adapted(LoRA(3, 6.0)),
    "dora": lambda: _adapted(LoRA(3, 6.0, dora=True)),
    "lora of some": lambda: _adapted(LoRA(3, 6.0), ("q_proj", "down_proj")),
    "qlora": lambda: _adapted(LoRA(3, 6.0, quantize="int8")),
}


def _adapted(lora: LoRA, targets: tuple[str, ...] = ()) -> Decoder:
    model = adapt(new_decoder(SHAPE, 0), lora, targets)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("in_place", [True, False], ids=["accumulating", "by torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_give_the_same_bits(kind: str, in_place: bool, compiled: bool, precision: str) -> None:
    def found(recomputes: bool) -> list[Tensor]:
        model = KINDS[kind]()
        if recomputes:
            model.recompute_layers()
        with _accumulating(in_place), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            losses = [loss_of(model, *laid(seed)) for seed in (3, 4)]
        with _accumulating(in_place):  # autocast has ended, as it has in a learner
            for loss in losses:
                loss.backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert gradients and all(g is not None and g.any() for g in gradients)
        return [*(loss.detach() for loss in losses), *(g for g in gradients if g is not None)]

    build.use(compiled)
    try:
        pairs = list(zip(found(True), found(False), strict=True))
    finally:
        build.use(True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["untied", "lora", "dora"])
def test_recomputed_in_another_thread_they_are_the_same_bits(kind: str, precision: str) -> None:
    """As on a GPU: torch computes gradients there in threads of its own, which know nothing of this one's settings."""

    def found(recomputes: bool) -> list[Tensor]:
        model = KINDS[kind]()
        if recomputes:
            model.recompute_layers()
        with accumulating(), ThreadPoolExecutor(1) as other:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                loss = loss_of(model, *laid())
            (other.submit(loss.backward) if recomputes else _now(loss.backward)).result()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    pairs = list(zip(found(True), found(False), strict=True))
    assert len(pairs) > 4 and all(torch.equal(ours, theirs) for ours, theirs in pairs)


def _now(function: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()
    done.set_result(function())
    return done


@contextmanager
def _accumulating(does: bool) -> Iterator[None]:
    if not does:
        yield
        return
    with accumulating():
        yield


@pytest.mark.parametrize("kind", ["untied", "lora"])
def test_a_layer_keeps_its_input_alone(kind: str) -> None:
    layers, tokens = 6, 64
    config = replace(SHAPE, layers=layers)
    kept = {}
    for recomputes in (True, False):
        model = new_decoder(config, 0)
        if kind == "lora":
            adapt(model, LoRA(3, 6.0))
        if recomputes:
            model.recompute_layers()
        layout = Layout(torch.arange(tokens) % 40, torch.arange(tokens), (0,), (tokens,), (-1,))
        kept[recomputes] = bytes_kept(model, lambda: model.hidden(layout, torch.arange(tokens)))
    inputs = layers * tokens * config.hidden * 4
    around = 3 * tokens * config.hidden * 4 + tokens * (
        2 * config.head_size * 4 + 4 * 8
    )  # the last norm, rotary tables
    assert inputs <= kept[True] <= inputs + around
    assert kept[False] >= 4 * kept[True]


def bytes_kept(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of the tensors, besides parameters, that are kept for a backward pass, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    held = []

    def pack(x: Tensor) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in own:
            seen[place] = x.untyped_storage().nbytes()
            held.append(x)
        return x

    with accumulating(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    assert out.requires_grad
    return sum(seen.values())


def test_without_a_gradient_nothing_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_decoder(SHAPE, 0)
    model.recompute_layers()
    layout, at, _ = laid()
    monkeypatch.setattr("posttrain.models.native.decoder.checkpoint", lambda *given, **more: pytest.fail("recomputed"))
    with torch.no_grad():
        model.hidden(layout, at)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recomputing(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """For each learner that is opened, whether each of its decoders that learn recomputes its layers."""
    from posttrain.models.backbone import decoders_in

    seen: list[list[bool]] = []
    update = LocalLearner.update

    def noting(self: LocalLearner, *given: Any) -> Any:
        parts: list[Any] = [self.model, *([self.critic] if self.critic else [])]
        decoders: list[Any] = [d for part in parts for d in decoders_in(part)]
        seen.append([d.recomputes for d in decoders if any(p.requires_grad for p in d.parameters())])
        return update(self, *given)

    monkeypatch.setattr(LocalLearner, "update", noting)
    return seen


@pytest.mark.parametrize("kind", ["ppo", "reward-model"])
def test_a_run_that_recomputes_writes_the_same_weights(
    kind: str, tmp_path: Path, recomputing: list[list[bool]]
) -> None:
    start = str(base_of("native", tmp_path / "start"))
    common: dict[str, Any] = {"threads": 1, "quiet": True}
    for recompute in ("layers", "none"):
        out = str(tmp_path / recompute)
        if kind == "ppo":
            posttrain.rl(
                SUMS, nearness, start, out=out, algorithm="ppo", steps=2, prompts=4, group=2, max_tokens=4,
                env_workers=0, lr=1e-3, recompute=recompute, **common,
            )  # fmt: skip
        else:
            posttrain.reward_model(PAIRS, start, out=out, steps=2, rows=4, recompute=recompute, lora=2, **common)
    decoders = 2 if kind == "ppo" else 1
    half = len(recomputing) // 2
    assert half and recomputing == [[True] * decoders] * half + [[False] * decoders] * half
    ours, theirs = (tmp_path / of / "checkpoints" / "step-000002" for of in ("layers", "none"))
    files = sorted(path.relative_to(ours) for path in ours.rglob("*.safetensors"))
    assert files and all((ours / file).read_bytes() == (theirs / file).read_bytes() for file in files)


def test_a_trust_region_refuses_it(tmp_path: Path) -> None:
    start = str(base_of("native", tmp_path / "start"))
    with pytest.raises(UserError, match="second derivatives need the activations of all layers"):
        posttrain.rl(SUMS, nearness, start, out=str(tmp_path / "out"), algorithm="trpo", recompute="layers", quiet=True)


def test_a_model_of_transformers_recomputes_its_layers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = []
    for recomputes in (True, False):
        model = load_model(base_of("phi3", tmp_path / f"model {recomputes}"))
        assert isinstance(model, Backed)
        if recomputes:
            model.recompute_layers()
        layout = Layout(torch.arange(3, 35), torch.arange(32), (0,), (32,), (-1,))
        found.append(bytes_kept(model, lambda: model.hidden(layout, torch.arange(32))))
        model.hidden(layout, torch.arange(32)).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    (ours, mine), (theirs, others) = found[:2], found[2:]
    assert ours < theirs / 2
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True) if a is not None)


def test_a_model_of_transformers_without_layers_to_recompute_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    model = load_model(base_of("phi3", tmp_path / "model"))
    assert isinstance(model, Backed)
    monkeypatch.setattr("posttrain.models.hf.backed._that_can_compute_twice", lambda inner: [])
    with pytest.raises(UserError, match="--recompute layers needs layers that transformers can recompute"):
        model.recompute_layers()
