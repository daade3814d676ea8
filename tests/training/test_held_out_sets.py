"""Several sets of held-out tasks: their names, their figures, and what a run remembers of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from update_cases import WORDS

import posttrain
from posttrain.cli.main import main
from posttrain.config.held_out_sets import held_out_sets
from posttrain.core.types import UserError
from posttrain.models.native.decoder_writer import save_model
from posttrain.runs.run_reading import read_metrics

RL = "rl --tasks rows.jsonl --model start --steps 2 --prompts 2 --group 2 --max-tokens 4 --env-workers 0 --threads 1".split()
RL += ["--quiet", "--eval-every", "1", "--env", "my.py:reward"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("rows", range(8)), ("easy", range(3)), ("hard", range(5, 9))):
        rows = [{"id": str(i), "prompt": f"{i}+{i}=", "part": name} for i in numbers]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("my.py").write_text("SUCCESS = 1.0\n\n\ndef reward(task, reply):\n    return float(task['part'] == 'easy')\n")
    save_model(tiny(WORDS), Path("start"), WORDS)
    return tmp_path


def evaluated(out: str) -> list[dict[str, Any]]:
    return [m for m in read_metrics(Path(out)) if "eval/accuracy" in m]


def test_each_set_has_its_own_figures_and_all_have_one(place: Path) -> None:
    assert main([*RL, "--out", "run", "--eval-tasks", "easy.jsonl", "difficult=hard.jsonl", "--eval-samples", "2"]) == 0
    found = evaluated("run")
    assert len(found) == 3
    for line in found:
        assert line["eval/mixture/easy/accuracy"] == 1 and line["eval/mixture/difficult/accuracy"] == 0
        assert line["eval/accuracy"] == pytest.approx(3 / 7), "of 3 tasks and 4"
    inputs = json.loads(Path("run/run.json").read_text())["inputs"]
    assert {"eval_tasks easy", "eval_tasks difficult"} <= inputs.keys()


def test_a_set_alone_has_no_name_and_a_limit_is_of_each_set(place: Path) -> None:
    run = posttrain.rl(
        "rows.jsonl", "my.py:reward", "start", out="one", steps=1, prompts=2, group=2, max_tokens=4, env_workers=0,
        threads=1, quiet=True, eval_tasks="hard.jsonl",
    )  # fmt: skip
    first = evaluated(str(run.path))[0]
    assert first["eval/accuracy"] == 0 and not any("mixture" in name for name in first)
    assert main([*RL, "--out", "two", "--eval-tasks", "easy.jsonl", "hard.jsonl", "--eval-limit", "2"]) == 0
    assert all(line["eval/accuracy"] == 0.5 for line in evaluated("two")), "two tasks of either set"


def test_another_content_of_a_set_is_refused_when_the_run_is_resumed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RL, "--out", "run", "--eval-tasks", "easy.jsonl", "hard.jsonl"]) == 0
    Path("hard.jsonl").write_text('{"id": "x", "prompt": "1+1=", "part": "hard"}\n')
    capsys.readouterr()
    assert main(["rl", "--out", "run", "--resume", "--steps", "3"]) == 2
    told = capsys.readouterr().err
    assert "hard.jsonl" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["a/test.jsonl"], [""]),
        (["x=a/test.jsonl"], ["x"]),
        (["a/one.jsonl", "b/two.parquet"], ["one", "two"]),
        (["gsm8k/test.parquet", "math/test.parquet"], ["gsm8k", "math"]),
        (["easy=test.jsonl", "math/test.jsonl"], ["easy", "test"]),
        (["org/easy:main", "org/hard@v2"], ["easy", "hard"]),
    ],
)
def test_sets_are_named_after_their_files_or_folders(values: list[str], names: list[str]) -> None:
    found = held_out_sets(values)
    assert list(found) == names and list(found.values()) == [v.removeprefix("x=").removeprefix("easy=") for v in values]


@pytest.mark.parametrize("values", [[""], ["a="], ["a=x.jsonl", "b="]])
def test_a_set_without_rows_is_refused(values: list[str]) -> None:
    with pytest.raises(UserError, match="--eval-tasks is empty: give a file"):
        held_out_sets(values)


def test_a_name_that_is_given_twice_is_named() -> None:
    with pytest.raises(UserError, match="has two sets named 'a'"):
        held_out_sets(["a=x.jsonl", "b=z.jsonl", "a=y.jsonl"])


def test_prompts_that_are_trained_on_are_told_at_the_start_and_not_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RL, "--out", "run", "--eval-tasks", "easy.jsonl", "hard.jsonl"]) == 0
    told = capsys.readouterr().err
    assert "--eval-tasks easy: 3 of its 3 prompts" in told and "--eval-tasks hard: 3 of its 4 prompts" in told
    assert main(["rl", "--out", "run", "--resume", "--steps", "3"]) == 0
    assert "trained on too" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "values", [["test.jsonl", "test.jsonl"], ["a=x.jsonl", "a=y.jsonl"], ["x/a/t.jsonl", "y/a/t.jsonl"]]
)
def test_sets_of_one_name_are_refused_with_the_fix(values: list[str]) -> None:
    with pytest.raises(UserError, match=re.escape("--eval-tasks easy=a.jsonl hard=b.jsonl")):
        held_out_sets(values)


def test_several_files_of_verl_become_several_sets(place: Path) -> None:
    command = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=rows.jsonl"
    command += " data.val_files=[gsm8k/test.parquet,math/test.parquet] actor_rollout_ref.model.path=start"
    Path("run.sh").write_text(command + "\n")
    assert main(["import", "run.sh", "--out", "recipe.toml"]) == 0
    assert 'eval_tasks = ["gsm8k/test.parquet", "math/test.parquet"]' in Path("recipe.toml").read_text()


@pytest.mark.parametrize("verb", ["sft", "prefer", "reward-model"])
def test_given_rows_are_evaluated_on_whole_files_and_trained_on_all_of_theirs(
    place: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    for name, numbers in (("pairs", range(8)), ("easy", range(6, 9)), ("hard", range(9, 12))):
        rows = [{"prompt": f"{i}+{i}=", "response": "4", "chosen": "4", "rejected": "1 2"} for i in numbers]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"{verb} --tasks pairs.jsonl --model start --steps 2 --rows 4 --threads 1 --eval-every 1 --out"
    assert main([*words.split(), "one", "--eval-tasks", "easy.jsonl"]) == 0
    told = capsys.readouterr()
    assert "8 tasks" in told.out + told.err and "3 held out" in told.out + told.err
    assert "--eval-tasks: 2 of its 3 prompts are trained on too" in told.err
    figure = "eval/loss" if verb == "sft" else "eval/accuracy"
    assert [line["step"] for line in read_metrics(Path("one")) if figure in line] == [0, 1, 2]
    assert main([*words.split(), "two", "--eval-tasks", "easy.jsonl", "hard.jsonl"]) == 0
    assert "6 held out" in "".join(capsys.readouterr())
    assert {"eval_tasks easy", "eval_tasks hard"} <= json.loads(Path("two/run.json").read_text())["inputs"].keys()
