"""DAPO's dynamic sampling: groups whose rewards are all equal are replaced by freshly played ones.

Fewer training steps are not fewer rollouts: replacing groups costs what it wastes. Both are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
from experiments.figure import Panel, Series
from experiments.harness import band, curves_of, held_out, practise, steps_to, sums
from experiments.worked import CHECKED, CHECKED_SIZES, opened, with_lines

ARMS = ("off", "on")


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = opened(sums, folder, seed, settings)
    return {
        arm: practise(
            arena, folder, arm, seed, settings, say,
            algorithm="grpo", aggregate="token-mean", clip_high=0.28,
            dynamic_sampling=settings["rounds"] if arm == "on" else 0,
        )
        for arm in ARMS
    }  # fmt: skip


def reached(arm: Numbers, target: float) -> int:
    """Steps to the target accuracy; those of the whole run if it is not reached."""
    curve = arm["curves"]["accuracy"]
    return steps_to(curve, target) or len(curve)


def spent(arm: Numbers, target: float) -> float:
    """Rollouts played until then."""
    return float(np.sum(arm["curves"]["rollouts"][: reached(arm, target)]))


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    target = settings["target"]
    per_step = settings["prompts"]

    def useful(arm: Numbers) -> float:
        return float(np.mean([min(1.0, n / per_step) for n in arm["curves"]["informative"]]))

    rows = []
    for arm in ARMS:
        own = [n[arm] for n in numbers.values()]
        missed = sum(steps_to(n["curves"]["accuracy"], target) is None for n in own)
        rows.append(
            [
                arm,
                str(over_seeds([useful(n) for n in own])),
                str(over_seeds([reached(n, target) for n in own])) + (f", not reached by {missed}" if missed else ""),
                str(over_seeds([spent(n, target) / 1000 for n in own])),
                str(over_seeds([float(np.sum(n["curves"]["rollouts"])) / 1000 for n in own])),
                str(held_out(numbers, arm)),
            ]
        )
    ratios = {
        name: over_seeds([figure(n["on"], target) / figure(n["off"], target) for n in numbers.values()])
        for name, figure in (("steps", reached), ("rollouts", spent))
    }
    comparisons = [
        Comparison("groups with signal per planned group, on minus off",
                   differences(numbers, "on", "off", useful), at_least=0.0),
        Comparison(f"steps to accuracy {target:g}, on / off", ratios["steps"], at_most=1.0),
        Comparison("held-out accuracy after the same steps, on minus off",
                   differences(numbers, "on", "off", lambda n: n["held_out"][1]), at_least=0.0),
        Comparison(f"rollouts to accuracy {target:g}, on / off", ratios["rollouts"], at_most=1.0),
    ]  # fmt: skip
    by_step = Panel("Accuracy of the rollouts", "step", [band(a, curves_of(numbers, a, "accuracy")) for a in ARMS])
    found = Finding(
        ("dynamic sampling", "groups with signal", f"steps to {target:g}", f"thousand rollouts to {target:g}",
         "thousand rollouts in all", "held-out accuracy"),
        rows,
        comparisons,
        [
            by_step,
            Panel("Accuracy by rollouts", "rollouts played, thousands", [_by_rollouts(numbers, a) for a in ARMS]),
            Panel("Groups with signal per step", "step", [band(a, curves_of(numbers, a, "informative")) for a in ARMS]),
        ],
        ["Published (Qwen2.5-32B): the same accuracy in fewer steps (figure 6), and 42 to 50 points on AIME 2024 "
         "(table 1)."],
    )  # fmt: skip
    return with_lines(found, numbers)


def _by_rollouts(numbers: Mapping[int, Numbers], arm: str) -> Series:
    line = band(arm, curves_of(numbers, arm, "accuracy"))
    played = np.cumsum(np.mean(np.array(curves_of(numbers, arm, "rollouts"), dtype=float), axis=0)) / 1000
    return Series(arm, played.tolist(), line.y, line.low, line.high)


EXPERIMENT = Experiment(
    "dynamic-sampling",
    "Replacing groups without signal fills every step with groups that have signal; an accuracy is reached in fewer steps.",
    "DAPO, arXiv 2503.14476, section 3.2",
    {"steps": 300, "prompts": 32, "group": 4, "minibatches": 2, "lr": 3e-4, "max_tokens": 4, "rounds": 4,
     "target": 0.65, "imitation_epochs": 4.0},
    measure,
    conclude,
    elsewhere={CHECKED: {
        "settings": {**CHECKED_SIZES, "steps": 60, "prompts": 32, "group": 4, "minibatches": 2, "rounds": 4, "target": 0.6},
        "seeds": (0, 1, 2, 3, 4),
    }},
)  # fmt: skip
