"""Products of layers in float8: torchao's numbers, near those of float32, and as good to learn from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import normal
from sharded import micro_batches
from sums import QUICK, SUMS
from torch import Tensor

import posttrain
from posttrain.config.resolve import validate
from posttrain.config.training import SFT
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.types import UserError
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.float8 import float8_product
from posttrain.runs.run_reading import read_metrics

SHAPE = DecoderConfig(48, 32, 3, 4, 2, 16, 64, 64, qk_norm=True)
CPU = torch.device("cpu")
BF16: dict[str, Any] = {"precision": "bfloat16", "float8": True}
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="the extra float8 is not installed"
)


class Likelihood:
    wants = frozenset[str]()

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        return -(batch.weight * outputs.logp).sum()


def learner(how: str, recompute: bool = False) -> LocalLearner:
    model = new_decoder(SHAPE, 0)
    for parameter in model.parameters():  # logits that differ
        parameter.data *= 5 if parameter.ndim == 2 and len(parameter) != 2 else 1
    if recompute:
        model.recompute_layers()
    precision = "float32" if how == "float32" else "bfloat16"
    product = float8_product(CPU) if how == "float8" else None
    return LocalLearner(model, Optimization(lr=1e-3), precision=precision, product=product)


def rounded(x: Tensor) -> Tensor:
    """Each row in e4m3 with a scale that is a power of two."""
    scale = 448.0 / x.float().abs().amax(1, keepdim=True)
    scale = torch.exp2(scale.log2().floor())
    return (x.float() * scale).to(torch.float8_e4m3fn).float() / scale


@needs_torchao
def test_a_product_is_that_of_rows_rounded_to_eight_bits() -> None:
    x, weight = normal(5, 32, seed=1).bfloat16().requires_grad_(), normal(48, 32, seed=2).float().requires_grad_()
    found = float8_product(CPU)(x, weight)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, (rounded(x.detach()) @ rounded(weight.detach()).t()).bfloat16())
    grad = normal(5, 48, seed=3).bfloat16()
    found.backward(grad)
    assert x.grad is not None and weight.grad is not None and weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, (grad.t() @ x.detach()).float())  # in bfloat16
    exact = grad.float() @ weight.detach()
    error = (x.grad.float() - exact).norm() / exact.norm()
    assert 0.005 < error < 0.06, "three bits of mantissa"


@needs_torchao
def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = normal(8, 32, seed=1).bfloat16(), normal(48, 32, seed=2).float()
    x[5] *= 1000
    product = float8_product(CPU)
    assert torch.equal(product(x, weight)[:3], product(x[:3], weight))


@needs_torchao
def test_log_probabilities_are_near_those_of_float32() -> None:
    batches = micro_batches(6)
    exact, half, quarter = (
        torch.cat([out.logp for out in learner(how).evaluate(batches)]) for how in ("float32", "bfloat16", "float8")
    )
    of_half, of_quarter = (half - exact).abs().mean().item(), (quarter - exact).abs().mean().item()
    assert exact.std() > 0.5 and 2 * of_half < of_quarter < 0.15, (of_half, of_quarter)


@needs_torchao
def test_an_update_uses_the_same_products_as_an_evaluation_before_it() -> None:
    batches, seen = micro_batches(2), []

    class Noting(Likelihood):
        def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
            seen.append(outputs.logp.detach())
            return super().__call__(outputs, batch, stats)

    of = learner("float8")
    before = [out.logp for out in of.evaluate(batches)]
    of.update(batches, Noting())
    assert all(map(torch.equal, before, seen))


@needs_torchao
def test_recomputed_layers_have_the_same_bits() -> None:
    found = []
    for recompute in (False, True):
        of = learner("float8", recompute)
        of.update(micro_batches(2), Likelihood())
        found.append([p.detach().clone() for p in of.model.parameters()])
    assert all(map(torch.equal, *found))


@needs_torchao
def test_a_small_model_learns_the_same(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 64, "context": 32}
    shape |= {"tokenizer": "characters", "steps": 40, "rows": 8, "lr": 1e-2}
    last = {}
    for name, how in {"half": {"precision": "bfloat16"}, "quarter": BF16}.items():
        posttrain.sft(SUMS, out=str(tmp_path / name), **shape, **QUICK, **how)
        losses = [row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row]
        assert losses[0] > 2
        last[name] = sum(losses[-10:]) / 10
    assert last["half"] < 1.4 and abs(last["quarter"] - last["half"]) < 0.15 and last["quarter"] != last["half"], last


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"float8": True}, "rounds the factors of products further than --precision bfloat16: add it"),
        ({**BF16, "lora": 4}, "for whole weights that all learn, without --lora: leave out one of them"),
        ({**BF16, "shard": True}, "without --shard: leave out one of them"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        validate(SFT(tasks="x", **options))


def test_what_cannot_run_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"out": str(tmp_path / "out"), "steps": 1, **QUICK, **BF16, "hidden": 24, "layers": 1}
    with pytest.raises(UserError, match="a multiple of 16 rows and columns, and one here has 72: leave it out"):
        posttrain.sft(SUMS, **how, heads=2, context=32, tokenizer="characters")
    monkeypatch.setattr("posttrain.models.native.float8.installed", lambda library: False)
    with pytest.raises(UserError, match=r"--float8 needs torchao, which is not installed: pip install 'torchao"):
        float8_product(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    with pytest.raises(UserError, match="--float8 needs a GPU of compute capability 8.9 .*, and an A100 has less"):
        float8_product(torch.device("cuda"))
