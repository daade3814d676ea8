"""What the health check does to a run: says, writes down, stops with a checkpoint, and finds the same when resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from constant_rewards import constant

import posttrain
from posttrain.cli.main import main
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_reading import read_health


def test_a_finding_is_told_and_written_down_and_the_run_goes_on(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = constant(tmp_path, tokenizer, "warned")
    (found,) = read_health(run.path)
    assert found["name"] == "signal" and found["step"] == 10 and run.final["step"] == 14 and run.stopped is None
    assert f"health, step 10: {found['message']}" in capsys.readouterr().out


def test_a_finding_stops_the_run_with_a_checkpoint_of_that_step_if_asked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    run = constant(tmp_path, tokenizer, "stopped", health="stop", quiet=True)
    assert run.stopped is not None and "nothing to learn" in run.stopped and not run.interrupted
    assert run.checkpoint is not None and run.checkpoint.name == "step-000010" and run.final["step"] == 10


def test_health_may_only_be_logged_or_not_looked_at(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = constant(tmp_path, tokenizer, "logged", health="log")
    assert len(read_health(logged.path)) == 1 and "health, step" not in capsys.readouterr().out
    assert read_health(constant(tmp_path, tokenizer, "off", health="off", quiet=True).path) == []


def test_a_resumed_run_finds_what_the_whole_one_finds(tmp_path: Path, tokenizer: Tokenizer) -> None:
    whole = constant(tmp_path, tokenizer, "whole", quiet=True)
    constant(tmp_path, tokenizer, "cut", quiet=True, steps=8)
    cut = constant(tmp_path, tokenizer, "cut", quiet=True, steps=14, resume=True)
    assert read_health(cut.path) == read_health(whole.path)
    constant(tmp_path, tokenizer, "late", quiet=True, steps=12)
    late = constant(tmp_path, tokenizer, "late", quiet=True, steps=14, resume=True)
    assert read_health(late.path) == read_health(whole.path)


def flaky(task: Any, reply: str) -> float:
    """Fails for one task of five."""
    if task["id"].endswith("0"):
        raise ValueError("no such unit")
    return 1.0


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(count)]


def test_the_first_invalid_reward_of_a_run_is_told_once_with_its_place(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    options: dict[str, Any] = {"prompts": 5, "group": 2, "max_tokens": 2, "threads": 1, "steps": 2, "env_workers": 0}
    posttrain.rl(rows(5), flaky, str(tmp_path / "start"), algorithm="dr-grpo", out=str(tmp_path / "run"), **options)
    out = capsys.readouterr().out
    assert out.count("rewards are invalid") == 1
    assert "step 1: 2 of 10 rewards are invalid; the first: ValueError: no such unit" in out
    assert "test_trainer_health.py" in out


@pytest.mark.parametrize(("fails", "ends"), [("0", ", 4 invalid rewards"), ("x", "")])
def test_the_last_line_of_a_run_counts_its_invalid_rewards(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], fails: str, ends: str
) -> None:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(5)))
    (tmp_path / "env.py").write_text(
        f"def reward(task, reply):\n    assert not task['id'].endswith('{fails}')\n    return float(len(reply))\n"
    )
    words = [
        "rl",
        "--tasks",
        str(tmp_path / "rows.jsonl"),
        "--env",
        f"{tmp_path / 'env.py'}:reward",
        "--algorithm",
        "dr-grpo",
    ]
    words += ["--model", str(tmp_path / "start"), "--out", str(tmp_path / "run"), "--prompts", "5", "--group", "2"]
    assert main([*words, *"--max-tokens 2 --threads 1 --steps 2 --env-workers 0".split()]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("done: ")]
    assert line.startswith("done: reward ") and line.endswith(ends) and ("invalid" in line) == bool(ends)


def test_an_evaluation_says_of_which_model_and_tasks_its_figures_are(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    options: dict[str, Any] = {"max_tokens": 2, "threads": 1, "env_workers": 0, "success": 1.0}
    found = posttrain.evaluate(rows(5), flaky, str(tmp_path / "start"), samples=2, k=(1, 2), **options)
    invalid, fewer = found.notes
    assert found.invalid == 2 and invalid.startswith(f"{tmp_path / 'start'}: 2 of 10 rewards were invalid")
    assert "its figures leave them out; the first: ValueError: no such unit" in invalid
    assert "reward over 4, accuracy over 4, pass@1 over 4, pass@2 over 4 of 5 tasks" in fewer
    calls: dict[str, int] = {}

    def every_other(task: Any, reply: str) -> Any:
        calls[task["id"]] = calls.get(task["id"], 0) + 1
        return 1.0 if calls[task["id"]] % 2 else posttrain.Invalid("even")

    found = posttrain.evaluate(rows(3), every_other, str(tmp_path / "start"), samples=2, k=(1, 2), **options)
    assert "pass@2 left out: no task has more than 1 valid rewards" in found.notes
    assert found.figures["pass@1"]["tasks"] == 3 and "pass@2" not in found.figures
