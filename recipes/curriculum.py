"""Compares the orders of tasks of `posttrain rl` on sums of two to four numbers: uniform, solve-rate and stages.

    python recipes/curriculum.py [--seeds 0 1 2] [--out runs/curriculum] [--page docs/guides/curriculum.md]

A small decoder imitates a few sums of each length, then learns from an exact check alone, once with each order: the same
tasks, steps and rollouts. The result is the accuracy on held-out sums at temperature 1, by length. Runs that are there
already are not repeated. With --page the recipe writes its part of that page.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from pages import over_seeds, write_page
from results_file import ResultsFile

import posttrain
from posttrain.core.types import Task
from posttrain.envs.builtin import arithmetic

LENGTHS = (2, 3, 4)
ROWS = {2: 80, 3: 700, 4: 1500}  # to train on: all but the held-out sums of two digits, many of the others
SHOWN = {2: 70, 3: 400, 4: 400}  # of them to imitate
ASKED = {2: 8, 3: 80, 4: 120}  # held out
ORDERS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "solve-rate": {"curriculum": "solve-rate"},
    "stages": {"curriculum": "stages", "curriculum_column": "level"},
}
SMALL: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/curriculum"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--page", type=Path, help="page whose marked part is replaced")
    options = parser.parse_args()
    found = ResultsFile(options.out)
    for seed in options.seeds:
        for name in ("imitation", *ORDERS):
            found.once(f"{name} {seed}", partial(one, options.out, name, seed, options.steps))
    lines = table(found, options.seeds)
    print("\n".join(lines))
    if options.page:
        write_page(options.page, lines)


def sums(counts: dict[int, int], seed: int, held_out: bool = False) -> list[Task]:
    """Return so many sums of each length, which is their level."""
    made = [(n, arithmetic.tasks(counts[n], seed, digits=1, operands=n, held_out=held_out)) for n in LENGTHS]
    return [{**task, "level": n} for n, tasks in made for task in tasks]


def one(out: Path, name: str, seed: int, steps: int) -> dict[str, float]:
    """Train once. Return the accuracy on held-out sums, over all and by length, and the groups without signal."""
    start = out / f"imitation-{seed}"
    if name == "imitation":
        run = posttrain.sft(
            sums(SHOWN, seed), out=str(start), seed=seed, hidden=64, layers=2, heads=4, context=24, tokenizer="characters",
            epochs=30, rows=64, lr=5e-3, warmup=10, **SMALL,
        )  # fmt: skip
    else:
        run = posttrain.rl(
            sums(ROWS, seed), "arithmetic", str(start), out=str(out / f"{name}-{seed}"), seed=seed, steps=steps,
            prompts=24, group=8, max_tokens=4, kl=0.0, lr=1e-3, betas=(0.9, 0.95), warmup=10, schedule="linear",
            minibatches=2, env_workers=0, save_every=steps, record="tokens", **ORDERS[name], **SMALL,
        )  # fmt: skip
    played = posttrain.evaluate(
        sums(ASKED, seed, held_out=True), "arithmetic", str(run.path), samples=4, k=(1,), max_tokens=4, threads=1,
        env_workers=0,
    )  # fmt: skip
    silent = [row["groups/no_signal"] for row in run.metrics if "groups/no_signal" in row]
    by_length = {str(n): _accuracy(played.rewards, n) for n in LENGTHS}
    return {"all": sum(by_length.values()) / 3, **by_length, "no signal": sum(silent) / max(1, len(silent))}


def _accuracy(rewards: dict[str, list[float]], length: int) -> float:
    own = [sum(found) / len(found) for task, found in rewards.items() if task.count("+") == length - 1 and found]
    return sum(own) / len(own)


def table(found: dict[str, dict[str, Any]], seeds: list[int]) -> list[str]:
    """Return a row for each order: mean over the seeds with its 95% interval, by length and over the three lengths."""
    lines = [
        f"| order | {' | '.join(f'{n} numbers' for n in LENGTHS)} | mean | less uniform | without signal |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("imitation", *ORDERS):
        runs = [found[f"{name} {seed}"] for seed in seeds]
        cells = [over_seeds([run[key] for run in runs]) for key in (*map(str, LENGTHS), "all")]
        gained = [run["all"] - found[f"uniform {seed}"]["all"] for run, seed in zip(runs, seeds, strict=True)]
        cells += [over_seeds(gained, "+.3f") if name in ("solve-rate", "stages") else ""]
        cells += [over_seeds([run["no signal"] for run in runs]) if name in ORDERS else ""]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return lines


if __name__ == "__main__":
    main()
