"""--forget measures the loss of texts at every evaluation, in every kind of training, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

import posttrain
from posttrain.cli.main import main
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import causal
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

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
    assert folder is not None
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    assert tokenizer.eos_id is not None
    losses: list[float] = []
    for row in TEXTS:
        before = tokenizer.encode(row.get("prompt", ""), start=True)
        tokens = [*before, *tokenizer.encode(row.get("response", row.get("text", ""))), tokenizer.eos_id]
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), causal) @ model.head.weight.T
        logp = logits.log_softmax(-1)
        losses += [-logp[i - 1, tokens[i]].item() for i in range(max(1, len(before)), len(tokens))]
    return sum(losses) / len(losses)


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
    without = trained(verb, "without", forget=None)
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
