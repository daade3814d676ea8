"""Trackers get the whole record of a run, go on in the same tracker run, and cannot hold up, change or end a run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

import posttrain
from posttrain.cli.main import main
from posttrain.config.training import RL
from posttrain.config.trackers import TRACKERS, check_trackers, trackers_of
from posttrain.core.types import UserError
from posttrain.envs.builtin import arithmetic
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_reading import read_health, read_metrics, read_timing
from posttrain.runs.run_record import RunRecord
from posttrain.runs.tracking import trackers
from posttrain.runs.tracking.follower import Follower, read_state
from posttrain.runs.tracking.tracker import TrackedRun, Tracker
from posttrain.runs.tracking.trackers import Trackers
from posttrain.training.trainer import Run

TRACKER = '''
import json, os, signal, time
from posttrain import Tracker

class Noting(Tracker):
    """Writes down each call."""

    def start(self, run):
        self.file = open(os.environ["NOTED"], "a", buffering=1)
        self.note("start", run.name, run.group, run.project, run.verb, run.id, run.config)
        return {"id": run.id or "first", "url": "http://here"}

    def note(self, *call):
        self.file.write(json.dumps(call) + "\\n")

    def log(self, step, metrics):
        self.note("log", step, metrics)

    def finding(self, step, name, message):
        self.note("finding", step, name, message)

    def rollouts(self, step, rows):
        self.note("rollouts", step, rows)

    def finish(self, status):
        self.note("finish", status)

class Raising(Noting):
    def log(self, step, metrics):
        raise ConnectionError("no route to the tracker")

class Broken(Noting):
    def start(self, run):
        raise PermissionError("no key")

class Hanging(Noting):
    def log(self, step, metrics):
        while True:
            time.sleep(1)

class Killed(Noting):
    def log(self, step, metrics):
        os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of calls that the trackers of `TRACKER`, in mine.py, write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TRACKER)
    monkeypatch.setenv("NOTED", str(tmp_path / "noted.jsonl"))
    return tmp_path / "noted.jsonl"


def calls(file: Path, name: str) -> list[Any]:
    every = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [rest for kind, *rest in every if kind == name]


def same(task: Any, reply: str) -> float:
    """Nothing can be learned from this reward, which the health check finds at step 10."""
    return 1.0


def rl(place: Path, tokenizer: Tokenizer, out: str, **options: Any) -> Run:
    if not (place / "start").exists():
        save_model(tiny(tokenizer), place / "start", tokenizer)
    given: dict[str, Any] = {"algorithm": "dr-grpo", "prompts": 1, "group": 2, "max_tokens": 2, "threads": 1, "steps": 12}
    given |= {"held_out": 0.2, "eval_every": 5, "save_every": 6, "env_workers": 0, "quiet": True}
    sums = arithmetic.tasks(20, seed=0, digits=1)
    return posttrain.rl(sums, same, str(place / "start"), out=str(place / "sweep" / out), **{**given, **options})


def recorded(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """What a tracker is to get of each step: all finite numbers of both files."""
    timing = {row["step"]: row for row in read_timing(folder)}
    rows = [{**row, **timing.get(row["step"], {})} for row in read_metrics(folder)]
    return [(r["step"], {n: v for n, v in r.items() if n != "step" and v is not None}) for r in rows]


def test_a_tracker_gets_configuration_curves_findings_and_samples_and_results_stay_the_same(
    tmp_path: Path, tokenizer: Tokenizer, noted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = rl(tmp_path, tokenizer, "plain")
    run = rl(tmp_path, tokenizer, "a", track="mine.py:Noting", track_project="sums", quiet=False)
    assert (run.path / "metrics.jsonl").read_bytes() == (plain.path / "metrics.jsonl").read_bytes()
    [(name, group, project, verb, former, config)] = calls(noted, "start")
    assert (name, group, project, verb, former) == ("a", "sweep", "sums", "rl", None)
    assert config["prompts"] == 1 and config["algorithm"] == "dr-grpo" and config["run"]["objective"]
    assert [(step, values) for step, values in calls(noted, "log")] == recorded(run.path)
    assert [step for step, _ in calls(noted, "log")] == list(range(13))
    found = [(row["step"], row["name"], row["message"]) for row in read_health(run.path)]
    assert [tuple(finding) for finding in calls(noted, "finding")] == found and found[0][:2] == (10, "signal")
    samples = dict(calls(noted, "rollouts"))
    assert list(samples) == [0, 5, 6, 10, 12]  # evaluations, and what is saved
    assert [row["reward"] for row in samples[6]] == [1.0, 1.0] and samples[6][0].keys() == {"prompt", "reply", "reward"}
    assert calls(noted, "finish") == [["finished"]] and "mine.py:Noting: http://here" in capsys.readouterr().out


def test_a_resumed_run_goes_on_in_the_same_tracker_run_without_a_step_twice(
    tmp_path: Path, tokenizer: Tokenizer, noted: Path
) -> None:
    rl(tmp_path, tokenizer, "a", steps=7, track="mine.py:Noting")
    for checkpoint in (tmp_path / "sweep" / "a" / "checkpoints").glob("step-000007"):
        for file in checkpoint.glob("*.safetensors"):
            file.write_bytes(b"damaged")  # so that step 7 is done again, which the tracker has
    run = rl(tmp_path, tokenizer, "a", resume=True)
    assert [start[4] for start in calls(noted, "start")] == [None, "first"]
    assert [step for step, _ in calls(noted, "log")] == [row["step"] for row in read_metrics(run.path)]
    assert len(calls(noted, "finding")) == len(read_health(run.path)) == 1
    assert read_state(run.path, "mine.py:Noting") == {"step": 12, "findings": 1, "id": "first", "url": "http://here"}


def test_a_tracker_that_comes_later_gets_the_steps_before_too(tmp_path: Path, tokenizer: Tokenizer, noted: Path) -> None:
    rl(tmp_path, tokenizer, "a", steps=6)
    run = rl(tmp_path, tokenizer, "a", resume=True, steps=8, track="mine.py:Noting")
    assert [(step, values) for step, values in calls(noted, "log")] == recorded(run.path)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Raising", "log failed, and the run goes on: ConnectionError: no route to the tracker (mine.py:31)"),
        ("Broken", "could not start, and the run goes on without it: PermissionError: no key (mine.py:35)"),
        ("Hanging", "did not finish within 0.5 s and was ended (--resume delivers the rest): it has no step"),
        ("Killed", "has ended, and the run goes on without it (exit code -9, SIGKILL)"),
    ],
)
def test_a_tracker_that_fails_hangs_or_is_killed_neither_stops_nor_changes_a_run(
    kind: str, told: str, tmp_path: Path, tokenizer: Tokenizer, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is of one process that waits for nothing but the end of the tracker, which the test bounds."""
    plain = rl(tmp_path, tokenizer, "plain", steps=3)
    said: list[str] = []
    finish = Trackers.finish

    def finished(self: Trackers, status: Any, seconds: float = 0.0) -> None:
        self._say = said.append
        while kind == "Hanging" and not calls(noted, "start"):
            time.sleep(0.05)  # it is to hang in log, not in its start
        finish(self, status, 0.5 if kind == "Hanging" else 100.0)

    monkeypatch.setattr(Trackers, "finish", finished)
    monkeypatch.setattr(Trackers, "look", lambda self: None, raising=True) if kind == "never" else None
    run = rl(tmp_path, tokenizer, "a", steps=3, track=f"mine.py:{kind}")
    assert run.final["step"] == 3 and run.stopped is None and run.checkpoint is not None
    assert (run.path / "metrics.jsonl").read_bytes() == (plain.path / "metrics.jsonl").read_bytes()
    assert any(text == f"mine.py:{kind}{':' if kind == 'Raising' else ''} {told}" for text in said), said
    if kind == "Raising":
        assert any("calls that failed: 4 of log; see " in text for text in said), said
        assert "no route to the tracker" in (run.path / "tracking" / f"mine-py-{kind}.log").read_text()
