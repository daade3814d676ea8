"""Dr. GRPO's length bias: when each reply counts the same, long wrong replies are punished less per token, and grow.

The sum is answered, the environment reports whether it was right, and then the policy may write any number of dots, which
change nothing. (Without that word a small model cannot know that its answer is wrong, and nothing could make wrong
replies longer than right ones.) Only the aggregation differs between the arms.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Mapping
from pathlib import Path

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
    FILLER,
    Arena,
    courses,
    ends,
    held_out,
    imitate,
    mean_of,
    practise,
)
from posttrain.core.types import Reply, Task, Turn
from posttrain.envs.builtin import arithmetic

ARMS = ("sequence-mean", "token-mean", "constant")
FIRST = 0.1  # share of the steps, the first ones, whose mean is called "at first"

END = ";"  # of the answer
TOLD = {True: "y", False: "n"}


def sums_and_dots(folder: Path, seed: int, settings: Settings) -> Arena:
    """Sums of four digits, such as 3+5+2+7=17;y....

    Demonstrations are wrong in a share `wrong` of the cases, and have 0 to `filler` dots, all equally often, whether
    they are right or wrong.
    """
    rng = random.Random(seed)
    tasks = arithmetic.tasks(4000, seed, digits=1, operands=4)
    shown = []
    for task in tasks[:2000]:
        right = rng.random() >= settings["wrong"]
        answer = int(task["answer"]) + (0 if right else rng.choice((-2, -1, 1, 2)))
        dots = FILLER * rng.randint(0, settings["filler"])
        shown.append({"id": task["id"], "prompt": task["prompt"], "response": f"{answer}{END}{TOLD[right]}{dots}"})
    started = imitate(shown, folder, seed, context=96, epochs=settings["imitation_epochs"])
    return Arena(tasks, told, started)


def told(task: Task) -> Generator[Turn, Reply, float]:
    """Ask, report whether the answer is right, let the policy go on as long as it likes."""
    answer = yield Turn(task["prompt"], stop=(END,))
    right = arithmetic.reward(task, answer.removesuffix(END))
    yield Turn(TOLD[right == 1.0])
    return right


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = sums_and_dots(folder, seed, settings)
    return {
        arm: practise(
            arena, folder, arm, seed, settings, say,
            algorithm="dr-grpo", aggregate=arm, max_grad_norm=0.0, max_episode_tokens=2 * settings["max_tokens"],
        )
        for arm in ARMS
    }  # fmt: skip


def doublings(arm: Numbers, which: str) -> float:
    """log2 of the length at the end over the length at first, of `right` or `wrong` replies."""
    curve = arm["curves"][f"length/{which}"]
    return math.log2(mean_of(curve, 0.8, 1.0) / mean_of(curve, 0.0, FIRST))


def apart(arm: Numbers) -> float:
    """By how much more wrong replies grew than right ones, in doublings."""
    return doublings(arm, "wrong") - doublings(arm, "right")


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    grown = {
        arm: {w: over_seeds([doublings(n[arm], w) for n in numbers.values()]) for w in ("wrong", "right")}
        for arm in ARMS
    }
    rows = [
        [
            arm,
            str(ends(numbers, arm, "length/wrong")),
            str(grown[arm]["wrong"]),
            str(ends(numbers, arm, "length/right")),
            str(grown[arm]["right"]),
            str(held_out(numbers, arm)),
        ]
        for arm in ARMS
    ]
    comparisons = [
        Comparison("sequence-mean: doublings of wrong replies", grown["sequence-mean"]["wrong"], at_least=0.0),
        Comparison("sequence-mean: doublings of wrong replies minus those of right ones",
                   over_seeds([apart(n["sequence-mean"]) for n in numbers.values()]), at_least=0.0),
    ]  # fmt: skip
    comparisons += [
        Comparison(
            f"that difference, sequence-mean minus {other}",
            differences(numbers, "sequence-mean", other, apart),
            at_least=0.0,
        )
        for other in ("token-mean", "constant")
    ]
    titles = {
        "length/wrong": "Length of wrong replies, tokens",
        "length/right": "Length of right replies, tokens",
        "accuracy": "Accuracy of the rollouts",
    }
    panels = courses(numbers, ARMS, titles)
    return Finding(
        ("aggregation", "wrong: tokens at the end", "wrong: doublings", "right: tokens at the end", "right: doublings",
         "held-out accuracy"),
        rows,
        comparisons,
        panels,
        ["Published (figure 5, Qwen2.5-1.5B): with GRPO's mean over each reply the wrong ones grow far longer than the "
         "right ones; with a constant instead, their length stays the same. Growth that right and wrong replies share is "
         "drift: dots neither help nor harm."],
    )  # fmt: skip


EXPERIMENT = Experiment(
    "length-bias",
    "A mean over each reply's tokens (GRPO) makes wrong replies longer, and more so than right ones; with a constant, or "
    "a mean over all tokens, right and wrong replies come less far apart.",
    "Dr. GRPO, arXiv 2503.20783, section 3.1",
    {"steps": 220, "prompts": 32, "group": 8, "minibatches": 2, "lr": 3e-4, "max_tokens": 48, "filler": 12,
     "wrong": 0.35, "imitation_epochs": 4.0},
    measure,
    conclude,
)  # fmt: skip
