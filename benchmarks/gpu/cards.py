"""Several cards of this machine: each way to divide a run gives the run of one process, and how fast steps are."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from subprocess import CompletedProcess

import golden
import torch
from findings import ROOT, Findings, Setting
from shapes import SIGNAL, model_folder, rows, tasks, write_rows
from stepping import memory_of
from tables import Figure, Table, number
from verbs import LEAST, difference, first_step, last_line

from posttrain.config.training import SFT
from posttrain.runs.run_reading import read_timing

SPARE = 25  # seconds without which a further run is not begun
SERVER = 60  # more seconds for a run with servers of vLLM, which compile
STEPS = 5
PHASES = ("rollout", "update", "between")
WAYS = {
    "--processes 2": "",
    "--processes 2 --shard": "--shard",
    "--processes 2 --tensor-parallel 2": "--tensor-parallel 2",
    "--processes 2 --context-parallel 2": "--context-parallel 2",
    "--processes 2 --shard --async-steps 1": "--shard --async-steps 1",
}

TRANSFERS = {
    "--weight-sync copied": ("", 2),
    "--weight-sync ipc": ("--weight-sync ipc --engine-devices 0 1", 2),
    "--weight-sync nccl": ("--weight-sync nccl --engine-devices 2 3", 4),
}
"""Ways of weights from two processes with --shard to a server of vLLM for each, and the cards that they need."""


def cards(setting: Setting, found: Findings) -> None:
    count = torch.cuda.device_count() if setting.cuda else 2
    if count < 2:
        found.notes.append("This machine has one card: nothing that needs several was run.")
        return
    place = setting.run_folder("cards")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    golden.write_data(place)
    _equal(setting, found, place)
    with found.trying("a killed process"):
        _killed(setting, found, place)
    with found.trying("a resumed run"):
        _resumed(setting, found, place)
    _fast(setting, found, place, count)
    _transfers(setting, found, place, count)


def _equal(setting: Setting, found: Findings, place: Path) -> None:
    table = found.table(
        "GRPO in two processes, each with a card, compared with one", "", "exit code",
        "largest relative difference of the first step's metrics", "of",
        notes=(f"The small decoder of tools/golden.py, float32. Metrics below {LEAST:g} count as if they were that.",),
    )  # fmt: skip
    with found.trying("one process"):
        for name in ("sft", "grpo"):
            ran = _run(setting, place, golden.RUNS[name][1], name)
            assert ran.returncode == 0, f"{name}: {last_line(ran)}"
    for name, words in dict(list(WAYS.items())[:2] if setting.tiny else WAYS).items():
        with found.trying(name), _in_time(setting, table, name) as fits:
            if fits:
                _compare(setting, found, table, place, name, words)


def _compare(setting: Setting, found: Findings, table: Table, place: Path, name: str, words: str) -> None:
    ran = _run(setting, place, f"{golden.RUNS['grpo'][1]} --processes 2 {words}", "two")
    assert ran.returncode == 0, last_line(ran)
    like = place / "runs" / "grpo"
    if "--async-steps" in words:  # it learns from other rollouts than a synchronous run, but not in its first step
        table.notes.append(f"{name}: the first step is that of a synchronous run.")
    worst, metric = difference(*(_shared(first_step(run), first_step(like)) for run in (place / "runs" / "two", like)))
    table.add(name, ran.returncode, f"{worst:.1e}", metric)
    found.figures[f"{name}: relative difference"] = worst


def _shared(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    """Return the metrics that both runs have: several processes count some that one does not."""
    return {name: value for name, value in one.items() if name in other}


def _fast(setting: Setting, found: Findings, place: Path, count: int) -> None:
    table = found.table(
        f"SFT 0.5B, 64 rows of 512 tokens for each of {count} cards", "", "s a step", "tokens/s", "most memory, GB",
        "estimated, GB", notes=(f"Medians of {STEPS - 1} steps after the first [minimum-maximum].",),
    )  # fmt: skip
    each, length = (4, 200) if setting.tiny else (64, 512)
    file = write_rows(place / "rows.jsonl", rows(each * count, length))
    for name, words in {f"--processes {count}": "", f"--processes {count} --shard": "--shard"}.items():
        with found.trying(f"{name}, 0.5B"), _in_time(setting, table, name) as fits:
            if not fits:
                continue
            model = model_folder("0.5b", setting)
            command = f"sft --tasks {file} --model {model} --precision bfloat16 --rows {each * count} --steps {STEPS}"
            ran = _run(setting, place, f"{command} --processes {count} {words}", "fast")
            assert ran.returncode == 0, last_line(ran)
            timing = read_timing(place / "runs" / "fast")[1:]
            seconds = Figure.of([sum(row.get(f"seconds/{phase}", 0.0) for phase in PHASES) for row in timing])
            config = SFT(tasks=file, model=str(model), precision="bfloat16", rows=each * count, processes=count,
                         shard=bool(words), device=setting.device, out=str(place / "runs" / "fast"))  # fmt: skip
            memory = memory_of(setting, config)
            speed = each * count * length / median(seconds.values)
            table.add(name, seconds, number(speed), number(memory.most), number(memory.estimated))
            found.figures[f"0.5B, {name}: tokens/s"] = speed


def _transfers(setting: Setting, found: Findings, place: Path, count: int) -> None:
    table = found.table(
        "Weight sync of 0.5B, two processes with --shard and a server of vLLM each", "", "s a weight sync",
        "largest difference of the weight probe, nats", notes=("Medians of the steps after the first.",),
    )  # fmt: skip
    if not setting.cuda or not importlib.util.find_spec("vllm"):
        table.notes.append("vLLM is not installed here, so no weight sync was measured.")
        return
    file, model = write_rows(place / "tasks.jsonl", tasks(8)), model_folder("0.5b", setting)
    command = f"rl --tasks {file} --env {SIGNAL} --model {model} --precision bfloat16 --prompts 4 --group 4 --steps 4"
    for name, (words, needed) in TRANSFERS.items():
        if count < needed:
            table.notes.append(f"{name} was not tried: it needs {needed} cards.")
            continue
        with found.trying(f"{name}, two processes"), _in_time(setting, table, name, SERVER) as fits:
            if not fits:
                continue
            engines = f"--max-tokens 64 --engine vllm --replicas 2 {words}"
            ran = _run(setting, place, f"{command} --processes 2 --shard {engines}", "transfer")
            assert ran.returncode == 0, last_line(ran)
            timing = read_timing(place / "runs" / "transfer")[1:]
            gap = max(row["engines/probe_gap"] for row in timing)
            table.add(name, Figure.of([row["seconds/load"] for row in timing]), f"{gap:.1e}")


def _killed(setting: Setting, found: Findings, place: Path) -> None:
    """Kill one of two processes in the middle of a run, and measure how soon the run ends."""
    words = golden.RUNS["grpo"][1].replace("--steps 3", "--steps 100000")
    command = (
        f"{words} --processes 2 --shard --out runs/killed --threads 1 --quiet --overwrite --device {setting.device}"
    )
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    run = subprocess.Popen(
        [sys.executable, "-m", "posttrain", *command.split()], cwd=place, env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        metrics = place / "runs" / "killed" / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
            assert run.poll() is None and setting.left() > SPARE, "it did not begin"
            time.sleep(0.1)
        os.kill(_process(run.pid, 1), signal.SIGKILL)
        began = time.monotonic()
        _, said = run.communicate(timeout=max(1.0, setting.left() - SPARE))
        seconds = time.monotonic() - began
    finally:
        run.kill()
        run.wait()
    found.notes.append(
        f"Process 1 of 2 was killed: the run ended after {seconds:.1f} s with exit code {run.returncode}."
    )
    found.notes += [line for line in said.splitlines() if line.startswith("posttrain:")][-1:]
    found.figures["a killed process: s until the end"] = seconds


def _resumed(setting: Setting, found: Findings, place: Path) -> None:
    """Compare a run of two processes that is interrupted after two of its four steps with one that is not."""
    words = golden.RUNS["grpo"][1].replace("--steps 3", "--steps {} --save-every 1 --deterministic")
    for name, command in (
        ("whole", f"{words.format(4)} --processes 2 --shard"),
        ("parted", f"{words.format(2)} --processes 2 --shard"),
    ):
        ran = _run(setting, place, command, name)
        assert ran.returncode == 0, f"{name}: {last_line(ran)}"
    ran = golden.played(place, "rl --out runs/parted --resume --steps 4 --processes 2 --shard")
    assert ran.returncode == 0, f"resumed: {last_line(ran)}"
    whole, parted = ((place / "runs" / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "parted"))
    same = sum(one == other for one, other in zip(whole, parted, strict=False))
    found.notes.append(f"A run of two processes, --shard and --deterministic, interrupted after 2 of 4 steps: {same} of "
                       f"{len(whole)} rows of metrics are the same to the bit.")  # fmt: skip
    found.figures["resumed in two processes: rows of metrics that differ"] = len(whole) - same


def _process(parent: int, rank: int) -> int:
    """Return the process of this rank, which that one has started."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            own = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if own == parent and f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
    raise AssertionError("no process has this rank")


@contextmanager
def _in_time(setting: Setting, table: Table, name: str, more: float = 0.0) -> Iterator[bool]:
    fits = setting.left() > SPARE + more
    if not fits:
        table.notes.append(f"{name} was not tried: the time of this part is over.")
    yield fits


def _run(setting: Setting, place: Path, words: str, out: str) -> CompletedProcess[str]:
    return golden.played(place, f"{words} --out runs/{out} --threads 1 --quiet --overwrite --device {setting.device}")
