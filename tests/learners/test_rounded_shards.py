"""Weights in bfloat16 that learn (--weights bfloat16) and are divided among processes are rounded as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from adapted import base_of
from judged import own_pad
from processes import in_processes
from ranks import free_port, joined
from safetensors.torch import load_file
from sharded import gradients, micro_batches
from sums import SUMS, nearness
from torch import Tensor, nn

import posttrain
from posttrain.config.training import SFT
from posttrain.core.protocols import Alone
from posttrain.learners import process_group
from posttrain.learners.data_parallel import DataParallelLearner
from posttrain.learners.fsdp import FSDPLearner
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.process_mesh import open_mesh
from posttrain.learners.tensor_parallel_learner import TensorParallelLearner
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.row_shards import is_sharded, slices_here, whole

pytestmark = pytest.mark.timeout(600)  # a module's processes start in its first test

NARROW: dict[str, Any] = {"weights": "bfloat16", "precision": "bfloat16"}
QUICK: dict[str, Any] = {"threads": 1, "quiet": True}
STEPS, HALF = 3, 2
DIVIDED = ("tensor_parallel", "context_parallel")


class Likelihood:
    wants = frozenset[str]()

    def __call__(self, outputs: Any, batch: Any, stats: Any) -> Tensor:
        return -(torch.linspace(0.5, 1.5, len(outputs.logp)) * outputs.logp).sum() / 7


def learner(kind: type[LocalLearner], world: Any, start: Path, **options: Any) -> LocalLearner:
    model = load_model(start, matrices=torch.bfloat16)
    cast(nn.Module, model).requires_grad_(True)
    how = Optimization(lr=1e-3, max_grad_norm=0.0)  # a norm of parts is summed in another order
    options |= {} if world is None else {"world": world}
    return kind(model, how, precision="bfloat16", **options)


def weights_of(held: LocalLearner) -> dict[str, Tensor]:
    return {name: whole(p).clone() for name, p in cast(nn.Module, held.model).named_parameters()}


def run(out: Path, steps: int, algorithm: str = "ppo", **options: Any) -> None:
    settings = {"critic_warmup": 0} if algorithm == "ppo" else {}
    how: dict[str, Any] = {"steps": steps, "prompts": 4, "group": 2, "max_tokens": 4, "env_workers": 0, "lr": 1e-2}
    how |= {"algorithm": algorithm, "settings": settings, "tokens_per_microbatch": 48, **NARROW, **QUICK}
    posttrain.rl(SUMS, nearness, str(out.parent / "start"), out=str(out), **how, **options)


def updates(out: Path, world: Any, copies: dict[str, Any]) -> None:
    """Two updates with one micro-batch in each process, so that both kinds of learners add the same numbers."""
    held = [learner(DataParallelLearner, world, out / "start"), learner(FSDPLearner, world, out / "start", **copies)]
    first = weights_of(held[0])
    for _ in range(2):
        found = [gradients(one) for one in held]
        for one in held:
            one.update(micro_batches(world.size), Likelihood())
        assert found[0].keys() == found[1].keys()
        assert all(gradient.dtype == torch.float32 for gradient in found[1].values())
    narrow = {name: p for name, p in held[1].parts[0].parameters.items() if p.dtype == torch.bfloat16}
    assert "embed.weight" in narrow and any("down" in name for name in narrow)
    sharded = dict(cast(nn.Module, held[1].model).named_parameters())
    assert all(is_sharded(parameter) for parameter in sharded.values())
    whole_ones, parts = weights_of(held[0]), weights_of(held[1])
    for name, own in whole_ones.items():
        if world.size == 2:  # of four addends the order differs
            assert torch.equal(own, parts[name]), name
        else:
            near(own, parts[name])
    assert any(not torch.equal(whole_ones[name], first[name]) for name in narrow)


def near(one: Tensor, other: Tensor, everywhere: bool = True) -> None:
    """Sums in another order change the last bits in float32, and seldom to which neighbour a number is rounded.

    `everywhere` False: activations are rounded in parts, so AdamW's first step differs where gradients are near 0. With
    other noise half of the numbers of a matrix would differ.
    """
    assert one.dtype == other.dtype
    same = torch.isclose(one.float(), other.float(), rtol=1e-4, atol=1e-6)
    if everywhere:
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=1e-4)
    if everywhere or one.ndim > 1:
        assert same.float().mean() > (0.98 if everywhere else 0.9)


def same_steps(out: Path, world: Any) -> None:
    """Two steps with given gradients: processes that divide heads, inner units and vocabulary round as one process."""
    one = learner(LocalLearner, Alone(), out / "start")
    many = learner(TensorParallelLearner, None, out / "start", mesh=open_mesh(world, 2, 1))
    first, generator = weights_of(one), torch.Generator().manual_seed(0)
    dims = set()
    for _ in range(2):
        for name, parameter in one.parts[0].parameters.items():
            part = many.parts[0].parameters[name]
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            dim, slices = slices_here(part)
            part.grad = torch.cat([parameter.grad.narrow(dim, s.start, s.stop - s.start) for s in slices], dim)
            dims |= {(dim, len(slices))}
        for of in (one, many):
            of.optimizer.step()
            of.version += 1
    assert dims >= {(0, 1), (0, 2), (0, 3), (1, 1)}, "embedding; gate and up; query, key and value; output and down"
    now, parts = weights_of(one), weights_of(many)
    for name, own in now.items():
        assert torch.equal(own, parts[name]), name
    assert sum(own.dtype == torch.bfloat16 and not torch.equal(own, first[name]) for name, own in now.items()) > 4


def ranks(rank: int, port: int, size: int, out: Path) -> None:
    joined(rank, port, size)
    together = process_group.joined("cpu", SFT().collective_timeout)
    copies: dict[str, Any] = {"shard_size": 2} if size == 4 else {}
    updates(out, together, copies)
    how = {"shard": True, **copies}
    run(out / f"{size}", 1, "grpo", **how)
    if size == 2:
        same_steps(out, together)
        for name in DIVIDED:
            run(out / name, 1, "grpo", **{name: 2})
        run(out / "whole", STEPS, **how)
        run(out / "parts", HALF, **how)
        run(out / "parts", STEPS, resume=True, **how)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    model = load_model(base_of("native", out / "wide"))
    save_model(model, out / "start", own_pad(), torch.bfloat16)  # type: ignore[arg-type]
    run(out / "1", 1, "grpo")
    in_processes(ranks, (free_port(), 2, out), 2)
    run(out / "parts", STEPS + 1, resume=True)
    return out


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def test_a_sharded_run_resumed_has_the_same_bits(runs: Path) -> None:
    one, other = saved(runs / "whole", STEPS), saved(runs / "parts", STEPS)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert saved(runs / "parts", STEPS + 1), "one process goes on"


def check_first_step(runs: Path, name: str, everywhere: bool = True) -> None:
    one, other, first = saved(runs / "1", 1), saved(runs / name, 1), load_file(runs / "start" / "model.safetensors")
    for key, own in one.items():
        near(own, other[key], everywhere)
    assert all(not torch.equal(own.float(), first[key].float()) for key, own in one.items() if "proj" in key)


def test_a_sharded_run_rounds_as_one_process(runs: Path) -> None:
    check_first_step(runs, "2")


@pytest.mark.parametrize("name", DIVIDED)
def test_processes_that_share_a_micro_batch_round_as_one(runs: Path, name: str) -> None:
    check_first_step(runs, name, everywhere=name == "context_parallel")


def test_two_sharded_copies_round_as_one_process(runs: Path) -> None:
    in_processes(ranks, (free_port(), 4, runs), 4)
    check_first_step(runs, "4")
