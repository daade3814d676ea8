"""A run whose processes share each micro-batch, by weights or by tokens, is the run of one process."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_processes
from ranks import free_port, joined
from safetensors.torch import load_file
from sharded import QUICK, Both, equal, go_on, gradients, long, micro_batches
from sums import PAIRS, SMALL, SUMS, nearness
from torch import Tensor

import posttrain
from posttrain.config.resolve import validate
from posttrain.config.training import SFT
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.transcripts import Transcript
from posttrain.core.types import UserError
from posttrain.learners import process_group
from posttrain.learners.data_parallel import DataParallelLearner
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.process_group import Processes
from posttrain.learners.process_mesh import ProcessMesh, open_mesh
from posttrain.learners.tensor_parallel_learner import TensorParallelLearner
from posttrain.models import checkpoint_folder
from posttrain.models.adapters.lora import LoRA, attach, begin, shared_copy
from posttrain.models.critic import ValueModel
from posttrain.models.native import decoder as native_decoder
from posttrain.models.native.context_parallel import refuse_undealt
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.head import SharedVocabulary
from posttrain.models.native.tensor_parallel import divide
from posttrain.models.row_shards import whole
from posttrain.runs.run_reading import read_metrics
from posttrain.training import open_learner
from posttrain.training.sources.sft_source import Demonstrations

pytestmark = pytest.mark.timeout(1200)  # a module's processes start in its first test

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


def learner(tied: bool, mesh: ProcessMesh | None, lora: int = 0, quantize: str = "", **options: Any) -> LocalLearner:
    """The learner of one process, or of a mesh: with critic and reference, and with adapters if they have a rank."""
    dtype = torch.float32 if "precision" in options else torch.float64
    model, rate = decoder(tied).to(dtype), Optimization(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    before = decoder(tied, 3).to(dtype).requires_grad_(False)
    if lora:
        attach(model, LoRA(lora, 4.0, quantize=quantize), lambda name: "k_proj" not in name)
        begin(model, 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("adapter.b"):
                    parameter.fill_(0.05)
        before = shared_copy(model)  # type: ignore[assignment]
    critic = ValueModel(14, decoder(True, 5, 1), 0).to(dtype)
    held: dict[str, Any] = {"others": {REFERENCE: before}, "critic": critic, **options}
    if mesh is None:
        return LocalLearner(model, rate, **held)
    if mesh.tensor is None:
        return DataParallelLearner(model, rate, mesh=mesh, **held)
    return TensorParallelLearner(model, rate, mesh=mesh, **held)


def weights(of: LocalLearner) -> dict[str, Tensor]:
    held = {"policy": of.model, "critic": of.critic, **of.others}
    return {f"{name}/{n}": whole(p).clone() for name, m in held.items() if m for n, p in m.named_parameters()}


def with_temperatures(batch: Batch) -> Batch:
    """The same tokens, each sampled at a temperature of its own, and the first at the run's."""
    heats = torch.linspace(0.5, 2.0, len(batch.target), dtype=torch.float64)
    heats[0] = torch.nan
    return replace(batch, temperature=heats, repeats=None)


def same_updates(one: LocalLearner, many: LocalLearner, together: Processes) -> None:
    """Outputs, gradients, metrics and weights over updates with and without losses of policy and critic."""
    grads, summed = gradients(one), gradients(many)
    equal(weights(one), weights(many), 0.0)
    wants = frozenset({"value", "entropy", "kl"})
    only = Both(policy=lambda batch: False)
    cases = ((ToReference(), 5, False), (ToReference(), 1, True), (only, 3, False), (Both(policy=long), 4, False))
    for objective, count, tempered in cases:
        batches = micro_batches(count)
        if tempered:
            batches = [with_temperatures(batch) for batch in batches]
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
        for tied, lora, packed in ((True, 0, ""), (False, 0, ""), (True, 3, "" if tensor > 1 else "int8")):
            one, many = (learner(tied, found, lora, packed) for found in (None, mesh))
            same_updates(one, many, together)
    (out / f"learners.{together.size}").write_text("equal")


def kept(of: LocalLearner, batch: Batch) -> int:
    """Bytes that a forward pass of the policy keeps for its backward pass, without the weights."""
    weights, found = {p.untyped_storage().data_ptr() for p in of.model.parameters()}, dict[int, int]()

    def note(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outputs = of._outputs(of.model, batch, frozenset())
    assert outputs.logp.requires_grad
    return sum(found.values())


def memory(out: Path, together: Processes) -> None:
    """Of the weights each process has its part, and of the activations in between what its weights or tokens make."""
    batch, one = long_batch(), learner(False, None)
    for tensor, context in SIZES[together.size]:
        many = learner(False, open_mesh(together, tensor, context))
        whole_weights, own = (sum(p.numel() for p in of.model.parameters()) for of in (one, many))
        assert own <= 1.2 * whole_weights / tensor
        share = kept(many, batch) / kept(one, batch)
        assert share <= 1.1 / context if context > 1 else share < 0.8, share
    (out / "memory").write_text("shared")


def long_batch() -> Batch:
    transcript = Transcript()
    transcript.observe([3])
    transcript.imitate([3 + place % 38 for place in range(511)])
    return Demonstrations([], 1, 600, 0, torch.device("cpu")).batches([[transcript]])[0]  # type: ignore[arg-type]


def in_bfloat16(out: Path, together: Processes) -> None:
    """Products are rounded, sums between processes are not: gradients are as far from exact ones as those of one process."""
    batches = [*micro_batches(5), long_batch()]

    def updated(mesh: ProcessMesh | None, precision: str) -> dict[str, Tensor]:
        of = learner(True, mesh, precision=precision)
        found = gradients(of)
        of.update(batches, Both())
        return found

    def far(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
        assert mine.keys() == theirs.keys()
        return sum((mine[name] - theirs[name]).square().sum().item() for name in mine) ** 0.5

    exact, one = updated(None, "float32"), updated(None, "bfloat16")
    for tensor, context in SIZES[together.size]:
        many = updated(open_mesh(together, tensor, context), "bfloat16")
        assert far(many, one) < far(one, exact) / 2
    (out / "in bfloat16").write_text("near")


def twice(of: TensorParallelLearner) -> None:
    for _ in range(2):
        TensorParallelLearner._share_gradients(of)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "a part is not summed": lambda patched, of: patched.setattr(native_decoder, "summed", lambda x, peers: x),
    "a gradient is not summed": lambda patched, of: patched.setattr(native_decoder, "copied", lambda x, peers: x),
    "gradients of norms are parts": lambda patched, of: patched.setattr(of, "_partial", set()),
    "gradients of norms are summed twice": lambda patched, of: patched.setattr(of, "_share_gradients", partial(twice, of)),
    "a part's norm is taken for the whole": lambda patched, of: patched.setattr(of, "_in_parts", lambda parameter: False),
    "logits of other processes are missing": lambda patched, of: patched.setattr(
        SharedVocabulary, "over_all", lambda self, *own: own
    ),
}  # fmt: skip


def faults(out: Path, together: Processes) -> None:
    """Each planted mistake changes gradients or weights."""
    mesh, noticed = open_mesh(together, 2, 1), []
    for name, plant in FAULTS.items():
        one, many = learner(True, None), learner(True, mesh)
        grads, summed = gradients(one), gradients(many)
        with pytest.MonkeyPatch.context() as patched:
            plant(patched, many)
            one.update(micro_batches(3), Both()), many.update(micro_batches(3), Both())
        try:
            equal(grads, summed, 1e-9)
            equal(weights(one), weights(many), 1e-8)
        except AssertionError:
            noticed.append(name)
    assert noticed == list(FAULTS)
    (out / "faults").write_text("noticed")


@dataclass(frozen=True)
class Breaking(Both):
    """A loss after which every collective breaks, as if a process was killed in the backward pass."""

    patched: pytest.MonkeyPatch | None = None

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        assert self.patched is not None
        breaking(self.patched)
        return super().__call__(outputs, batch, stats)


def breaking(patched: pytest.MonkeyPatch) -> None:
    def broken(self: Processes, x: Tensor) -> Tensor:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    for name in ("total", "stacked", "exchanged"):
        patched.setattr(Processes, name, broken)


def losses(out: Path, together: Processes) -> None:
    """A process that is lost in a backward pass, or when outputs are joined, is told of in words."""
    for tensor, context in SIZES[together.size]:
        many, batches = learner(True, open_mesh(together, tensor, context)), micro_batches(2)
        with (
            pytest.MonkeyPatch.context() as patched,
            pytest.raises(UserError, match="another process of the run is gone"),
        ):
            many.update(batches, Breaking(patched=patched))
        with (
            pytest.MonkeyPatch.context() as patched,
            pytest.raises(UserError, match="another process of the run is gone"),
        ):
            breaking(patched)
            many.evaluate(batches)
    (out / "losses").write_text("told")


# -- runs --------------------------------------------------------------------------------------------------------------

STEPS, HALF = 4, 2
PLAYED: dict[str, Any] = {"prompts": 4, "group": 3, "max_tokens": 4, "lr": 1e-3, "eval_every": 2, "env_workers": 0}
PPO: dict[str, Any] = {
    "algorithm": "ppo",
    "settings": {"reference_every": 2, "minibatches": 2},
    "save_every": 2,
    **PLAYED,
}
"""All that a learner can hold: a critic, and a reference that moves."""
RL = posttrain.rl, (SUMS, nearness)
KINDS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "sft": (posttrain.sft, (SUMS,), {"rows": 8, "lr": 3e-3, "recompute": "layers"}),
    "dpo": (posttrain.prefer, (PAIRS,), {"rows": 6, "lr": 1e-3}),
    "reward-model": (posttrain.reward_model, (PAIRS,), {"rows": 6, "lr": 1e-3}),
    "grpo": (*RL, {**PLAYED, "kl": 0.05}),
    "grpo of adapters": (*RL, {**PLAYED, "kl": 0.05, "lora": 3, "frozen_weights": "bfloat16"}),
    "ahead": (*RL, {**PLAYED, "algorithm": "gspo", "async_steps": 1}),
    "engines": (*RL, {**PLAYED, "algorithm": "gspo", "replicas": 2}),
    "whole matrices": (
        posttrain.sft,
        (SUMS,),
        {"rows": 8, "lr": 3e-3, "lora": 3, "dora": True, "optimizer": "adafactor"},
    ),
}
"""`sft` recomputes its layers; `whole matrices` has what needs them: norms of rows, and moments of rows and columns."""
COMPARED = {
    "tensor": tuple(kind for kind in KINDS if kind != "whole matrices"),
    "context": tuple(kind for kind in KINDS if kind != "ahead"),
}


def kinds(out: Path, start: Path, names: Iterable[str], **options: Any) -> None:
    """Runs whose policies, and references, are in float64."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(open_learner, "load_model", partial(checkpoint_folder.load_model, dtype=torch.float64))
        for name in names:
            verb, given, own = KINDS[name]
            common = {"model": str(start), "out": str(out / name), "steps": 3, "save_every": 2, **QUICK}
            verb(*given, **common, **own, **options)


def play(out: Path, start: Path, steps: int = STEPS, **options: Any) -> None:
    posttrain.rl(SUMS, nearness, str(start), out=str(out), steps=steps, **PPO, **QUICK, **options)


def runs_of_two(out: Path, together: Processes) -> None:
    for name, kind in COMPARED.items():
        kinds(out / name, out / "start", kind, **{f"{name}_parallel": 2})
    play(out / "half", out / "start", HALF, tensor_parallel=2)
    go_on(out / "half", out / "half, data parallel", STEPS, tensor_parallel=1)
    go_on(out / "half of one", out / "half of one, in two", STEPS, tensor_parallel=2)
    play(out / "sharded", out / "start", context_parallel=2, shard=True)


def ranks(rank: int, port: int, size: int, out: Path) -> None:
    """All that so many processes do together in these tests."""
    joined(rank, port, size)
    together = process_group.joined("cpu", SFT().collective_timeout)
    for part in PARTS[size]:
        part(out, together)


PARTS: dict[int, list[Callable[[Path, Processes], None]]] = {
    2: [learners, memory, in_bfloat16, faults, losses, runs_of_two],
    4: [learners],
}


def runs_of_one(out: Path) -> None:
    kinds(out / "one", out / "start", KINDS)
    play(out / "ppo", out / "start")
    play(out / "half of one", out / "start", HALF)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    start = posttrain.sft(SUMS, out=str(out / "first"), steps=10, rows=8, lr=3e-3, **SMALL, **QUICK)
    assert start.checkpoint
    shutil.copytree(start.checkpoint, out / "start")
    runs_of_one(out)
    in_processes(ranks, (free_port(), 2, out), 2)
    go_on(out / "half", out / "half, in one", STEPS, tensor_parallel=1)
    return out


@pytest.fixture(scope="module")
def four(runs: Path) -> None:
    in_processes(ranks, (free_port(), 4, runs), 4)


def test_updates_of_two_processes_are_those_of_one(runs: Path) -> None:
    assert (runs / "learners.2").read_text() == "equal"


@pytest.mark.parametrize(
    ("what", "found"), [("memory", "shared"), ("in bfloat16", "near"), ("faults", "noticed"), ("losses", "told")]
)
def test_processes_share_memory_round_as_one_and_mistakes_are_noticed(runs: Path, what: str, found: str) -> None:
    assert (runs / what).read_text() == found


@pytest.mark.long
@pytest.mark.usefixtures("four")
def test_updates_of_four_processes_are_those_of_one(runs: Path) -> None:
    assert (runs / "learners.4").read_text() == "equal"


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, own in COMPARED.items() for kind in own])
def test_every_kind_of_run_is_that_of_one_process(runs: Path, name: str, kind: str) -> None:
    check_run(runs / "one" / kind, runs / name / kind, SINGLE if kind == "reward-model" else DOUBLE, 3)


@pytest.mark.parametrize("name", ["half, in one", "half, data parallel", "half of one, in two", "sharded"])
def test_run_with_a_critic_is_that_of_one_process_also_resumed_with_others(runs: Path, name: str) -> None:
    check_run(runs / "ppo", runs / name, SINGLE, STEPS)


DOUBLE, SINGLE = {"rel": 1e-7, "abs": 1e-8}, {"rel": 1e-3, "abs": 1e-4}


def check_run(one: Path, other: Path, within: dict[str, float], steps: int) -> None:
    """Metrics and the last checkpoint."""
    ours, theirs = read_metrics(one), read_metrics(other)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for mine, row in zip(ours, theirs, strict=True):
        assert row == pytest.approx(mine, **within), mine["step"]
    assert any(row.get("grad_norm", 0) > 0 for row in theirs)
    mine, found = (run / "checkpoints" / f"step-{steps:06d}" for run in (one, other))
    files = sorted(path.relative_to(mine) for path in mine.rglob("*.safetensors"))
    assert files and files == sorted(path.relative_to(found) for path in found.rglob("*.safetensors"))
    for file in files:
        ours_, theirs_ = load_file(mine / file), load_file(found / file)
        assert ours_.keys() == theirs_.keys(), file
        for name, tensor in ours_.items():
            torch.testing.assert_close(theirs_[name], tensor, atol=within["abs"], rtol=within["rel"])


def test_a_process_that_does_not_respond_is_named_by_its_rank_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"is_initialized": True, "get_rank": 0, "get_world_size": 2, "get_process_group_ranks": [2, 3]}
    for name, value in known.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda group=None, value=value: value)
    second = Processes(torch.distributed.HashStore(), 0.01, "the second of two groups", "1.1.")
    with pytest.raises(UserError, match="process 3 did not respond within"):
        second.gather(None)


def test_what_cannot_be_divided_is_refused() -> None:
    three = namedtuple("Peers", "rank size")(0, 3)
    whole_once = (
        "--shard divides rows of whole matrices, and --tensor-parallel has divided them already: leave out one of"
    )
    asked: dict[str, Callable[[], Any]] = {
        "--tensor-parallel 2 needs 2 processes for each micro-batch, and the run has 1: give --processes 2": lambda: (
            posttrain.sft(SUMS, out="never", tensor_parallel=2, **SMALL)
        ),
        whole_once: lambda: validate(SFT(tasks="x", shard=True, tensor_parallel=2)),
        "--tensor-parallel 3 divides key-value heads, and this model has 4: give a divisor of 4": lambda: divide(
            decoder(True), three
        ),  # type: ignore[arg-type]
        "--context-parallel 3 divides heads within attention, and each process has 8: give a divisor of 8": lambda: (
            refuse_undealt(decoder(True), 3)
        ),
    }
    for told, call in asked.items():
        with pytest.raises(UserError) as caught:
            call()
        assert told in str(caught.value)
