"""A sharded run in bfloat16 moves half of the bytes of its layers, and learns what one process learns in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_processes
from ranks import free_port, joined
from sharded import equal, gradients, micro_batches
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from posttrain.config.training import SFT
from posttrain.core.protocols import Alone
from posttrain.engines.local.engine_weights import own_copy
from posttrain.engines.weight_probe import LIMIT_BFLOAT16, WeightProbe
from posttrain.learners import process_group
from posttrain.learners.fsdp import FSDPLearner
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.row_shards import is_sharded

pytestmark = pytest.mark.timeout(1200)  # a module's processes start in its first test

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab": 41, "hidden": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "intermediate": 48, "context": 64,
}  # fmt: skip


def decoder() -> Decoder:
    model = new_decoder(DecoderConfig(layers=LAYERS, tied=True, qk_norm=True, qkv_bias=False, **SIZES), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def learner(kind: type[LocalLearner], world: Any, precision: str = "bfloat16") -> LocalLearner:
    return kind(decoder(), Optimization(lr=1e-2, max_grad_norm=0.5), world=world, precision=precision)


class Counted:
    """Bytes that FSDP2 gathers in each call, and the types in which it sums gradients."""

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.summed: set[torch.dtype] = set()

    def __enter__(self) -> Counted:
        self.kept = gather, scatter = DefaultAllGather.__call__, DefaultReduceScatter.__call__

        def gathering(comm: Any, output_tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            self.gathered.append(output_tensor.numel() * output_tensor.itemsize)
            return gather(comm, output_tensor, *arguments, **named)

        def summing(comm: Any, output_tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            self.summed.add(output_tensor.dtype)
            return scatter(comm, output_tensor, *arguments, **named)

        DefaultAllGather.__call__, DefaultReduceScatter.__call__ = gathering, summing  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        DefaultAllGather.__call__, DefaultReduceScatter.__call__ = self.kept  # type: ignore[method-assign]


class Likelihood:
    """Weighted log-probabilities; the entropy is computed too."""

    wants = frozenset({"entropy"})

    def __call__(self, outputs: Any, batch: Any, stats: Any) -> Tensor:
        return -(torch.linspace(0.5, 1.5, len(outputs.logp)) * outputs.logp).sum() / 7


def layer_bytes(model: Decoder, wide: bool) -> int:
    """Of one layer's weights, with products in bfloat16 or `wide`, by hand: norms are read in float32."""
    layer = next(iter(model.layers))
    matrices = sum(m.weight.numel() for m in (layer.qkv, layer.o, layer.gate_up, layer.down))  # type: ignore[union-attr]
    return matrices * (4 if wide else 2) + 4 * (sum(p.numel() for p in layer.parameters()) - matrices)


def learners(rank: int, port: int, out: Path) -> None:
    joined(rank, port, 2)
    together = process_group.joined("cpu", SFT().collective_timeout)
    sizes: dict[str, set[int]] = {}
    for precision in ("bfloat16", "float32"):
        one, sharded = learner(LocalLearner, Alone(), precision), learner(FSDPLearner, together, precision)
        grads, summed = gradients(one), gradients(sharded)
        batches = micro_batches(7)
        for mine, theirs in zip(one.evaluate(batches), sharded.evaluate(batches), strict=True):
            torch.testing.assert_close(mine.logp, theirs.logp, atol=2e-5, rtol=2e-5)
        with Counted() as counted:
            ours, others = (of.update(batches, Likelihood()).means() for of in (one, sharded))
        assert counted.summed == {torch.float32}, "gradients are summed in float32"
        sizes[precision] = set(counted.gathered)
        assert layer_bytes(decoder(), precision == "float32") in sizes[precision]
        assert ours == pytest.approx(others, rel=1e-5, abs=1e-6)
        equal(grads, summed, 1e-5)
        assert all(p.dtype == torch.float32 for p in sharded.parts[0].parameters.values()), "rows are master copies"
        assert sharded.model.decoder is not None
        for layer in sharded.model.decoder.layers:
            assert all(is_sharded(parameter) for parameter in layer.parameters()), "nothing stays gathered"
        probe = WeightProbe(sharded.model, LIMIT_BFLOAT16)
        probe.look(sharded.weights())
        assert probe._table is not None
        copied, plain = own_copy(sharded.weights()), WeightProbe(sharded.model, LIMIT_BFLOAT16)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            plain.look(copied)
        torch.testing.assert_close(probe._table, plain._table, atol=2e-5, rtol=2e-5)
        rounded: Any = own_copy(sharded.weights(), torch.bfloat16)
        plain.look(rounded)
        for name, weight in dict(copied.named_parameters()).items():  # type: ignore[attr-defined]
            matrix = name.startswith("layers.") and name.endswith("weight") and weight.ndim == 2
            held = rounded.get_parameter(name)
            assert held.dtype == (torch.bfloat16 if matrix else torch.float32) and torch.equal(held, weight.to(held))
    narrow, wide = (layer_bytes(decoder(), way) for way in (False, True))
    assert narrow < 0.52 * wide, "the rest of a layer is small"
    (out / f"said.{rank}").write_text("equal")


def test_layers_are_gathered_in_half_of_the_bytes_and_learn_as_in_one_process(tmp_path: Path) -> None:
    in_processes(learners, (free_port(), tmp_path), 2)
    assert [(tmp_path / f"said.{rank}").read_text() for rank in (0, 1)] == ["equal"] * 2
