"""A source of one's own, with an objective of its own, is trained on, recorded and resumed with nothing else changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import tiny
from labelled import train_on_labels

from posttrain.config.resolve import filled
from posttrain.config.training import SFT
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_reading import read_metrics

TASKS = [
    {"id": f"{i}{word}", "prompt": f"{i}:", "response": word, "good": word == "yes"}
    for i in range(8)
    for word in ("yes", "no")
]


def test_third_source_with_its_objective_learns_and_goes_on_exactly(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)

    def run(out: str, steps: int, **more: object) -> Path:
        how = {
            "model": str(tmp_path / "start"),
            "rows": 6,
            "lr": 3e-3,
            "schedule": "constant",
            "save_every": 10,
            "quiet": True,
            "threads": 1,
        }
        return train_on_labels(TASKS, filled(SFT, {**how, "out": str(tmp_path / out), "steps": steps, **more})).path

    whole, half = run("whole", 20), run("parts", 10)
    assert run("parts", 20, resume=True) == half
    assert (whole / "metrics.jsonl").read_bytes() == (half / "metrics.jsonl").read_bytes()
    loss = [row["unlikelihood"] for row in read_metrics(whole)]
    assert loss[0] > 1.5 and sum(loss[-3:]) / 3 < 0.5 * loss[0]
    assert loss[0] == pytest.approx(read_metrics(whole)[0]["loss"])
