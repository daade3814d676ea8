"""A run whose weights are dealt out to several processes is the run of one, and so are the checkpoints that it leaves."""

from __future__ import annotations

import os
import re
import shutil
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
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
from sharded import QUICK, Both, equal, go_on, gradients, long, micro_batches, same_run
from sums import PAIRS, SMALL, SUMS, nearness
from tiny_models import make, make_seeing
from torch import Tensor

import posttrain
from posttrain.algorithms.all_algorithms import find
from posttrain.config.resolve import validate
from posttrain.config.training import RL, SFT
from posttrain.core.batch import Batch, Outputs
from posttrain.core.protocols import Alone, Objective
from posttrain.core.token_probe import Found, TokenSink
from posttrain.core.types import UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.engines.servers.adapter_sync import rank_for
from posttrain.engines.vllm.vllm_setup import VLLMSetup
from posttrain.engines.weight_probe import LIMIT, WeightProbe
from posttrain.learners import fsdp, process_group, sharded_decoder
from posttrain.learners.fsdp import FSDPLearner
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.optimizers import ROWS
from posttrain.learners.process_group import Processes
from posttrain.models.adapters.lora import LoRA, attach
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import ValueModel
from posttrain.models.hf.expert_parallel import divide_experts
from posttrain.models.native.decoder import Decoder, causal, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.tensor_parallel import divide
from posttrain.models.row_shards import is_sharded, whole
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_metrics
from posttrain.training.adjust import adjust
from posttrain.training.distributed_setup import open_world
from posttrain.training.open_learner import new_learner, policy
from posttrain.training.sources.sft_source import LikelihoodObjective

pytestmark = pytest.mark.timeout(1200)  # a module's processes start in its first test

PLAYED: dict[str, Any] = {"prompts": 5, "group": 3, "max_tokens": 4, "lr": 1e-3, "eval_every": 2, "env_workers": 0}
PPO: dict[str, Any] = {
    "algorithm": "ppo",
    "settings": {"reference_every": 2, "minibatches": 2},
    "save_every": 2,
    **PLAYED,
}
"""All that a learner can hold: a critic, and a reference that moves."""
STEPS, HALF = 6, 4
SHARDED = {"shard": True}


# -- runs --------------------------------------------------------------------------------------------------------------


def play(out: Path, start: Path, steps: int = STEPS, **options: Any) -> None:
    posttrain.rl(SUMS, nearness, str(start), out=str(out), steps=steps, **PPO, **QUICK, **options)


def all_kinds(out: Path, start: Path, **options: Any) -> None:
    again = posttrain.sft(SUMS, out=str(out / "sft"), steps=3, rows=8, lr=3e-3, **SMALL, **QUICK, **options)
    assert again.checkpoint
    common: dict[str, Any] = {"steps": 3, "rows": 6, "lr": 1e-3, "save_every": 2, **QUICK, **options}
    posttrain.prefer(PAIRS, model=str(start), out=str(out / "dpo"), **common)
    posttrain.prefer(PAIRS, model=str(start), out=str(out / "tr-dpo"), algorithm="tr-dpo", **common)
    posttrain.reward_model(PAIRS, model=str(start), out=str(out / "reward-model"), **common)
    played: dict[str, Any] = {"steps": 3, **PLAYED, **QUICK, **options}
    soft = {"algorithm": "sac", "settings": {"critic_warmup": 1}}
    posttrain.rl(SUMS, nearness, str(start), out=str(out / "sac"), **soft, **played)
    posttrain.rl(SUMS, nearness, str(start), out=str(out / "ahead"), algorithm="gspo", async_steps=1, **played)
    teacher = str(again.checkpoint)
    moving = {"teacher_every": 1, "teacher_update_rate": 0.3}
    posttrain.distill(SUMS, model=str(start), teacher=teacher, out=str(out / "distill"), settings=moving, **played)


def ranks(rank: int, port: int, size: int, out: Path) -> None:
    """All that so many processes do together in these tests."""
    joined(rank, port, size)
    together = process_group.joined("cpu", SFT().collective_timeout)
    for part in PARTS[size]:
        part(out, rank, together)


def runs_of_two(out: Path, rank: int, together: Processes) -> None:
    play(out / "two", out / "start", **SHARDED)
    play(out / "two, recomputed", out / "start", recompute="layers", **SHARDED)
    play(out / "half", out / "start", HALF, **SHARDED)
    go_on(out / "half", out / "half, the same", STEPS, **SHARDED)
    go_on(out / "half", out / "half, whole", STEPS, shard=False)
    go_on(out / "half of one", out / "half of one, in two", STEPS, **SHARDED)


def kinds_of_two(out: Path, rank: int, together: Processes) -> None:
    all_kinds(out / "kinds of two", out / "start", **SHARDED)


def runs_of_three(out: Path, rank: int, together: Processes) -> None:
    play(out / "three", out / "start", **SHARDED)
    go_on(out / "half", out / "half, in three", STEPS, **SHARDED)


def runs_in_copies(out: Path, rank: int, together: Processes) -> None:
    copies = {**SHARDED, "shard_size": 2}
    play(out / "two copies in two", out / "start", **copies)
    play(out / "two copies, tokens divided", out / "start", context_parallel=2, **copies)
    go_on(out / "half", out / "half, in two copies", STEPS, **copies)


def fails_within(out: Path, rank: int, together: Processes) -> None:
    """The second process fails in the middle of an update; what each of them says of it is written down."""
    outputs, seen = FSDPLearner._outputs, []

    def failing(self: FSDPLearner, *arguments: Any, **named: Any) -> Outputs:
        seen.append(1)
        if rank == 1 and len(seen) == 3:
            raise UserError("the disk is full")
        return outputs(self, *arguments, **named)

    FSDPLearner._outputs = failing  # type: ignore[method-assign]
    try:
        posttrain.sft(SUMS, out=str(out / "failed"), steps=4, rows=8, save_every=9, **SMALL, **QUICK, **SHARDED)
    except UserError as error:
        (out / f"said.{rank}").write_text(f"{error.code} {error}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, and halves of it gone on with, by one process, two and three."""
    out = tmp_path_factory.mktemp("runs")
    start = posttrain.sft(SUMS, out=str(out / "first"), steps=10, rows=8, lr=3e-3, **SMALL, **QUICK)
    assert start.checkpoint
    shutil.copytree(start.checkpoint, out / "start")
    play(out / "one", out / "start")
    play(out / "half of one", out / "start", HALF)
    all_kinds(out / "kinds of one", out / "start")
    in_processes(ranks, (free_port(), 2, out), 2)
    go_on(out / "half", out / "half, in one", STEPS, shard=False)
    return out


@pytest.fixture(scope="module")
def three(runs: Path) -> None:
    in_processes(ranks, (free_port(), 3, runs), 3)


@pytest.fixture(scope="module")
def copies(runs: Path) -> None:
    """Four processes with two copies of the weights, each in two of them."""
    in_processes(ranks, (free_port(), 4, runs), 4)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("name", ["two copies in two", "two copies, tokens divided", "half, in two copies"])
def test_run_with_two_sharded_copies_is_that_of_one_process(runs: Path, name: str) -> None:
    check_whole(runs, name)


@pytest.mark.long
@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("name", ["three", "half, in three"])
def test_run_sharded_to_three_is_that_of_one_process(runs: Path, name: str) -> None:
    check_whole(runs, name)


@pytest.mark.parametrize("name", ["two", "two, recomputed", "half, whole", "half of one, in two", "half, in one"])
def test_sharded_run_is_that_of_one_process_also_resumed_with_others(runs: Path, name: str) -> None:
    check_whole(runs, name)


def check_whole(runs: Path, name: str) -> None:
    same_run(runs / "one", runs / name)
    for step in range(1, STEPS + 1):
        pairs = zip(read_rollouts(runs / "one", step), read_rollouts(runs / name, step), strict=True)
        for mine, theirs in pairs:
            assert (mine["id"], mine["text"], mine["reward"]) == (theirs["id"], theirs["text"], theirs["reward"]), step
    assert any(row["grad_norm"] > 0 for row in read_metrics(runs / name)[1:])
    ours, others = (runs / of / "checkpoints" / f"step-{STEPS:06d}" for of in ("one", name))
    for file in sorted(path.relative_to(ours) for path in ours.rglob("*.safetensors")):
        mine, theirs = load_file(ours / file), load_file(others / file)
        assert mine.keys() == theirs.keys(), file
        for key, tensor in mine.items():
            torch.testing.assert_close(theirs[key], tensor, atol=1e-4, rtol=1e-3)


def test_sharded_run_that_is_resumed_with_as_many_ends_byte_for_byte_as_undisturbed(runs: Path) -> None:
    whole_run, resumed = runs / "two", runs / "half, the same"
    assert (whole_run / "metrics.jsonl").read_bytes() == (resumed / "metrics.jsonl").read_bytes()
    last = f"checkpoints/step-{STEPS:06d}"
    files = [path.relative_to(whole_run) for path in (whole_run / last).rglob("*.safetensors")]
    assert {path.name for path in files} == {
        *("model.safetensors", "optimizer.safetensors", "critic.safetensors", "reference.safetensors")
    }
    for file in files:
        assert (whole_run / file).read_bytes() == (resumed / file).read_bytes(), file


@pytest.mark.parametrize("kind", ["sft", "dpo", "tr-dpo", "reward-model", "sac", "ahead", "distill"])
def test_every_kind_of_sharded_run_is_that_of_one_process(runs: Path, kind: str) -> None:
    same_run(runs / "kinds of one" / kind, runs / "kinds of two" / kind)


def test_sharded_checkpoint_opens_in_transformers_with_equal_logits(runs: Path) -> None:
    folder = runs / "two" / "checkpoints" / f"step-{STEPS:06d}"
    import transformers  # which the processes need not load

    tokens = torch.randint(3, 10, (12,), generator=torch.Generator().manual_seed(0))
    ours = load_model(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(ours, Decoder)
    with torch.no_grad():
        mine = ours.head.logits(ours(tokens, torch.arange(12), causal))
        torch.testing.assert_close(mine, theirs(tokens[None]).logits[0], atol=1e-5, rtol=1e-5)


def test_process_that_fails_within_an_update_ends_all_in_its_words(runs: Path) -> None:
    said = [(runs / f"said.{rank}").read_text() for rank in (0, 1)]
    assert said[0].startswith("2 process 1: the disk is full; no step was saved")
    assert said[1].startswith("2 the disk is full")


# -- learners ----------------------------------------------------------------------------------------------------------


def decoder(tied: bool, seed: int = 0, layers: int = 2) -> Decoder:
    """Of sizes that nothing divides: with three processes some have fewer rows, or none."""
    sizes = {"vocab": 41, "hidden": 14, "heads": 1, "kv_heads": 1, "head_size": 14, "intermediate": 23, "context": 64}
    model = new_decoder(DecoderConfig(layers=layers, tied=tied, qk_norm=True, **sizes), seed).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


CASES: dict[str, tuple[Callable[[], Objective], int]] = {
    "unequal": (Both, 7),
    "none on one process": (Both, 1),
    "only the critic": (lambda: Both(policy=lambda batch: False), 5),
    "the policy in some micro-batches": (lambda: Both(policy=long, critic=lambda batch: True), 6),
    "either of them": (lambda: Both(policy=long, critic=lambda batch: not long(batch)), 6),
    "without a critic's say": (LikelihoodObjective, 5),
}


def learner(kind: type[LocalLearner], tied: bool, world: Any, optimizer: str = "adamw") -> LocalLearner:
    critic = ValueModel(14, decoder(True, 5, 1), 0).double()
    rate = Optimization(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, optimizer=optimizer)
    return kind(decoder(tied), rate, critic=critic, world=world)


def weights(of: LocalLearner) -> dict[str, Tensor]:
    held = {"policy": of.model, "critic": of.critic}
    return {f"{of}/{n}": whole(p).clone() for of, m in held.items() if m for n, p in m.named_parameters()}


def tapped(batches: list[Batch]) -> tuple[TokenSink, list[Batch]]:
    """These micro-batches, with a tap at every second rollout."""
    sink, found = TokenSink(frozenset(range(0, 100, 2))), []
    for batch in batches:
        index, sizes = batch.rollout.unique_consecutive(return_counts=True)
        found.append(replace(batch, tap=sink.tap(index.tolist(), sizes.tolist())))
    return sink, found


def same_numbers(mine: Found, theirs: Found) -> None:
    """Of every process: each has the numbers of all micro-batches."""
    assert mine.keys() == theirs.keys() and mine
    for place, columns in mine.items():
        assert columns.keys() == theirs[place].keys()
        for name, values in columns.items():
            assert theirs[place][name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


def learners(out: Path, rank: int, together: Processes, each: int | None = None) -> None:
    """`each`: processes that share one copy of the weights; None: all."""
    kind: Any = partial(FSDPLearner, shard_size=each)
    for tied in (True, False):
        one, sharded = learner(LocalLearner, tied, Alone()), learner(kind, tied, together)
        grads, summed = gradients(one), gradients(sharded)
        copied = own_copy(sharded.weights())
        before = weights(sharded)
        for case, (objective, count) in list(CASES.items())[: None if tied and together.size == 2 else 2]:
            batches = micro_batches(count)
            for mine, theirs in zip(one.evaluate(batches), sharded.evaluate(batches), strict=True):
                torch.testing.assert_close(mine.logp, theirs.logp, atol=1e-9, rtol=1e-9)
            grads.clear(), summed.clear()
            (alone, own), (dealt, theirs) = tapped(batches), tapped(batches)
            ours, others = one.update(own, objective()).means(), sharded.update(theirs, objective()).means()
            assert ours == pytest.approx(others, rel=1e-9), case
            same_numbers(alone.settle(), dealt.settle())
            equal(grads, summed, 1e-10)
            now = weights(sharded)
            equal(weights(one), now, 1e-8)
            moved = {name.partition("/")[0] for name, tensor in now.items() if not torch.equal(tensor, before[name])}
            assert moved == {"only the critic": {"critic"}, "without a critic's say": {"policy"}}.get(
                case, {"policy", "critic"}
            ), case
            assert len(set(together.gather(b"".join(t.numpy().tobytes() for t in now.values())))) == 1
            before = now
        assert not torch.equal(whole(next(sharded.model.parameters())), next(copied.parameters())), (
            "a copy stays as it is"
        )
        share = sum(rows.numel() for rows in sharded.parts[0].parameters.values())  # type: ignore[attr-defined]
        assert share <= sum(p.numel() for p in one.model.parameters()) / (each or together.size) * 1.2
        sharded.evaluate(micro_batches(4))
        for found in sharded._decoders:  # type: ignore[attr-defined]
            assert all(is_sharded(parameter) for parameter in found.parameters()), "nothing stays gathered"
            assert not sharded_decoder.state_of(found)._comm_ctx.post_forward_order, "nothing grows from step to step"
    (out / f"learners.{together.size}").write_text("equal")


def test_gradients_and_weights_are_those_of_one_process_wherever_a_loss_reaches(runs: Path) -> None:
    assert (runs / "learners.2").read_text() == "equal"


@pytest.mark.usefixtures("copies")
def test_gradients_and_weights_of_two_sharded_copies_are_those_of_one_process(runs: Path) -> None:
    assert (runs / "learners.4").read_text() == "equal"


@pytest.mark.long
@pytest.mark.usefixtures("three")
def test_gradients_and_weights_of_three_are_those_of_one_process(runs: Path) -> None:
    assert (runs / "learners.3").read_text() == "equal"


def saves(out: Path, rank: int, together: Processes, each: int | None = None) -> None:
    folder = out / f"saved.{together.size}"
    gather, alive, most = sharded_decoder.gathered, list[weakref.ref[Tensor]](), list[int]()

    def watched(parameter: Tensor, of: Any) -> Tensor:
        found = gather(parameter, of)
        alive.append(weakref.ref(found))
        most.append(sum(ref() is not None for ref in alive))
        return found

    sharded_decoder.gathered = fsdp.gathered = watched
    kind: Any = partial(FSDPLearner, shard_size=each)
    sharded = learner(kind, False, together)
    sharded.update(micro_batches(5), Both())
    sharded.save(folder if rank == 0 else None)
    sharded_decoder.gathered = fsdp.gathered = gather
    together.gather(None)
    assert len(most) > 60 and max(most) == 1, "one parameter at a time"
    shard = partial(sharded_decoder.shard, size=together.size, device=torch.device("cpu"), each=each)
    again = kind(
        load_model(folder, torch.float64, shard=shard, shares=each or together.size), Optimization(), world=together,
        critic=ValueModel(14, decoder(True, 6, 1), 0).double(),
    )  # fmt: skip
    again.load(folder)
    equal(weights(sharded), weights(again), 0.0)
    (_, moments), *_ = sharded._state()
    equal(
        {name: whole(moment) for name, moment in moments.items()},
        load_file(folder / "training" / "optimizer.safetensors"),
        0.0,
    )
    for (_, mine), (_, theirs) in zip(sharded._state(), again._state(), strict=True):
        equal({name: whole(t) for name, t in mine.items()}, {name: whole(t) for name, t in theirs.items()}, 0.0)
    with torch.no_grad():
        next(iter(sharded.parts[0].parameters.values())).fill_(torch.nan if rank else 0.0)
    try:
        sharded.save(folder if rank == 0 else None)
    except UserError as error:
        (out / f"not finite.{rank}").write_text(str(error))


def test_weights_are_gathered_one_by_one_and_each_process_reads_its_own(runs: Path) -> None:
    said = {(runs / f"not finite.{rank}").read_text() for rank in (0, 1)}
    assert len(said) == 1 and "weights of the policy are no longer finite" in said.pop()


def other_optimizers(out: Path, rank: int, together: Processes) -> None:
    for name in (name for name, row in ROWS.items() if row.by_number and name != "adamw"):
        one, sharded = learner(LocalLearner, False, Alone(), name), learner(FSDPLearner, False, together, name)
        for _ in range(3):
            one.update(micro_batches(5), Both()), sharded.update(micro_batches(5), Both())
        equal(weights(one), weights(sharded), 1e-8)
        sharded.save(out / name if rank == 0 else None)
        together.gather(None)
        again = learner(FSDPLearner, False, together, name)
        again.load(out / name)
        for (_, mine), (_, theirs) in zip(sharded._state(), again._state(), strict=True):
            equal({n: whole(t) for n, t in mine.items()}, {n: whole(t) for n, t in theirs.items()}, 0.0)
    (out / "optimizers").write_text("equal")


def test_optimizers_of_single_numbers_are_those_of_one_process_and_are_read_back(runs: Path) -> None:
    assert (runs / "optimizers").read_text() == "equal"


PARTS: dict[int, list[Callable[[Path, int, Processes], None]]] = {
    2: [runs_of_two, kinds_of_two, learners, saves, other_optimizers, fails_within],
    3: [learners, runs_of_three],
    4: [partial(learners, each=2), partial(saves, each=2), runs_in_copies],
}


def one_is_lost(rank: int, port: int, out: Path) -> None:
    joined(rank, port)
    sharded = learner(FSDPLearner, True, process_group.joined("cpu", 20.0))
    if rank:
        with sharded.world.meeting():
            os._exit(0)
    with pytest.raises(UserError) as caught:
        WeightProbe(sharded.model, LIMIT).look(sharded.weights())
    (out / "said").write_text(f"{caught.value.code} {caught.value}")


def test_a_process_that_is_lost_while_the_weight_probe_is_told_what_to_hear_is_told_in_words(tmp_path: Path) -> None:
    in_processes(one_is_lost, (free_port(), tmp_path), 2)
    assert (tmp_path / "said").read_text().startswith("1 another process of the run is gone")


# -- refusals ----------------------------------------------------------------------------------------------------------


DIVIDING: dict[str, dict[str, Any]] = {
    "--shard": SHARDED,
    "--tensor-parallel": {"tensor_parallel": 2},
    "--context-parallel": {"context_parallel": 2},
    "--expert-parallel": {"expert_parallel": 2},
}
"""The options of the guide's table that divide a model or a micro-batch."""


def refusals(folder: Path, option: str) -> dict[str, Callable[[], Any]]:
    """Of each feature of the guide that an option refuses, the call that refuses it."""
    how, shards, parts = DIVIDING[option], option == "--shard", option != "--context-parallel"
    other = Recurrent(Sizes(9, 8, 16), (1,))
    seeing = namedtuple("Seeing", "vision layers inner native family sees")(
        "a tower", [], None, False, "qwen2_vl", True
    )
    weighted = RL(algorithm="grpo", settings={"advantage.weight": "gradient"}, **how)
    found: dict[str, Callable[[], Any]] = {
        "`--float8`": lambda: validate(SFT(tasks="x", precision="bfloat16", float8=True, **how)),
        "`--offload`": lambda: validate(SFT(tasks="x", offload=("optimizer",), **how)),
        "`--role-devices`": lambda: validate(SFT(tasks="x", role_devices={"reference": "1"}, **how)),
        "`--algorithm trpo`": lambda: adjust(find("trpo"), RL(algorithm="trpo", **how), True),
        "`--set advantage.weight=gradient`": lambda: adjust(find("grpo"), weighted, True),
        "a model without a decoder": lambda: new_learner(SFT(**how), other, Optimization(), Alone()),
    }
    if parts:
        adapted, packed = decoder(True), SFT(lora=3, quantize="int8", **how)
        attach(adapted, LoRA(2, 4.0), lambda name: True)
        adapted.embed.weight.full_tensor = None  # type: ignore[assignment]  by which a sharded weight is known
        stacked = SFT(tasks="x", optimizer="muon", **how)
        found |= {
            "`--weight-sync adapter`": lambda: rank_for(adapted, VLLMSetup),
            "`--quantize`": lambda: policy(packed, folder, torch.device("cpu"), Alone()),
            "`--optimizer muon`, `adafactor`, `adamw8bit`, `lion`": lambda: validate(stacked),
        }

    def taught() -> None:
        new_learner(SFT(**how), decoder(True), Optimization(), Alone(), others={"teacher": decoder(True)})

    if option == "--expert-parallel":
        return {**found, "teachers": taught, "pictures": lambda: divide_experts(seeing, Alone())}  # type: ignore[arg-type]
    if shards:
        return found

    def of(model: Path, kind: type[RL] | type[SFT] = SFT, **options: Any) -> None:
        new_learner(kind(**options, **how), load_model(model), Optimization(), Alone())

    experts = make("qwen3_moe", folder / "experts")
    found |= {
        "`--router-balance`, `--router-z`": lambda: of(experts, router_balance=0.1),
        "`--routing-replay`": lambda: of(experts, RL, routing_replay=True),
        "a model that transformers computes": lambda: of(make("gpt2", folder / "gpt2")),
        "pictures": lambda: of(make_seeing("qwen2_5_vl", folder / "seeing")),
    }
    found["teachers"] = taught
    if parts:
        scaled = decoder(True)
        attach(scaled, LoRA(2, 4.0, dora=True), lambda name: True)
        found["`--dora`"] = lambda: divide(scaled, namedtuple("Peers", "rank size")(0, 1))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("option", DIVIDING)
def test_guide_lists_exactly_what_is_refused_with_its_reason(tmp_path: Path, option: str) -> None:
    text = (ROOT / "docs" / "guides" / "scaling.md").read_text()
    head, _, rest = text.partition("### Features in several processes")[2].strip().partition("\n")
    options, table = head.strip("| ").split(" | ")[1:], rest.partition("\n")[2].partition("\n\n")[0]
    rows = {cells[0]: cells[1:] for line in table.splitlines() for cells in [line.strip("| ").split(" | ")]}
    assert options == ["one process", "`--processes`", *(f"`{name}`" for name in DIVIDING)]
    assert all(len(cells) == len(options) and cells[:2] == ["works", "works"] for cells in rows.values())
    column = {name: cells[options.index(f"`{option}`")] for name, cells in rows.items()}
    told = {name: cell.removeprefix("refused: ") for name, cell in column.items() if cell.startswith("refused")}
    calls = refusals(tmp_path, option)
    assert told.keys() == calls.keys()
    works = {
        name: {o for o, cell in zip(options, cells, strict=True) if "works" in cell} for name, cells in rows.items()
    }
    for name, call in calls.items():
        with pytest.raises(UserError) as caught:
            call()
        assert told[name] in str(caught.value), name
        remedy = remedy_of(str(caught.value), option)
        for offered in re.findall(r"(--[a-z-]+) (?:works|divides)", remedy):
            assert f"`{offered}`" in works[name], f"{name}: the message offers {offered}, which refuses it"


REMEDY = re.compile(r"(leave (it|out)|give|choose|add) ")
"""Beginning of the remedy in a message."""


def remedy_of(message: str, option: str) -> str:
    """Return the remedy of a one-line refusal; fail if the message lacks the option, a reason or a remedy."""
    assert "\n" not in message and message.count(": ") >= 1, message
    reason, _, remedy = message.rpartition(": ")
    assert option in message and len(reason.split()) >= 5 and REMEDY.match(remedy), message
    return remedy


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({**SHARDED, "tensor_parallel": 2}, "--shard divides rows of whole matrices"),
        ({**SHARDED, "expert_parallel": 2}, "--expert-parallel leaves all but the experts whole, and --shard divides"),
        ({"tensor_parallel": 2, "expert_parallel": 2}, "and --tensor-parallel divides them too"),
        ({"context_parallel": 2, "expert_parallel": 2}, "and --context-parallel divides them too"),
    ],
)  # fmt: skip
def test_divisions_that_exclude_each_other_say_why_and_what_to_do(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(SFT(tasks="x", **options))
    assert reason in str(caught.value) and remedy_of(str(caught.value), "-parallel") == "leave out one of them"


def test_a_size_of_shards_without_shards_says_what_to_do() -> None:
    with pytest.raises(UserError, match="--shard-size is .* with --shard: add it, or leave it out"):
        validate(SFT(tasks="x", shard_size=2))


@pytest.mark.parametrize(
    ("options", "size"),
    [({"tensor_parallel": 2}, 3), ({"expert_parallel": 4}, 2), ({"tensor_parallel": 2, "context_parallel": 2}, 2),
     ({**SHARDED, "shard_size": 2}, 3), (SHARDED, 1), ({"restarts": 2}, 1), ({"collective_timeout": 5.0}, 1)],
)  # fmt: skip
def test_numbers_of_processes_that_do_not_suit_say_why_and_what_to_do(
    options: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": size, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError) as caught, open_world(SFT(tasks="x", **options)):
        pass
    remedy_of(str(caught.value), "--")


def test_what_cannot_be_sharded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--shard requires --processes above 1"):
        posttrain.sft(SUMS, out="never", **SHARDED, **SMALL)
    other = Recurrent(Sizes(9, 8, 16), (1,))
    other.save(tmp_path)
    with pytest.raises(
        UserError, match="only a decoder can be divided .* and a recurrent is not one: leave out --shard"
    ):
        load_model(tmp_path, shard=lambda found: None)
