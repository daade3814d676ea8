"""DAPO's answers to replies that are cut off: leave them out of the loss, or punish those that come near the limit.

Beside them, where the settings name these arms, means over each reply, in which a token of a long one counts for less:
GRPO's, and GSPO, whose ratio is that of a whole reply.

Any number of dots may follow the answer, and the budget cuts off many of the demonstrated lengths: a reply whose answer
was right is then worth nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
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
from experiments.worked import CHECKED, CHECKED_SIZES, opened, with_lines
from posttrain.core.types import Reply, Task
from posttrain.envs.builtin import arithmetic

NONE, REPLY_MEAN, GSPO = "none", "sequence mean", "gspo"


def sums_and_dots(folder: Path, seed: int, settings: Settings) -> Arena:
    """Sums of four digits with 0 to `filler` dots behind the answer, all equally often: 3+5+2+7=17......

    Length is independent of whether the answer is right.
    """
    rng = random.Random(seed)
    tasks = arithmetic.tasks(4000, seed, digits=1, operands=4)
    shown = [{**t, "response": t["response"] + FILLER * rng.randint(0, settings["filler"])} for t in tasks[:2000]]
    started = imitate(shown, folder, seed, context=96, epochs=settings["imitation_epochs"])
    return Arena(tasks, answered_and_ended, started)


def answered_and_ended(task: Task, reply: Reply) -> float:
    """1.0 if the reply is the integer, whatever dots follow, and was not cut off."""
    return 0.0 if reply.stop.truncated else arithmetic.reward(task, reply.rstrip(FILLER))


def arms(settings: Settings) -> dict[str, dict[str, Any]]:
    """Name -> options of `posttrain.rl`, of the arms that the settings name."""
    plain = {"algorithm": "grpo", "aggregate": "token-mean", "clip_high": 0.28, "overlong_filter": False}
    every = {
        NONE: {**plain, "overlong_cache": 0},
        "filter": {**plain, "overlong_cache": 0, "overlong_filter": True},
        "soft": {**plain, "overlong_cache": settings["cache"]},
        REPLY_MEAN: {**plain, "overlong_cache": 0, "aggregate": "sequence-mean"},
        GSPO: {"algorithm": "gspo", "overlong_filter": False, "overlong_cache": 0},
    }
    return {arm: every[arm] for arm in settings["arms"]}


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = opened(sums_and_dots, folder, seed, settings)
    return {
        arm: practise(arena, folder, arm, seed, settings, say, **options)
        for arm, options in arms(settings).items()
    }  # fmt: skip


def over_run(metric: str) -> Callable[[Numbers], float]:
    """Return a function that computes the mean of a metric over all steps of an arm."""
    return lambda arm: mean_of(arm["curves"][metric], 0.0, 1.0)


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    names = list(arms(settings))
    rows = [
        [
            arm,
            str(over_seeds([over_run("truncated")(n[arm]) for n in numbers.values()])),
            str(ends(numbers, arm, "truncated")),
            str(ends(numbers, arm, "length")),
            str(ends(numbers, arm, "accuracy")),
            str(held_out(numbers, arm)),
            str(ends(numbers, arm, "entropy")),
        ]
        for arm in names
    ]
    comparisons = []
    for arm in ("filter", "soft"):
        comparisons.append(
            Comparison(
                f"held-out accuracy, {arm} minus none",
                differences(numbers, arm, NONE, lambda n: n["held_out"][1]),
                at_least=0.0,
            )
        )
    comparisons += [
        Comparison(
            f"{what} over the run, soft minus none",
            differences(numbers, "soft", NONE, over_run(metric)),
            at_most=0.0,
        )
        for what, metric in (("cut-off share", "truncated"), ("tokens", "length"))
    ]
    comparisons += [
        Comparison(f"cut-off share over the run, {arm} minus none",
                   differences(numbers, arm, NONE, over_run("truncated")), at_least=0.0)
        for arm in (REPLY_MEAN, GSPO)
        if arm in names
    ]  # fmt: skip
    titles = {
        "truncated": "Share of replies cut off",
        "length": "Reply length, tokens",
        "accuracy": "Accuracy of the rollouts",
    }
    panels = courses(numbers, names, titles)
    found = Finding(
        ("arm", "cut off over the run", "at the end", "tokens at the end", "accuracy at the end", "held-out accuracy",
         "entropy at the end"),
        rows,
        comparisons,
        panels,
        ["Published (table 1, Qwen2.5-32B on AIME 2024): the filter raises accuracy from 30 to 36 points, the soft "
         "punishment from 38 to 41, and training is steadier (figure 5)."],
    )  # fmt: skip
    return with_lines(found, numbers)


EXPERIMENT = Experiment(
    "overlong",
    "Leaving cut-off replies out of the loss, or a soft punishment near the limit, ends in a higher accuracy; the "
    "soft punishment also shortens replies.",
    "DAPO, arXiv 2503.14476, section 3.4",
    {"steps": 150, "prompts": 32, "group": 8, "minibatches": 2, "lr": 3e-4, "max_tokens": 16, "cache": 4, "filler": 20,
     "imitation_epochs": 4.0, "arms": [NONE, "filter", "soft"]},
    measure,
    conclude,
    elsewhere={CHECKED: {
        "claim": "Leaving cut-off replies out of the loss, or a soft punishment near the limit, ends in a higher "
        "accuracy; the soft punishment also shortens replies. With a mean over each reply, GRPO's or GSPO's, instead of the "
        "token mean, tokens of long replies count for less, and more replies are cut off.",
        "paper": "DAPO, arXiv 2503.14476, sections 3.3 and 3.4; GSPO, arXiv 2507.18071",
        "settings": {**CHECKED_SIZES, "prompts": 32, "minibatches": 2, "max_tokens": 27, "cache": 6,
                     "arms": [NONE, "filter", "soft", REPLY_MEAN, GSPO]},
        "seeds": (0, 1, 2, 3, 4),
    }},
)  # fmt: skip
