"""The demos: what they ask, that they hold apart what they train and what they test, and that they run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.cli.demo_command import questions
from posttrain.cli.main import main
from posttrain.core.types import Task
from posttrain.verify.named_verifiers import find_verifier


def test_questions_are_all_those_of_the_numbers_with_right_answers_in_an_order_of_the_seed() -> None:
    asked = questions("+*-", range(10), seed=1)
    assert len({task["id"] for task in asked}) == 300 and asked != questions("+*-", range(10), seed=2)
    for task in asked:
        words = str(task["prompt"]).removeprefix("What is ").partition("?")[0]
        assert int(str(task["answer"])) == eval(words)
    reward = find_verifier("numeric").reward({})
    assert all(reward(task, f"It is {task['answer']}.") == 1.0 for task in asked)
    assert not any(reward(task, f"It is {int(str(task['answer'])) + 1}.") for task in asked)


def shortened(function: Callable[..., Any], **short: Any) -> Callable[..., Any]:
    return lambda *given, **options: function(*given, **{**options, **short})


@pytest.mark.parametrize("options", [[], ["--model", "start"]], ids=["small", "own model"])
def test_a_demo_trains_measures_what_it_held_apart_and_says_where_everything_is(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [{"prompt": task["prompt"], "response": task["answer"]} for task in questions("+*-", range(99), 0)[:999]]
    imitate, measure = posttrain.sft, posttrain.evaluate
    small: dict[str, Any] = {"tokenizer": "characters", "hidden": 16, "layers": 1, "heads": 2, "context": 96}
    imitate(shown, out="start", steps=1, rows=4, quiet=True, **small)
    tested = []

    def evaluate(tasks: list[Task], *given: Any, **more: Any) -> Any:
        tested.append({task["prompt"] for task in tasks})
        return measure(tasks[:3], *given, **more)

    monkeypatch.setattr(posttrain, "sft", shortened(imitate, epochs=0.01), raising=False)
    monkeypatch.setattr(posttrain, "rl", shortened(posttrain.rl, steps=2, prompts=8, eval_limit=2), raising=False)
    monkeypatch.setattr(posttrain, "evaluate", evaluate, raising=False)
    assert main(["demo", "--out", "out", *options]) == 0
    practised = {json.loads(line)["prompt"] for line in Path("out/practice.jsonl").read_text().splitlines()}
    assert tested and not any(practised & prompts for prompts in tested)
    said = capsys.readouterr().out
    assert "posttrain view out/rl" in said and "gained" in said and Path("out/curves.png").exists()


def test_demo_names_what_it_cannot_use_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_REAL_MODEL", "nowhere.gguf")
    Path("file").touch()
    for words, says in ((["--real"], "POSTTRAIN_REAL_MODEL names nowhere.gguf"), (["--out", "file/x"], "--out file/x")):
        assert main(["demo", *words]) == 2
        assert says in capsys.readouterr().err
