"""GRPO's group size at equal rollouts a step, beside PPO with a critic: accuracy, seconds and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.experiment import Comparison, Experiment, Finding, Numbers, Say, Settings, differences, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import courses, ends, held_out
from experiments.peak_memory import peak_memory, wide_model
from experiments.worked import CHECKED, CHECKED_SIZES, SIZES, arena_of, opened, practise, with_lines
from posttrain.core.types import UserError

PPO = "ppo"
GROUPS = (2, 4, 8, 16, 32, 64)
ARMS = tuple(str(size) for size in GROUPS)
SMALL, USUAL = "2", "16"  # the claim's
BESIDE = "8"  # the arm beside PPO, which has its prompts and groups
DRAWN = (SMALL, BESIDE, ARMS[-1], PPO)  # the arms whose course is drawn


def arms(settings: Settings) -> dict[str, dict[str, Any]]:
    """Name -> options of `posttrain.rl`. All sample as many rollouts a step; PPO and its neighbour differ in where
    advantages come from, and in nothing else.
    """
    common = {"aggregate": "token-mean", "kl": 0.0, "minibatches": settings["minibatches"]}
    rollouts, least = settings["prompts"] * settings["group"], max(GROUPS) * settings["minibatches"]
    if rollouts % least:  # an update needs a group, and all arms have as many updates
        raise UserError(f"group-size: prompts times group is {rollouts}: make it a multiple of {least}")
    sizes = {arm: {"prompts": rollouts // size, "group": size} for arm, size in zip(ARMS, GROUPS, strict=True)}
    grpo = {arm: {**common, "algorithm": "grpo", **size} for arm, size in sizes.items()}
    return {**grpo, PPO: {**common, "algorithm": "ppo", "critic_lr": settings["critic_lr"], **sizes[BESIDE]}}


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena, found = opened(arena_of, folder, seed, settings), {}
    for arm, options in arms(settings).items():
        found[arm] = practise(arena, folder, f"group {arm}", seed, settings, say, **options)[1]
    wide = wide_model(folder / "wide", seed, settings)
    for arm in (BESIDE, PPO):
        found[arm]["memory"] = peak_memory(folder / "memory", wide, arena.start, seed, settings, arms(settings)[arm])
        say(f"  seed {seed}, {arm}: {found[arm]['memory']:.0f} MiB")
    return found


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    names = (*ARMS, PPO)

    def cell(arm: str, figure: str) -> str:
        each = [n[arm][figure] for n in numbers.values() if figure in n[arm]]
        return str(over_seeds(each)) if each else "-"

    rows = [
        [
            arm if arm == PPO else f"grpo, {arm}",
            " ".join(f"{n[arm]['held_out'][1]:.3f}" for n in numbers.values()),
            str(held_out(numbers, arm)),
            str(ends(numbers, arm, "groups/no_signal")),
            str(ends(numbers, arm, "entropy")),
            cell(arm, "seconds"),
            cell(arm, "memory"),
        ]
        for arm in names
    ]

    def accuracy(arm: Numbers) -> float:
        return float(arm["held_out"][1])

    near, half = settings["near"], settings["half"]
    comparisons = [
        Comparison(f"held-out accuracy, groups of {SMALL} minus groups of {USUAL}",
                   differences(numbers, SMALL, USUAL, accuracy), -near, near),
        Comparison(f"held-out accuracy, groups of {BESIDE} minus {PPO}",
                   differences(numbers, BESIDE, PPO, accuracy), at_least=-near),
        *(
            Comparison(f"{what}, groups of {BESIDE} over {PPO}",
                       over_seeds([n[BESIDE][figure] / n[PPO][figure] for n in numbers.values()]), 0.5 - half, 0.5 + half)
            for what, figure in (("processor seconds of a step", "seconds"), ("peak memory", "memory"))
        ),
    ]  # fmt: skip
    after = [over_seeds([accuracy(n[arm]) for n in numbers.values()]) for arm in ARMS]
    critic = over_seeds([accuracy(n[PPO]) for n in numbers.values()])
    panels = [
        Panel("Held-out accuracy afterwards", "group size", [
            Series("grpo", GROUPS, [e.mean for e in after], [e.low for e in after], [e.high for e in after]),
            Series(PPO, GROUPS, [critic.mean] * len(GROUPS), dashed=True),
        ], log_x=True),
        *courses(numbers, DRAWN, {"accuracy": "Accuracy of the rollouts",
                                                            "entropy": "Entropy, nats per token"}),
    ]  # fmt: skip
    before = over_seeds([n[PPO]["held_out"][0] for n in numbers.values()])
    found = Finding(
        ("arm", "held-out accuracy of each seed", "held-out accuracy", "rollouts without signal at the end",
         "entropy at the end", "processor seconds a step", "peak memory, MiB"),
        rows,
        comparisons,
        panels,
        [f"Held-out accuracy of the start: {before}. Every arm samples {settings['prompts'] * settings['group']} rollouts a "
         f"step and makes {settings['minibatches']} updates of them; {PPO} has groups of {BESIDE}, which it does not "
         "compare. No arm has a KL or a reference.",
         "Seconds are those of a step, sampling included, the median of a run. Peak memory is that of two steps of a "
         f"model of width {settings['wide']}, in a process of its own, above that of a process that trained the "
         "small one, whose own would be lost beside what every process holds.",
         "Published: groups of 2 keep 98% of the performance of groups of 16 with an eighth of the rollouts (It Takes Two); "
         "GRPO leaves out a value model that is typically as large as the policy (DeepSeekMath, section 4.1)."],
    )  # fmt: skip
    return with_lines(found, numbers, DRAWN)


UPDATES = {"minibatches": 2, "critic_lr": 2e-3, "near": 0.05, "half": 0.1, "wide": 512, "deep": 4}


EXPERIMENT = Experiment(
    "group-size",
    "At equal rollouts groups of 2 learn as well as groups of 16, and GRPO learns as well as PPO for about half of the "
    "seconds and of the memory.",
    "It Takes Two, arXiv 2510.00977; DeepSeekMath, arXiv 2402.03300, section 4.1",
    {**SIZES, **UPDATES},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
    elsewhere={CHECKED: {"settings": {**CHECKED_SIZES, **UPDATES}}},
)
