"""A model of transformers whose weights are dealt out to two processes learns what one process learns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_processes
from ranks import free_port, joined
from safetensors.torch import load_file
from sharded import QUICK, Both, equal, gradients, long, micro_batches, same_run
from sums import PAIRS, SUMS, nearness
from tiny_models import InDouble, make, opened

import posttrain
from posttrain.config.training import SFT
from posttrain.core.protocols import Alone
from posttrain.core.types import UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.learners import process_group
from posttrain.learners.fsdp import FSDPLearner
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.process_group import Processes
from posttrain.learners.router_losses import RouterLosses
from posttrain.learners.sharded_decoder import shard, state_of
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import ValueModel
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.backed_writer import stored_tensors
from posttrain.models.row_shards import is_sharded, whole
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.sft_source import LikelihoodObjective

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
]  # what tests of the native decoder show, of other models; processes start in the first

KINDS = ("gemma3_text", "phi", "qwen3_moe", "mamba2")
"""Flat and in rows, tied and not, with a biased head, with experts, without attention."""
PLAYED: dict[str, Any] = {
    "prompts": 5,
    "group": 3,
    "max_tokens": 4,
    "lr": 1e-3,
    "env_workers": 0,
    "kl": 0.05,
    "eval_every": 2,
}
STEPS, HALF = 4, 2


def learner(kind: type[LocalLearner], folder: Path, together: Any) -> LocalLearner:
    losses = RouterLosses(balance=0.3, z=0.1)
    critic = ValueModel(32, opened(folder, torch.float64), 0).double()
    rate = Optimization(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    return kind(opened(folder, torch.float64), rate, critic=critic, world=together, router_losses=losses)


def weights(of: LocalLearner) -> dict[str, torch.Tensor]:
    return {name: whole(p).clone() for m in (of.model, of.critic) if m for name, p in m.named_parameters()}


def learners(out: Path, rank: int, together: Processes) -> None:
    for kind in KINDS:
        with InDouble():
            one = learner(LocalLearner, out / kind, Alone())
            sharded = learner(FSDPLearner, out / kind, together)
            grads, summed = gradients(one), gradients(sharded)
            copied = own_copy(sharded.weights())
            equal(dict(one.model.named_parameters()), dict(copied.named_parameters()), 0.0)  # type: ignore[arg-type]
            cases = [
                (Both(), 7),
                (Both(), 1),
                (Both(policy=long, critic=lambda b: not long(b)), 6),
                (LikelihoodObjective(), 5),
                (Both(policy=lambda b: False), 5),  # routers still have losses
            ]
            for objective, count in cases:
                batches = micro_batches(count)
                for mine, theirs in zip(one.evaluate(batches), sharded.evaluate(batches), strict=True):
                    torch.testing.assert_close(mine.logp, theirs.logp, atol=1e-9, rtol=1e-9)
                grads.clear(), summed.clear()
                ours, others = (of.update(batches, objective).means() for of in (one, sharded))  # type: ignore[arg-type]
                assert ours == pytest.approx(others, rel=1e-9), kind
                equal(grads, summed, 1e-9)
            equal(weights(one), weights(sharded), 1e-7)
        deep(one.model)
        if rank == 0:  # what is gathered does not depend on it
            deep(sharded.model)
        one.update(micro_batches(6), Both())
        sharded.update(micro_batches(6), Both())
        equal(weights(one), weights(sharded), 1e-5)  # a backward pass is not within `InDouble`
        own = sum(rows.numel() for rows in sharded.parts[0].parameters.values())
        assert own <= 0.7 * sum(p.numel() for p in one.model.parameters()), kind
        sharded.evaluate(micro_batches(4))
        for found in sharded._decoders:  # type: ignore[attr-defined]
            assert isinstance(found, Backed) and all(map(is_sharded, found.parameters())), "nothing stays gathered"
            assert not state_of(found)._comm_ctx.post_forward_order, "nothing grows from step to step"
        sharded.save(out / f"{kind}-saved" if rank == 0 else None)
        together.gather(None)
        if rank == 0:
            named = {name: tensor.clone() for name, tensor in stored_tensors(one.model)}  # type: ignore[arg-type]
            equal(load_file(out / f"{kind}-saved" / "model.safetensors"), named, 1e-7)
    (out / f"learners.{rank}").write_text("equal")


def deep(model: Any) -> None:
    """Let its layers be computed twice."""
    model.activation_room = 0.0


def play(out: Path, start: Path, steps: int = STEPS, **options: Any) -> None:
    posttrain.rl(SUMS, nearness, str(start), out=str(out), steps=steps, save_every=HALF, **PLAYED, **QUICK, **options)


def runs(out: Path, rank: int, together: Processes) -> None:
    play(out / "two", out / "start", shard=True)
    play(out / "half", out / "start", HALF, shard=True)
    if rank == 0:
        shutil.copytree(out / "half", out / "half, whole")
    play(out / "half", out / "start", STEPS, shard=True, resume=True)
    play(out / "half, whole", out / "start", STEPS, resume=True, shard=False)
    posttrain.reward_model(
        PAIRS, model=str(out / "start"), out=str(out / "rewards of two"), steps=3, rows=6, lr=1e-3, shard=True, **QUICK
    )


def both(rank: int, port: int, out: Path) -> None:
    joined(rank, port, 2)
    together = process_group.joined("cpu", SFT().collective_timeout)
    learners(out, rank, together)
    runs(out, rank, together)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Runs and learners of one process and of two."""
    out = tmp_path_factory.mktemp("runs")
    for kind in KINDS:
        make(kind, out / kind)
    tokenizer.save(make("gemma3_text", out / "start", vocab_size=tokenizer.vocab_size))
    play(out / "one", out / "start")
    posttrain.reward_model(
        PAIRS, model=str(out / "start"), out=str(out / "rewards of one"), steps=3, rows=6, lr=1e-3, **QUICK
    )
    in_processes(both, (free_port(), out), 2)
    return out


def test_gradients_and_weights_are_those_of_one_process_to_rounding_of_float64(place: Path) -> None:
    assert [(place / f"learners.{rank}").read_text() for rank in (0, 1)] == ["equal"] * 2


@pytest.mark.parametrize("name", ["two", "half", "half, whole"])
def test_sharded_run_is_that_of_one_process_also_resumed(place: Path, name: str) -> None:
    same_run(place / "one", place / name)
    folder = f"checkpoints/step-{STEPS:06d}"
    mine, theirs = (load_file(place / of / folder / "model.safetensors") for of in ("one", name))
    equal(mine, theirs, 1e-4)
    assert isinstance(load_model(place / name / folder), Backed)


def test_sharded_run_that_is_resumed_with_as_many_ends_byte_for_byte_as_undisturbed(place: Path) -> None:
    whole_run, resumed = place / "two", place / "half"
    assert (whole_run / "metrics.jsonl").read_bytes() == (resumed / "metrics.jsonl").read_bytes()
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        file = f"checkpoints/step-{STEPS:06d}/{name}"
        assert (whole_run / file).read_bytes() == (resumed / file).read_bytes()


def test_sharded_reward_model_is_that_of_one_process(place: Path) -> None:
    same_run(place / "rewards of one", place / "rewards of two")
    mine, theirs = (
        load_file(place / f"rewards of {of}" / "checkpoints" / "step-000003" / "model.safetensors")
        for of in ("one", "two")
    )
    equal(mine, theirs, 1e-4)


def test_what_cannot_be_dealt_out_is_refused_in_one_line(tmp_path: Path) -> None:
    model = opened(make("gemma3_text", tmp_path / "base"))
    layers = model.inner.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(UserError, match="--shard splits layers, and layers of Gemma3ForCausalLM share weights"):
        shard(model, 2, torch.device("cpu"))
    assert os.environ.get("RANK") is None


ADAPTED: dict[str, Any] = {"lora": 2, "precision": "bfloat16"}
MIXED: dict[str, Any] = {"routing_replay": True, "router_balance": 0.01, "router_z": 1e-3}


def further_run(out: Path, start: Path, **options: Any) -> None:
    """In bfloat16 of demonstrations: a sampled token may follow from the order of a sum."""
    if options.get("precision") == "bfloat16":
        posttrain.sft(SUMS, model=str(start), out=str(out), steps=3, rows=8, lr=1e-3, **QUICK, **options)
    else:
        play(out, start, **options)


def further_runs(rank: int, port: int, out: Path) -> None:
    joined(rank, port, 2)
    for name, start, options in FURTHER:
        further_run(out / f"{name} of two", out / start, shard=True, **options)


FURTHER: list[tuple[str, str, dict[str, Any]]] = [
    ("replay", "qwen3_moe", MIXED),
    ("adapted replay", "qwen3_moe", {**MIXED, "lora": 2}),
    ("adapted", "gemma3_text", ADAPTED),
    ("narrow", "gemma3_text", {"precision": "bfloat16"}),
]


def test_routing_replay_adapters_and_bfloat16_are_those_of_one_process(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for kind in ("qwen3_moe", "gemma3_text"):
        tokenizer.save(make(kind, tmp_path / kind, vocab_size=tokenizer.vocab_size))
    for name, start, options in FURTHER:
        further_run(tmp_path / f"{name} of one", tmp_path / start, **options)
    in_processes(further_runs, (free_port(), tmp_path), 2)
    for name, _, _ in FURTHER:
        same_run(tmp_path / f"{name} of one", tmp_path / f"{name} of two")
