"""The whole job through the front door: data -> imitation -> rollouts -> reward -> checkpoint -> evaluation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.envs.builtin import arithmetic
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_run, rollout_steps
from posttrain.training.trainer import Run

TASKS = arithmetic.tasks(60, 0, digits=1)
SMALL: dict[str, Any] = {"threads": 1, "quiet": True}
STEPS: dict[str, Any] = {
    "steps": 4,
    "prompts": 4,
    "group": 4,
    "max_tokens": 4,
    "lr": 1e-3,
    "kl": 0.0,
    "env_workers": 0,
    **SMALL,
}


def even(task: posttrain.Task, reply: str) -> dict[str, float]:
    return {"digit": 0.5 * reply[:1].isdigit(), "even": float(reply[:1] in "02468" and reply[:1] != "")}


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return posttrain.sft(
        TASKS, out=str(tmp_path_factory.mktemp("sft") / "run"), hidden=32, layers=2, heads=2, context=24,
        tokenizer="characters", epochs=6, rows=16, lr=5e-3, held_out=0.1, **SMALL,
    )  # fmt: skip


def digest(run: Run) -> str:
    assert run.checkpoint is not None
    return hashlib.sha256((run.checkpoint / "model.safetensors").read_bytes()).hexdigest()


def test_imitation_lowers_the_held_out_loss(imitated: Run) -> None:
    losses = [m["eval/loss"] for m in imitated.metrics if "eval/loss" in m]
    assert len(losses) == 2 and losses[-1] < losses[0] - 0.5
    assert imitated.final["eval/loss"] == losses[-1]


def test_every_kind_of_run_says_what_its_tokenizer_cannot_read(
    imitated: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = [{"prompt": f"one and {i}:", "response": "two"} for i in range(20)], "has no token for"
    posttrain.sft(words, model=str(imitated.path), out=str(tmp_path / "sft"), steps=1, **SMALL)
    assert said in capsys.readouterr().err
    posttrain.rl(words, even, str(imitated.path), out=str(tmp_path / "rl"), **{**STEPS, "steps": 1})
    assert said in capsys.readouterr().err
    found = posttrain.evaluate(words, even, str(imitated.path), samples=1, max_tokens=2, env_workers=0, threads=1)
    assert any(said in note for note in found.notes)


@pytest.mark.usefixtures("drawn")
def test_function_as_reward_gives_a_run_that_can_be_read(imitated: Run, tmp_path: Path) -> None:
    bonus = 0.25

    def closure(task: posttrain.Task, reply: str) -> float:
        return even(task, reply)["even"] + bonus

    run = posttrain.rl(TASKS, closure, str(imitated.path), out=str(tmp_path / "run"), held_out=0.1, **STEPS)
    assert [m["step"] for m in run.metrics] == [0, 1, 2, 3, 4]
    assert all(m["ratio/first"] == 1.0 and m["sampler/gap"] < 1e-5 and m["invalid"] == 0 for m in run.metrics[1:])
    assert rollout_steps(run.path) == [1, 2, 3, 4]
    for rollout in read_rollouts(run.path, 4):
        assert rollout["reward"] in (bonus, 1 + bonus)
        assert len(rollout["engine"]) == rollout["sampled"] > 0
        assert rollout["stop"] in ("eos", "length")
    recorded = read_run(run.path)
    assert recorded["config"]["group"] == 4 and recorded["versions"]["torch"]
    assert "maximise" in json.dumps(recorded)
    assert (run.path / "curves.png").stat().st_size > 10_000 and list(run.path.rglob("*tfevents*"))


def test_rows_stand_under_the_step_whose_metrics_they_give(imitated: Run, tmp_path: Path) -> None:
    options = {**STEPS, "steps": 2, "held_out": 0.2, "eval_every": 1, "max_tokens": 2}
    run = posttrain.rl(TASKS, even, str(imitated.path), out=str(tmp_path / "run"), **options)
    means = []
    for held_out, name, steps in ((False, "reward", [1, 2]), (True, "eval/reward", [0, 1, 2])):
        assert rollout_steps(run.path, held_out) == steps
        for step in steps:
            rows = read_rollouts(run.path, step, held_out=held_out)
            assert {row["step"] for row in rows} == {step} and [row["index"] for row in rows] == list(range(len(rows)))
            [told] = [line for line in run.metrics if line["step"] == step]
            means.append(sum(row["reward"] for row in rows) / len(rows))
            assert means[-1] == pytest.approx(told[name], abs=1e-9)
    assert len(set(means)) > 2, "steps that give the same would hide a shift"


@pytest.mark.slow
def test_group_advantages_in_the_record_sum_to_zero(imitated: Run, tmp_path: Path) -> None:
    run = posttrain.rl(
        TASKS, even, str(imitated.path), out=str(tmp_path / "run"), algorithm="dr-grpo", **{**STEPS, "env_workers": 1}
    )
    groups: dict[str, list[float]] = {}
    for rollout in read_rollouts(run.path, 1):
        groups.setdefault(rollout["group"], []).append(rollout["advantage"])
    assert len(groups) == 4 and all(len(g) == 4 and abs(sum(g)) < 1e-5 for g in groups.values())


@pytest.mark.slow
def test_evaluation_changes_nothing_in_training(imitated: Run, tmp_path: Path) -> None:
    often = posttrain.rl(TASKS, even, str(imitated.path), out=str(tmp_path / "a"), held_out=0.2, eval_every=1, **STEPS)
    never = posttrain.rl(TASKS, even, str(imitated.path), out=str(tmp_path / "b"), held_out=0.2, **STEPS)
    assert digest(often) == digest(never)


@pytest.mark.slow
def test_same_seed_gives_the_same_run_and_another_seed_another(imitated: Run, tmp_path: Path) -> None:
    a, b = (posttrain.rl(TASKS, even, str(imitated.path), out=str(tmp_path / n), **STEPS) for n in "ab")
    c = posttrain.rl(TASKS, even, str(imitated.path), out=str(tmp_path / "c"), **{**STEPS, "seed": 1})
    assert digest(a) == digest(b) != digest(c)
    for name in ("metrics.jsonl", *(f"rollouts/step-{i:06d}.parquet" for i in range(1, 5))):
        assert (a.path / name).read_bytes() == (b.path / name).read_bytes()


def test_checkpoint_opens_in_transformers_with_the_same_log_probabilities(imitated: Run) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from posttrain.models.checkpoint_folder import load_model
    from posttrain.models.native.decoder import causal
    from posttrain.models.tokenizer.tokenizer import Tokenizer

    assert imitated.checkpoint is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(imitated.checkpoint)
    tokens = transformers.AutoTokenizer.from_pretrained(imitated.checkpoint)("3+4=7").input_ids
    ours, own = load_model(imitated.checkpoint), Tokenizer.load(imitated.checkpoint).encode("3+4=7", start=True)
    assert tokens == own
    logits = ours(torch.tensor(own), torch.arange(len(own)), causal) @ ours.head.weight.T
    assert (theirs(torch.tensor([own])).logits[0] - logits).abs().max() < 1e-4


@pytest.mark.slow
def test_evaluation_compares_two_checkpoints_on_the_same_tasks(imitated: Run, tmp_path: Path) -> None:
    run = posttrain.rl(TASKS, even, str(imitated.path), out=str(tmp_path / "a"), **{**STEPS, "steps": 15, "lr": 5e-3})
    found = posttrain.evaluate(
        TASKS[:40],
        even,
        str(run.path),
        against=str(imitated.path),
        env_workers=0,
        samples=8,
        k=(1, 4),
        success=1.5,
        max_tokens=4,
        threads=1,
    )
    [compared] = found.against
    gain, gap = (
        found.figures["accuracy"]["mean"] - compared.figures["accuracy"]["mean"],
        compared.differences["accuracy"],
    )
    assert gap["mean"] == pytest.approx(gain) and gap["low"] > 0.1 and compared.wins["verdict"] == "better"
    assert (
        found.figures["pass@4"]["mean"]
        >= found.figures["pass@1"]["mean"]
        == pytest.approx(found.figures["accuracy"]["mean"])
    )
    itself = posttrain.evaluate(
        TASKS[:10], even, str(run.path), against=str(run.path), samples=2, max_tokens=4, threads=1, env_workers=0
    )
    why = "no interval: all 10 tasks are at 0"
    assert itself.against[0].differences == {
        "reward": {"mean": 0.0, "low": None, "high": None, "why": why, "tasks": 10}
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"teacher": "http://localhost"}, "unknown option 'teacher'"),
        ({"model": {}}, "model is {}; it must be a path"),
        ({"model": [None]}, "must be a path"),
        ({"fields": 5}, "fields must be a dict"),
        ({"lr": 10**400}, "lr is too large a number"),
        ({"out": ""}, "--out is empty"),
        ({"out": "run\ud800"}, "is not valid text"),
        ({"tasks": 5}, "the rows are 5"),
    ],
)
def test_values_of_a_wrong_type_are_user_errors(options: dict[str, Any], told: str) -> None:
    with pytest.raises(posttrain.UserError) as error:
        posttrain.rl(**{"tasks": [{"prompt": "a"}], "env": lambda task, reply: 1.0, "model": "none", **options})
    assert told in str(error.value)


def test_unknown_option_is_refused_with_a_suggestion(imitated: Run) -> None:
    with pytest.raises(posttrain.UserError, match="unknown option 'promts'; did you mean 'prompts'"):
        posttrain.rl(TASKS, even, str(imitated.path), promts=3)


@pytest.mark.slow
def test_bfloat16_trains_and_its_checkpoint_stays_in_float32(imitated: Run, tmp_path: Path) -> None:
    run = posttrain.rl(TASKS, even, str(imitated.path), out=str(tmp_path / "a"), precision="bfloat16", **STEPS)
    assert run.checkpoint is not None
    assert json.loads((run.checkpoint / "config.json").read_text())["dtype"] == "float32"
    assert all(m["ratio/first"] == 1.0 and m["skipped"] == 0 for m in run.metrics if m["step"])


@pytest.mark.slow
def test_reference_keeps_the_policy_near_its_start(imitated: Run, tmp_path: Path) -> None:
    kls = []
    for i, beta in enumerate((0.001, 2.0)):
        how = {**STEPS, "steps": 12, "lr": 5e-3, "kl": beta}
        kls.append(posttrain.rl(TASKS, even, str(imitated.path), out=str(tmp_path / str(i)), **how).final["kl"])
    assert 0 < kls[1] < kls[0] / 2
