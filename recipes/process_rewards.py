"""Compares ways to learn from the steps of a reply on worked sums: a verifier for each line, and a process reward model.

    python recipes/process_rewards.py [--seeds 0 1 2] [--out runs/process-rewards] [--page docs/guides/process-rewards.md]
    python recipes/process_rewards.py --grid docs/results/grid.md

The task and the start are those of `recipes/algorithms.py --task worked-sums`. The process reward model is trained on
workings of demonstrators, whose lines are labelled by the verifier; then each way trains with the same tasks, steps and
rollouts. All are measured on held-out tasks, by the exact answer and by the verifier of lines. Finished runs are not
repeated. With --page the recipe writes its part of that page. With --grid it runs the ways to assign credit instead,
with rewards from the exact answer, from the model beside it, and from the model alone, and writes that page's part.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common_tasks import LONG_LINES, NUMBERS, WORKED_SUMS
from grid import OFFLINE, SAMPLED, SFT_RATE, agreement, best_and_worst, chosen
from pages import over_seeds, with_seeds, write_page
from results_file import ResultsFile

import posttrain
from posttrain import Rollout
from posttrain.core.types import OUTCOME, Task
from posttrain.envs.builtin import worked_sums

LABELLED = 8000  # solutions that the reward model learns from
LABELLED_SLIPS = 0.2  # how often a line of theirs is wrong by one
DPO_RATE = 1e-5  # best of 1e-5, 3e-5, 1e-4, 3e-4 and 1e-3 on seed 9
MODEL = "process reward model"
REWARD: dict[str, Any] = {
    **{"algorithm": "outcome", "lr": 1e-3, "rows": 32, "epochs": 12, "warmup": 50, "schedule": "linear"},
    **{"held_out": 0.05, "threads": 1, "quiet": True, "overwrite": True, "save_every": 10**6},
}
STEPS: dict[str, Any] = {"reward_model": ("{rm}",), "step_delimiter": "line", "step_weight": 0.125}
LEAST: dict[str, Any] = {**STEPS, "step_aggregate": "min", "step_weight": 0.5}
ARMS: dict[str, dict[str, Any]] = {
    "outcome": {"algorithm": "grpo"},
    "verifier of lines": {"algorithm": "grpo-process", "env": "worked-sums,lines=0.5"},
    "model, each step": {"algorithm": "grpo-process", **STEPS},
    "model, steps apart": {"algorithm": "grpo-process", "settings": {"outcome_apart": True}, **STEPS},
    "model, if right": {"algorithm": "grpo-process", "step_rewards": "if-right", **STEPS},
    "model, minimum": {"algorithm": "grpo", **LEAST},
    "model, mean": {"algorithm": "grpo", **LEAST, "step_aggregate": "mean"},
    "model alone, each step": {"algorithm": "grpo-process", "env": "unscored", **STEPS},
    "model alone, minimum": {"algorithm": "grpo", "env": "unscored", **LEAST},
}
"""Way -> options of `posttrain.rl`; {rm} is the process reward model of the seed."""
RULE, BOTH, ALONE = "rule", "rule and process reward model", "process reward model"
SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    RULE: ({}, {}),
    BOTH: (STEPS, LEAST),
    ALONE: ({"env": "unscored", **STEPS}, {"env": "unscored", **LEAST, "step_weight": 1.0}),
}
"""Source of the grid -> its options where tokens are credited, and where whole replies are compared."""
GROUPS = "group statistics"
IN_GROUPS = {RULE: "outcome", BOTH: "model, each step", ALONE: "model alone, each step"}
CREDIT = {"critic + GAE": "ppo", GROUPS: "", "leave-one-out": "rloo", "offline pairs": "dpo", "imitation": "sft"}
"""Way to assign credit -> algorithm; those with group statistics are arms of above."""


def arm(source: str, credit: str) -> str:
    return IN_GROUPS[source] if credit == GROUPS else f"{source}, {credit}"


def cell(source: str, credit: str) -> dict[str, Any]:
    if credit == GROUPS:
        return ARMS[IN_GROUPS[source]]
    algorithm = CREDIT[credit]
    own = WORKED_SUMS.own.get(algorithm, {})
    return {"algorithm": algorithm, **own, **SOURCES[source][algorithm != "ppo"]}


CELLS = {arm(source, credit): cell(source, credit) for source in SOURCES for credit in CREDIT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--out", type=Path, default=Path("runs/process-rewards"))
    parser.add_argument("--starts", type=Path, default=Path("runs/algorithms/worked-sums/start"))
    parser.add_argument("--page", type=Path, help="page whose marked part is replaced")
    parser.add_argument("--grid", type=Path, help="run the cells of the grid instead, and write its part of this page")
    options = parser.parse_args()
    found = ResultsFile(options.out)
    for seed in options.seeds:
        start = options.starts / f"seed-{seed}" / "sft"
        if not start.exists():
            raise SystemExit(
                f"{start} is missing: python recipes/algorithms.py start --task worked-sums --seeds {seed}"
            )
        for name in (MODEL, "start", *(CELLS if options.grid else options.arms)):
            found.once(f"{name} {seed}", partial(one, options.out, start, name, seed))
    lines = grid_table(found, options.seeds) if options.grid else table(found, options.seeds)
    print("\n".join(lines))
    if page := options.grid or options.page:
        write_page(page, lines, "steps" if options.grid else "")


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
    if name == "start":
        return measured(start, seed)
    given = {"env": WORKED_SUMS.env, **(ARMS | CELLS)[name]}
    given |= {"reward_model": (str(rm),)} if "reward_model" in given else {}
    folder = str(out / f"{name.replace(',', '').replace(' ', '-')}-{seed}")
    if given["algorithm"] in ("dpo", "sft"):
        return offline(start, folder, seed, **given)
    run = posttrain.rl(
        WORKED_SUMS.practice(seed), model=str(start), out=folder, seed=seed, overwrite=True, record="tokens",
        **{**WORKED_SUMS.common, **given},
    )  # fmt: skip
    assert not run.interrupted, "an interrupted run is no result"
    return measured(run.path, seed)


def offline(start: Path, out: str, seed: int, *, algorithm: str, **source: Any) -> dict[str, float]:
    """Train on the best and the worst of 4 replies by the source, of as many replies as the other cells sample."""
    online = WORKED_SUMS.common
    tasks = WORKED_SUMS.practice(seed)[: online["steps"] * online["prompts"] * online["group"] // SAMPLED]
    asked = posttrain.evaluate(
        tasks, model=str(start), samples=SAMPLED, k=(1,), success=1.0, max_tokens=online["max_tokens"], seed=seed,
        threads=1, env_workers=0, **source,
    )  # fmt: skip
    groups: dict[str, list[Rollout]] = {}
    for rollout in asked.rollouts:
        groups.setdefault(rollout.task["id"], []).append(rollout)
    pairs, common = best_and_worst(groups.values()), {"out": out, "seed": seed, **OFFLINE}
    if algorithm == "sft":
        run = posttrain.sft(chosen(pairs), model=str(start), lr=SFT_RATE, **common)
    else:
        run = posttrain.prefer(pairs, str(start), algorithm=algorithm, lr=DPO_RATE, **common)
    assert not run.interrupted, "an interrupted run is no result"
    return {"agrees": agreement(groups.values(), right_answer), "pairs": len(pairs), **measured(run.path, seed)}


def right_answer(task: Mapping[str, Any], reply: str) -> bool:
    return worked_sums.reward(dict(task), reply) == {OUTCOME: 1.0}


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


def grid_table(found: dict[str, dict[str, float]], seeds: list[int]) -> list[str]:
    """Return the grid: of each cell the mean over seeds with its 95% interval (Student), then every seed."""

    def cells(source: str, told: Callable[[list[float]], str], key: str = "accuracy") -> list[str]:
        return [told([found[f"{arm(source, credit)} {seed}"][key] for seed in seeds]) for credit in CREDIT]

    def each(values: Sequence[float]) -> str:
        return ", ".join(f"{value:.3f}" for value in values)

    head = [f"| reward from | {' | '.join(CREDIT)} |", "|---" * (len(CREDIT) + 1) + "|"]
    lines = [f"The start: {with_seeds([found[f'start {seed}']['accuracy'] for seed in seeds])}.", "", *head]
    lines += [f"| {' | '.join([source, *cells(source, over_seeds)])} |" for source in SOURCES]
    lines += ["", "Every seed:", "", *head]
    lines += [f"| {' | '.join([source, *cells(source, each)])} |" for source in SOURCES]
    ranked = [found[f"{ALONE}, imitation {seed}"]["agrees"] for seed in seeds]
    area = [found[f"{MODEL} {seed}"]["area_under_the_curve"] for seed in seeds]
    lines += [
        "",
        f"The minimum of the steps ranks a right reply above a wrong one in {over_seeds(ranked)} of the start's;",
    ]
    lines += [f"area under the curve of the model on held-out steps {over_seeds(area)}."]
    return lines


if __name__ == "__main__":
    main()
