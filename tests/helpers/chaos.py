"""A run whose engines are killed or stopped all the time, and one of whose processes is killed once, beside one left alone.

    python tests/helpers/chaos.py [--seeds 0 1 2] [--steps 30] [--folder runs/chaos]

Two processes with an engine each, playing one step ahead. A script that follows from the seed kills (SIGKILL) or stops
(SIGSTOP) a random engine every third step, and once a process of the run. It has to end by itself, with the metrics and
rollouts of the calm run to the byte, and leave no process behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

from places import ROOT
from processes import descendants

RUN = (
    "rl --tasks sums.jsonl --env my.py:reward --model start --prompts 4 --group 4 --max-tokens 6 --async-steps 1 --lr 1e-3 "
    "--save-every 1 --keep 2 --env-workers 1 --threads 1 --quiet --processes 2 --replicas 2 --engine-timeout 3 "
    "--engine-restarts 50 --collective-timeout 60 --restarts 5"
)
SMALL = "--tokenizer characters --hidden 32 --layers 2 --heads 2 --context 32 --steps 30 --rows 8 --threads 1 --quiet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", default="runs/chaos")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    folder = Path(options.folder).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my.py").write_text("def reward(task, reply):\n    return len(set(reply)) / 4\n")
    command = [sys.executable, "-m", "posttrain", "sft", "--tasks", "sums.jsonl", "--out", "start", *SMALL.split()]
    subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)
    for seed in options.seeds:
        calm, _ = played(folder, f"calm-{seed}", seed, options.steps, chaos=False)
        wild, told = played(folder, f"chaos-{seed}", seed, options.steps, chaos=True)
        same = "as calm, to the byte" if calm == wild else "OTHER than calm"
        print(f"seed {seed}: {told}; {len(calm)} files {same}", flush=True)
        assert calm == wild


def played(folder: Path, out: str, seed: int, steps: int, chaos: bool) -> tuple[dict[str, str], str]:
    """The checksums of metrics and rollouts of a run, and what was done to it."""
    words, done = [*RUN.split(), "--out", out, "--seed", str(seed), "--steps", str(steps)], dict[str, int]()
    began, draw = time.monotonic(), random.Random(f"chaos {seed}")
    with (folder / f"{out}.log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "posttrain", *words], cwd=folder, env=environment(), stdout=log, stderr=log
        )
        fatal, due = draw.randrange(steps // 3, 2 * steps // 3), 3
        while run.poll() is None:
            step = steps_of(folder / out)
            if chaos and step >= fatal and (ranks := [pid for pid in descendants(run.pid) if is_rank(pid)]):
                os.kill(draw.choice(ranks), signal.SIGKILL)
                fatal, done["process killed"] = steps + 1, 1
            if chaos and due <= step < steps and (engines := [pid for pid in descendants(run.pid) if is_engine(pid)]):
                kind = draw.choice([signal.SIGKILL, signal.SIGSTOP])
                os.kill(draw.choice(engines), kind)
                due = step + 3
                what = "engines killed" if kind == signal.SIGKILL else "engines stopped"
                done[what] = done.get(what, 0) + 1
            time.sleep(0.005)
    assert run.returncode == 0, f"exit code {run.returncode}: see {folder / out}.log"
    left = [pid for pid in everybody() if str(folder).encode() in folder_of(pid)]
    assert not left, f"processes are left: {left}"
    files = [folder / out / "metrics.jsonl", *(folder / out / "rollouts").iterdir()]
    told = ", ".join(f"{count} {what}" for what, count in sorted(done.items()))
    sums = {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
    return sums, f"{told} in {time.monotonic() - began:.0f} s"


def steps_of(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_engine(pid: int) -> bool:
    """Not its keeper: that one stopped, and whom it belongs to killed, nobody would be left to end it."""
    return all(b"engines.replica:" in command_of(each) for each in (pid, parent_of(pid)))


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_rank(pid: int) -> bool:
    return b"posttrain\0rl\0" in command_of(pid)


def everybody() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def folder_of(pid: int) -> bytes:
    try:
        return os.readlink(f"/proc/{pid}/cwd").encode()
    except OSError:
        return b""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
