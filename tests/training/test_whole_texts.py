"""Rows of text alone are trained as a whole by sft, with their end, and measured and shown alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHATML, tiny
from row_files import write_jsonl

import posttrain
from posttrain.apps.data_report import report
from posttrain.core.transcripts import Mask
from posttrain.core.types import UserError
from posttrain.data.rows import load_rows
from posttrain.data.tasks import to_tasks
from posttrain.envs.demonstration import demonstrate
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.checkpoint_summary import outline
from posttrain.models.native.decoder import causal
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.chat_choice import Chatting

NEED = ("prompt", "response")
TEXTS = [f"the number {word} is {len(word)}" for word in ("one", "two", "three", "four", "five", "six")]
NONE: dict[str, Any] = {"fields": {}, "prompt_template": None}


@pytest.fixture
def model(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """An instruct model: its template must not reach a text."""
    save_model(tiny(tokenizer, context=64), tmp_path / "model", tokenizer.templated(CHATML, "its own"))
    return tmp_path / "model"


def loss_of(folder: Path, texts: list[str]) -> float:
    """Mean negative log-likelihood of all tokens but the first of each text, its end included."""
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    losses: list[float] = []
    for text in texts:
        tokens = [*tokenizer.encode(text, start=True), model.eos_ids[0]]
        logp = (model(torch.tensor(tokens), torch.arange(len(tokens)), causal) @ model.head.weight.T).log_softmax(-1)
        losses += [-logp[i - 1, tokens[i]].item() for i in range(1, len(tokens))]
    return sum(losses) / len(losses)


def test_training_and_held_out_loss_are_those_of_whole_texts(model: Path, tmp_path: Path) -> None:
    train, unseen = (
        write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in TEXTS[:4]]),
        tmp_path / "eval.jsonl",
    )
    write_jsonl(unseen, [{"text": text, "url": "x"} for text in TEXTS[4:]])
    run = posttrain.sft(
        str(train), model=str(model), eval_tasks=str(unseen), eval_every=1, rows=4, steps=3, lr=1e-2, seed=1,
        out=str(tmp_path / "run"), threads=1, quiet=True,
    )  # fmt: skip
    losses = [row["nll"] for row in run.metrics if "nll" in row]
    held_out = [row["eval/loss"] for row in run.metrics if "eval/loss" in row]
    assert losses[0] == pytest.approx(loss_of(model, TEXTS[:4]), abs=1e-4) and losses[-1] < losses[0]
    assert held_out[0] == pytest.approx(loss_of(model, TEXTS[4:]), abs=1e-4)
    assert run.checkpoint is not None
    assert held_out[-1] == pytest.approx(loss_of(run.checkpoint, TEXTS[4:]), abs=1e-4)


@pytest.mark.parametrize("mask", ["assistant", "last", "all"])
def test_every_token_but_the_first_is_shown_as_trained(model: Path, mask: Mask) -> None:
    known = outline(model)
    found = report(load_rows([{"text": TEXTS[0]}]), NONE, known, Chatting(on=True, template=True), mask=mask)
    tokens = known.tokenizer.encode(TEXTS[0], start=True)
    assert (found.shape, found.verb, found.prompts) == ("language modeling", "sft", 0)
    assert found.lengths == {"prompt": [1], "trained": [len(tokens)], "whole": [len(tokens) + 1]}
    [example] = found.examples
    assert "".join(part.text for part in example.texts[0]) == known.tokenizer.decode([*tokens, known.ends[0]])
    [[plain]] = report(load_rows([{"text": TEXTS[0]}]), NONE, None, Chatting(), mask=mask).examples[0].texts
    assert plain == (TEXTS[0], True)


def test_a_text_that_was_written_with_its_end_or_beginning_has_no_second_one(model: Path) -> None:
    tokenizer = outline(model).tokenizer
    assert tokenizer.eos_id is not None
    end = tokenizer.decode([tokenizer.eos_id])
    assert tokenizer.encode("a" + end)[-1] == tokenizer.eos_id
    bare, ended = (demonstrate({"response": text}, tokenizer, (tokenizer.eos_id,)) for text in ("abc", "abc" + end))
    assert bare.tokens == ended.tokens and bare.n_scored == ended.n_scored == len(bare) - 1


def test_a_text_is_whole_only_in_a_row_without_prompt_and_reply() -> None:
    def only(row: dict[str, Any], **options: Any) -> dict[str, Any]:
        [task] = to_tasks([row], need=NEED, **options)
        return task

    row = {"text": "a b", "source": "c"}
    assert (task := only(row))["response"] == "a b" and "prompt" not in task and task["source"] == "c"
    assert to_tasks([row], need=NEED).taken() == "all of the text from 'text'"
    named = {"fields": {"text": "body"}}
    assert only({"body": "a b", "question": "c"}, **named)["response"] == "a b"
    assert to_tasks([{"body": "a b"}], need=NEED, **named).taken() == "all of the text from 'body'"
    assert only({"text": "a", "instruction": "b", "output": "c"})["prompt"] == "b", (
        "a row of Alpaca with its rendered text"
    )
    assert only({"text": "a", "prompt": "b", "completion": "c"})["response"] == "c"
    for other in ("summary", "code", "question", "Answer", "label", "conversation"):
        with pytest.raises(UserError, match="no prompt and no response; the row has: text, .*--fields.text COLUMN"):
            only({"text": "a", other: "b"})
    with pytest.raises(UserError, match="no prompt; .*text to train as a whole: --fields.text COLUMN"):
        only({"text": "a"}, fields={"response": "text"})
    with pytest.raises(UserError, match="row 1: text must be text, and is 3"):
        only({"text": 3})
    with pytest.raises(UserError, match="row 1: no prompt; the row has: text"):
        to_tasks([{"text": "a"}])  # of rl


def test_equal_texts_are_held_out_together() -> None:
    rows = [{"text": text, "url": str(number)} for number, text in enumerate(TEXTS * 5)]
    tasks = to_tasks(rows, need=NEED, split_seed=3)
    assert tasks.draws is not None
    assert len(tasks) == len(rows) and len(set(tasks.draws[1].tolist())) == len(TEXTS)
