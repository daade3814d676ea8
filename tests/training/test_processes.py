"""A run of several processes is the run of one, and what ends one of them ends or restarts them all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st
from processes import in_processes
from ranks import free_port, joined
from sums import PAIRS, QUICK, SMALL, SUMS, nearness

import posttrain
from posttrain.cli import launch_processes
from posttrain.cli.main import main
from posttrain.config.training import RL
from posttrain.core.types import Sampling, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.play.answer_journal import AnswerJournal
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.learners import process_group
from posttrain.learners.data_parallel import DataParallelLearner, deal
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_files import made_by_run
from posttrain.runs.run_reading import read_metrics, rollout_steps
from posttrain.system.child_processes import MEETING
from posttrain.training.verbs import reward_model_training

PLAYED: dict[str, Any] = {"steps": 3, "prompts": 5, "group": 3, "max_tokens": 4, "lr": 1e-3, "eval_every": 2,
                          "env_workers": 0}  # fmt: skip
RUNS = ("sft", "grpo", "curriculum", "ahead", "dapo", "ppo", "dpo", "reward-model", "distill", "asked", "heated")


def everything(out: Path) -> None:
    """A run of each kind."""
    start = posttrain.sft(SUMS, out=str(out / "sft"), steps=10, rows=8, lr=3e-3, **SMALL, **QUICK)
    model = str(start.path)
    for row, workers in (("grpo", 1), ("dapo", 0), ("ppo", 0)):
        played = {**PLAYED, "env_workers": workers}
        posttrain.rl(SUMS, nearness, model, out=str(out / row), algorithm=row, **played, **QUICK)
    posttrain.rl(
        SUMS,
        nearness,
        model,
        out=str(out / "ahead"),
        algorithm="grpo",
        async_steps=1,
        tokens_per_step=3,
        **PLAYED,
        **QUICK,
    )
    by_rate: dict[str, Any] = {"curriculum": "solve-rate", "success": 0.5, "algorithm": "grpo", "async_steps": 1}
    posttrain.rl(SUMS, nearness, model, out=str(out / "curriculum"), **by_rate, **PLAYED, **QUICK)
    heated = [{**row, "heat": 0.5 + place % 3} for place, row in enumerate(SUMS)]
    hot = {"temperature_column": "heat", "out": str(out / "heated"), "algorithm": "grpo", "minibatches": 2}
    posttrain.rl(heated, nearness, model, **hot, **PLAYED, **QUICK)
    posttrain.prefer(PAIRS, model=model, out=str(out / "dpo"), steps=3, rows=6, lr=1e-3, **QUICK)
    posttrain.reward_model(PAIRS, model=model, out=str(out / "reward-model"), steps=3, rows=6, lr=1e-3, **QUICK)
    asked = {
        "reward_model": (str(out.parent / "one" / "reward-model"),),
        "out": str(out / "asked"),
        "algorithm": "grpo",
    }
    posttrain.rl(SUMS, "reward-model", model, **asked, **PLAYED, **QUICK)
    posttrain.distill(SUMS, model=model, teacher=str(out / "dpo"), out=str(out / "distill"), **PLAYED, **QUICK)


def one_of_two(rank: int, port: int, out: str) -> None:
    joined(rank, port)
    if rank:
        reward_model_training.replace = forbidden  # type: ignore[attr-defined]
    everything(Path(out))


def forbidden(path: Path, content: bytes) -> None:
    raise AssertionError(f"a second process writes {path}")


def test_every_kind_of_run_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    everything(tmp_path / "one")
    in_processes(one_of_two, (free_port(), str(tmp_path / "two")), 2)
    for name in RUNS:
        one, two = (read_metrics(tmp_path / of / name) for of in ("one", "two"))
        assert [row.keys() for row in one] == [row.keys() for row in two], name
        for mine, theirs in zip(one, two, strict=True):
            for key, value in mine.items():
                assert theirs[key] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, mine["step"], key)
        if name in ("grpo", "curriculum", "ahead", "dapo", "ppo", "distill", "asked", "heated"):
            assert any(row.get("grad_norm", 0) > 0 for row in one[1:])
            for step in rollout_steps(tmp_path / "one" / name):
                pairs = zip(*(read_rollouts(tmp_path / of / name, step) for of in ("one", "two")), strict=True)
                for a, b in pairs:
                    assert (a["id"], a["text"], a["reward"]) == (b["id"], b["text"], b["reward"]), (name, step)

    alone, first, second = (
        {json.loads(line).get("question") for line in (tmp_path / path).read_text().splitlines()}
        for path in ("one/asked/answers.jsonl", "two/asked/answers.jsonl", "two/asked/answers.1.jsonl")
    )
    assert first | second == alone and first != alone != second, "each asked for its own episodes"
    assert tmp_path / "two" / "asked" / "answers.1.jsonl" in made_by_run(tmp_path / "two" / "asked")
    again = AnswerJournal(tmp_path / "two" / "asked", resumed=True)
    assert set(again.valid) == alone - {None}, "whoever resumes knows them all"


class Listening:
    """A world of two, seen by one of them: nobody else has played anything."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank, self.told = rank, list[Any]()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: Any) -> list[Any]:
        self.told = x
        return [x, []] if self.rank == 0 else [[], x]


def test_each_group_is_played_whole_by_one_process(tokenizer: Tokenizer) -> None:
    episodes = [Episode({"id": g, "prompt": f"{g}+1="}, g, seed) for g in "312" for seed in range(2)]
    played = []
    for rank in (0, 1):
        world = Listening(rank)
        engine = LocalEngine(tiny(tokenizer), tokenizer, slots=4)
        with EnvPool(lambda task, reply: 0.0, 0) as pool:
            Player(pool, engine, tokenizer, Sampling(max_tokens=2), 64, world=world).play(episodes)
        played.append([rollout.group for rollout in world.told])
    assert played == [["3", "3", "2", "2"], ["1", "1"]]


def fails_in_the_second(rank: int, port: int, out: str, error: Exception) -> None:
    joined(rank, port)
    update = DataParallelLearner.update

    def failing(self: DataParallelLearner, *how: Any) -> Any:
        if rank == 1 and self.version == 2:
            raise error
        return update(self, *how)

    DataParallelLearner.update = failing  # type: ignore[method-assign]
    try:
        posttrain.sft(SUMS, out=out, steps=5, rows=8, save_every=5, **SMALL, **QUICK)
    except (UserError, ArithmeticError) as found:
        Path(f"{out}.{rank}").write_text(f"{getattr(found, 'code', None)} {found}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("the disk is full"), "2 process 1: the disk is full"),
        (ArithmeticError("x"), "1 process 1: ArithmeticError: x"),
    ],
)
def test_what_ends_one_process_ends_all_in_words_with_the_last_whole_step_saved(
    tmp_path: Path, error: Exception, said: str
) -> None:
    in_processes(fails_in_the_second, (free_port(), str(tmp_path / "run"), error), 2)
    told = [Path(f"{tmp_path}/run.{rank}").read_text() for rank in (0, 1)]
    assert told[0].startswith(f"{said}; fix it and continue after step 2 with posttrain sft")
    assert str(error) in told[1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 5))
def test_micro_batches_are_dealt_whole_and_evenly(sizes: list[int], count: int) -> None:
    shares = deal(sizes, count)
    assert sorted(place for share in shares for place in share) == list(range(len(sizes)))
    sums = [sum(sizes[place] for place in share) for share in shares]
    assert max(sums) - min(sums) <= max(sizes, default=0)


def test_every_process_computes_its_share_alone_and_has_the_results_of_all() -> None:
    """Three micro-batches of 5, 9 and 2 tokens: the first process has the second, the other one the others."""
    shares, asked = ((1,), (0, 2)), list[Sequence[Any]]()

    def compute(own: Sequence[Any]) -> list[str]:
        asked.append(own)
        return [f"of {size}" for size in own]

    for rank in (0, 1):

        def gather(own: list[str], rank: int = rank) -> list[list[str]]:
            return [own if one == rank else [f"of {(5, 9, 2)[i]}" for i in shares[one]] for one in (0, 1)]

        learner: Any = SimpleNamespace(
            groups=SimpleNamespace(size=2, rank=rank, gather=gather),
            _shares=lambda sizes: deal(sizes, 2),
            _own=lambda sizes, rank=rank: [sizes[place] for place in shares[rank]],
        )
        batches: Any = [5, 9, 2]
        found = DataParallelLearner._together(learner, batches, compute, lambda x: x)
        assert found == ["of 5", "of 9", "of 2"]
    assert asked == [[9], [5, 2]]


def test_a_process_that_no_signal_ends_does_not_hide_which_one_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_processes, "GRACE", 0.5)
    monkeypatch.setattr(launch_processes, "DYING", 0.5)
    waits = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_DFL if {} else signal.SIG_IGN); time.sleep(60)"
    )
    programs = [waits.format(False), "raise SystemExit(1)", waits.format(True)]
    children = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        assert launch_processes._watched(children, 0.0) == 1
        assert capfd.readouterr().err == ""
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_programs_of_several_processes_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="torchrun --nproc-per-node 2"):
        posttrain.sft(SUMS, out="never", processes=2, **SMALL)
    with pytest.raises(UserError, match="--restarts requires --processes above 1"):
        posttrain.sft(SUMS, out="never", restarts=2, **SMALL)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match="WORLD_SIZE is set in the environment and RANK, MASTER_ADDR, MASTER_PORT is not"
    ):
        posttrain.sft(SUMS, out="never", **SMALL)


NEWEST = ["--resume", "--no-overwrite"]


@pytest.mark.parametrize(
    ("given", "begun", "saved", "then"),
    [
        ([], True, True, NEWEST),
        (["--overwrite"], True, True, NEWEST),
        ([], True, False, ["--overwrite"]),
        (["--resume"], True, True, ["--resume"]),
        # the run that is there is none of this launch: it is neither gone on with nor deleted, unless that was asked for
        ([], False, True, []),
        (["--overwrite"], False, True, ["--overwrite"]),
        (["--resume"], False, True, ["--resume"]),
    ],
)
def test_a_restart_goes_on_with_the_run_that_was_begun_and_touches_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], begun: bool, saved: bool, then: list[str]
) -> None:
    folder, tried = tmp_path / "run", list[list[str]]()
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    if saved:
        (folder / "checkpoints" / "step-000005").mkdir(parents=True)
    words = ["rl", "--out", str(folder), "--processes", "2"]
    monkeypatch.setattr(sys, "argv", ["posttrain", *words, *given])

    def attempt(words: list[str], config: RL) -> int:
        tried.append(words)
        if begun:
            os.utime(folder / "run.json", ns=(len(tried), len(tried)))
        return 1

    monkeypatch.setattr(launch_processes, "_attempt", attempt)
    config = RL(out=str(folder), processes=2, restarts=1, resume="--resume" in given, overwrite="--overwrite" in given)
    assert launch_processes.launch(config) == 1
    assert tried == [[*words, *given], [*words, *then]]


# -- the command -------------------------------------------------------------------------------------------------------


STEPS = 6
SLOW = """
import os, time
def reward(task, reply):
    time.sleep(float(os.environ.get("SECONDS_OF_REWARD", "0")))
    return len(set(reply)) / 4
"""
LAUNCHER = """
from posttrain.cli import launch_processes as launching, main
launching.GRACE, launching.DYING = 3.0, 0.5  # what is stopped does not end by itself however long it is waited for
main.entry()
"""


def prepared(folder: Path) -> Path:
    """A folder with what a run needs."""
    folder.mkdir(exist_ok=True)
    (folder / "slow.py").write_text(SLOW)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    posttrain.sft(SUMS, out=str(folder / "start"), steps=2, rows=4, **SMALL, threads=1, quiet=True)
    return folder


def at_once(folder: Path) -> posttrain.Run:
    """The run of `Command`, undisturbed and with rewards that take no time, in this process, or as one of several."""
    os.chdir(folder)
    return posttrain.rl(
        "sums.jsonl", "slow.py:reward", "start", out="run", steps=STEPS, prompts=4, group=4, max_tokens=4, lr=1e-3,
        save_every=1, env_workers=0, quiet=True, threads=1,
    )  # fmt: skip


def one_of_two_at_once(rank: int, port: int, folder: Path) -> None:
    joined(rank, port)
    at_once(folder)


class Command:
    """A run of two processes that takes its time."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.out = prepared(folder), folder / "run"
        options = (
            f"--steps {STEPS} --prompts 4 --group 4 --max-tokens 4 --lr 1e-3 --save-every 1 --processes 2 --quiet "
            "--threads 1 --env-workers 1"
        )
        self.command = [
            *(sys.executable, "-c", LAUNCHER, "rl", "--tasks", "sums.jsonl", "--env", "slow.py:reward"),
            *("--model", "start", "--out", "run", *options.split(), *words),
        ]

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "SECONDS_OF_REWARD": "0.05"}, start_new_session=True,
        )  # fmt: skip

    def wait(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=150)
        return self.process.returncode, said

    def saved(self, step: int) -> None:
        """Return once a step is on the disk."""
        end = time.monotonic() + 100
        while not (self.out / "checkpoints" / f"step-{step:06d}").exists():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.01)

    def rank(self, rank: int) -> int:
        """The process of that rank."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                known = (path / "environ").read_bytes().split(b"\0")
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.process.pid and f"RANK={rank}".encode() in known:
                return int(path.name)
        raise AssertionError("it has not begun")

    def left(self) -> list[str]:
        """What of its session is still alive."""
        found = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(self.process.pid)], capture_output=True, text=True)
        return [line for line in found.stdout.splitlines() if "Z" not in line]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_whose_processes_are_killed_and_stopped_goes_on_to_the_same_end(tmp_path: Path, stopped: bool) -> None:
    calm, hit = (tmp_path / name for name in ("calm", "hit"))
    in_processes(one_of_two_at_once, (free_port(), prepared(calm)), 2)
    run = Command(hit, "--restarts", "2", "--collective-timeout", "4" if stopped else "30")
    run.start()
    run.saved(1)
    os.kill(run.rank(1), signal.SIGKILL)
    if stopped:
        run.saved(3)
        os.kill(run.rank(1), signal.SIGSTOP)
    code, said = run.wait()
    assert code == 0, said
    assert "process 1 was ended by SIGKILL" in said
    assert ("process 1 did not respond within 4 s (--collective-timeout)" in said) == stopped
    assert said.count("started again from the newest checkpoint") == 1 + stopped
    assert (hit / "run" / "metrics.jsonl").read_bytes() == (calm / "run" / "metrics.jsonl").read_bytes()
    for path in sorted((calm / "run" / "checkpoints" / f"step-{STEPS:06d}").glob("*.safetensors")):
        assert path.read_bytes() == (hit / "run" / "checkpoints" / f"step-{STEPS:06d}" / path.name).read_bytes()
    assert run.left() == [] and said.count("done: ") == 1
    resumed = json.loads((hit / "run" / "run.json").read_text())["resumes"]
    assert [again["step"] >= least for again, least in zip(resumed, (1, 3)[: 1 + stopped], strict=True)] == [
        True
    ] * len(resumed)


@pytest.mark.timeout(200)
def test_an_interruption_of_one_process_ends_all_after_the_same_step_and_any_number_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Command(tmp_path)
    run.start()
    run.saved(1)
    os.kill(run.rank(1), signal.SIGINT)
    code, said = run.wait()
    assert code == 130 and "interrupted" in said and run.left() == [], said
    assert main(["rl", "--out", str(run.out), "--resume", "--quiet"]) == 0
    whole = at_once(prepared(tmp_path / "whole"))
    found = read_metrics(run.out)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for mine, theirs in zip(found, whole.metrics, strict=True):
        assert mine["reward"] == theirs["reward"] and mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_ctrl_c_for_the_launcher_alone_or_for_its_whole_group_is_one_request_to_stop(
    tmp_path: Path, send: Callable[[int, int], None]
) -> None:
    run = Command(tmp_path)
    run.start()
    run.saved(1)
    send(run.process.pid, signal.SIGINT)
    code, said = run.wait()
    done = [row["step"] for row in read_metrics(run.out)][-1]
    assert code == 130 and "interrupted" in said and done < STEPS and run.left() == [], said
    assert (run.out / "checkpoints" / f"step-{done:06d}").exists()  # the step was finished and saved


def test_a_request_to_stop_during_the_record_of_a_step_ends_the_run_with_this_step(tmp_path: Path) -> None:
    def ask(step: int, metrics: object, rollouts: object) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    run = posttrain.sft(SUMS, out=str(tmp_path / "run"), steps=5, rows=4, **SMALL, threads=1, quiet=True, hook=[ask])
    assert run.interrupted and [row["step"] for row in run.metrics][-1] == 2
    assert (tmp_path / "run" / "checkpoints" / "step-000002").exists()


def test_the_first_process_listens_at_the_socket_that_its_launcher_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:  # nobody else can open its port meanwhile
        own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        for name, value in {**own, MEETING: str(os.dup(held.fileno()))}.items():
            monkeypatch.setenv(name, value)
        store = process_group._shared_store.__wrapped__(5.0)
        store.set("a", "b")
        assert store.get("a") == b"b" and MEETING not in os.environ


@pytest.mark.parametrize("unheard", [False, True])
def test_another_process_prints_a_message_only_if_the_first_does_not_know_it(
    unheard: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = UserError("the GPU is full")
    error.unheard = unheard

    def fails(words: list[str]) -> list[str]:
        raise error

    monkeypatch.setattr("posttrain.cli.main.prepared", fails)
    monkeypatch.setenv("RANK", "3")
    assert main(["rl"]) == 2
    assert capsys.readouterr().err == ("posttrain: the GPU is full\n" if unheard else "")
