"""A run whose processes divide the experts of each layer is the run of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import segments
from processes import in_processes
from ranks import free_port, joined
from safetensors.torch import load_file
from sharded import QUICK, Both, equal, go_on, gradients, long, micro_batches, same_run
from sums import SUMS, nearness
from tiny_models import InDouble, make, opened
from torch import Tensor

import posttrain
from posttrain.config.resolve import filled, validate
from posttrain.config.training import SFT
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.types import UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.learners import process_group
from posttrain.learners.expert_parallel_learner import ExpertParallelLearner
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.process_group import Processes
from posttrain.learners.process_mesh import open_mesh
from posttrain.learners.router_losses import RouterLosses
from posttrain.models.critic import ValueModel
from posttrain.models.hf import expert_parallel
from posttrain.models.hf.expert_parallel import divide_experts
from posttrain.models.hf.pass_memory import ByteCount, pass_bytes
from posttrain.models.hf.transformers_folder import load_backed
from posttrain.models.native.kernels import build
from posttrain.models.row_shards import part_of, whole
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training import memory_advice, memory_estimate
from posttrain.training.memory_estimate import UpdateSize
from posttrain.training.memory_plan import shapes_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(1200)  # a module's processes start in its first test

KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
"""Softmax and sigmoid routers, biased experts, shared ones; dense layers between; flat, and in rows."""
SIZES = {2: [2], 4: [2, 4]}
"""Processes -> expert parallelism of the learners that are compared with one process."""


def learner(folder: Path, together: Processes | None, experts: int = 1) -> LocalLearner:
    """The learner of one process, or of several: with critic, reference and losses of routers."""
    losses = RouterLosses(balance=0.3, z=0.1)
    before = opened(folder, torch.float64).requires_grad_(False)
    critic = ValueModel(32, opened(folder, torch.float64), 0).double()
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.mul_(1.1)
    rate = Optimization(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    held: dict[str, Any] = {"others": {REFERENCE: before}, "critic": critic, "router_losses": losses}
    model = opened(folder, torch.float64)
    if together is None:
        return LocalLearner(model, rate, **held)
    return ExpertParallelLearner(model, rate, world=together, mesh=open_mesh(together, experts, 1), **held)


def weights(of: LocalLearner) -> dict[str, Tensor]:
    held: dict[str, Any] = {"policy": of.model, "critic": of.critic, **of.others}
    return {f"{name}/{n}": whole(p).clone() for name, m in held.items() for n, p in m.named_parameters()}


def all_to(experts: list[int], batches: list[Batch]) -> list[Batch]:
    """These micro-batches, each of whose tokens takes these experts in the layers with routers."""

    def routed(batch: Batch) -> Batch:
        taken = torch.tensor(experts, dtype=torch.int16).expand(len(batch.layout.tokens), 2, len(experts))
        return replace(batch, layout=replace(batch.layout, experts=taken.contiguous()))

    return [routed(batch) for batch in batches]


def same_updates(one: LocalLearner, many: LocalLearner, together: Processes, kind: str) -> None:
    """Outputs, gradients, metrics and weights over updates with and without losses of policy and critic."""
    grads, summed = gradients(one), gradients(many)
    equal(weights(one), weights(many), 0.0)
    wants = frozenset({"value", "entropy", "kl"})
    cases = [
        (Both(wants=wants), micro_batches(7)),
        (Both(), micro_batches(1)),  # other processes have none
        (Both(policy=long, critic=lambda b: not long(b)), micro_batches(6)),
        (Both(policy=lambda b: False), micro_batches(5)),
    ]
    if kind == "qwen3_moe":
        for of in (one, many):
            of.model.replays = True  # type: ignore[attr-defined]
        cases += [(Both(), all_to([1, 0], micro_batches(5)))]  # no token for the other experts and their processes
    for objective, batches in cases:
        for of in ("policy", REFERENCE):
            for mine, theirs in zip(one.evaluate(batches, of, wants), many.evaluate(batches, of, wants), strict=True):
                for name in ("logp", *wants):
                    torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), atol=1e-9, rtol=1e-9)
        grads.clear(), summed.clear()
        ours, others = (of.update(batches, objective).means() for of in (one, many))
        assert ours == pytest.approx(others, rel=1e-8), kind
        equal(grads, summed, 1e-9)
        equal(weights(one), weights(many), 1e-8)
        one.move(REFERENCE, 0.3), many.move(REFERENCE, 0.3)
    now = b"".join(t.numpy().tobytes() for t in weights(many).values())
    assert len(set(together.gather(now))) == 1


def learners(out: Path, together: Processes, kinds: Sequence[str] = KINDS) -> None:
    for kind in kinds:
        for size in SIZES[together.size]:
            with InDouble():
                one, many = learner(out / kind, None), learner(out / kind, together, size)
                same_updates(one, many, together, kind)
            holds_its_own(one, many, size)
            again(out / f"{kind}-{together.size}-{size}", one, many, together)
        (out / f"{kind}.{together.size}").write_text("equal")


def holds_its_own(one: LocalLearner, many: LocalLearner, size: int) -> None:
    """A process has its share of the experts' bytes, and no other's moments."""
    total: dict[bool, int] = {}
    for (name, mine), (_, theirs) in zip(many.model.named_parameters(), one.model.named_parameters(), strict=True):
        divided = part_of(mine) is not None
        assert divided == (".experts." in name)
        assert mine.untyped_storage().nbytes() * (size if divided else 1) == theirs.untyped_storage().nbytes(), name
        total[divided] = total.get(divided, 0) + theirs.nbytes
        assert many.optimizer.state[mine]["exp_avg"].shape == mine.shape
    assert total[True] > total[False] / 5


def again(folder: Path, one: LocalLearner, many: LocalLearner, together: Processes) -> None:
    """A checkpoint is that of one process, and is read by its parts; an engine's copy is whole."""
    equal(dict(one.model.named_parameters()), dict(own_copy(many.weights()).named_parameters()), 1e-7)  # type: ignore[arg-type]
    rank = together.rank
    if rank == 0:
        one.save(folder / "one")
    many.save(folder / "many" if rank == 0 else None)
    together.gather(None)
    for file in ("model.safetensors", "training/optimizer.safetensors", "training/critic.safetensors"):
        equal(load_file(folder / "one" / file), load_file(folder / "many" / file), 1e-7)
    read = learner(folder / "many", together, many.experts.size)  # type: ignore[attr-defined]
    read.load(folder / "many")
    equal(weights(many), weights(read), 0.0)
    for (_, mine), (_, theirs) in zip(many._state(), read._state(), strict=True):
        equal({n: whole(t).double() for n, t in mine.items()}, {n: whole(t).double() for n, t in theirs.items()}, 0.0)


def deep(out: Path, together: Processes) -> None:
    """Layers are recomputed in all processes, even if only one has too little memory."""
    with InDouble():
        one, many = learner(out / "qwen3_moe", None), learner(out / "qwen3_moe", together, together.size)
    if together.rank == 0:
        many.model.activation_room = 0.0  # type: ignore[attr-defined]
    for count in (6, 3):
        one.update(micro_batches(count), Both()), many.update(micro_batches(count), Both())
    equal(weights(one), weights(many), 1e-5)  # a backward pass is not within `InDouble`
    (out / "deep").write_text("equal")


def memory(out: Path, together: Processes) -> None:
    """The estimate of weights, gradients and moments equals their count, with critic and reference."""
    with InDouble():
        many, counted = learner(out / "qwen3_moe", together, together.size), [0]
    held = [p for part in many.parts for p in part.parameters.values()]
    step = many.optimizer.step
    note = lambda: (counted.append(sum(p.grad.nbytes for p in held if p.grad is not None)), step())  # noqa: E731
    many.optimizer.step = note  # type: ignore[assignment, method-assign]
    with InDouble():
        many.update(micro_batches(6), Both())
    modules: list[Any] = [many.model, many.critic, *many.others.values()]
    weights = sum(p.nbytes for module in modules for p in module.parameters())
    moments = sum(m.nbytes for p in held for m in many.optimizer.state[p].values() if m.ndim)
    size = UpdateSize.of(SFT(expert_parallel=2), 64, 1e12, processes=2)
    assert memory_estimate.lasting_bytes(many, size) == pytest.approx(
        {"weights": weights, "gradients": counted[-1], "moments": moments}, rel=0.01
    )
    [line] = memory_advice.memory_lines(many, size)
    assert line.startswith("memory of the GPU: about ") and "beside activations" in line
    with pytest.raises(UserError, match=r"this run needs .* GiB \(") as caught:
        memory_advice.refuse_too_large(many, replace(size, room=weights / 4))
    assert "--shard" not in str(caught.value) and "--offload" not in str(caught.value), "which it refuses"
    (out / "memory").write_text("counted")


def planned(out: Path, together: Processes) -> None:
    """The estimate from config.json alone equals the bytes of weights, and of a forward and backward pass, of a process to
    which half of all tokens go.
    """
    folder, length = out / "qwen3_moe", 128
    real, options = opened(folder), {"tasks": "x", "processes": 2, **DIVIDED}
    divide_experts(real, open_mesh(together, 2, 1).tensor)  # type: ignore[arg-type]
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter)
    layout = segments((length, -1))
    layout = replace(layout, position=torch.arange(length), experts=torch.tensor([0, 2]).expand(length, 2, 2))
    real.replays, compiled, count = True, build.used(), ByteCount(real)
    build.use(False)  # compiled attention fills the heads of a tiny model up
    with count, real.peers.meeting():  # type: ignore[union-attr]
        states = real.hidden(layout, torch.arange(length))
        states.backward(torch.ones_like(states))
    shaped: Any = shapes_of(filled(SFT, options), folder).model
    build.use(compiled)
    bytes_of = [sum(p.nbytes for p in model.parameters()) for model in (real, shaped)]
    assert bytes_of[0] == bytes_of[1]
    found = pass_bytes(shaped, 1, length, False, False)
    assert found == pytest.approx(count.most, rel=0.1), (found, count.most)
    together.gather(None)
    (out / "planned").write_text("near")


@dataclass(frozen=True)
class Likelihood:
    """A loss of the policy alone."""

    wants: frozenset[str] = frozenset()

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        return -outputs.logp.sum() / 7


def rounded(out: Path, together: Processes) -> None:
    """Weights in bfloat16 are rounded as in one process; experts in one tensor keep float32."""
    folder, how = out / "qwen3_moe", Optimization(lr=1e-2, max_grad_norm=0.0)
    models = [
        load_backed(folder, json.loads((folder / "config.json").read_text()), matrices=torch.bfloat16) for _ in "12"
    ]
    for model in models:
        model.requires_grad_(True)
    held: dict[str, Any] = {"precision": "bfloat16"}
    mesh = open_mesh(together, together.size, 1)
    one = LocalLearner(models[0], how, **held)
    many = ExpertParallelLearner(models[1], how, world=together, mesh=mesh, **held)
    for of in (one, many):
        of.update(micro_batches(6), Likelihood())
    for (name, mine), (_, theirs) in zip(one.model.named_parameters(), many.model.named_parameters(), strict=True):
        own, found = mine.detach().float(), whole(theirs).float()
        assert mine.dtype == theirs.dtype and (part_of(theirs) is None or mine.dtype == torch.float32)
        if mine.dtype == torch.bfloat16:  # of numbers with other noise half would differ
            assert (own == found).float().mean() > 0.95, name
    now = b"".join(p.detach().float().numpy().tobytes() for p in many.model.parameters() if part_of(p) is None)
    assert len(set(together.gather(now))) == 1
    assert many.model.decoder.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    (out / "rounded").write_text("equal")


def twice(of: ExpertParallelLearner) -> None:
    ExpertParallelLearner._share_gradients(of)
    for part in of.parts:
        for parameter in part.parameters.values():
            if part_of(parameter) is not None and parameter.grad is not None:
                parameter.grad *= of.experts.size


def exchanged(weigh: Callable[[Tensor], Tensor], *given: Any) -> Tensor:
    inner, peers, count, states, experts, own = given
    return EXCHANGED(inner, peers, count, states, experts, weigh(own))


EXCHANGED = expert_parallel._exchanged
FAULTS: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "gradients of experts are summed twice": lambda patched, of: patched.setattr(of, "_share_gradients", partial(twice, of)),
    "an expert's norm is taken for all of them": lambda patched, of: patched.setattr(of, "_in_parts", lambda p: False),
    "gradients do not go back": lambda patched, of: patched.setattr(
        expert_parallel, "dealt", lambda x, peers, sent, got: peers.dealt(x, sent, got)
    ),
    "results are weighed by another expert's weight": lambda patched, of: weighing(patched, of, lambda w: w.flip(-1)),
    "results are not weighed": lambda patched, of: weighing(patched, of, torch.ones_like),
}  # fmt: skip


def weighing(patched: pytest.MonkeyPatch, of: LocalLearner, weigh: Callable[[Tensor], Tensor]) -> None:
    for layer in of.model.modules():
        if isinstance(found := vars(layer).get("forward"), partial):
            patched.setattr(layer, "forward", partial(exchanged, weigh, *found.args))


def faults(out: Path, together: Processes) -> None:
    """Each planted mistake changes gradients or weights."""
    noticed = []
    for name, plant in FAULTS.items():
        with InDouble():
            one, many = learner(out / "qwen3_moe", None), learner(out / "qwen3_moe", together, together.size)
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


# -- runs --------------------------------------------------------------------------------------------------------------

STEPS, HALF = 4, 2
PLAYED: dict[str, Any] = {"prompts": 5, "group": 3, "max_tokens": 4, "lr": 1e-3, "env_workers": 0, "kl": 0.05}
DIVIDED = {"expert_parallel": 2}
KINDS_OF_RUNS: dict[str, dict[str, Any]] = {
    "sft": {"recompute": "layers", "router_balance": 0.01},
    "grpo": {"eval_every": 2, "save_every": HALF},
    "replay": {"algorithm": "gspo", "async_steps": 1, "routing_replay": True, "router_balance": 0.01, "router_z": 1e-3},
    "lora": {"lora": 2, "dora": True, "frozen_weights": "bfloat16"},
    "bfloat16": {"precision": "bfloat16", "steps": 3},
    "weights": {"precision": "bfloat16", "weights": "bfloat16", "steps": 3},
    "ppo": {"algorithm": "ppo", "critic": "separate", "replicas": 2, "steps": 2},
}


def play(out: Path, start: Path, kind: str, **options: Any) -> None:
    own = {"steps": STEPS, **KINDS_OF_RUNS[kind], **options}
    if kind in ("sft", "bfloat16", "weights"):  # a sampled token may follow from the order of a sum in bfloat16
        posttrain.sft(SUMS, model=str(start), out=str(out), rows=8, lr=1e-3, **QUICK, **own)
    else:
        posttrain.rl(SUMS, nearness, str(start), out=str(out), **PLAYED, **QUICK, **own)


def runs_of_two(out: Path, together: Processes) -> None:
    for kind in KINDS_OF_RUNS:
        play(out / "two" / kind, out / "start", kind, **DIVIDED)
    play(out / "half", out / "start", "grpo", steps=HALF, **DIVIDED)
    go_on(out / "half", out / "half, the same", STEPS, **DIVIDED)
    go_on(out / "half", out / "half, whole", STEPS, expert_parallel=1)
    go_on(out / "half of one", out / "half of one, divided", STEPS, **DIVIDED)


PARTS: dict[str, list[Callable[[Path, Processes], None]]] = {
    "quick": [partial(learners, kinds=KINDS[:1]), rounded, memory, planned, faults],
    "long": [partial(learners, kinds=KINDS[1:]), deep, runs_of_two],
    "four": [learners],
}


def ranks(rank: int, port: int, size: int, out: Path, parts: str) -> None:
    """All that so many processes do together in these tests."""
    joined(rank, port, size)
    together = process_group.joined("cpu", SFT().collective_timeout)
    for part in PARTS[parts]:
        part(out, together)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with results of two processes, of one kind of model."""
    out = tmp_path_factory.mktemp("learners")
    make(KINDS[0], out / KINDS[0])
    in_processes(ranks, (free_port(), 2, out, "quick"), 2)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Runs of one process and of two, and updates of other kinds of models."""
    out = tmp_path_factory.mktemp("runs")
    for kind in KINDS:
        make(kind, out / kind)
    tokenizer.save(make("qwen3_moe", out / "start", vocab_size=tokenizer.vocab_size))
    for kind in KINDS_OF_RUNS:
        play(out / "one" / kind, out / "start", kind)
    play(out / "half of one", out / "start", "grpo", steps=HALF)
    in_processes(ranks, (free_port(), 2, out, "long"), 2)
    go_on(out / "half", out / "half, in one", STEPS, expert_parallel=1)
    return out


@pytest.fixture(scope="module")
def four(runs: Path) -> None:
    in_processes(ranks, (free_port(), 4, runs, "four"), 4)


def test_updates_of_two_processes_are_those_of_one_and_planted_mistakes_are_noticed(place: Path) -> None:
    assert (place / f"{KINDS[0]}.2").read_text() == "equal"
    assert (place / "faults").read_text() == "noticed"


def test_memory_that_lasts_is_estimated_as_it_is_counted(place: Path) -> None:
    assert (place / "memory").read_text() == "counted"


def test_the_estimate_from_a_config_alone_is_near_what_a_process_takes(place: Path) -> None:
    assert (place / "planned").read_text() == "near"


def test_weights_in_bfloat16_are_rounded_as_in_one_process(place: Path) -> None:
    assert (place / "rounded").read_text() == "equal"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS[1:])
def test_updates_of_other_models_are_those_of_one_process(runs: Path, kind: str) -> None:
    assert (runs / f"{kind}.2").read_text() == "equal"


@pytest.mark.long
def test_all_recompute_their_layers_if_one_process_has_too_little_memory(runs: Path) -> None:
    assert (runs / "deep").read_text() == "equal"


@pytest.mark.long
@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_four_processes_in_one_group_and_in_two_are_those_of_one(runs: Path, kind: str) -> None:
    assert (runs / f"{kind}.4").read_text() == "equal"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS_OF_RUNS)
def test_run_with_divided_experts_is_that_of_one_process(runs: Path, kind: str) -> None:
    same_run(runs / "one" / kind, runs / "two" / kind)


@pytest.mark.long
@pytest.mark.parametrize("name", ["half, the same", "half, whole", "half, in one", "half of one, divided"])
def test_run_is_resumed_with_divided_experts_and_without(runs: Path, name: str) -> None:
    same_run(runs / "one" / "grpo", runs / name)
    last = f"checkpoints/step-{STEPS:06d}/model.safetensors"
    equal(load_file(runs / "one" / "grpo" / last), load_file(runs / name / last), 1e-4)


@pytest.mark.long
def test_run_that_is_resumed_with_as_many_ends_byte_for_byte_as_undisturbed(runs: Path) -> None:
    undisturbed, resumed = runs / "two" / "grpo", runs / "half, the same"
    last = f"checkpoints/step-{STEPS:06d}"
    for file in ("metrics.jsonl", f"{last}/model.safetensors", f"{last}/training/optimizer.safetensors"):
        assert (undisturbed / file).read_bytes() == (resumed / file).read_bytes(), file


class Three:
    """The first of three processes."""

    rank, size = 0, 3


def test_what_cannot_be_divided_is_refused_in_one_line(tmp_path: Path) -> None:
    experts, dense = opened(make("qwen3_moe", tmp_path / "experts")), opened(make("qwen3", tmp_path / "dense"))
    stacked = opened(tmp_path / "experts")
    for module in stacked.inner.modules():
        vars(module).pop("is_transposed", None)
    asked: dict[str, Callable[[], Any]] = {
        "--expert-parallel 2 needs 2 processes for each layer's experts, and the run has 1: give --processes 2": lambda: (
            posttrain.sft(SUMS, out="never", model=str(tmp_path / "experts"), **DIVIDED)
        ),
        "leaves all but the experts whole, and --shard divides them too: leave out one of them": lambda: validate(
            SFT(tasks="x", shard=True, **DIVIDED)
        ),
        "--expert-parallel 3 divides experts, and this model has 4 per layer: give a divisor of 4": lambda: divide_experts(
            experts, Three()  # type: ignore[arg-type]
        ),
        "--expert-parallel divides the experts of a mixture, and this model is dense: leave it out": lambda: divide_experts(
            dense, Three()  # type: ignore[arg-type]
        ),
        "Qwen3MoeForCausalLM has 2 layers with routers, and 0 with such tensors: leave it out": lambda: divide_experts(
            stacked, type("Two", (), {"rank": 0, "size": 2})()
        ),
    }  # fmt: skip
    for told, call in asked.items():
        with pytest.raises(UserError) as caught:
            call()
        assert told in str(caught.value)
