"""No prompt depends on the clock, the time zone, the locale or the hash seed: runs whose chat template tells the date."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from reward_models import write_reward_model

from posttrain import evaluate, label, rl, sample
from posttrain.cli.main import main
from posttrain.core import run_date
from posttrain.core.types import UserError
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts

TEMPLATE = (
    "{{ strftime_now('%A %d %B %Y %H:%M') }}\n{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SMALL = {"steps": 1, "prompts": 2, "group": 2, "max_tokens": 2, "env_workers": 0, "quiet": True, "threads": 1}


@pytest.fixture
def start(tmp_path: Path) -> Path:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 :\n"
    tokenizer = Tokenizer.train([letters], 80, "characters").templated(TEMPLATE, "dated")
    model = new_decoder(DecoderConfig(tokenizer.vocab_size, 16, 1, 2, 2, 8, 32, 128), seed=0)
    tokenizer.save(tmp_path / "start")
    model.save(tmp_path / "start")
    rows = [
        {"messages": [{"role": "user", "content": word}], "answer": word} for word in ("up", "down", "left", "right")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.py").write_text(
        "def reward(task, reply):\n    order = list({'up', 'down', 'left', 'right', 'in', 'out'})\n"
        "    return order.index(task['answer']) + len(reply) / 9\n"
    )
    torch.set_num_threads(1)
    return tmp_path


def days(folder: Path, step: int) -> set[str]:
    tokenizer = Tokenizer.load(folder.parent / "start")
    return {tokenizer.decode(row["tokens"]).partition("\n")[0] for row in read_rollouts(folder, step, ["tokens"])}


def at(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    monkeypatch.setattr(run_date, "today", lambda: day)


def test_a_run_that_is_resumed_on_another_day_asks_as_before(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"tasks": str(start / "rows.jsonl"), "env": f"{start}/my.py:reward"}
    at(monkeypatch, "2026-02-03")
    begun = rl(**data, model=str(start / "start"), out=str(start / "run"), save_every=1, **SMALL)
    assert days(begun.path, 1) == {"Tuesday 03 February 2026 00:00"}
    assert json.loads((begun.path / "run.json").read_text())["day"] == "2026-02-03"
    at(monkeypatch, "2026-02-04")
    assert run_date.fixed_day() is None, "the run has ended"
    resumed = rl(**data, model=str(start / "start"), out=str(start / "run"), resume=True, **{**SMALL, "steps": 2})
    assert days(resumed.path, 2) == {"Tuesday 03 February 2026 00:00"}
    other = rl(**data, model=str(start / "run"), out=str(start / "next"), **SMALL)
    assert days(other.path, 1) == {"Tuesday 03 February 2026 00:00"}, "its checkpoint was trained with that day"
    again = rl(**data, model=str(start / "start"), out=str(start / "own"), **SMALL)
    assert days(again.path, 1) == {"Wednesday 04 February 2026 00:00"}


def test_an_evaluation_asks_a_checkpoint_and_its_rival_as_the_checkpoint_was_trained(
    start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"tasks": str(start / "rows.jsonl"), "env": f"{start}/my.py:reward", "max_tokens": 2}
    at(monkeypatch, "2026-02-03")
    rl(**data, model=str(start / "start"), out=str(start / "run"), **{k: v for k, v in SMALL.items() if k not in data})
    at(monkeypatch, "2026-02-04")
    found = evaluate(**data, model=str(start / "run"), against=str(start / "start"), env_workers=0, threads=1)
    for rollout in (*found.rollouts, *found.against[0].rollouts):
        assert Tokenizer.load(start / "start").decode(rollout.transcripts[0].tokens).startswith("Tuesday 03 February")


def test_the_run_s_day_is_told_before_a_checkpoint_s_own_and_within_a_part_that_fixes_none() -> None:
    with run_date.fixed("2026-02-03"), run_date.fixed(None):
        assert (
            run_date.template_date("2026-02-04").isoformat()
            == run_date.template_date(None).isoformat()
            == "2026-02-03T00:00:00"
        )
    assert run_date.fixed_day() is None and run_date.template_date("2026-02-04").isoformat() == "2026-02-04T00:00:00"


@pytest.mark.parametrize("verb", ["sample", "label"])
def test_a_file_of_rows_that_is_continued_on_another_day_asks_as_before(
    start: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def written(out: str, **how: bool) -> bytes:
        if verb == "sample":
            sample(str(start / "rows.jsonl"), str(start / "start"), out=out, max_tokens=3, slots=1, quiet=True, **how)
        else:
            label(str(start / "items.jsonl"), f"reward-model={start}/scores", out=out, **how)
        return Path(out).read_bytes()

    tokenizer = Tokenizer.load(start / "start")
    write_reward_model(
        start / "scores", new_decoder(DecoderConfig(tokenizer.vocab_size, 16, 1, 2, 2, 8, 32, 128), seed=1), tokenizer
    )
    rows = [json.loads(line) | {"responses": ["up", "in"]} for line in (start / "rows.jsonl").read_text().splitlines()]
    (start / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("posttrain.training.verbs.label.BLOCK", 1)
    at(monkeypatch, "2026-02-03")
    whole = written(str(start / "out.jsonl"))
    at(monkeypatch, "2026-02-04")
    assert written(str(start / "later.jsonl")) != whole, "what the day says reaches the model"
    (start / "out.jsonl").write_bytes(whole[: whole.index(b"\n") + 1])
    assert written(str(start / "out.jsonl"), resume=True) == whole
    (start / "out.jsonl").write_bytes(b"")
    assert written(str(start / "out.jsonl"), resume=True) == (start / "later.jsonl").read_bytes(), "begun anew"
    origin = start / ".out.jsonl.made"
    origin.write_text(origin.read_text().replace("2026-02-04", "yesterday"))
    with pytest.raises(UserError, match=r"\.out\.jsonl\.made .* is missing or damaged; use --overwrite"):
        written(str(start / "out.jsonl"), resume=True)


def test_a_day_that_is_none_is_refused(start: Path) -> None:
    file = start / "start" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), run_date.CONFIG_KEY: "yesterday"}))
    with pytest.raises(UserError, match="posttrain_date is .yesterday.; it must be a day"):
        Tokenizer.load(start / "start")


HERE = {"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONHASHSEED": "0"}
ELSEWHERE = {"TZ": "America/Los_Angeles", "LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "2"}


def test_time_zone_locale_and_hash_seed_change_no_byte_of_a_run(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run is a process in other surroundings, the other one this process, with workers in its own."""
    tokenizer = Tokenizer.load(start / "start")
    with run_date.fixed("2026-02-03"):
        tokenizer.save(start / "start")
    words = "rl --tasks rows.jsonl --env my.py:reward --model start --steps 1 --prompts 2 --group 2 --max-tokens 2"
    words += " --threads 1 --quiet --env-workers 1 --out"
    command = [sys.executable, "-m", "posttrain", *words.split(), "elsewhere"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **ELSEWHERE}
    with subprocess.Popen(command, cwd=start, env=environment, stdout=subprocess.DEVNULL) as running:
        for name, value in HERE.items():
            monkeypatch.setenv(name, value)
        time.tzset()
        monkeypatch.chdir(start)
        try:
            assert main([*words.split(), "here"]) == 0
        finally:
            monkeypatch.undo()
            time.tzset()
        assert running.wait(100) == 0
    names = ("metrics.jsonl", "rollouts/step-000001.parquet", "checkpoints/step-000001/model.safetensors")
    for name in names:
        assert (start / "here" / name).read_bytes() == (start / "elsewhere" / name).read_bytes(), name
