"""LoRA without regret: in reinforcement learning adapters of any rank learn what all weights do, at some ten times the rate.

The output of adapters is divided by their rank (alpha is the same for all), so that one rate suits all ranks, as in the
source. Learning rates are swept in every arm. That of a seed is the one that was best on the other seeds, so none is
chosen by the figure that it is judged by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.experiment import Comparison, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import band, practise, sums

ALL = "all weights"
RANKS = (1, 8, 64)
ARMS = (ALL, *(f"rank {rank}" for rank in RANKS))


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = sums(folder, seed, settings)
    found: Numbers = {}
    for arm in ARMS:
        adapted = {} if arm == ALL else {"lora": int(arm.split()[1]), "lora_alpha": settings["alpha"]}
        for rate in rates(arm, settings):
            name = f"{arm}, {rate:g}"
            found[name] = practise(
                arena,
                folder,
                name.replace(" ", "-"),
                seed,
                {**settings, "lr": rate},
                say,
                algorithm="grpo",
                schedule="linear",
                **adapted,
            )
    return found


def rates(arm: str, settings: Settings) -> list[float]:
    """The learning rates that are tried in an arm."""
    middle = settings["lr"] if arm == ALL else settings["lr_adapters"]
    return [middle / settings["apart"], middle, middle * settings["apart"]]


def chosen(arm: str, seed: int, numbers: Mapping[int, Numbers], settings: Settings) -> float:
    """The rate that was best on the other seeds."""
    others = [n for own, n in numbers.items() if own != seed] or list(numbers.values())
    return max(rates(arm, settings), key=lambda rate: np.mean([_accuracy(n, arm, rate) for n in others]))


def _accuracy(numbers: Numbers, arm: str, rate: float) -> float:
    accuracy: float = numbers[f"{arm}, {rate:g}"]["held_out"][1]
    return accuracy


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    rate = {arm: {seed: chosen(arm, seed, numbers, settings) for seed in numbers} for arm in ARMS}
    held = {arm: {seed: _accuracy(n, arm, rate[arm][seed]) for seed, n in numbers.items()} for arm in ARMS}
    rows = [
        [
            arm,
            *(str(over_seeds([_accuracy(n, arm, r) for n in numbers.values()])) for r in rates(arm, settings)),
            ", ".join(f"{rate[arm][seed]:g}" for seed in numbers),
            str(over_seeds(list(held[arm].values()))),
        ]
        for arm in ARMS
    ]
    near = settings["near"]
    comparisons = [
        Comparison(
            f"held-out accuracy, {arm} minus {ALL}",
            over_seeds([held[arm][seed] - held[ALL][seed] for seed in numbers]),
            at_least=-near,
            at_most=near,
        )
        for arm in ARMS[1:]
    ]
    ratios = [float(np.mean([math.log10(rate[arm][seed] / rate[ALL][seed]) for arm in ARMS[1:]])) for seed in numbers]
    comparisons.append(
        Comparison("best rate, adapters over all weights, log10", over_seeds(ratios), at_least=0.5, at_most=1.5)
    )
    lines = [_course(numbers, arm, rate[arm]) for arm in ARMS]
    panels = [Panel("Accuracy of the rollouts, at the rate of the other seeds", "step", lines)]
    tried = f"{_told(rates(ALL, settings))}; of adapters: {_told(rates(ARMS[1], settings))}"
    return Finding(
        ("what is trained", "accuracy, least rate", "middle rate", "greatest rate", "rate of each seed",
         "held-out accuracy"),
        rows,
        comparisons,
        panels,
        [f"Rates of all weights: {tried}. The model is 64 wide, so rank 64 is no restriction.",
         "Published (Llama 3.1 8B on MATH and DeepMath): rank 1 reaches the reward of full fine-tuning, and the best rate "
         "of adapters is about ten times that of full fine-tuning."],
    )  # fmt: skip


def _told(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values)


def _course(numbers: Mapping[int, Numbers], arm: str, rate: Mapping[int, float]) -> Series:
    return band(arm, [n[f"{arm}, {rate[seed]:g}"]["curves"]["accuracy"] for seed, n in numbers.items()])


EXPERIMENT = Experiment(
    "lora-rl",
    "In reinforcement learning adapters learn as well as all weights, even of rank 1, at some ten times the learning rate.",
    "LoRA Without Regret, Thinking Machines Lab, 2025 (thinkingmachines.ai/blog/lora)",
    {"steps": 150, "prompts": 64, "group": 8, "minibatches": 2, "lr": 2.1e-3, "lr_adapters": 4e-3, "alpha": 32.0,
     "apart": 3.0, "max_tokens": 4, "near": 0.03, "imitation_epochs": 4.0},
    measure,
    conclude,
)  # fmt: skip
