"""The column chat_template_kwargs: a row's variables replace those of the run, wherever its template is rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

import posttrain
from posttrain.cli.main import main
from posttrain.core.types import Task
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.custom_template import CHATML, around
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts

COLUMN = "chat_template_kwargs"
MOOD = "{% if mood is defined %}{{ mood }}{% endif %}{% if tone is defined %}{{ tone }}{% endif %}: " + CHATML
MOODS = ["angry", "glad", None, {}]  # the last two rows have those of the run
ROWS: list[dict[str, Any]] = [
    {"prompt": f"what is {i}", "answer": str(i), "response": f"it is {i}"}
    | {COLUMN: {"mood": mood} if isinstance(mood, str) else mood}
    for i, mood in enumerate(MOODS)
]
SHOWN = {"0": "angrylow", "1": "gladlow", "2": "calmlow", "3": "calmlow"}
RUN: dict[str, Any] = {COLUMN: {"mood": "calm", "tone": "low"}, "quiet": True, "seed": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = ["what is it calm angry glad low : 0123456789", *around(CHATML)]
    words = Tokenizer.train(texts, 96, "characters").templated(MOOD, "its template")
    folder = tmp_path_factory.mktemp("moods") / "model"
    save_model(tiny(words, context=512), folder, words)
    return str(folder)


def right(task: Task, reply: str) -> float:
    return float(len(reply) % 2)


def opened(model: str, texts: Any) -> dict[str, set[str]]:
    """Number in the prompt -> what stands in front of the prompts with it."""
    found: dict[str, set[str]] = {}
    for tokens in texts:
        before, _, behind = Tokenizer.load(model).decode(list(tokens)).partition(":<|im_start|>user\nwhat is ")
        found.setdefault(behind[0], set()).add(before)
    return found


def recorded(model: str, run: Any) -> dict[str, set[str]]:
    return opened(model, [row["tokens"] for row in read_rollouts(run.path, 1, None)])


@pytest.mark.parametrize("verb", ["sft", "prefer", "reward_model", "rl"])
def test_training_renders_each_row_with_its_own(verb: str, model: str, tmp_path: Path) -> None:
    pairs = [{**row, "chosen": row["response"], "rejected": "it is it"} for row in ROWS]
    rows: Any = [{k: v for k, v in row.items() if k != "response"} for row in pairs] if verb != "sft" else ROWS
    how = {"model": model, "out": str(tmp_path / "run"), "steps": 1, **RUN}
    if verb == "rl":
        run = posttrain.rl(ROWS, right, prompts=4, group=2, max_tokens=2, env_workers=0, **how)
    else:
        run = getattr(posttrain, verb)(rows, rows=4, **how)
    assert recorded(model, run) == {number: {text} for number, text in SHOWN.items()}


def test_evaluation_renders_each_row_with_its_own(model: str) -> None:
    found = posttrain.evaluate(
        ROWS, right, model=model, samples=1, max_tokens=2, env_workers=0, seed=1, **{COLUMN: RUN[COLUMN]}
    )
    texts = [rollout.transcripts[0].tokens for rollout in found.rollouts]
    assert opened(model, texts) == {number: {text} for number, text in SHOWN.items()}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("mood=calm", f"{COLUMN} is 'mood=calm'"),
        (["calm"], f"{COLUMN} is ['calm']"),
        ({"moood": "calm"}, "chat_template.jinja does not read 'moood'; did you mean 'mood'?"),
    ],
)
def test_a_column_that_is_no_object_or_names_no_variable_is_refused_in_one_line(
    given: Any, told: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({**row, COLUMN: given}) + "\n" for row in ROWS))
    assert main(["sft", "--tasks", "rows.jsonl", "--model", model, "--out", "run", "--chat", "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and "rows.jsonl" in line
