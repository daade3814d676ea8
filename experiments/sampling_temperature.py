"""The temperature at which training samples: what it leaves of accuracy and of variety at temperature 1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from experiments.experiment import (
    Comparison,
    Estimate,
    Experiment,
    Finding,
    Numbers,
    Say,
    Settings,
    differences,
    over_seeds,
)
from experiments.figure import Panel, Series
from experiments.harness import checkpoint_of, courses
from experiments.worked import CHECKED, CHECKED_SIZES, SIZES, arena_of, examined, opened, practise, with_lines

TEMPERATURES = (0.6, 0.8, 1.0, 1.2)
ARMS = tuple(f"{t:g}" for t in TEMPERATURES)
SAMPLES = 8
FIGURES = {
    "accuracy": "accuracy at temperature 1", "greedy": "greedy accuracy", f"pass@{SAMPLES}": f"pass@{SAMPLES}",
    "entropy": "entropy at temperature 1",
}  # fmt: skip
HIGH, LOW = "1", "0.6"  # the claim's


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena, found = opened(arena_of, folder, seed, settings), {}
    for arm, temperature in zip(ARMS, TEMPERATURES, strict=True):
        options = {"temperature": temperature, "minibatches": settings["minibatches"], "kl": 0.0}
        run, course = practise(
            arena, folder, arm, seed, settings, say, algorithm="grpo", aggregate="token-mean", **options
        )
        end = checkpoint_of(run)
        after = examined(end, seed, settings, env=arena.env, samples=SAMPLES)
        greedy = examined(end, seed, settings, env=arena.env, temperature=0.0, samples=1)["accuracy"]
        found[arm] = {**course, "after": {**after, "greedy": greedy}}
    return found


def figure_after(name: str, arm: Numbers) -> float:
    """A figure of an arm's policy after training."""
    return float(arm["after"][name])


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    def after(arm: str, figure: str) -> Estimate:
        return over_seeds([n[arm]["after"][figure] for n in numbers.values()])

    rows = [
        [
            arm,
            " ".join(f"{n[arm]['after']['accuracy']:.3f}" for n in numbers.values()),
            *(str(after(arm, figure)) for figure in FIGURES),
        ]
        for arm in ARMS
    ]
    comparisons = [
        Comparison(f"{title}, trained at {HIGH} minus at {LOW}",
                   differences(numbers, HIGH, LOW, partial(figure_after, figure)), at_least=0.0)
        for figure, title in FIGURES.items()
    ]  # fmt: skip
    panels = [
        *courses(numbers, ARMS, {"accuracy": "Accuracy of the rollouts, at their temperature",
                                 "entropy": "Entropy of the rollouts, at their temperature"}),
        Panel("Afterwards, at temperature 1", "temperature of training", [
            Series(title, TEMPERATURES, [after(arm, figure).mean for arm in ARMS])
            for figure, title in FIGURES.items()
        ]),
    ]  # fmt: skip
    before = over_seeds([n[HIGH]["held_out"][0] for n in numbers.values()])
    found = Finding(
        ("temperature", "accuracy of each seed", *FIGURES.values()),
        rows,
        comparisons,
        panels,
        [f"Held-out accuracy of the start, at temperature 1: {before}. Log-probabilities in training are those at its "
         f"temperature. Afterwards each policy answers unseen tasks {SAMPLES} times at temperature 1, and once greedily."],
    )  # fmt: skip
    return with_lines(found, numbers)


EXPERIMENT = Experiment(
    "sampling-temperature",
    "Training that samples at temperature 1 instead of 0.6 ends with a higher accuracy, sampled and greedy, a higher pass@8 "
    "and more entropy.",
    "Skywork Open Reasoner 1, arXiv 2505.22312, its ablation of the rollouts' temperature",
    {**SIZES, "minibatches": 4},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
    elsewhere={CHECKED: {"settings": {**CHECKED_SIZES, "minibatches": 4}}},
)
