"""Weights stored in bfloat16 that learn (--weights bfloat16): gradients as in float32, updates that are not rounded away."""

from __future__ import annotations

import os
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from adapted import base_of
from digit_tasks import TASKS, digits
from judged import own_pad
from processes import in_processes
from safetensors.torch import load_file
from sharded import micro_batches
from sums import PAIRS, SUMS, nearness
from torch import Tensor, nn

import posttrain
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.protocols import Alone
from posttrain.core.types import UserError
from posttrain.learners import optimizer_chunks, rounded_weights
from posttrain.learners.adamw import AdamW
from posttrain.learners.data_parallel import DataParallelLearner
from posttrain.learners.gradient_sums import sum_gradients
from posttrain.learners.local_learner import Optimization
from posttrain.learners.optimizers import OptimizerChoice
from posttrain.learners.process_group import Processes
from posttrain.learners.rounded_weights import (
    RoundedOptimizer,
    noise_of,
    rounded_at_random,
    widen_gradients,
)
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.row_shards import WeightPart, marked
from posttrain.training.open_learner import new_learner
from posttrain.training.verbs import rl

NARROW: dict[str, Any] = {"weights": "bfloat16", "precision": "bfloat16"}
QUICK: dict[str, Any] = {"threads": 1, "quiet": True, "env_workers": 0}
ROWS = [{"prompt": row["prompt"], "response": row["response"]} for row in SUMS]


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    return rounded_at_random(x, noise_of(x.numel(), generator).view(x.shape))


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of bfloat16 next to float32 numbers, towards 0 and away from it."""
    low = (x.view(torch.int32) & -65536).view(torch.float32)
    return low, (low.view(torch.int32) + 65536).view(torch.float32)


# -- rounding ----------------------------------------------------------------------------------------------------------


def test_numbers_of_bfloat16_stay_as_they_are() -> None:
    x = torch.cat([torch.randn(400_001, generator=noise()), torch.tensor([0.0, -0.0, 1e-38, -3e38])]).bfloat16()
    assert torch.equal(rounded(x.float(), noise(1)), x)


def test_a_number_goes_to_either_neighbour_and_is_itself_in_the_mean() -> None:
    x = torch.tensor([1.0 + 1 / 512, 1.0 + 1 / 1024, -0.3, 7.77e-5, -123.4])
    low, high = neighbours(x)
    found = rounded(x.repeat(40_000, 1), noise(2)).float()
    assert ((found == low) | (found == high)).all()
    share = ((x - low) / (high - low)).double()
    error = ((found == high).double().mean(0) - share).abs()
    assert (error < 5 * (share * (1 - share) / 40_000).sqrt()).all()


def test_a_number_that_is_not_finite_stays_so() -> None:
    """Or the run would save it: nan has a payload of all ones on a GPU, and of a single bit here."""
    x = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, 0x7F800000, -0x800000], dtype=torch.int64)
    found = rounded(x.to(torch.int32).view(torch.float32).repeat(100, 1), noise(4))
    assert found[:, :4].isnan().all() and (found[:, 4] == torch.inf).all() and (found[:, 5] == -torch.inf).all()


def test_noise_depends_on_the_generator_alone() -> None:
    x = torch.randn(1000, generator=noise())
    one, same, other = (rounded(x.clone(), noise(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


# -- steps -------------------------------------------------------------------------------------------------------------


def stepped(
    weight: Tensor, steps: int, lr: float, offloads: bool = False, name: str = "adamw", gradient: Tensor | None = None
) -> Tensor:
    """A matrix after steps of an optimizer with this gradient; None: 1."""
    matrix, vector = nn.Parameter(weight.clone()), nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [{"params": [own], "weight_decay": 0.0, "share": 1.0} for own in (matrix, vector)]
    groups[0]["hidden"] = True
    choice, done, memory = OptimizerChoice(name), [0], matrix.data_ptr()
    narrow = widen_gradients([matrix, vector])
    rounds = partial(RoundedOptimizer, update=lambda: done[0], in_chunks=choice.in_chunks, numbers={})
    rows = {matrix: [len(matrix) // 4, len(matrix) - len(matrix) // 4]}  # Muon's two matrices
    optimizer = choice.open(groups, lr, rows, offloads, rounds if narrow else None)
    for _ in range(steps):
        matrix.grad, vector.grad = torch.ones(matrix.shape) if gradient is None else gradient.clone(), torch.ones(3)
        before = matrix._version
        optimizer.step()
        assert matrix._version > before and matrix.data_ptr() == memory, "engines read it there"
        done[0] += 1
    assert matrix.dtype == weight.dtype and vector.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in optimizer.state[matrix].values() if isinstance(value, Tensor))
    return matrix.detach()


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
def test_steps_too_small_for_bfloat16_add_up(name: str) -> None:
    weight, lr = torch.full((100, 200), 1.0).bfloat16(), 1e-5
    wide = stepped(weight.float(), 20, lr, name=name)
    assert torch.equal(wide.bfloat16(), weight), "the nearest number of bfloat16 is the old one"
    moved, wanted = (stepped(weight, 20, lr, name=name).double() - 1).mean(), (wide.double() - 1).mean()
    # 20,000 numbers, each of which fell by 1/256 with the probability wanted * 256
    assert abs(moved - wanted) < 5 * (-wanted / 256 / 20_000) ** 0.5


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_gives_a_neighbour_of_what_float32_gives(name: str) -> None:
    weight, gradient = torch.randn(64, 64, generator=noise()).bfloat16(), torch.randn(64, 64, generator=noise(1))
    wide = stepped(weight.float(), 1, 1e-2, name=name, gradient=gradient)
    narrow = stepped(weight, 1, 1e-2, name=name, gradient=gradient).float()
    low, high = neighbours(wide)
    assert ((narrow == low) | (narrow == high)).all() and (narrow == low).any() and (narrow == high).any()


def test_each_weight_and_each_update_has_noise_of_its_own() -> None:
    def updated(number: int) -> list[Tensor]:
        """Two equal weights after one step with equal gradients, which is the update of this number."""
        both = [nn.Parameter(torch.ones(40, 50).bfloat16()) for _ in range(2)]
        widen_gradients(both)
        inner = OptimizerChoice("sgd").open([{"params": both, "weight_decay": 0.0, "share": 1.0}], 1e-3)
        for own in both:
            own.grad = torch.ones(own.shape)
        RoundedOptimizer(inner, lambda: number, True).step()
        return [own.detach() for own in both]

    seen = [*updated(0), *updated(1)]
    assert not any(torch.equal(one, other) for place, one in enumerate(seen) for other in seen[:place])
    assert all(torch.equal(one, other) for one, other in zip(seen, [*updated(0), *updated(1)], strict=True))


def test_chunks_and_the_host_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 50, generator=noise()).bfloat16()
    whole = stepped(weight, 3, 1e-3)
    assert torch.equal(stepped(weight, 3, 1e-3, offloads=True), whole)
    monkeypatch.setattr(optimizer_chunks, "CHUNK", 1)
    assert torch.equal(stepped(weight, 3, 1e-3), whole)
    assert torch.equal(stepped(weight, 3, 1e-3, offloads=True), whole)


PARTS: dict[str, tuple[tuple[int, ...], int, list[list[tuple[int, int]]]]] = {
    "rows": ((10, 9), 0, [[(0, 4)], [(4, 4)], [(4, 9)], [(9, 10)]]),
    "rows of several matrices": ((10, 9), 0, [[(0, 3), (6, 8)], [(3, 6), (8, 10)]]),
    "columns": ((10, 9), 1, [[(0, 4)], [(4, 9)]]),
    "columns of several matrices": ((10, 9), 1, [[(0, 1), (5, 8)], [(1, 5), (8, 9)]]),
    "experts": ((4, 3, 5), 0, [[(0, 2)], [(2, 3)], [(3, 4)]]),
}
"""Shape of a weight, dimension along which processes divide it, and the parts of each."""


@pytest.mark.parametrize("block", [1 << 20, 64, 20, 7])
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_rounded_as_within_the_whole_weight(kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_weights, "BLOCK", block)
    shape, dim, parts = PARTS[kind]
    weight, gradient = torch.randn(shape, generator=noise()).bfloat16(), torch.randn(shape, generator=noise(1))
    slices = tuple(tuple(slice(*ends) for ends in own) for own in parts)

    def step(rank: int | None) -> Tensor:
        """The whole weight after a step, or the part of a process."""
        own = [slice(0, shape[dim])] if rank is None else slices[rank]

        def part_of(x: Tensor) -> Tensor:
            return torch.cat([x.narrow(dim, s.start, s.stop - s.start) for s in own], dim)

        held = nn.Parameter(part_of(weight))
        widen_gradients([held])
        if rank is not None:
            marked(held, WeightPart(torch.Size(shape), dim, slices, namedtuple("Peers", "rank")(rank)))  # type: ignore[arg-type]
        inner = OptimizerChoice("adamw").open([{"params": [held], "weight_decay": 0.0, "share": 1.0}], 1e-3)
        held.grad = part_of(gradient)
        RoundedOptimizer(inner, lambda: 3, True).step()
        return held.detach()

    whole = step(None)
    for rank, own in enumerate(slices):
        expected = torch.cat([whole.narrow(dim, s.start, s.stop - s.start) for s in own], dim)
        assert torch.equal(step(rank), expected)


def test_each_block_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_weights, "BLOCK", 64)
    one, other = stepped(torch.ones(2, 64).bfloat16(), 1, 1 / 512, name="sgd")  # halfway to the next number
    assert 10 < (one != 1).sum() < 54 and not torch.equal(one, other)


def test_a_step_that_fails_leaves_weights_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [nn.Parameter(torch.randn(5, 7, generator=noise(seed)).bfloat16()) for seed in range(2)]
    before, memory = [own.detach().clone() for own in both], [own.data_ptr() for own in both]
    widen_gradients(both)
    inner = OptimizerChoice("sgd").open([{"params": both, "weight_decay": 0.0, "share": 1.0}], 1e-3)
    optimizer, step = RoundedOptimizer(inner, lambda: 0, True), inner.step

    def fail() -> None:
        step()
        raise torch.OutOfMemoryError

    monkeypatch.setattr(inner, "step", fail)
    for own in both:
        own.grad = torch.ones(own.shape)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert all(map(torch.equal, both, before)) and [own.data_ptr() for own in both] == memory


def test_memory_of_moments_is_that_of_float32() -> None:
    matrix = nn.Parameter(torch.zeros(10, 10).bfloat16())
    assert AdamW([{"params": [matrix], "weight_decay": 0.0}], 1.0, (0.9, 0.999), 1e-8).moment_bytes() == 800


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> str:
    """A checkpoint stored in bfloat16."""
    save_model(load_model(base_of("native", tmp_path / "wide")), tmp_path / "start", own_pad(), torch.bfloat16)  # type: ignore[arg-type]
    return str(tmp_path / "start")


def weights(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


@pytest.mark.parametrize("verb", ["sft", "rl", "prefer", "distill"])
def test_an_update_is_that_of_float32_but_for_its_rounding(verb: str, tmp_path: Path, start: str) -> None:
    def ran(name: str, more: dict[str, Any]) -> dict[str, Tensor]:
        out: dict[str, Any] = {"out": str(tmp_path / name), "steps": 1, "lr": 1e-2, **QUICK, **more}
        out.pop("env_workers") if verb in ("sft", "prefer") else None
        played: dict[str, Any] = {"prompts": 4, "group": 4, "max_tokens": 4}
        if verb == "sft":
            posttrain.sft(ROWS, model=start, rows=4, **out)
        elif verb == "prefer":
            posttrain.prefer(PAIRS, start, algorithm="dpo", rows=4, **out)
        elif verb == "rl":
            posttrain.rl(SUMS, nearness, start, algorithm="grpo", settings={"kl": 0.1}, **played, **out)
        else:
            posttrain.distill(SUMS, model=start, teacher=start, temperature=0.7, **played, **out)
        return weights(tmp_path / name, 1)

    narrow, wide = ran("narrow", NARROW), ran("wide", {"precision": "bfloat16"})
    first = load_file(Path(start) / "model.safetensors")
    moved = 0
    for name, own in narrow.items():
        low, high = neighbours(wide[name])
        rounds = own.ndim == 2 and "norm" not in name
        assert torch.equal(own, wide[name]) if not rounds else bool(((own == low) | (own == high)).all()), name
        moved += int((own != first[name].float()).sum())
    assert moved or verb == "distill", "the weights have learned"


def test_a_reference_has_the_numbers_of_the_policy_although_the_start_is_stored_in_float32(tmp_path: Path) -> None:
    save_model(load_model(base_of("native", tmp_path / "base")), tmp_path / "wide", own_pad())  # type: ignore[arg-type]
    how: dict[str, Any] = {"prompts": 4, "group": 4, "max_tokens": 4, "steps": 1, **QUICK, **NARROW}
    run = posttrain.rl(SUMS, nearness, str(tmp_path / "wide"), settings={"kl": 0.1}, out=str(tmp_path / "run"), **how)
    assert run.metrics[0]["kl"] == 0


def test_a_missing_gradient_is_zeros_in_float32() -> None:
    matrix = nn.Parameter(torch.ones(3, 2).bfloat16())
    widen_gradients([matrix])
    sum_gradients(Alone(), [matrix])
    assert matrix.grad is not None and matrix.grad.dtype == torch.float32 and not matrix.grad.any()


@pytest.mark.parametrize(("algorithm", "kind"), [("ppo", torch.bfloat16), ("sac", torch.float32)])
def test_a_critic_is_narrow_unless_a_copy_follows_it_in_small_steps(
    algorithm: str, kind: torch.dtype, tmp_path: Path, start: str
) -> None:
    learners = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "new_learner", lambda *a, **k: learners.append(new_learner(*a, **k)) or learners[-1])
        how: dict[str, Any] = {
            "prompts": 2,
            "group": 2,
            "max_tokens": 2,
            "steps": 1,
            "critic_warmup": 0,
            **QUICK,
            **NARROW,
        }
        posttrain.rl(TASKS, digits, start, out=str(tmp_path / "run"), algorithm=algorithm, **how)
    matrices = {p.dtype for name, p in learners[0].critic.named_parameters() if "qkv" in name and p.ndim == 2}
    assert matrices == {kind}


def likelihood(outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
    return -outputs.logp.sum()


likelihood.wants = frozenset[str]()  # type: ignore[attr-defined]


def one_of_two(rank: int, folder: str, start: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        model = load_model(start, matrices=torch.bfloat16)
        module = cast(nn.Module, model).requires_grad_(True)
        learner = DataParallelLearner(model, Optimization(lr=1e-3), precision="bfloat16", world=Processes())
        learner.update(micro_batches(4 + rank), likelihood)  # type: ignore[arg-type]
        torch.save({name: p.detach() for name, p in module.named_parameters()}, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_processes_round_alike(tmp_path: Path, start: str) -> None:
    in_processes(one_of_two, (str(tmp_path), start), 2)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)
    before = dict(cast(nn.Module, load_model(start, matrices=torch.bfloat16)).named_parameters())
    assert any(p.dtype == torch.bfloat16 and not torch.equal(p, before[name]) for name, p in one.items())


@pytest.mark.parametrize("options", [{}, {"algorithm": "ppo"}, {"optimizer": "muon"}], ids=["grpo", "ppo", "muon"])
def test_a_resumed_run_has_the_same_bits(options: dict[str, Any], tmp_path: Path, start: str) -> None:
    def ran(name: str, steps: int, **more: Any) -> None:
        how = {"prompts": 4, "group": 4, "max_tokens": 4, "lr": 1e-3, **QUICK, **NARROW, **options}
        posttrain.rl(TASKS, digits, start, out=str(tmp_path / name), steps=steps, **how, **more)

    ran("whole", 4)
    ran("parts", 2)
    ran("parts", 4, resume=True)
    whole, parts = weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert any(not torch.equal(whole[name], weights(tmp_path / "parts", 2)[name]) for name in whole)


def learned(run: Path, start: Path) -> list[str]:
    """Names of the matrices of layers that differ from their start, each of which has only numbers of bfloat16."""
    found, first = weights(run, 2), load_file(start / "model.safetensors")
    matrices = [name for name in found if "_proj" in name and name.endswith("weight")]
    assert matrices and all(torch.equal(found[name].bfloat16().float(), found[name].float()) for name in matrices)
    return [name for name in matrices if not torch.equal(found[name].float(), first[name].bfloat16().float())]


def test_models_of_transformers_learn(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = base_of("phi3", tmp_path / "backed")
    own_pad().save(folder)
    out: dict[str, Any] = {"steps": 2, "rows": 4, "lr": 1e-2, "threads": 1, "quiet": True, **NARROW}
    posttrain.sft(ROWS, model=str(folder), out=str(tmp_path / "run"), **out)
    assert learned(tmp_path / "run", folder)


def test_reward_models_learn(tmp_path: Path, start: str) -> None:
    out: dict[str, Any] = {"steps": 2, "rows": 4, "lr": 1e-2, "threads": 1, "quiet": True, **NARROW}
    posttrain.reward_model(PAIRS, start, out=str(tmp_path / "run"), **out)
    assert learned(tmp_path / "run", Path(start))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"precision": "float32"}, "add --precision bfloat16"),
        ({"lora": 2}, "give --frozen-weights bfloat16 instead"),
        ({"float8": True}, "not been tried with --float8"),
        ({"model": None}, "give --model"),
    ],
)
def test_what_it_contradicts_is_one_line(options: dict[str, Any], told: str, tmp_path: Path, start: str) -> None:
    with pytest.raises(UserError, match=told):
        posttrain.sft(ROWS, out=str(tmp_path / "run"), **{"model": start, "steps": 1, **NARROW, **options})
