"""Trackers get the whole record of a run, go on in the same tracker run, and cannot hold up, change or end a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from constant_rewards import constant

import posttrain
from posttrain.config.known_trackers import TRACKERS, check_trackers, trackers_of
from posttrain.core.types import UserError
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_reading import read_health, read_metrics, read_timing
from posttrain.runs.terminal.display import Display
from posttrain.runs.tracking import trackers
from posttrain.runs.tracking.follower import read_state
from posttrain.runs.tracking.trackers import Trackers, without_secrets
from posttrain.training.trainer import Run

pytestmark = pytest.mark.timeout(600)

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

class Silent(Noting):
    def start(self, run):
        super().start(run)

class Wrong(Noting):
    def start(self, run):
        return 7

class Hanging(Noting):
    def log(self, step, metrics):
        self.note("got", step)
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
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 500.0)  # a busy machine takes a minute to start a process
    return tmp_path / "noted.jsonl"


def calls(file: Path, name: str) -> list[Any]:
    every = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [rest for kind, *rest in every if kind == name]


def rl(place: Path, tokenizer: Tokenizer, out: str, **options: Any) -> Run:
    given = {"steps": 12, "held_out": 0.2, "eval_every": 5, "save_every": 6, "quiet": True, **options}
    return constant(place, tokenizer, f"sweep/{out}", **given)


def recorded(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the numbers that a tracker gets of each step: all finite ones of both files."""
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


def test_a_tracker_that_comes_later_gets_the_steps_before_too(
    tmp_path: Path, tokenizer: Tokenizer, noted: Path
) -> None:
    rl(tmp_path, tokenizer, "a", steps=6)
    run = rl(tmp_path, tokenizer, "a", resume=True, steps=8, track="mine.py:Noting")
    assert [(step, values) for step, values in calls(noted, "log")] == recorded(run.path)


def test_a_tracker_whose_start_returns_nothing_gets_its_steps(
    tmp_path: Path, tokenizer: Tokenizer, noted: Path
) -> None:
    rl(tmp_path, tokenizer, "a", steps=2, track="mine.py:Silent")
    assert len(calls(noted, "start")) == 1 and [step for step, _ in calls(noted, "log")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "told"),
    {
        "Raising": ": log failed, and the run continues: ConnectionError: no route to the tracker (mine.py:",
        "Broken": " could not start, and the run continues without it: PermissionError: no key (mine.py:",
        "Wrong": " could not start, and the run continues without it: TypeError: start returned 7: return a dict",
        "Hanging": " did not finish within 0.2 s and was ended (--resume delivers the rest): it has no step",
        "Killed": " has ended, and the run continues without it (exit code -9, SIGKILL)",
    }.items(),
)
def test_a_tracker_that_fails_hangs_or_is_killed_neither_stops_nor_changes_a_run(
    kind: str, told: str, tmp_path: Path, tokenizer: Tokenizer, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is done while the tracker hangs: the run waits at its end alone, for a bounded time."""
    plain = rl(tmp_path, tokenizer, "plain", steps=3)
    said: list[str] = []
    monkeypatch.setattr(Display, "note", lambda self, text: said.append(text))
    hooks = []
    if kind in ("Hanging", "Killed"):

        def until_then(step: int, metrics: Any, rollouts: Any) -> None:
            """Wait until the tracker has got step 0, at which it hangs or dies."""
            while step == 1 and not (calls(noted, "got") if kind == "Hanging" else any("has ended" in s for s in said)):
                [open_trackers] = gathered
                open_trackers.look()
                time.sleep(0.02)

        hooks.append(until_then)
        monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.2)
    gathered: list[Trackers] = []
    start = Trackers.__init__
    monkeypatch.setattr(Trackers, "__init__", lambda self, *given: (gathered.append(self), start(self, *given))[1])
    run = rl(tmp_path, tokenizer, "a", steps=3, track=f"mine.py:{kind}", hook=hooks)
    assert run.final["step"] == 3 and run.stopped is None and run.checkpoint is not None
    assert (run.path / "metrics.jsonl").read_bytes() == (plain.path / "metrics.jsonl").read_bytes()
    assert any(text.startswith(f"mine.py:{kind}{told}") for text in said), said
    if kind == "Raising":
        assert any("calls that failed: 4 of log; see " in text for text in said), said
        assert "no route to the tracker" in (run.path / "tracking" / f"mine-py-{kind}.log").read_text()
    if kind == "Hanging":  # what it did not take is not lost
        monkeypatch.setattr(trackers, "FINISH_SECONDS", 500.0)
        again = rl(tmp_path, tokenizer, "a", steps=3, resume=True, track="mine.py:Noting")
        assert [step for step, _ in calls(noted, "log")] == [row["step"] for row in read_metrics(again.path)]


def test_an_interrupted_a_stopped_and_a_failed_run_end_as_such_for_the_tracker(
    tmp_path: Path, tokenizer: Tokenizer, noted: Path
) -> None:
    def stop(step: int, metrics: Any, rollouts: Any) -> None:
        raise posttrain.StopRun("enough")

    def interrupt(step: int, metrics: Any, rollouts: Any) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    class Full:
        def on_step(self, step: int, metrics: Any, rollouts: Any) -> None:
            shutil.rmtree(tmp_path / "sweep" / "failed" / "checkpoints", ignore_errors=True)
            (tmp_path / "sweep" / "failed" / "checkpoints").write_text("a file where checkpoints belong")

    rl(tmp_path, tokenizer, "stopped", track="mine.py:Noting", hook=stop, steps=3)
    assert rl(tmp_path, tokenizer, "interrupted", track="mine.py:Noting", hook=interrupt, steps=3).interrupted
    with pytest.raises(UserError):
        rl(tmp_path, tokenizer, "failed", track="mine.py:Noting", hook=Full(), steps=3, save_every=1)
    assert calls(noted, "finish") == [["stopped"], ["interrupted"], ["failed"]]


def test_names_of_trackers_are_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from posttrain import Tracker\nclass Mine:\n    pass\nclass Good(Tracker):\n    pass\nobject = Good()\n"
    )
    assert trackers_of(("wandb,trackio", "wandb", "prometheus:0")) == ["wandb", "trackio", "prometheus:0"]
    for name, known in TRACKERS.items():
        if known.library:
            monkeypatch.setitem(sys.modules, known.library, None)
            with pytest.raises(UserError, match=rf"--track {name} needs the library {name}: pip install '{name}"):
                check_trackers((name,))
    for name, told in {
        "wandbb": "--track wandbb: no such tracker; did you mean 'wandb'?",
        "tensorboard": "every run writes TensorBoard's files: leave it out",
        "mine.py:Mine": "--track mine.py:Mine is not a tracker: write a class that extends posttrain.Tracker",
        "mine.py:Else": "mine.py has no 'Else'",
        "mine.py:object": "--track mine.py:object is not a tracker: write a class that extends posttrain.Tracker",
        "prometheus:http": "--track prometheus:http is not an address: write prometheus:PORT or prometheus:HOST:PORT",
        "prometheus:65536": "with a port from 0 to 65535",
        "prometheus:a:b:1": "--track prometheus:a:b:1 is not an address: write prometheus:PORT",
    }.items():
        with pytest.raises(UserError, match=re.escape(told)):
            check_trackers((f"prometheus,{name}",))
    with pytest.raises(UserError, match=r"--track names no tracker: give one of wandb, .*, or leave it out"):
        check_trackers((",",))
    check_trackers(())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hidden@host:80/a", "http://***@host:80/a"),
        ("https://hidden@host", "https://***@host"),
        ("my.py:reward,api_key=hidden,max_tokens=4", "my.py:reward,api_key=***,max_tokens=4"),
        ("my.py:f,OPENAI_API_KEY=hidden + my.py:g*0.5", "my.py:f,OPENAI_API_KEY=*** + my.py:g*0.5"),
        ("harness:x,password=hi,dden", "harness:x,password=***,dden"),
        ("my.py:f,key=answer,tokens=3,url=http://host/a@b", "my.py:f,key=answer,tokens=3,url=http://host/a@b"),
        ("Bearer", "Bearer"),
    ],
)
def test_secrets_in_options_do_not_reach_trackers(text: str, shown: str) -> None:
    given = {"env": text, "engines": [text, 3], "run": {"deep": [{"x": text}]}, "steps": 4}
    assert without_secrets(given) == {"env": shown, "engines": [shown, 3], "run": {"deep": [{"x": shown}]}, "steps": 4}


def test_the_options_of_a_run_reach_its_tracker_without_secrets(
    tmp_path: Path, tokenizer: Tokenizer, noted: Path
) -> None:
    rl(tmp_path, tokenizer, "a", steps=1, track="mine.py:Noting", track_project="http://me:hidden@host/x")
    [start] = calls(noted, "start")
    assert start[5]["track_project"] == "http://***@host/x" and "hidden" not in json.dumps(start[5])


def test_overwriting_a_run_forgets_the_runs_of_its_trackers(tmp_path: Path, tokenizer: Tokenizer, noted: Path) -> None:
    rl(tmp_path, tokenizer, "a", steps=1, track="mine.py:Noting")
    run = rl(tmp_path, tokenizer, "a", steps=1, overwrite=True)
    assert not (run.path / "tracking").exists()
