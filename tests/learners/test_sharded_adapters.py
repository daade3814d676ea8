"""Adapters of sharded frozen weights are trained, saved and merged as those of one process."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_processes
from ranks import free_port, joined
from safetensors.torch import load_file
from sharded import Both, equal, gradients, micro_batches
from sums import PAIRS, SMALL, SUMS, nearness
from torch import Tensor

import posttrain
from posttrain.cli.main import main
from posttrain.config.training import SFT
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.protocols import Alone
from posttrain.core.types import UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.learners import process_group
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.fsdp import FSDPLearner
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.process_group import Processes
from posttrain.models import checkpoint_folder
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.critic import ValueModel
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.row_shards import here, is_sharded
from posttrain.runs.run_reading import read_metrics
from posttrain.training import open_learner
from posttrain.training.memory_plan import plan_memory
from posttrain.training.open_learner import adapt, reference
from posttrain.training.sources.sft_source import LikelihoodObjective

pytestmark = pytest.mark.timeout(1200)  # a module's processes start in its first test

QUICK: dict[str, Any] = {
    "threads": 1,
    "quiet": True,
    "held_out": 0.2,
    "tokens_per_microbatch": 48,
    "save_every": 2,
    "eval_every": 2,
}
LORA: dict[str, Any] = {"lora": 3, "lora_alpha": 6.0, "lr": 1e-2, "schedule": "constant"}
STEPS, HALF = 4, 2
SYNCED: dict[str, Any] = {"async_steps": 1, "replicas": 2}
KINDS = ("sft", "dpo", "tr-dpo", "grpo", "dora")


def play(kind: str, out: Path, start: Path, steps: int = STEPS, **options: Any) -> None:
    common = {"model": str(start), "out": str(out), "steps": steps, **QUICK, **LORA, **options}
    if kind in ("sft", "dora"):
        posttrain.sft(SUMS, rows=8, **common, **({"dora": True} if kind == "dora" else {}))
    elif kind in ("dpo", "tr-dpo"):
        posttrain.prefer(PAIRS, rows=6, algorithm=kind, **common)
    else:
        posttrain.rl(SUMS, nearness, prompts=4, group=3, max_tokens=4, env_workers=0, kl=0.05, **common)


def in_double() -> None:
    """Let runs of this process load their weights in float64."""
    open_learner.load_model = partial(checkpoint_folder.load_model, dtype=torch.float64)


@dataclass(frozen=True)
class ToReference:
    """A loss of policy, critic and the divergence from a reference."""

    both: Both = Both()
    wants: frozenset[str] = frozenset({"value", "entropy", "kl"})

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        assert outputs.kl is not None
        return self.both(outputs, batch, stats) + outputs.kl.sum() / 9


def learner(kind: type[LocalLearner], config: SFT, world: Any) -> LocalLearner:
    sizes = {"vocab": 41, "hidden": 14, "heads": 1, "kv_heads": 1, "head_size": 14, "intermediate": 23, "context": 64}
    model, own = (
        new_decoder(DecoderConfig(layers=layers, tied=True, qk_norm=True, **sizes), seed).double()  # type: ignore[arg-type]
        for layers, seed in ((2, 0), (1, 5))
    )
    with torch.no_grad():
        for parameter in (*model.parameters(), *own.parameters()):
            if parameter.ndim == 2:
                parameter.mul_(8)
    with pytest.MonkeyPatch.context() as patched:  # the base is in no folder
        patched.setattr(open_learner, "fingerprint", lambda folder: "digest")
        patched.setattr(open_learner, "checkpoint_folder", lambda folder: folder)
        adapt(config, model, Path("start"))
    before = reference(config, model, Path("start"), world, moves=True)
    critic = ValueModel(14, own, 0).double()
    rate = Optimization(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    return kind(model, rate, critic=critic, world=world, others={REFERENCE: before})


def trained(of: LocalLearner) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in of.parts[0].parameters.items()}


def learners(out: Path, rank: int, together: Processes) -> None:
    for dora in (False, True):
        config = SFT(lora=3, dora=dora)
        one, sharded = (
            learner(LocalLearner, config, Alone()),
            learner(FSDPLearner, SFT(lora=3, dora=dora, shard=True), together),
        )
        grads, summed = gradients(one), gradients(sharded)
        only = Both(policy=lambda batch: False)
        for objective, count in ((ToReference(), 7), (ToReference(), 1), (only, 5), (Both(), 4)):
            batches, before = micro_batches(count), {n: t.clone() for n, t in trained(sharded).items()}
            for model in ("policy", REFERENCE):
                for own, theirs in zip(one.evaluate(batches, model), sharded.evaluate(batches, model), strict=True):
                    torch.testing.assert_close(own.logp, theirs.logp, atol=1e-9, rtol=1e-9)
            grads.clear(), summed.clear()
            mine, others = (of.update(batches, objective).means() for of in (one, sharded))
            assert mine == pytest.approx(others, rel=1e-8)  # AdamW divides rounding by the roots of tiny moments
            equal(grads, summed, 1e-9)
            equal(trained(one), trained(sharded), 1e-8)
            assert objective is not only or all(torch.equal(before[n], t) for n, t in trained(sharded).items())
            one.move(REFERENCE, 0.3), sharded.move(REFERENCE, 0.3)
        assert len(set(together.gather(b"".join(t.numpy().tobytes() for t in trained(sharded).values())))) == 1
        decoder = sharded.model.decoder
        assert decoder is not None and not any(is_sharded(p) for a in adapters(decoder) for p in a.parameters())
        frozen = [p for p in decoder.parameters() if not p.requires_grad]
        assert frozen and all(map(is_sharded, frozen)), "the base is whole nowhere"
        copies = [dict(own_copy(of.weights()).named_parameters()) for of in (one, sharded)]
        equal(*copies, 1e-8)  # type: ignore[arg-type]
        sharded.save(out / f"saved-{dora}" if rank == 0 else None)
        together.gather(None)
        if rank == 0:
            one.save(out / f"saved-{dora}-one")
            ours, theirs = out / f"saved-{dora}-one", out / f"saved-{dora}"
            for file in sorted(path.relative_to(ours) for path in ours.rglob("*.safetensors")):
                equal(load_file(ours / file), load_file(theirs / file), 1e-8)


def ranks(rank: int, port: int, out: Path) -> None:
    joined(rank, port, 2)
    together = process_group.joined("cpu", SFT().collective_timeout)
    learners(out, rank, together)
    for kind in KINDS:
        play(kind, out / f"{kind}, half", out / "start", HALF, shard=True)
        if rank == 0:
            shutil.copytree(out / f"{kind}, half", out / f"{kind}, whole")
        together.gather(None)
        play(kind, out / f"{kind}, half", out / "start", shard=True, resume=True)
        play(kind, out / f"{kind}, whole", out / "start", shard=False, resume=True)
        play(kind, out / f"{kind}, two", out / "start", shard=True)
    play("sft", out / "narrow, two", out / "start", shard=True, frozen_weights="bfloat16")
    play("grpo", out / "synced, two", out / "start", shard=True, **SYNCED)
    in_double()
    for kind in KINDS:
        play(kind, out / f"{kind}, double, two", out / "start", shard=True)
    (out / f"said.{rank}").write_text("equal")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    first = posttrain.sft(SUMS, out=str(out / "first"), steps=10, rows=8, lr=3e-3, threads=1, quiet=True, **SMALL)
    shutil.copytree(str(first.checkpoint), out / "start")
    for kind in KINDS:
        play(kind, out / f"{kind}, one", out / "start")
    play("sft", out / "narrow, one", out / "start", frozen_weights="bfloat16")
    play("grpo", out / "synced, one", out / "start", **{**SYNCED, "replicas": 1})
    in_processes(ranks, (free_port(), out), 2)
    kept = open_learner.load_model
    in_double()
    for kind in KINDS:
        play(kind, out / f"{kind}, double, one", out / "start")
    open_learner.load_model = kept
    return out


def compare(one: Path, other: Path, within: float) -> None:
    for mine, row in zip(read_metrics(one), read_metrics(other), strict=True):
        assert mine.keys() == row.keys()
        for key, value in mine.items():
            assert row[key] == pytest.approx(value, rel=within, abs=within), (mine["step"], key)
    file = f"checkpoints/step-{STEPS:06d}/adapter_model.safetensors"
    equal(load_file(one / file), load_file(other / file), within)


@pytest.mark.parametrize("kind", KINDS)
def test_run_in_float64_is_that_of_one_process(runs: Path, kind: str) -> None:
    compare(runs / f"{kind}, double, one", runs / f"{kind}, double, two", 1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_run_is_resumed_to_the_bit_and_also_without_shards(runs: Path, kind: str) -> None:
    undisturbed, resumed = runs / f"{kind}, two", runs / f"{kind}, half"
    assert (undisturbed / "metrics.jsonl").read_bytes() == (resumed / "metrics.jsonl").read_bytes()
    for file in (undisturbed / f"checkpoints/step-{STEPS:06d}").rglob("*.safetensors"):
        assert file.read_bytes() == (resumed / file.relative_to(undisturbed)).read_bytes(), file
    compare(runs / f"{kind}, one", runs / f"{kind}, whole", 1e-3)


def test_frozen_weights_are_sharded_in_bfloat16_with_the_same_results(runs: Path) -> None:
    compare(runs / "narrow, one", runs / "narrow, two", 1e-4)


def test_engines_in_other_processes_sample_with_merged_weights(runs: Path) -> None:
    compare(runs / "synced, one", runs / "synced, two", 1e-3)


def test_adapters_of_a_sharded_run_are_merged(runs: Path, tmp_path: Path) -> None:
    for kind in ("one", "two"):
        folder = runs / f"dora, {kind}" / "checkpoints" / f"step-{STEPS:06d}"
        assert main(["merge", str(folder), "--out", str(tmp_path / kind)]) == 0
    mine, theirs = (load_file(tmp_path / kind / "model.safetensors") for kind in ("one", "two"))
    equal(mine, theirs, 1e-4)


def test_packed_weights_are_refused_before_anything_is_read() -> None:
    with pytest.raises(UserError, match="--quantize int8 packs whole matrices, and --shard splits them: leave out"):
        open_learner.policy(SFT(lora=3, quantize="int8", shard=True), Path("none"), torch.device("cpu"), Alone())


def measured(rank: int, port: int, folder: Path, out: Path, lora: int | None) -> None:
    """Bytes of rows, gradients and moments that a process has in an update."""
    joined(rank, port, 2)
    together = process_group.joined("cpu", SFT().collective_timeout)
    config = SFT(model=str(folder), lora=lora, shard=True, lr=1e-3)
    model = open_learner.policy(config, folder, torch.device("cpu"), together)
    sharded = open_learner.new_learner(config, model, Optimization(lr=1e-3), together)
    batches, summed = micro_batches(3), gradients(sharded)
    sharded.update(batches, LikelihoodObjective())
    assert summed
    trained = [p for part in sharded.parts for p in part.parameters.values()]
    moments = sum(moment.nbytes for p in trained for moment in sharded.optimizer.state[p].values())
    held = sum(here(parameter).nbytes for parameter in model.parameters())
    (out / f"{rank}.json").write_text(json.dumps([held, sum(p.nbytes for p in trained), moments]))


@pytest.mark.parametrize("lora", [None, 3])
def test_memory_is_estimated_as_it_is_measured_in_two_processes(tmp_path: Path, lora: int | None) -> None:
    sizes = {"vocab": 41, "hidden": 16, "heads": 2, "kv_heads": 1, "head_size": 8, "intermediate": 24, "context": 64}
    start = tmp_path / "start"
    save_model(new_decoder(DecoderConfig(layers=2, tied=True, qk_norm=True, qkv_bias=False, **sizes), 0), start)
    in_processes(measured, (free_port(), start, tmp_path, lora), 2)
    most = [
        max(sizes)
        for sizes in zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)), strict=True)
    ]
    planned = SFT(model=str(start), lora=lora, shard=True, processes=2, lr=1e-3, tasks="rows.jsonl")
    parts = plan_memory(planned, 1e9).found.parts
    assert [parts[name] for name in ("weights", "gradients", "moments")] == pytest.approx(most, rel=0.02)
    alone = plan_memory(SFT(model=str(start), lora=lora, tasks="rows.jsonl"), 1e9).found.parts
    assert parts["weights"] < 0.65 * alone["weights"] and parts["gathered"] > 0 == alone["gathered"]
