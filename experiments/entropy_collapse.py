"""Entropy collapse and its remedies: an aggressive run, and one change to it at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from experiments.harness import courses, ends, held_out, late, mean_of, practise, sums

BASE = "aggressive"


def arms(settings: Settings) -> dict[str, dict[str, Any]]:
    """Name -> what it changes in the aggressive run."""
    return {
        BASE: {},
        "clip 0.28": {"clip_high": 0.28},
        "entropy bonus": {"entropy": settings["bonus"]},
        "KL": {"kl": settings["penalty"], "kl_estimator": "k2", "kl_where": "loss"},
        "top-entropy tokens": {"top_entropy": settings["top_entropy"]},
        "low lr": {"lr": settings["low_lr"]},
    }


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = sums(folder, seed, settings)
    return {
        arm: practise(
            arena, folder, arm.replace(" ", "-"), seed, settings, say,
            **{"algorithm": "grpo", "aggregate": "token-mean", "epochs": settings["epochs"], **options},
        )
        for arm, options in arms(settings).items()
    }  # fmt: skip


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    names = list(arms(settings))

    def left(arm: Numbers) -> float:
        """Entropy at the end, as a share of that at the start."""
        curve = arm["curves"]["entropy"]
        return late(curve) / mean_of(curve, 0.0, 0.02)

    rows = [
        [
            arm,
            str(over_seeds([left(n[arm]) for n in numbers.values()])),
            str(ends(numbers, arm, "accuracy")),
            str(ends(numbers, arm, "any_right")),
            str(held_out(numbers, arm)),
        ]
        for arm in names
    ]
    comparisons = [
        Comparison(f"share of the entropy that is left, {BASE}",
                   over_seeds([left(n[BASE]) for n in numbers.values()]), at_most=0.5),
        *(
            Comparison(f"share of the entropy that is left, {arm} minus {BASE}", differences(numbers, arm, BASE, left),
                       at_least=0.0)
            for arm in names[1:]
        ),
        *(
            Comparison(f"pass@{settings['group']} at the end, {arm} minus {BASE}",
                       differences(numbers, arm, BASE, lambda n: late(n["curves"]["any_right"])), at_least=0.0)
            for arm in names[1:]
        ),
    ]  # fmt: skip
    titles = {
        "entropy": "Entropy, nats per token",
        "accuracy": "Accuracy of the rollouts",
        "any_right": f"pass@{settings['group']} of the rollouts",
    }
    panels = courses(numbers, names, titles)
    return Finding(
        ("run", "share of entropy left", "accuracy at the end", f"pass@{settings['group']} at the end",
         "held-out accuracy"),
        rows,
        comparisons,
        panels,
        ["Published (arXiv 2505.22617, figure 1): without a remedy the entropy falls to almost nothing early in "
         "training, and then accuracy no longer rises."],
    )  # fmt: skip


EXPERIMENT = Experiment(
    "entropy-collapse",
    "With a high learning rate and many updates per step the entropy collapses; clip-higher, an entropy bonus, a KL, "
    "learning from high-entropy tokens only, or a lower learning rate hold it, and pass@k with it.",
    "The entropy mechanism, arXiv 2505.22617; DAPO, arXiv 2503.14476; beyond the 80/20 rule, arXiv 2506.01939",
    {"steps": 120, "prompts": 32, "group": 8, "epochs": 2, "minibatches": 4, "lr": 1e-3, "low_lr": 2e-4, "bonus": 0.01,
     "penalty": 0.1, "top_entropy": 0.5, "max_tokens": 4, "imitation_epochs": 4.0},
    measure,
    conclude,
)  # fmt: skip
