"""--eval-suite samples the parts of a suite at every evaluation of a training run, and changes nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

import posttrain
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.overview import overview
from posttrain.cli.main import main
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.quantized import packed_layers
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training import suite_check

REWARDS = """
def even(task, reply):
    return float(len(reply) % 2 == 0)

def graded(task, reply):
    return {"reward": min(len(reply), 10) / 10, "short": float(len(reply) < 4)}

def length(task, reply):
    return float(len(reply))

def broken(task, reply):
    if "42" in reply:  # a sample reply before the run
        return 0.0
    raise ValueError("no")
"""
SUITE = """
samples = 2
max_tokens = 5
env_workers = 0

[near]
tasks = "near.jsonl"
env = "rewards.py:even"
success = 1.0
k = [1, 2]
maj = [2]
best = [2]
scorer = "rewards.py:length"

[far]
tasks = "near.jsonl"
env = "rewards.py:graded"
seed = 3
held_out = 0.4
split_seed = 1
"""
ROWS = [{"prompt": f"say {word}", "response": word * 3} for word in ("one", "two", "six", "ten")]
PAIRS = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "no"} for row in ROWS]
COMMON: dict[str, Any] = {"threads": 1, "quiet": True, "eval_suite": "suite.toml", "eval_every": 2, "lr": 1e-2}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tiny(tokenizer), tmp_path / "model", tokenizer)
    words = "one two three four five six seven".split()
    (tmp_path / "near.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "suite.toml").write_text(SUITE)


def one_reward(task: Any, reply: str) -> float:
    return float(sum(map(ord, reply)) % 97)


def trained(verb: str, out: str, **more: Any) -> posttrain.Run:
    how = {**COMMON, "out": out, **more}
    if verb == "sft":
        return posttrain.sft(ROWS, model="model", rows=2, steps=4, **how)
    if verb == "prefer":
        return posttrain.prefer(PAIRS, model="model", rows=2, steps=4, **how)
    sampling = {"prompts": 2, "group": 4, "max_tokens": 4, "env_workers": 0, **({} if "steps" in how else {"steps": 4})}
    return posttrain.rl(ROWS, one_reward, "model", **sampling, **how)


def of_suite(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith("suite/")}


def alone(model: str) -> dict[str, float]:
    """The same from `posttrain eval --suite` on a checkpoint."""
    words = f"eval --suite suite.toml --model {model} --against model --threads 1 --out alone.json --overwrite"
    assert main(words.split()) == 0
    content = json.loads(Path("alone.json").read_text())
    found = {"suite/mean": content["averages"]["all"]["mean"]}
    for name, part in content["parts"].items():
        found |= {f"suite/{name}/{of}": own["mean"] for of, own in part["figures"].items() if isinstance(own, dict)}
        found[f"suite/{name}/tasks"] = part["figures"]["tasks"]
        found[f"suite/{name}/length"] = part["rates"]["length"]
        found |= {f"suite/{name}/{rate}": part["rates"][rate] for rate in ("truncated", "invalid")}
    found["suite/near/win_rate"] = content["parts"]["near"]["against"][0]["win_rate"]["mean"]
    assert {"pass@2", "maj@2", "best@2", "score", "win_rate"} <= {name.split("/")[-1] for name in found}
    found["suite/far/reward/short"] = content["parts"]["far"]["rates"]["part/short"]
    return found


@pytest.mark.parametrize("verb", ["sft", "prefer", "rl"])
def test_metrics_are_those_of_eval_on_the_checkpoint_and_training_is_the_same_without(verb: str) -> None:
    run = trained(verb, "with")
    told = {row["step"]: of_suite(row) for row in run.metrics if of_suite(row)}
    assert list(told) == [0, 2, 4]
    assert told[0] == pytest.approx(alone("model")) and told[4] == pytest.approx(alone("with")) and told[0] != told[4]
    without = trained(verb, "without", eval_suite=None, eval_every=0)
    bare = [{name: x for name, x in row.items() if name not in of_suite(row)} for row in run.metrics if row["step"]]
    assert bare == [row for row in without.metrics if row["step"]], "it is measured, and changes nothing"
    assert run.checkpoint is not None and without.checkpoint is not None
    weights = [(checkpoint / "model.safetensors").read_bytes() for checkpoint in (run.checkpoint, without.checkpoint)]
    assert weights[0] == weights[1]


NARROW = {"weights": "bfloat16", "precision": "bfloat16"}
PACKED = {"lora": 2, "quantize": "nf4"}


@pytest.mark.parametrize("types", [{}, NARROW, PACKED], ids=["", "bfloat16", "nf4"])
def test_a_resumed_run_has_the_metrics_of_one_that_was_not_interrupted(
    types: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def loaded(*args: Any, **how: Any) -> Any:
        starts.append(load_model(*args, **how))
        return starts[-1]

    monkeypatch.setattr(suite_check, "load_model", loaded)
    whole = trained("rl", "whole", **types)
    trained("rl", "parts", steps=2, **types)
    trained("rl", "parts", resume=True, **types)
    lines = [Path(out, "metrics.jsonl").read_text().splitlines() for out in ("whole", "parts")]
    assert lines[0] == lines[1] and whole.checkpoint is not None
    [start] = starts  # of the win rate, with the numbers that the run began with
    assert (start.head.dtype == torch.bfloat16) == (types == NARROW)
    assert bool(packed_layers((start,))) == (types == PACKED)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("near.jsonl", "--eval-suite near.jsonl"),
        ("rewards.py", "--eval-suite rewards.py:even"),
        ("held.jsonl", "--eval-tasks held.jsonl changed since the run began"),
    ],
)
def test_a_run_whose_parts_have_changed_is_not_resumed_unnoticed(file: str, told: str) -> None:
    held: dict[str, Any] = {}
    if file == "held.jsonl":
        Path(file).write_text('{"prompt": "nine"}\n')
        held = {"eval_tasks": (file,)}
    trained("rl", "parts", steps=2, **held)
    with Path(file).open("a") as more:
        more.write('{"prompt": "eight"}\n' if file.endswith("l") else "\n# judged otherwise\n")
    with pytest.raises(posttrain.UserError, match=f"cannot resume parts: .*{re.escape(told)}") as refused:
        trained("rl", "parts", resume=True)
    assert str(refused.value).count(told) == 1
    trained("rl", "parts", resume=True, accept_changes=True)


def test_texts_to_forget_belong_to_the_run_and_the_message_says_so() -> None:
    Path("suite.toml").write_text(SUITE + 'forget = "near.jsonl"\n')
    with pytest.raises(posttrain.UserError, match=r"forget has no place within training: give the run --forget ROWS"):
        trained("sft", "refused")


def test_parts_are_curves_of_the_overview() -> None:
    run = trained("rl", "with")
    questions = overview(OpenRun(run.path, "with"))["questions"]
    [panel] = [panel for question in questions for panel in question["panels"] if panel["title"] == "Suite"]
    assert {line["name"]: line["of"] for line in panel["lines"]} == {
        "mean": "suite/mean", "near": "suite/near/accuracy", "far": "suite/far/reward",
    }  # fmt: skip
    assert panel["steps"] == [0, 2, 4]


def test_a_part_without_valid_rewards_does_not_end_the_run_and_there_is_no_mean_over_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("suite.toml").write_text(SUITE.replace("rewards.py:graded", "rewards.py:broken"))
    last = trained("sft", "with").metrics[-1]
    assert last["suite/far/invalid"] == 1 and "suite/far/reward" not in last
    assert "suite/mean" not in last and "suite/near/accuracy" in last
    assert "--eval-suite [far] no reward was valid: this evaluation has no suite/mean" in capsys.readouterr().err


def test_a_scorer_that_fails_does_not_end_the_run() -> None:
    Path("suite.toml").write_text(SUITE.replace("rewards.py:length", "rewards.py:broken"))
    last = trained("sft", "with").metrics[-1]
    assert "suite/near/accuracy" in last and not {f"suite/near/{of}" for of in ("score", "best@2", "win_rate")} & set(
        last
    )


@pytest.mark.parametrize(
    ("verb", "text", "told"),
    [
        ("sft", None, "--eval-suite suite.toml cannot be read"),
        ("sft", "samples = 2", "--eval-suite suite.toml has no part"),
        ("sft", '[a]\ntasks = "none.jsonl"\nenv = "rewards.py:even"', "--eval-suite [a] "),
        (
            "sft",
            '[a]\ntasks = "near.jsonl"\nenv = "rewards.py:even"\nreplicas = 2',
            "--eval-suite [a] replicas has no place",
        ),
        ("reward-model", SUITE, "a reward model gives none: leave it out"),
    ],
)
def test_a_mistake_is_one_line(verb: str, text: str | None, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps({**a, **b}) + "\n" for a, b in zip(ROWS, PAIRS, strict=True)))
    Path("suite.toml").unlink() if text is None else Path("suite.toml").write_text(text)
    words = f"{verb} --tasks rows.jsonl --model model --out x --eval-suite suite.toml --quiet --threads 1"
    assert main(words.split()) == 2
    assert told in " ".join(capsys.readouterr().err.split())
