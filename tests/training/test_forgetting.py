"""--forget measures the loss of texts at every evaluation, in every kind of training, and changes nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

import posttrain
from posttrain.apps.view.evaluation_file import EvaluationFile
from posttrain.cli.main import main
from posttrain.core.intervals import ratio_interval
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import causal
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.text_loss import TextLosses

TEXTS = [{"text": "one two three"}, {"prompt": "four ", "response": "five six"}, {"text": "seven"}]
ROWS = [{"prompt": f"say {word}", "response": word * 3} for word in ("one", "two", "six", "ten")]
PAIRS = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "no"} for row in ROWS]
COMMON: dict[str, Any] = {"threads": 1, "quiet": True, "forget": "texts.jsonl", "eval_every": 2, "lr": 1e-2}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tiny(tokenizer), tmp_path / "model", tokenizer)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))


def loss_of(folder: Path | None) -> float:
    """Mean over the scored tokens of all texts: whole texts with their end, and responses with theirs."""
    each = losses_of(folder)
    return sum(map(sum, each)) / sum(map(len, each))


def losses_of(folder: Path | None, texts: Sequence[dict[str, str]] = TEXTS) -> list[list[float]]:
    """The loss of each scored token of each text."""
    assert folder is not None
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    assert tokenizer.eos_id is not None
    losses: list[list[float]] = []
    for row in texts:
        before = tokenizer.encode(row.get("prompt", ""), start=True)
        tokens = [*before, *tokenizer.encode(row.get("response", row.get("text", ""))), tokenizer.eos_id]
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), causal) @ model.head.weight.T
        logp = logits.log_softmax(-1)
        losses.append([-logp[i - 1, tokens[i]].item() for i in range(max(1, len(before)), len(tokens))])
    return losses


def one_reward(task: Any, reply: str) -> float:
    return float(sum(map(ord, reply)) % 97)


def trained(verb: str, out: str, **more: Any) -> posttrain.Run:
    how = {**COMMON, "out": out, **more}
    if verb == "sft":
        return posttrain.sft(ROWS, model="model", rows=2, steps=4, **how)
    if verb == "prefer":
        return posttrain.prefer(PAIRS, model="model", rows=2, steps=4, **how)
    sampling = {"prompts": 2, "group": 4, "max_tokens": 4, "env_workers": 0, "steps": 4}
    return posttrain.rl(ROWS, one_reward, "model", **sampling, **how)


@pytest.mark.parametrize("verb", ["sft", "prefer", "rl"])
def test_the_loss_is_that_of_the_texts_before_during_and_after_training(verb: str) -> None:
    run = trained(verb, "with")
    told = {row["step"]: row["forget/loss"] for row in run.metrics if "forget/loss" in row}
    assert list(told) == [0, 2, 4]
    assert told[0] == pytest.approx(loss_of(Path("model")), abs=1e-4)
    assert told[4] == pytest.approx(loss_of(run.checkpoint), abs=1e-4) and told[4] != pytest.approx(told[0], abs=1e-3)
    without = trained(verb, "without", forget=None, eval_every=0)
    bare = [{name: x for name, x in row.items() if name != "forget/loss"} for row in run.metrics if row["step"]]
    assert bare == [row for row in without.metrics if row["step"]], "it is measured, and changes nothing"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["reward-model"], "which a reward model does not have: leave it out"),
        (["sft", "--forget", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["sft", "--forget", "bare.jsonl"],
            "--forget bare.jsonl needs rows with text, or with prompt and response; one has prompt",
        ),
    ],
)
def test_texts_that_have_no_loss_are_refused_in_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (PAIRS if "reward-model" in words else ROWS))
    )
    Path("bare.jsonl").write_text('{"prompt": "only"}\n')
    verb, *rest = words
    how = rest or ["--forget", "texts.jsonl"]
    assert main([verb, "--tasks", "rows.jsonl", "--model", "model", "--out", "run", "--steps", "1", *how]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_part_of_a_suite_reports_the_loss_of_its_texts_paired_with_other_models(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tiny(tokenizer, 1), tmp_path / "other", tokenizer)
    texts = [{"text": "word " * n} for n in (4, 1, 3, 2)] + TEXTS
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("rewards.py").write_text("def graded(task, reply):\n    return float(len(reply))\n")
    common = 'tasks = "rows.jsonl"\nenv = "rewards.py:graded"\nsamples = 1\nmax_tokens = 3\nenv_workers = 0\n'
    Path("suite.toml").write_text(f'{common}[told]\nforget = "texts.jsonl"\n[plain]\n')
    own, other = losses_of(Path("model"), texts), losses_of(Path("other"), texts)
    assert main(["eval", "--suite", "suite.toml", "--model", "model", "--against", "other", "--out", "s.json"]) == 0
    parts = json.loads(Path("s.json").read_text())["parts"]
    [against] = parts["told"]["against"]
    tokens, places = [len(each) for each in own], range(len(texts))
    for found, expected in ((parts["told"]["figures"], own), (against["figures"], other)):
        assert found["text loss"]["mean"] == pytest.approx(sum(map(sum, expected)) / sum(tokens), abs=1e-5)
        assert found["text loss"]["texts"] == len(texts)
    gaps = [sum(own[i]) - sum(other[i]) for i in places]
    interval = ratio_interval(gaps, tokens, of="texts")
    found = against["differences"]["text loss"]
    assert [found[n] for n in ("mean", "low", "high")] == pytest.approx(
        [sum(gaps) / sum(tokens), interval.low, interval.high], abs=1e-5
    )
    assert (
        "text loss" not in parts["plain"]["figures"] and "text loss" not in parts["plain"]["against"][0]["differences"]
    )
    printed = capsys.readouterr().out
    assert "model minus other models: text loss, nats per token (lower is better)" in printed
    rows = EvaluationFile.read(Path("s.json")).page["rows"]
    assert rows[0]["means"]["text loss"]["mean"] == parts["told"]["figures"]["text loss"]["mean"]
    assert rows[1]["means"]["difference in text loss"]["low"] == found["low"]


def test_losses_of_other_tokens_are_not_compared() -> None:
    one = TextLosses({0: 2.0, 1: 3.0}, {0: 2, 1: 3})
    assert one.minus(TextLosses({0: 2.0, 1: 3.0}, {0: 2, 1: 4})) is None and one.minus(one) is not None


def test_texts_that_cannot_be_read_are_refused_before_anything_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    Path("odd.jsonl").write_text('{"word": "one"}\n')
    how = ["--model", ".", "--tasks", "rows.jsonl", "--env", "verify:exact_match", "--forget", "odd.jsonl"]
    assert main(["eval", *how]) == 2
    assert "--forget odd.jsonl needs rows with text" in capsys.readouterr().err
