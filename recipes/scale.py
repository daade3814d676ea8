"""The same run in one process, in two, and with its weights sharded over two: learning curves and time.

    python recipes/scale.py [--seeds 0 1 2] [--steps 120] [--out runs/scale]

The model and the sums are those of cli/demo_command.py, with fewer steps. Each way is a command, as a user would give it.
The results are the accuracy on sums that are in no training row, and seconds of a step (without the start). Figures go to
OUT/results.json; finished ones are not run again.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from results_file import ResultsFile
from staleness import prepared

from posttrain.core.intervals import student_interval
from posttrain.runs.run_reading import read_metrics, read_timing

WAYS = {
    "one process, two threads": "--threads 2",
    "one process, one thread": "--threads 1",
    "two processes": "--threads 1 --processes 2",
    "two processes, --shard": "--threads 1 --processes 2 --shard",
    "two processes, --shard --replicas 2 --async-steps 1": "--threads 1 --processes 2 --shard --replicas 2 --async-steps 1",
}
RUN = (
    "rl --env arithmetic --prompts 64 --group 8 --minibatches 2 --max-tokens 4 --kl 0 --lr 7e-4 --betas 0.9 0.95 "
    "--warmup 10 --schedule linear --eval-samples 4 --env-workers 1 --save-every 1000 --quiet --overwrite"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", default="runs/scale")
    options = parser.parse_args()
    out = Path(options.out)
    results = ResultsFile(out)
    for seed in options.seeds:
        _, start = prepared(out, seed)
        for way in WAYS:
            results.once(f"{way}; {seed}", partial(one, out, start, way, seed, options.steps))
    print(report(results, options.seeds))


def one(out: Path, start: str, way: str, seed: int, steps: int) -> dict[str, Any]:
    words = [*RUN.split(), *WAYS[way].split(), "--model", start, "--tasks", str(out / f"practice-{seed}.jsonl")]
    words += ["--eval-tasks", str(out / f"unseen-{seed}.jsonl"), "--eval-every", str(steps // 6), "--seed", str(seed)]
    words += ["--steps", str(steps), "--out", str(out / "run")]
    subprocess.run([sys.executable, "-m", "posttrain", *words], check=True, stdout=subprocess.DEVNULL)
    curve = [[line["step"], line["eval/accuracy"]] for line in read_metrics(out / "run") if "eval/accuracy" in line]
    times = [line["seconds/rollout"] + line["seconds/update"] for line in read_timing(out / "run")[5:]]
    return {"curve": curve, "seconds": statistics.median(times)}


def report(results: dict[str, Any], seeds: Sequence[int]) -> str:
    """A Markdown table: a line each way, the curve of each seed, the mean of their ends, seconds of a step."""
    found = [
        "| way | accuracy after sixths of the run, each seed | at the end | s a step, each seed |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        own = [results[f"{way}; {seed}"] for seed in seeds]
        curves = "; ".join(" ".join(f"{value:.2f}" for _, value in each["curve"]) for each in own)
        ends = [each["curve"][-1][1] for each in own]
        seconds = ", ".join(f"{each['seconds']:.3f}" for each in own)
        found.append(f"| {way} | {curves} | {sum(ends) / len(ends):.3f} {student_interval(ends).text()} | {seconds} |")
    return "\n".join(found)


if __name__ == "__main__":
    main()
