"""A model of another kind trains, is sampled from, saved and resumed like the decoder, with nothing but the protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from digit_tasks import TASKS, digits
from recurrent import Recurrent, Sizes

import posttrain
from posttrain.core.batch import Layout
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_reading import read_metrics


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "start"
    folder.mkdir()
    assert tokenizer.eos_id is not None
    Recurrent(Sizes(tokenizer.vocab_size, 32, 64), (tokenizer.eos_id,)).save(folder)
    tokenizer.save(folder)
    return folder


def test_a_branch_goes_on_from_the_end_of_its_prefix(tokenizer: Tokenizer) -> None:
    model = Recurrent(Sizes(40, 16, 64), (1,)).double()
    tokens = torch.arange(3, 12)
    tree = Layout(tokens, torch.tensor([0, 1, 2, 3, 4, 3, 4, 5, 6]), (0, 3, 5), (3, 2, 4), (-1, 0, 0))
    apart = torch.cat([tokens[:3], tokens[5:]])
    whole = model.hidden(Layout(apart, torch.arange(7), (0,), (7,), (-1,)), torch.arange(3, 7))
    assert torch.allclose(model.hidden(tree, torch.arange(5, 9)), whole)


def test_model_of_another_kind_learns_and_goes_on_exactly(start: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = dict(
        model=str(start),
        prompts=4,
        group=4,
        max_tokens=8,
        lr=1e-2,
        threads=1,
        env_workers=0,
        save_every=6,
        quiet=True,
        kl=0,
        minibatches=2,
    )
    whole = posttrain.rl(TASKS, digits, steps=12, out=str(tmp_path / "whole"), **how)
    half = posttrain.rl(TASKS, digits, steps=6, out=str(tmp_path / "parts"), **how)
    posttrain.rl(TASKS, digits, steps=12, out=str(half.path), resume=True, **how)
    metrics = read_metrics(whole.path)
    assert (whole.path / "metrics.jsonl").read_bytes() == (half.path / "metrics.jsonl").read_bytes()
    compared = [row for row in metrics if "ratio/first" in row]  # not in steps that learn from nothing
    assert len(compared) > 6
    assert all(row["ratio/first"] == 1.0 and row["sampler/gap/max"] < 1e-5 for row in compared)
    assert metrics[0]["reward"] < 0.5 and sum(row["reward"] for row in metrics[-3:]) / 3 > 0.8
