"""A verb with a source and an objective of its own: one file, and it is found, trained, recorded and resumed like others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from labelled import VERB
from places import TESTS

import posttrain
from posttrain.config.verbs import VERBS
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_reading import read_metrics

TASKS = [
    {"id": f"{i}{word}", "prompt": f"{i}:", "response": word, "good": word == "yes"}
    for i in range(8)
    for word in ("yes", "no")
]


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    return tmp_path / "start"


def test_third_source_with_its_objective_learns_and_goes_on_exactly(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERBS, "unlikelihood", VERB)
    how = {"rows": 6, "lr": 3e-3, "schedule": "constant", "save_every": 10, "quiet": True, "threads": 1}

    def run(out: str, steps: int, **more: Any) -> Path:
        train: Any = posttrain.unlikelihood  # type: ignore[attr-defined]
        path: Path = train(TASKS, start, out=str(tmp_path / out), steps=steps, **how, **more).path
        return path

    whole, half = run("whole", 20), run("parts", 10)
    assert run("parts", 20, resume=True) == half
    assert (whole / "metrics.jsonl").read_bytes() == (half / "metrics.jsonl").read_bytes()
    loss = [row["unlikelihood"] for row in read_metrics(whole)]
    assert loss[0] > 1.5 and sum(loss[-3:]) / 3 < 0.5 * loss[0]
    assert loss[0] == pytest.approx(read_metrics(whole)[0]["loss"])


EVERYWHERE = """
import contextlib, io, sys
from pathlib import Path
import labelled
from posttrain.config.verbs import VERBS
VERBS["unlikelihood"] = labelled.VERB
from posttrain.cli import write_types
from posttrain.cli.main import main
from posttrain.apps.audit.replies import holds_replies
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.overview import overview

def said(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(list(words)) == 0, words
    return out.getvalue()

assert labelled.VERB.help[:40] in said("--help")
assert "--good" in said("unlikelihood", "--help") and "--steps" in said("unlikelihood", "--help")
Path("recipe.toml").write_text('[unlikelihood]\\nsteps = 2\\nrows = 4\\ngood = "good"\\n')
words = ["unlikelihood", "--config", "recipe.toml", "--tasks", "rows.jsonl", "--model", "start", "--threads", "1"]
ended = said(*words, "--out", "run", "--quiet")
assert "talk to it  posttrain chat run" in ended
assert "unlikelihood --tasks" in said("launch", "--slurm", "--nodes", "1", "--gpus-per-node", "1", "--time", "1:00:00", "--",
                                      "unlikelihood", "--tasks", "rows.jsonl", "--model", "start", "--out", "other")
assert "def unlikelihood(" in write_types.text() and "class LabelledOptions" in write_types.text()
assert '"unlikelihood": "demonstrations"' in write_types.script()
assert not holds_replies(Path("run"))
"""


def test_new_verb_is_found_by_command_line_help_recipe_types_launch_and_pages(tmp_path: Path, start: Path) -> None:
    paths = [str(TESTS / "helpers"), str(Path(posttrain.__file__).parents[1]), *sys.path]
    ran = subprocess.run(
        [sys.executable, "-c", EVERYWHERE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
