"""A run whose processes share each micro-batch, by weights or by tokens, is the run of one process."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from processes import in_processes
from ranks import free_port, joined
from recurrent import Recurrent, Sizes
from safetensors.torch import load_file
from sharded import QUICK, Both, equal, gradients, long, micro_batches, same_run
from sums import PAIRS, SUMS, nearness
from torch import Tensor

import posttrain
from posttrain.algorithms.all_algorithms import find
from posttrain.config.resolve import validate
from posttrain.config.training import RL, SFT, Training
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.protocols import Alone
from posttrain.core.types import UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.learners import process_group
from posttrain.learners.fsdp import FSDPLearner
from posttrain.learners.local_learner import REFERENCE, LocalLearner, Optimization
from posttrain.learners.process_group import Processes
from posttrain.learners.process_mesh import ProcessMesh, open_mesh
from posttrain.learners.tensor_parallel import TensorParallelLearner
from posttrain.models import checkpoint_folder
from posttrain.models.adapters.lora import LoRA, attach, begin, shared_copy
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import ValueModel
from posttrain.models.native import decoder as native_decoder
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.row_shards import whole
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_metrics
from posttrain.training import open_learner
from posttrain.training.adjust import adjust
from posttrain.training.open_learner import new_learner, policy

pytestmark = pytest.mark.timeout(300)  # a module's processes start in its first test

SIZES: dict[int, list[tuple[int, int]]] = {2: [(2, 1), (1, 2)], 4: [(2, 1), (4, 1), (2, 2), (1, 4)]}
"""Processes -> (tensor parallelism, context parallelism) of the meshes that are compared with one process."""


def decoder(tied: bool, seed: int = 0, layers: int = 2) -> Decoder:
    """With biases at every matrix, or norms of heads; the vocabulary and the MLP are divided unevenly."""
    sizes = {"vocab": 41, "hidden": 14, "heads": 8, "kv_heads": 4, "head_size": 4, "intermediate": 23, "context": 64}
    kind = {"qk_norm": True} if tied else {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    model = new_decoder(DecoderConfig(layers=layers, tied=tied, **kind, **sizes), seed).double()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1).add_(torch.randn(parameter.shape, generator=generator) / 20)
    return model


@dataclass(frozen=True)
class ToReference:
    """A loss of policy, critic and the exact divergence from a reference."""

    both: Both = Both()
    wants: frozenset[str] = frozenset({"value", "entropy", "kl", "collision"})

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        assert outputs.kl is not None and outputs.collision is not None
        stats.add("collision", outputs.collision.sum().item(), len(outputs.collision))
        return self.both(outputs, batch, stats) + outputs.kl.sum() / 9


def learner(tied: bool, mesh: ProcessMesh | None, lora: int = 0, optimizer: str = "adamw") -> LocalLearner:
    """The learner of one process, or of a mesh: with critic and reference, and with adapters if they have a rank."""
    model, rate = decoder(tied), Optimization(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, optimizer=optimizer)
    before = decoder(tied, 3).requires_grad_(False)
    if lora:
        attach(model, LoRA(lora, 4.0), lambda name: not name.endswith("k_proj"))
        begin(model, 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("adapter.b"):
                    parameter.fill_(0.05)
        before = shared_copy(model)  # type: ignore[assignment]
    held: dict[str, Any] = {"others": {REFERENCE: before}, "critic": ValueModel(14, decoder(True, 5, 1), 0).double()}
    if mesh is None:
        return LocalLearner(model, rate, **held)
    if mesh.tensor is None:
        return open_learner.DataParallelLearner(model, rate, mesh=mesh, **held)
    return TensorParallelLearner(model, rate, mesh=mesh, **held)


def weights(of: LocalLearner) -> dict[str, Tensor]:
    held = {"policy": of.model, "critic": of.critic, **of.others}
    return {f"{name}/{n}": whole(p).clone() for name, m in held.items() if m for n, p in m.named_parameters()}


def same_updates(one: LocalLearner, many: LocalLearner, together: Processes) -> None:
    """Outputs, gradients, metrics and weights over updates with and without losses of policy and critic."""
    grads, summed = gradients(one), gradients(many)
    equal(weights(one), weights(many), 0.0)
    wants = frozenset({"value", "entropy", "kl"})
    only = Both(policy=lambda batch: False)
    for objective, count in ((ToReference(), 7), (ToReference(), 1), (only, 5), (Both(policy=long), 4)):
        batches = micro_batches(count)
        for of in ("policy", REFERENCE):
            for mine, theirs in zip(one.evaluate(batches, of, wants), many.evaluate(batches, of, wants), strict=True):
                for name in ("logp", *wants):
                    torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), atol=1e-9, rtol=1e-9)
        grads.clear(), summed.clear()
        ours, others = (of.update(batches, objective).means() for of in (one, many))
        assert ours == pytest.approx(others, rel=1e-8)
        equal(grads, summed, 1e-9)
        equal(weights(one), weights(many), 1e-8)
        one.move(REFERENCE, 0.3), many.move(REFERENCE, 0.3)
    now = b"".join(t.numpy().tobytes() for t in weights(many).values())
    assert len(set(together.gather(now))) == 1


def learners(out: Path, together: Processes) -> None:
    for tensor, context in SIZES[together.size]:
        mesh = open_mesh(together, tensor, context)
        for tied, lora in ((True, 0), (False, 0), (True, 3)):
            same_updates(learner(tied, None, lora), learner(tied, mesh, lora), together)
    (out / f"learners.{together.size}").write_text("equal")


def ranks(rank: int, port: int, size: int, out: Path) -> None:
    """All that so many processes do together in these tests."""
    joined(rank, port, size)
    together = process_group.joined("cpu", SFT().collective_timeout)
    for part in PARTS[size]:
        part(out, together)


PARTS: dict[int, list[Callable[[Path, Processes], None]]] = {2: [learners], 4: [learners]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    in_processes(ranks, (free_port(), 2, out), 2)
    return out


@pytest.fixture(scope="module")
def four(runs: Path) -> None:
    in_processes(ranks, (free_port(), 4, runs), 4)


def test_updates_of_two_processes_are_those_of_one(runs: Path) -> None:
    assert (runs / "learners.2").read_text() == "equal"


@pytest.mark.usefixtures("four")
def test_updates_of_four_processes_are_those_of_one(runs: Path) -> None:
    assert (runs / "learners.4").read_text() == "equal"
