"""Sizes decide micro-batches, and a learning rate that is too low for a size is named before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import tiny
from digit_tasks import TASKS, digits

import posttrain
from posttrain.config.training import RL
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training import setup
from posttrain.training.setup import rate_note


@pytest.mark.parametrize(
    ("lr", "adapted", "size", "named"),
    [
        (1e-6, False, 135_000_000, "1e-5 is usual"),
        (3e-6, False, 135_000_000, None),
        (1e-5, True, 135_000_000, "1e-4 to 1e-3 with --lora"),
        (1e-4, True, 135_000_000, None),
        (1e-5, False, 100_000, "1e-3 is usual"),
        (1e-3, False, 100_000, None),
        (1e-6, False, 7_000_000_000, None),
    ],
)
def test_rate_that_learned_nothing_at_this_size_is_named(
    lr: float, adapted: bool, size: int, named: str | None
) -> None:
    note = rate_note(lr, adapted, size)
    assert named in note[0] if named else note == []


def test_a_run_says_it_unless_a_trust_region_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = tmp_path / "start"
    shown = [{**task, "response": "1"} for task in TASKS]
    posttrain.sft(
        shown, out=str(start), steps=1, rows=2, layers=1, hidden=16, heads=2, tokenizer="characters", quiet=True
    )
    for algorithm, said in (("grpo", 1), ("trpo", 0)):
        posttrain.rl(TASKS, digits, str(start), algorithm=algorithm, out=str(tmp_path / algorithm), steps=1, prompts=1,
                     group=2, max_tokens=2, env_workers=0)  # fmt: skip
        assert capsys.readouterr().out.count("parameters little") == said


@pytest.mark.parametrize(("given", "large", "tokens"), [(None, False, 1024), (None, True, 512), (77, True, 77)])
def test_microbatches_of_a_large_model_have_half_the_tokens_on_a_cpu(
    given: int | None, large: bool, tokens: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(tokenizer)
    monkeypatch.setattr(setup, "LARGE_MODEL", setup.parameters(model) + (not large))
    assert setup.microbatch_tokens(RL(tokens_per_microbatch=given), model) == tokens
