"""The order of the tasks: uniform, by solve rate and by stages, on worked sums of mixed difficulty at equal rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experiment import Comparison, Experiment, Finding, Numbers, Say, Settings, differences, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import Arena, band, courses, late, mean_of
from experiments.worked import ENV, LEFT_TO_RIGHT, demonstrations, practise, start_of, tasks_of, through
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Task

UNIFORM, BY_RATE, STAGES = "uniform", "solve-rate", "stages"
ARMS = (UNIFORM, BY_RATE, STAGES)


def arms(settings: Settings) -> dict[str, dict[str, Any]]:
    """Name -> options of `posttrain.rl`, which differ in the order of the tasks alone."""
    stages = {"curriculum_column": "level", "curriculum_accuracy": settings["stage_accuracy"]}
    return {UNIFORM: {}, BY_RATE: {"curriculum": BY_RATE}, STAGES: {"curriculum": STAGES, **stages}}


def levels_of(counts: Sequence[int], seed: int, settings: Settings, held_out: bool = False) -> dict[int, list[Task]]:
    """So many tasks of each level, which is how many numbers they have."""
    return {
        level: [
            {**task, "level": level}
            for task in tasks_of(count, seed, {**settings, "numbers": level}, held_out=held_out)
        ]
        for level, count in zip(settings["levels"], counts, strict=True)
    }


def named(level: int) -> str:
    """The name of the held-out tasks of a level."""
    return f"of-{level}"


def mean_level(rollouts: Sequence[Rollout]) -> float:
    """Mean level of the rollouts of a step."""
    return float(np.mean([rollout.task["level"] for rollout in rollouts]))


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    tasks = [task for level in levels_of(settings["tasks"], seed, settings).values() for task in level]
    shown = demonstrations(tasks, seed, settings)
    arena = Arena(tasks, ENV, start_of(shown, folder, seed, settings), noted={"level": mean_level})
    sets = {named(n): level for n, level in levels_of(settings["unseen"], seed, settings, held_out=True).items()}
    common = {"algorithm": "grpo", "aggregate": "token-mean", "kl": 0.0}
    common |= {name: settings[name] for name in ("minibatches", "eval_every")}
    found = {}
    for arm, options in arms(settings).items():
        _, found[arm] = practise(arena, folder, arm, seed, settings, say, sets=sets, **{**common, **options})
    return found


def at_level(level: int, arm: Numbers) -> float:
    """Held-out accuracy after training on the tasks of a level."""
    return float(arm["sets"][named(level)][-1][1])


def over_levels(arm: Numbers, place: int = -1) -> float:
    """Held-out accuracy of an evaluation, the last by default: the mean over the levels, which count alike."""
    return float(np.mean([evaluated[place][1] for evaluated in arm["sets"].values()]))


def informative(arm: Numbers) -> float:
    """Share of the groups whose rewards differ, over the whole run."""
    return 1 - mean_of(arm["curves"]["groups/no_signal"], 0, 1)


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    levels, hardest = settings["levels"], max(settings["levels"])
    rows = [
        [
            arm,
            " ".join(f"{over_levels(n[arm]):.3f}" for n in numbers.values()),
            str(over_seeds([over_levels(n[arm]) for n in numbers.values()])),
            *(str(over_seeds([at_level(level, n[arm]) for n in numbers.values()])) for level in levels),
            str(over_seeds([informative(n[arm]) for n in numbers.values()])),
            str(over_seeds([mean_of(n[arm]["curves"]["level"], 0, 1) for n in numbers.values()])),
            str(over_seeds([late(n[arm]["curves"]["level"]) for n in numbers.values()])),
        ]
        for arm in ARMS
    ]
    comparisons = [
        Comparison(f"held-out accuracy, mean over levels, {BY_RATE} minus {UNIFORM}",
                   differences(numbers, BY_RATE, UNIFORM, over_levels), at_least=0.0),
        Comparison(f"held-out accuracy, {hardest} numbers, {STAGES} minus {UNIFORM}",
                   differences(numbers, STAGES, UNIFORM, partial(at_level, hardest)), at_least=0.0),
        Comparison(f"share of groups whose rewards differ, {BY_RATE} minus {UNIFORM}",
                   differences(numbers, BY_RATE, UNIFORM, informative), at_least=0.0),
    ]  # fmt: skip
    panels = [
        *(
            Panel(f"Held-out accuracy, {level} numbers", "step", [of_level(numbers, arm, level) for arm in ARMS])
            for level in levels
        ),
        Panel("Groups whose rewards differ, share", "step", [
            band(arm, [[None if v is None else 1 - v for v in n[arm]["curves"]["groups/no_signal"]]
                       for n in numbers.values()])
            for arm in ARMS
        ]),
        *courses(numbers, ARMS, {"level": "Numbers of the tasks practised, mean"}),
    ]  # fmt: skip
    start = [str(over_seeds([n[UNIFORM]["sets"][named(level)][0][1] for n in numbers.values()])) for level in levels]
    return Finding(
        ("order", "held-out accuracy of each seed", "mean over levels", *(f"{level} numbers" for level in levels),
         "groups whose rewards differ", "numbers per task trained on", "at the end"),
        rows,
        comparisons,
        panels,
        [f"Held-out accuracy of the start with {', '.join(map(str, levels))} numbers: {', '.join(start)}. All arms have "
         f"{settings['steps']} steps of {settings['prompts']} prompts with {settings['group']} replies, the same tasks and "
         "the same start. Groups whose rewards differ, and numbers per task, are means over the run.",
         "Published (Kimi k1.5, section 2.3.4 and its ablation of the curriculum): a uniform phase and then hard problems "
         "ends higher than uniform sampling; problems are sampled in proportion to one minus their solve rate. The order by "
         "solve rate here prefers tasks solved half of the time."],
    )  # fmt: skip


def of_level(numbers: Mapping[int, Numbers], arm: str, level: int) -> Series:
    """Mean held-out accuracy at a level over the steps of an arm, with a 95% band."""
    return through({seed: {arm: {"evaluated": n[arm]["sets"][named(level)]}} for seed, n in numbers.items()}, arm)


EXPERIMENT = Experiment(
    "curriculum",
    "At equal rollouts, tasks chosen by solve rate end with a higher held-out accuracy than uniform ones and give more "
    "groups whose rewards differ; stages from easy to hard end higher on the hardest tasks.",
    "Kimi k1.5, arXiv 2501.12599, sections 2.3.4 and 3.5; learnability, arXiv 2502.12272",
    {**{name: value for name, value in LEFT_TO_RIGHT.items() if name != "numbers"}, "levels": [3, 4, 5, 6],
     "tasks": [160, 300, 300, 300], "unseen": [15, 40, 40, 40], "demonstrators": 3, "slips": 0.15,
     "imitation_epochs": 10.0, "imitation_lr": 4e-3, "steps": 80, "lr": 2e-4, "max_tokens": 40, "context": 56,
     "minibatches": 2, "eval_every": 10, "eval_samples": 8,
     "stage_accuracy": 0.4},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
