"""PPO with a critic against GRPO: who is faster at first, who is steadier at last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experiment import (
    Comparison,
    Experiment,
    Finding,
    Numbers,
    Say,
    Settings,
    differences,
    over_seeds,
)
from experiments.harness import (
    courses,
    ends,
    held_out,
    mean_of,
    practise,
    smooth,
    steps_to,
    sums,
)
from experiments.worked import CHECKED, CHECKED_SIZES, opened, with_lines

ARMS = ("grpo", "ppo")


def options(arm: str, settings: Settings) -> dict[str, Any]:
    """The arms differ in where advantages come from, and in nothing else."""
    own = {"algorithm": arm, "aggregate": "token-mean", "epochs": settings["epochs"], "kl": 0.0}
    return {**own, "critic_lr": settings["critic_lr"]} if arm == "ppo" else own


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = opened(sums, folder, seed, settings)
    return {arm: practise(arena, folder, arm, seed, settings, say, **options(arm, settings)) for arm in ARMS}


def fall(arm: Numbers) -> float:
    """How far the smoothed accuracy ends below its peak."""
    line = smooth(arm["curves"]["accuracy"])
    return float(line.max() - line[-1])


def unrest(arm: Numbers) -> float:
    """Standard deviation of the accuracy from step to step about its smoothed curve, in the last half."""
    curve = arm["curves"]["accuracy"]
    away = np.asarray(curve, dtype=float) - smooth(curve)
    return float(np.std(away[len(away) // 2 :]))


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    target = settings["target"]

    def reached(arm: Numbers) -> float:
        curve = arm["curves"]["accuracy"]
        return float(steps_to(curve, target) or len(curve))

    def early(arm: Numbers) -> float:
        return mean_of(arm["curves"]["accuracy"], 0.0, 0.25)

    rows = []
    for arm in ARMS:
        own = [n[arm] for n in numbers.values()]
        rows.append(
            [
                arm,
                str(over_seeds([early(n) for n in own])),
                str(over_seeds([reached(n) for n in own])),
                str(ends(numbers, arm, "accuracy")),
                str(held_out(numbers, arm)),
                str(over_seeds([fall(n) for n in own])),
                str(over_seeds([unrest(n) for n in own])),
            ]
        )
    comparisons = [
        Comparison("accuracy in the first quarter, grpo minus ppo",
                   differences(numbers, "grpo", "ppo", early), at_least=0.0),
        Comparison("fall from the peak, grpo minus ppo", differences(numbers, "grpo", "ppo", fall), at_least=0.0),
        Comparison("unrest in the last half, grpo minus ppo",
                   differences(numbers, "grpo", "ppo", unrest), at_least=0.0),
    ]  # fmt: skip
    titles = {
        "accuracy": "Accuracy of the rollouts",
        "entropy": "Entropy, nats per token",
        "grad_norm": "Gradient norm before clipping",
    }
    panels = courses(numbers, ARMS, titles)
    found = Finding(
        ("algorithm", "accuracy, first quarter", f"steps to {target:g}", "accuracy at the end", "held-out accuracy",
         "fall from the peak", "unrest"),
        rows,
        comparisons,
        panels,
        ["Published (Search-R1, Qwen2.5 3B and 7B): GRPO climbs faster because PPO's critic has to warm up, and its "
         "reward collapses after many steps where PPO's does not. The critic's extra time is not counted here."],
    )  # fmt: skip
    return with_lines(found, numbers)


EXPERIMENT = Experiment(
    "ppo-vs-grpo",
    "GRPO rises faster, since PPO's critic must be learned first; PPO is steadier late, where GRPO may collapse.",
    "Search-R1, arXiv 2503.09516, section 5.1",
    {"steps": 200, "prompts": 32, "group": 8, "epochs": 1, "minibatches": 2, "lr": 5e-4, "critic_lr": 1e-3,
     "max_tokens": 4, "target": 0.65, "imitation_epochs": 4.0},
    measure,
    conclude,
    elsewhere={CHECKED: {
        "settings": {**CHECKED_SIZES, "prompts": 32, "epochs": 1, "minibatches": 2, "critic_lr": 2e-3, "target": 0.6},
        "seeds": (0, 1, 2, 3, 4),
    }},
)  # fmt: skip
