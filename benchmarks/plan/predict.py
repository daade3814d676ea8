"""Predicts runs from a pilot, makes them, and compares: `posttrain plan` against this machine.

    python benchmarks/plan/predict.py [--seeds 0 1 2] [--engine local] [--folder runs/plan] [--processor-time]

Pilot and runs sample with the 5 M model of the shared data on GSM8K, one thread each, one after the other. The pilot has 8
prompts a step and 8 replies a prompt; what is predicted from it has other numbers of both. Runs that are there are kept.
Environments play in the process itself, so that processor time is all of a run's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from posttrain.apps.planning.job import PlanSetting
from posttrain.apps.planning.pilot import read_pilot
from posttrain.apps.planning.simulation import Simulation

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
PILOT, OTHERS = (8, 8), ((4, 16), (16, 8))
PROCESSOR_TIME = "import time; time.perf_counter = time.process_time; from posttrain.cli.main import entry; entry()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--engine", default="local")
    parser.add_argument("--folder", default="runs/plan")
    parser.add_argument(
        "--processor-time", action="store_true", help="count that instead of the clock's, beside other work"
    )
    options = parser.parse_args()
    print("| prompts x replies | seed | measured, steps/h | simulated | off by |\n|---|---|---|---|---|")
    for seed in options.seeds:
        pilot = made(Path(options.folder), options.engine, PILOT, seed, options.processor_time)
        for size in (PILOT, *OTHERS):
            real = read_pilot(
                str(made(Path(options.folder), options.engine, size, seed, options.processor_time))
            ).steps_per_hour
            job = read_pilot(str(pilot), *size).job
            simulated = Simulation(job, PlanSetting(1, shared=True), 48).run().steps_per_hour
            own = " (pilot)" if size == PILOT else ""
            print(
                f"| {size[0]} x {size[1]}{own} | {seed} | {real:.0f} | {simulated:.0f} | {simulated / real - 1:+.1%} |",
                flush=True,
            )


def made(folder: Path, engine: str, size: tuple[int, int], seed: int, processor_time: bool) -> Path:
    """The folder of a run, which is made if it is not there."""
    out = folder / f"{engine}-{size[0]}x{size[1]}-{seed}"
    if not (out / "checkpoints").exists():
        begin = ["-c", PROCESSOR_TIME] if processor_time else ["-m", "posttrain"]
        command = [
            *(sys.executable, *begin, "rl", "--engine", engine, "--engine-cache", "1", "--seed", str(seed)),
            *("--model", str(DATA / "models" / "gsm8k-5m"), "--tasks", str(DATA / "gsm8k" / "train.jsonl")),
            *("--fields.prompt", "question", "--env", str(ROOT / "benchmarks" / "speed" / "rewards.py") + ":signal"),
            *("--prompts", str(size[0]), "--group", str(size[1]), "--max-tokens", "64", "--kl", "0", "--lr", "1e-5"),
            *(
                "--steps",
                "6",
                "--save-every",
                "100",
                "--env-workers",
                "0",
                "--threads",
                "1",
                "--out",
                str(out),
                "--quiet",
            ),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


if __name__ == "__main__":
    main()
