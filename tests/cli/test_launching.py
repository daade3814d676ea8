"""What starts runs of several processes: a file for Slurm, torchrun that starts a run again."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from torch.distributed import HashStore

import posttrain
from posttrain.cli.main import main
from posttrain.core.protocols import Alone
from posttrain.core.types import UserError
from posttrain.learners import process_group
from posttrain.runs.run_reading import read_metrics
from posttrain.training import training_run

SRUN = """#!/usr/bin/env python3
# Slurm's, as far as a job on one machine is concerned: as many processes as tasks, signals passed on, the highest exit code.
import os, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
own = [{**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in range(int(os.environ["SLURM_NTASKS"]))]
tasks = [subprocess.Popen(words, env=environment) for environment in own]
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = '#!/bin/bash\n[[ "$1 $2" == "show hostnames" ]] && printf "127.0.0.1\\nelsewhere\\n"\n'


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["launch", "--slurm", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a tiny run needs, whose names are awkward."""
    folder = tmp_path / "it's a 'test' $HOME"
    folder.mkdir()
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "my sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my.py").write_text("def reward(task, reply):\n    return len(set(reply)) / 4\n")
    posttrain.sft(rows, out=str(folder / "start"), steps=1, rows=4, hidden=16, layers=1, heads=2, context=32,
                  tokenizer="characters", threads=1, quiet=True)  # fmt: skip
    monkeypatch.chdir(folder)
    return folder


COMMAND = [
    *("rl", "--tasks", "my sums.jsonl", "--env", "my.py:reward", "--model", "start", "--out", 'a "run"', "--quiet"),
    *"--steps 500 --prompts 4 --group 2 --max-tokens 4 --save-every 1 --env-workers 1 --threads 1 --keep 2".split(),
]


def job_with_a_free_port() -> int:
    """A job's number whose port nobody uses: a test runs beside others, which listen too."""
    for number in range(os.getpid(), os.getpid() + 1000):
        with suppress(OSError), socket.create_server(("", 20000 + number % 12000)):
            return number
    raise AssertionError("a thousand ports in a row are in use")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a job on two tasks, with our programs in Slurm's place."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(job_with_a_free_port()), "SLURM_JOB_NODELIST": "node[1-2]"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return {
        **kept,
        **slurm,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / 'a "run"' / "checkpoints").glob("step-*"))


def test_a_job_of_slurm_saves_at_its_limit_and_goes_on_when_it_is_submitted_again(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(["--processes-per-node", "2", "--name", "it's", "--", *COMMAND], capsys)
    file = job / "job.sbatch"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    told = job / "told"
    with told.open("w") as out:
        first = subprocess.Popen(["bash", str(file)], env=environment(job), stdout=out, stderr=out)
    end = time.monotonic() + 60
    while len(saved(job)) < 2:
        assert first.poll() is None and time.monotonic() < end, told.read_text()
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)  # of the batch shell alone, as --signal=B:TERM says
    assert first.wait(60) == 130, told.read_text()
    reached = len(read_metrics(job / 'a "run"'))
    assert 2 <= reached < 500 and saved(job)[-1] == f"step-{reached:06d}"
    assert told.read_text().count("interrupted: ") == 1, "the first process speaks for both"
    (job / "bin" / "python").write_text('#!/bin/bash\n[ "$RANK" = 0 ] && printf "%s\\n" "$@"\nexit 0\n')
    (job / "bin" / "python").chmod(0o755)
    again = subprocess.run(["bash", str(file)], env=environment(job), capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and again.stdout.splitlines() == ["-m", "posttrain", *COMMAND, "--resume"], (
        again.stderr
    )


def test_what_a_job_begun_in_vain_has_left_is_overwritten_after_a_requeue_alone(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(["--", *COMMAND], capsys)
    (job / "bin").mkdir()
    (job / "bin" / "python").write_text(
        '#!/bin/bash\nprintf "%s\\n" "$@" "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR"\n'
    )
    (job / "bin" / "python").chmod(0o755)
    for restarts, checkpoint, added in (("0", False, []), ("1", False, ["--overwrite"]), ("1", True, ["--resume"])):
        if checkpoint:
            (job / 'a "run"' / "checkpoints" / "step-000001").mkdir(parents=True)
        own = environment(job, SLURM_RESTART_COUNT=restarts, SLURM_NTASKS="1")
        ran = subprocess.run(["bash", "-c", text], env=own, capture_output=True, text=True, check=True)
        assert ran.stdout.splitlines() == ["-m", "posttrain", *COMMAND, *added, "0 0 1 127.0.0.1"]


def test_directives_say_what_was_asked_in_the_quotes_that_sbatch_reads(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--nodes",
        "2",
        "--gpus-per-node",
        "8",
        "--time",
        "2-00:00:00",
        "--partition",
        "big one",
        "--name",
        'it\'s "x"',
    ]
    text = printed(
        [*words, "--directives", "constraint=a100 80", "exclusive", "--container", "my image.sif", "--", *COMMAND],
        capsys,
    )
    directives = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert all(len(words) == 1 for words in directives)
    told = [word for words in directives for word in words]
    assert told[:3] == ['--job-name=it\'s "x"', "--nodes=2", "--ntasks-per-node=8"]
    assert told[3:6] == ["--gpus-per-node=8", "--time=2-00:00:00", "--partition=big one"]
    assert {"--signal=B:TERM@120", "--requeue", "--constraint=a100 80", "--exclusive"} <= set(told)
    assert "export WORLD_SIZE=16 LOCAL_WORLD_SIZE=8" in text and "apptainer exec --nv 'my image.sif' python" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", *COMMAND], "a scheduler is missing: give posttrain launch --slurm"),
        (["--slurm"], "a training command follows two dashes"),
        (["--slurm", *COMMAND], "follows two dashes: posttrain launch --slurm -- rl ..."),
        (["--slurm", "--nodes", "2", "posttrain", "rl", "--tasks", "x"], "posttrain launch --slurm -- rl ..."),
        (["--slurm", "--", "posttrain", *COMMAND], "leave out the word posttrain after the two dashes: -- rl ..."),
        (["--slurm", "--time", "2", "--", *COMMAND], "--time 2 is not longer than --save-seconds 120"),
        (["--slurm", "--time", "0:59:59", "--save-seconds", "3599", "--", *COMMAND], "a shorter --save-seconds"),
        (["--slurm", "--nods", "2", "--", *COMMAND], "unknown option --nods"),
        (["--slurm", "--", "chat", "runs/rl"], "a training command follows two dashes"),
        (["--slurm", "--", "rl", "--taks", "x"], "posttrain rl: Unknown option: --taks"),
        (["--slurm", "--", "rl", "--tasks", "x"], "--env is missing"),
        (["--slurm", "--", *COMMAND, "--lr", "-1"], "--lr"),
        (["--slurm", "--", *COMMAND, "--processes=2"], "--processes is set by the file"),
        (["--slurm", "--", *COMMAND, "--resume"], "--resume is set by the file"),
        (["--slurm", "--time", "soon", "--", *COMMAND], "--time soon is not a time of Slurm"),
        (["--slurm", "--name", "a\nb", "--", *COMMAND], "--job-name 'a\\nb' cannot stand in a line of sbatch"),
        (["--slurm", "--log", "a\\b", "--", *COMMAND], "cannot stand in a line of sbatch"),
        (["--slurm", "--venv", "a", "--container", "b", "--", *COMMAND], "--venv and --container"),
        (["--slurm", "--directives", "nodes=3", "--", *COMMAND], "--directives nodes is set by the file"),
        (["--slurm", "--directives", "rm rf", "--", *COMMAND], "is not an option of sbatch"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words]) == 2
    told = capsys.readouterr()
    assert said in " ".join(told.err.split()) and told.out == ""


# -- torchrun: with real processes, `python tests/helpers/launched.py` -------------------------------------------------


class Launched(Alone):
    """A world whose launcher starts it again, and keeps what was marked."""

    def __init__(self, marks: set[str]) -> None:
        self.marks = marks

    def mark(self, name: str) -> None:
        self.marks.add(name)

    def marked(self, name: str) -> bool:
        return name in self.marks


def test_a_restart_by_torchrun_goes_on_with_the_run_that_was_begun_and_touches_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(marks: set[str], **more: Any) -> posttrain.training.trainer.Run:
        monkeypatch.setattr(training_run, "open_world", lambda config: nullcontext(Launched(marks)))
        small: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "context": 32, "tokenizer": "characters"}
        rows = [{"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(8)]
        return posttrain.sft(rows, out=str(tmp_path / "run"), rows=4, threads=1, quiet=True, **small, **more)

    def dies(*ignored: Any) -> None:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(posttrain.training.trainer.Trainer, "_save", dies)
        with pytest.raises(ArithmeticError):
            run(marks := set(), steps=2, save_every=1)
    with pytest.raises(UserError, match="already holds a run"):
        run(set(), steps=2)  # another launch
    begun = run(marks, steps=4, save_every=2)
    assert not json.loads((begun.path / "run.json").read_text()).get("resumes"), "nothing was saved: from the beginning"
    again = run(marks, steps=4, save_every=2)
    assert json.loads((again.path / "run.json").read_text())["resumes"][0]["step"] == 4
    with pytest.raises(UserError, match="already holds a run"):
        run(set(), steps=4, save_every=2)


def test_all_processes_of_a_start_agree_on_its_number_whatever_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = HashStore()
    for number, size in ((1, 3), (2, 3), (3, 1), (4, 2)):
        found: dict[int, int] = {}
        kept.set("posttrain starts/here/1", "somebody of before, who never came")

        def start(rank: int, size: int = size, found: dict[int, int] = found) -> None:
            found[rank] = process_group.attempt_of(kept, rank, size, 5.0)

        threads = [threading.Thread(target=start, args=(rank,)) for rank in reversed(range(size))]
        for thread in threads:
            thread.start()
            time.sleep(0.03)  # the first process comes last
        for thread in threads:
            thread.join()
        assert found == dict.fromkeys(range(size), number)
    with pytest.raises(UserError, match=r"process 1 did not join within 0.1 s \(--collective-timeout\)"):
        process_group.attempt_of(kept, 0, 2, 0.1)
