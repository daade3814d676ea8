"""Compares learning rates of GRPO: full fine-tuning and LoRA, on one of three tasks. It also resumes:

    python -m recipes.learning_rates [--task instructions] [--seeds 0 1]

    sums            one-digit sums and products, asked as in `posttrain demo --real`; 15 steps from the untrained model
    instructions    the constraints of recipes/real/instructions.py; 10 steps after its SFT stage, which a seed's rates share
    tiny            sums of four digits with a decoder of 0.1 M parameters: those of recipes/common_tasks.py; 60 steps after
                    their SFT stage, 64 prompts x 8 replies each

The other two have a real model, and steps of 8 prompts x 8 replies. The table shows a figure on held-out tasks, and reward
and entropy of the last three steps. It is a part of docs/results/learning-rates.md, written with --page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import posttrain
from posttrain.cli.demo_command import questions
from posttrain.training.trainer import Run
from recipes.common_tasks import SUMS
from recipes.real import instructions
from recipes.real.study import Figures, Study, finished, options, run

FULL, ADAPTERS = "full", "LoRA, rank 16"
Rates = Mapping[str, Sequence[float]]
RATES: Mapping[str, Rates] = {
    "sums": {FULL: (1e-6, 3e-6, 1e-5, 3e-5), ADAPTERS: (1e-5, 1e-4, 1e-3)},
    "instructions": {FULL: (5e-6, 2e-5, 5e-5), ADAPTERS: (1e-4, 4e-4, 1e-3)},
    "tiny": {FULL: (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2), ADAPTERS: (1e-3, 1e-2)},
}
SEEDS = {"sums": [0, 1], "instructions": [0], "tiny": [0, 1, 2]}
STEPS = {"sums": 15, "instructions": 10, "tiny": 60}
TINY = "a decoder of 0.1 M parameters"
LAST = 3  # steps


def main() -> None:
    parser = options(__doc__ or "", "")
    parser.add_argument("--task", choices=[*RATES], default="sums")
    parser.add_argument(
        "--steps", type=int, help="steps of each run (default: 15 for sums, 10 for instructions, 60 for tiny)"
    )
    parser.set_defaults(seeds=None, out=None)
    given = parser.parse_args()
    task = given.task
    given.seeds = given.seeds or SEEDS[task]
    given.out = given.out or Path("runs/learning-rates") / task
    given.model = TINY if task == "tiny" else given.model  # for the page: its SFT stage makes the model
    steps = given.steps or (2 if given.small else STEPS[task])
    study = Study(given, {"task": task, "steps": steps})
    arms = {named(way, rate): (rate, way == ADAPTERS) for way, rates in RATES[task].items() for rate in rates}
    for seed in study.seeds:
        if task == "instructions":
            trial = instructions.of_seed(study, seed)
            study.once("SFT", seed, lambda trial=trial: kept(trial, trial.sft("SFT")))
            figures = partial(instructed, trial)
        elif task == "tiny":
            study.once("SFT", seed, partial(imitated, study, seed))
            figures = partial(small_sums, study, seed)
        else:
            figures = partial(summed, study, seed)
        for arm, (rate, adapters) in arms.items():
            study.once(arm, seed, partial(figures, arm, rate, adapters, steps))
    study.finish(page(study, task, steps, list(arms)), "" if task == "sums" else task)


def named(way: str, rate: float) -> str:
    return f"{way}, {rate:g}"


def summed(study: Study, seed: int, arm: str, rate: float, adapters: bool, steps: int) -> Figures:
    """The accuracy on 40 held-out questions (4 in a small run), 4 replies each at temperature 1."""
    asked, count = questions("+*", range(10), seed), 4 if study.is_small else 40
    how: dict[str, Any] = {"algorithm": "grpo", "kl": 0.0, "lr": rate, "lora": 16 if adapters else None}
    size = {"steps": steps, "prompts": 2 if study.is_small else 8, "group": 8, "max_tokens": 24, "eval_every": 0}
    trained = posttrain.rl(asked[40:], "verify:numeric", study.model, **how, **size, **study.common(arm, seed))
    again = {"samples": 4, "temperature": 1.0, "max_tokens": 24, "seed": seed}
    played = study.evaluate(asked[:count], "verify:numeric", finished(trained), **again)
    return {"held out": played.figures["accuracy"]["mean"], **last(trained)}


def instructed(trial: instructions.Instructions, arm: str, rate: float, adapters: bool, steps: int) -> Figures:
    """The share of held-out prompts with trained kinds of constraints whose greedy reply keeps its constraint."""
    trained = trial.grpo(arm, rate, adapters, steps)
    return {**kept(trial, finished(trained)), **last(trained)}


def kept(trial: instructions.Instructions, model: str) -> Figures:
    asked, how = trial.unseen["trained"], {"max_tokens": instructions.LONGEST, "success": 2.0}
    rollouts = trial.study.evaluate(asked, instructions.REWARD, model, **how).rollouts
    return {"held out": sum(rollout.rewards["kept"] for rollout in rollouts) / len(rollouts)}


def imitated(study: Study, seed: int) -> Figures:
    """The start of a seed: it imitates demonstrators who forget the last number at times."""
    shown = SUMS.demonstrations(SUMS.practice(seed), seed)[: 64 if study.is_small else None]
    return on_sums(study, seed, finished(posttrain.sft(shown, **{**SUMS.imitation, **study.common("SFT", seed)})))


def small_sums(study: Study, seed: int, arm: str, rate: float, adapters: bool, steps: int) -> Figures:
    """The accuracy on sums that neither stage has seen."""
    settings = {**SUMS.settings("grpo"), "lr": rate, "steps": steps, "lora": 16 if adapters else None, "eval_every": 0}
    start = str(study.folder("SFT", seed))
    env = settings.pop("env")
    trained = posttrain.rl(SUMS.practice(seed), env, start, **{**settings, **study.common(arm, seed)})
    return {**on_sums(study, seed, finished(trained)), **last(trained)}


def on_sums(study: Study, seed: int, model: str) -> Figures:
    again = {"samples": 4, "temperature": 1.0, "max_tokens": 4, "seed": seed}
    played = study.evaluate(SUMS.unseen(seed)[: 8 if study.is_small else None], SUMS.env, model, **again)
    return {"held out": played.figures["accuracy"]["mean"]}


def last(trained: Run) -> Figures:
    """Reward and entropy of the last steps."""
    rows = trained.metrics[-LAST:]
    return {name: sum(row[name] for row in rows) / len(rows) for name in ("reward", "entropy")}


def page(study: Study, task: str, steps: int, arms: Sequence[str]) -> list[str]:
    """The part of the page for a task."""
    measured = "held-out constraints kept" if task == "instructions" else "held-out accuracy"
    columns = {"held out": measured, "reward": f"reward, last {LAST} steps", "entropy": "entropy", "minutes": "minutes"}
    known = arms if task == "sums" else ["SFT", *arms]
    how = f"{steps} steps of GRPO with each learning rate. The mean over seeds has its 95% interval (Student)."
    return [*study.head(f"learning_rates --task {task}", "recipes"), how, "", *study.table(known, columns)]


if __name__ == "__main__":
    run(main)
