"""Compares ways to learn from the steps of a reply on worked sums: a verifier for each line, and a process reward model.

    python recipes/process_rewards.py [--seeds 0 1 2] [--out runs/process-rewards] [--page docs/guides/process-rewards.md]

The task and the start are those of `recipes/algorithms.py --task worked-sums`. The process reward model is trained on
workings of demonstrators, whose lines are labelled by the verifier; then each way trains with the same tasks, steps and
rollouts. All are measured on held-out tasks, by the exact answer and by the verifier of lines. Finished runs are not
repeated. With --page the recipe writes its part of that page.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from common_tasks import LONG_LINES, NUMBERS, WORKED_SUMS
from pages import over_seeds, write_page

import posttrain
from posttrain.core.types import Task
from posttrain.envs.builtin import worked_sums

LABELLED = 8000  # solutions that the reward model learns from
LABELLED_SLIPS = 0.2  # how often a line of theirs is wrong by one
MODEL = "process reward model"
REWARD: dict[str, Any] = {
    **{"algorithm": "outcome", "lr": 1e-3, "rows": 32, "epochs": 12, "warmup": 50, "schedule": "linear"},
    **{"held_out": 0.05, "threads": 1, "quiet": True, "overwrite": True, "save_every": 10**6},
}
STEPS: dict[str, Any] = {"reward_model": ("{rm}",), "step_delimiter": "line", "step_weight": 0.125}
ARMS: dict[str, dict[str, Any]] = {
    "outcome": {"algorithm": "grpo"},
    "verifier of lines": {"algorithm": "grpo-process", "env": "worked-sums,lines=0.5"},
    "model, each step": {"algorithm": "grpo-process", **STEPS},
    "model, steps apart": {"algorithm": "grpo-process", "settings": {"outcome_apart": True}, **STEPS},
    "model, if right": {"algorithm": "grpo-process", "step_rewards": "if-right", **STEPS},
    "model, minimum": {"algorithm": "grpo", "step_aggregate": "min", **STEPS, "step_weight": 0.5},
    "model, mean": {"algorithm": "grpo", "step_aggregate": "mean", **STEPS, "step_weight": 0.5},
    "model alone, each step": {"algorithm": "grpo-process", "env": "unscored", **STEPS},
    "model alone, minimum": {"algorithm": "grpo", "env": "unscored", "step_aggregate": "min", **STEPS},
}
"""Way -> options of `posttrain.rl`; {rm} is the process reward model of the seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--out", type=Path, default=Path("runs/process-rewards"))
    parser.add_argument("--starts", type=Path, default=Path("runs/algorithms/worked-sums/start"))
    parser.add_argument("--page", type=Path, help="page whose marked part is replaced")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    found: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
    for seed in options.seeds:
        start = options.starts / f"seed-{seed}" / "sft"
        if not start.exists():
            raise SystemExit(
                f"{start} is missing: python recipes/algorithms.py start --task worked-sums --seeds {seed}"
            )
        for name in (MODEL, "start", *options.arms):
            if f"{name} {seed}" not in found:
                found[f"{name} {seed}"] = one(options.out, start, name, seed)
                print(f"{name}, seed {seed}: {found[f'{name} {seed}']}", flush=True)
                file.write_text(json.dumps(found, indent=1) + "\n")
    lines = table(found, options.seeds)
    print("\n".join(lines))
    if options.page:
        write_page(options.page, lines)


def solutions(seed: int) -> list[Task]:
    """Return workings with a label for each line: true where the verifier accepts it."""
    rng = random.Random(f"solutions {seed}")
    rows = []
    for task in worked_sums.tasks(LABELLED, 1000 + seed, numbers=NUMBERS):
        reply = worked_sums.working(rng, task["numbers"], LONG_LINES, LABELLED_SLIPS)
        labels = [int(line.right) for line in worked_sums.checked(task["numbers"], reply)]
        rows.append({"prompt": task["prompt"], "steps": reply.split("\n"), "labels": labels})
    return rows


def one(out: Path, start: Path, name: str, seed: int) -> dict[str, float]:
    """Train once, and return the figures on held-out tasks."""
    rm = out / f"reward-model-{seed}"
    if name == MODEL:
        run = posttrain.reward_model(solutions(seed), str(start), out=str(rm), seed=seed, **REWARD)
        assert not run.interrupted, "an interrupted run is no result"
        figures = json.loads((run.path / "report.json").read_text())["figures"]
        return {key.replace(" ", "_"): figures[key]["mean"] for key in ("accuracy", "area under the curve")}
    folder = start
    if name != "start":
        chosen = {**WORKED_SUMS.common, **ARMS[name]}
        chosen |= {"reward_model": (str(rm),)} if "reward_model" in chosen else {}
        env = chosen.pop("env", WORKED_SUMS.env)
        run = posttrain.rl(
            WORKED_SUMS.practice(seed), env, str(start), out=str(out / f"{name.replace(' ', '-')}-{seed}"), seed=seed,
            overwrite=True, record="tokens", **chosen,
        )  # fmt: skip
        assert not run.interrupted, "an interrupted run is no result"
        folder = run.path
    return measured(folder, seed)


def measured(folder: Path, seed: int) -> dict[str, float]:
    """Return accuracy, share of right lines, lines and tokens of a reply, and the share of replies that were cut off."""
    budget = WORKED_SUMS.common["max_tokens"]
    played = posttrain.evaluate(
        WORKED_SUMS.unseen(seed), WORKED_SUMS.env, str(folder), samples=4, k=(1,), max_tokens=budget, threads=1,
        env_workers=0,
    )  # fmt: skip
    lines = [worked_sums.checked(r.task["numbers"], r.text) for r in played.rollouts]
    return {
        "accuracy": played.figures["accuracy"]["mean"],
        "right lines": float(np.mean([line.right for own in lines for line in own])),
        "lines": float(np.mean([len(own) for own in lines])),
        "tokens": float(np.mean([r.n_sampled for r in played.rollouts])),
        "cut off": float(np.mean([r.stop.truncated for r in played.rollouts])),
    }


def table(found: dict[str, dict[str, float]], seeds: list[int]) -> list[str]:
    """Return a row for each way: every seed's accuracy, the mean over seeds with its 95% interval, and the other figures."""
    curve = [found[f"{MODEL} {seed}"]["area_under_the_curve"] for seed in seeds]
    lines = [
        f"Area under the curve of the process reward model on held-out steps: {over_seeds(curve)}.",
        "",
        "| step rewards | accuracy, each seed | accuracy | less outcome alone | right lines | lines | tokens | cut off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in ("start", *ARMS):
        runs = [found.get(f"{name} {seed}") for seed in seeds]
        if not all(runs):
            continue
        own = [run for run in runs if run]
        values = [run["accuracy"] for run in own]
        gained = [value - found[f"outcome {seed}"]["accuracy"] for value, seed in zip(values, seeds, strict=True)]
        cells = [", ".join(f"{value:.3f}" for value in values), over_seeds(values)]
        cells += [over_seeds(gained, "+.3f") if name not in ("start", "outcome") else ""]
        cells += [f"{np.mean([run['right lines'] for run in own]):.3f}"]
        cells += [f"{np.mean([run[key] for run in own]):.1f}" for key in ("lines", "tokens")]
        lines.append(f"| {' | '.join([name, *cells])} | {np.mean([run['cut off'] for run in own]):.2f} |")
    return lines


if __name__ == "__main__":
    main()
