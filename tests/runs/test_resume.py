"""A run that is killed, interrupted or damaged and resumed ends, byte for byte, where the undisturbed one does."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from conftest import tiny
from judged import decoder, eos_alone
from processes import FORKS, commanded
from run_traces import there, traces

from posttrain.cli.main import main
from posttrain.envs.builtin import arithmetic
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs import checkpoint
from posttrain.runs.run_reading import read_metrics

pytestmark = pytest.mark.slow

ENVIRONMENTS = '''
"""Rewards that differ between the replies of a model that knows nothing, so that every step moves the weights."""

from posttrain import Turn
from posttrain.envs.builtin import arithmetic


def digits(reply):
    return sum(c.isdigit() for c in reply) / (len(reply) + 1)


def reward(task, reply):
    return {"right": arithmetic.reward(task, reply), "digits": digits(reply)}


def dialogue(task):
    reply = yield Turn(text=task["prompt"], stop=("1", "2", "a"), max_tokens=7)
    shown = [reply]
    while len(shown) < 3 and not reply.endswith("a"):
        reply = yield Turn(text=f" {len(reply)} ", reward=0.1)
        shown.append(reply)
    return {"digits": sum(map(digits, shown)), "short": 1.0 / len(shown)}
'''
Left = Callable[[str, list[str]], dict[str, str]]
"""(name, command) -> what the uninterrupted run leaves."""

SFT = "sft --tasks rows.jsonl --tokenizer characters --hidden 32 --layers 2 --context 32 --held-out 0.1".split()
SFT += "--eval-every 3 --epochs 4 --rows 8 --lr 1e-2 --warmup 2 --save-every 2".split()
SFT += "--tokens-per-microbatch 40 --threads 1".split()
RL = "rl --tasks rows.jsonl --model start --held-out 0.1 --eval-every 4 --group 3 --prompts 4 --max-tokens 10".split()
RL += "--steps 10 --lr 1e-2 --save-every 2 --tokens-per-microbatch 60 --threads 1 --env-workers 1".split()
REWARD = (
    "reward-model --tasks pairs.jsonl --model start-padded --held-out 0.1 --eval-every 3 --rows 4 --lr 1e-2".split()
)
REWARD += "--steps 10 --save-every 2 --tokens-per-microbatch 40 --threads 1".split()
ONE_TURN = [*RL, "--env", "env.py:reward", "--algorithm", "grpo"]
TURNS = [*RL, *"--env env.py:dialogue --algorithm dr-grpo --epochs 2 --minibatches 2 --max-episode-tokens 21".split()]
TAUGHT = ["distill", *RL[1:], *"--teacher teacher --env env.py:reward --algorithm distill-k1 --minibatches 2".split()]
TAUGHT += ["--teacher-prompt-template", "{answer}: {prompt}"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Path]:
    """A folder with data, environments and a model to begin with; the current one for all tests here."""
    folder = tmp_path_factory.mktemp("resume")
    tasks = arithmetic.tasks(60, seed=0, digits=1, operators="+-")
    (folder / "rows.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "env.py").write_text(ENVIRONMENTS)
    save_model(tiny(tokenizer), folder / "start", tokenizer)
    pairs = [{"prompt": t["prompt"], "chosen": t["answer"], "rejected": t["answer"] + "0"} for t in tasks]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    save_model(decoder(eos_alone()), folder / "start-padded", eos_alone())  # its runs add a token to pad with
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def uninterrupted(place: Path) -> Left:
    """What the run of a command leaves when nothing disturbs it; each is run once, in this process."""
    known: dict[str, dict[str, str]] = {}

    def left(name: str, words: list[str]) -> dict[str, str]:
        if name not in known:
            assert main([*words, "--out", name, "--quiet"]) == 0
            known[name] = traces(place / name)
        return known[name]

    return left


def begin(*words: str) -> BaseProcess:
    """The command, as a process of its own."""
    process = FORKS.Process(target=commanded, args=([*words, "--quiet"], Path.cwd()))
    process.start()
    return process


def disturb(process: BaseProcess, due: Callable[[], bool], delay: float, number: signal.Signals) -> int:
    """Send a signal a little after `due`; returns the exit code. A process that is done before is left alone."""
    end = time.monotonic() + 60
    while not due() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(delay)
    assert process.pid is not None
    if process.is_alive():
        os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def lines(run: Path, count: int) -> Callable[[], bool]:
    file = run / "metrics.jsonl"
    return lambda: file.exists() and file.read_bytes().count(b"\n") >= count


def kill_and_resume(run: Path, words: list[str], moments: list[Callable[[], bool]]) -> None:
    """Kill the run at each of the moments in turn, a random while after, and let it come to its end."""
    delays = random.Random(run.name)
    codes: list[int] = []
    for moment in moments:
        process = begin(*words, "--out", run.name, *going_on(run))
        codes.append(disturb(process, moment, delays.choice([0.0, delays.uniform(0, 0.05)]), signal.SIGKILL))
    assert codes[0] == -signal.SIGKILL, "the first kill is early enough to come before the end"
    assert main([*words, "--out", run.name, *going_on(run), "--quiet"]) == 0


def going_on(run: Path) -> list[str]:
    """How a run is taken up again: from its newest checkpoint, or anew where it was killed before the first."""
    if not run.exists():
        return []
    return ["--resume"] if checkpoint.listed(run) else ["--overwrite"]


def test_sft_killed_at_any_moment_and_resumed_is_identical(place: Path, uninterrupted: Left) -> None:
    run = place / "sft-killed"
    half_written = there(run / "checkpoints" / ".step-000008.draft", run / "checkpoints" / "step-000008")
    kill_and_resume(run, SFT, [lines(run, 2), half_written])
    assert traces(run) == uninterrupted("sft", SFT)


def test_rl_killed_at_any_moment_and_resumed_is_identical(place: Path, uninterrupted: Left) -> None:
    run = place / "rl-killed"
    rollouts = run / "rollouts"
    half_written = there(run / "checkpoints" / ".step-000004.draft", run / "checkpoints" / "step-000004")
    recorded = there(rollouts / "step-000007.parquet.tmp", rollouts / "step-000007.parquet")
    kill_and_resume(run, ONE_TURN, [lines(run, 1), half_written, recorded])
    assert traces(run) == uninterrupted("rl", ONE_TURN)
    assert json.loads((run / "run.json").read_text())["resumes"], "it was resumed"
    assert not (run / "lock").exists(), "nobody writes it any more"


def test_reward_model_killed_at_any_moment_and_resumed_is_identical(place: Path, uninterrupted: Left) -> None:
    run = place / "reward-killed"
    half_written = there(run / "checkpoints" / ".step-000006.draft", run / "checkpoints" / "step-000006")
    kill_and_resume(run, REWARD, [lines(run, 2), half_written])
    assert traces(run) == uninterrupted("reward", REWARD)
    config = json.loads((run / "checkpoints" / "step-000010" / "config.json").read_text())
    assert config["pad_token_id"] == config["vocab_size"] - 1 != config["eos_token_id"]
    assert (run / "report.json").read_bytes() == (place / "reward" / "report.json").read_bytes()


def test_report_of_a_reward_model_killed_after_its_last_checkpoint_is_written_by_the_resumed_run(
    place: Path, uninterrupted: Left
) -> None:
    uninterrupted("reward", REWARD)
    run = Path(shutil.copytree(place / "reward", place / "reward-unreported"))
    (run / "report.json").unlink()
    assert main(["reward-model", "--out", run.name, "--resume", "--quiet"]) == 0
    assert (run / "report.json").read_bytes() == (place / "reward" / "report.json").read_bytes()


def test_several_turns_and_updates_per_step_killed_and_resumed_are_identical(place: Path, uninterrupted: Left) -> None:
    run = place / "turns-killed"
    kill_and_resume(run, TURNS, [lines(run, 6)])
    assert traces(run) == uninterrupted("turns", TURNS)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({step["reward"] for step in steps[1:]}) > 1 and all(step["grad_norm"] > 0 for step in steps[1:])


def test_steps_played_ahead_killed_and_resumed_are_identical(place: Path, uninterrupted: Left) -> None:
    run, words = place / "ahead-killed", [*TURNS, "--async-steps", "2"]
    half_written = there(run / "checkpoints" / ".step-000004.draft", run / "checkpoints" / "step-000004")
    kill_and_resume(run, words, [lines(run, 3), half_written, lines(run, 8)])
    assert traces(run) == uninterrupted("ahead", words)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["staleness"] for step in steps[1:]] == [0, 4, *[8] * 8]


def test_replies_in_the_middle_killed_and_resumed_are_identical(place: Path, uninterrupted: Left) -> None:
    run, words = place / "middle-killed", [*ONE_TURN, "--tokens-per-step", "4", "--async-steps", "1"]
    kill_and_resume(run, words, [lines(run, 4), lines(run, 7)])
    assert traces(run) == uninterrupted("middle", words)
    assert any('"open"' in file.read_text() for file in run.glob("checkpoints/*/training/state.json"))


def test_distillation_killed_and_resumed_is_identical(place: Path, uninterrupted: Left, tokenizer: Tokenizer) -> None:
    save_model(tiny(tokenizer, seed=5, context=96), place / "teacher", tokenizer)
    run = place / "distill-killed"
    half_written = there(run / "checkpoints" / ".step-000004.draft", run / "checkpoints" / "step-000004")
    kill_and_resume(run, TAUGHT, [lines(run, 2), half_written])
    assert traces(run) == uninterrupted("distill", TAUGHT)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(step["divergence"] > 0 and step["grad_norm"] > 0 for step in steps[1:])
    (place / "teacher" / "config.json").write_text((place / "start" / "config.json").read_text())
    assert main([*TAUGHT, "--out", run.name, "--resume", "--quiet"]) == 2, "another teacher would be another run"


def test_ctrl_c_finishes_the_step_and_resumes_identically(place: Path, uninterrupted: Left) -> None:
    run = place / "rl-interrupted"
    process = begin(*ONE_TURN, "--out", run.name)
    assert disturb(process, lines(run, 4), 0.01, signal.SIGINT) == 130
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] < 10 and (run / "checkpoints" / f"step-{steps[-1]:06d}").is_dir(), "saved where it stopped"
    assert (run / "curves.png").exists()
    assert main(["rl", "--out", run.name, "--resume", "--quiet"]) == 0
    assert traces(run) == uninterrupted("rl", ONE_TURN)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "file", "told"),
    [
        (flip, "model.safetensors", "model.safetensors differs from its checksum"),
        (truncate, "training/optimizer.safetensors", "training/optimizer.safetensors differs"),
        (Path.unlink, "training/state.json", "training/state.json is missing"),
        (truncate, "manifest.json", "manifest.json cannot be read"),
    ],
)
def test_damaged_checkpoint_is_told_and_the_one_before_gives_the_identical_end(
    place: Path,
    uninterrupted: Left,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    file: str,
    told: str,
) -> None:
    expected = uninterrupted("rl", ONE_TURN)
    run = place / f"damaged-{damage.__name__}-{Path(file).stem}"
    shutil.copytree(place / "rl", run)
    damage(run / "checkpoints" / "step-000010" / file)
    capsys.readouterr()
    assert main(["rl", "--out", run.name, "--resume", "--quiet"]) == 0
    said = capsys.readouterr().err
    assert f"step-000010 is damaged ({told}" in said and "using the one before it" in said
    assert traces(run) == expected


def test_resuming_takes_recorded_options_and_refuses_others(
    place: Path, uninterrupted: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    uninterrupted("rl", ONE_TURN)
    shutil.copytree(place / "rl", place / "longer")
    assert main(["rl", "--out", "longer", "--resume", "--quiet", "--lr", "1e-3"]) == 2
    assert "lr was 0.01" in capsys.readouterr().err
    assert main(["rl", "--out", "longer", "--resume", "--quiet", "--steps", "12"]) == 0
    assert main(["rl", "--out", "longer", "--resume", "--quiet", "--steps", "3"]) == 2
    assert "longer has done 12 steps: it cannot end at 3" in capsys.readouterr().err
    assert main(["rl", "--out", "longer", "--resume"]) == 0  # 12 are the run's steps from now on
    assert "resumed from step 12, the last one; a larger --steps continues the run" in capsys.readouterr().err
    run = json.loads((place / "longer" / "run.json").read_text())
    assert run["config"]["steps"] == 12 and run["config"]["lr"] == 0.01 and run["final"]["step"] == 12
    del run["config"]["prompts"]
    (place / "longer" / "run.json").write_text(json.dumps(run))
    assert main(["rl", "--out", "longer", "--resume", "--quiet"]) == 2
    assert "run.json is damaged (it lacks prompts)" in capsys.readouterr().err


def test_a_resumed_run_may_be_evaluated_at_other_steps_and_trains_alike(place: Path, uninterrupted: Left) -> None:
    """Evaluation draws no randomness of training, so only its figures differ."""
    whole = uninterrupted("rl", ONE_TURN)
    steps = ONE_TURN.index("--steps") + 1
    assert main([*ONE_TURN[:steps], "4", *ONE_TURN[steps + 1 :], "--out", "often", "--quiet"]) == 0
    assert main(["rl", "--out", "often", "--resume", "--steps", "10", "--eval-every", "3", "--quiet"]) == 0
    evaluated = [step for step, row in enumerate(read_metrics(place / "often")) if "eval/reward" in row]
    assert evaluated == [0, 4, 6, 9, 10]
    trained = {name: trace for name, trace in traces(place / "often").items() if name != "metrics.jsonl"}
    assert trained == {name: trace for name, trace in whole.items() if name != "metrics.jsonl"} and len(trained) > 10


def test_resumed_run_keeps_the_reference_it_began_with(place: Path, uninterrupted: Left, tokenizer: Tokenizer) -> None:
    """--model may name a run that has gone on since: its newest checkpoint is another model by now."""
    uninterrupted("sft", SFT)
    shutil.copytree(place / "sft", place / "moving")
    words = "rl --tasks rows.jsonl --model moving --env env.py:reward --group 2 --prompts 4 --max-tokens 10".split()
    words += "--lr 1e-2 --save-every 1 --threads 1 --kl 0.5 --quiet".split()
    assert main([*words, "--steps", "3", "--out", "whole"]) == 0
    assert main([*words, "--steps", "2", "--out", "parted"]) == 0
    other = tiny(tokenizer, seed=9)
    checkpoint.Draft(place / "moving", 99, lambda folder: save_model(other, folder, tokenizer)).finish(keep=9)
    assert checkpoint.resolve("moving").name == "step-000099"
    assert main(["rl", "--model", "moving", "--out", "parted", "--resume", "--quiet", "--steps", "3"]) == 0
    assert traces(place / "parted") == traces(place / "whole")
