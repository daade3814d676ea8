"""PPO with one of its parts removed at a time: the ratio, the clip, the min, the KL term, the critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.experiment import Comparison, Experiment, Finding, Numbers, Say, Settings, differences, over_seeds
from experiments.figure import Panel
from experiments.harness import courses, ends, held_out, late
from experiments.worked import CHECKED, CHECKED_SIZES, SIZES, arena_of, opened, practise, through, with_lines
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.surrogate import Surrogate
from posttrain.core.batch import Batch, Outputs

WHOLE = "whole"
UNPENALISED = 1e-9  # coefficient of a KL that is measured and has no effect
BELOW = 0.5  # share of its best held-out accuracy under which a run has collapsed


@dataclass(frozen=True)
class ClipAlone(Surrogate):
    """PPO's clip without the min. A token whose ratio left the range in the wrong direction has no gradient either, so that
    nothing brings it back.
    """

    low: float = 0.2
    high: float = 0.2
    formula = "clip(r, 1 - low, 1 + high) A"
    source = "PPO, arXiv 1707.06347, eq. 7, without its min"

    @property
    def clips(self) -> bool:
        return True

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        assert batch.advantage is not None
        return ratio.clamp(1 - self.low, 1 + self.high) * batch.advantage


@dataclass(frozen=True)
class Stale(Surrogate):
    """The plain policy gradient at every update of a step, as if its rollouts were still the policy's: lp A.

    It declares that it uses the ratio, since posttrain would otherwise weigh or refuse such updates.
    """

    formula = "lp A"
    source = "REINFORCE, Williams 1992, eq. 4, on samples of an earlier policy"

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        assert batch.advantage is not None
        return outputs.logp * batch.advantage


STALE = replace(TABLE["ppo"], name="ppo-stale", paper="PPO without its ratio", surrogate=Stale())
CLIP_ALONE = replace(TABLE["ppo"], name="ppo-clip-alone", paper="PPO without its min", surrogate=ClipAlone())


def arms(settings: Settings) -> dict[str, dict[str, Any]]:
    """Name -> options of `posttrain.rl`, which differ in the part that is removed."""
    critic = {"critic_lr": settings["critic_lr"]}
    return {
        WHOLE: critic,
        "no ratio": {**critic, "algorithm": f"{__name__}:STALE"},
        "no clip": {**critic, "surrogate": "ratio"},
        "no min": {**critic, "algorithm": f"{__name__}:CLIP_ALONE"},
        "no KL": {**critic, "kl": UNPENALISED, "kl_where": "loss", "kl_estimator": "k3"},
        "no critic": {"advantage": "to-go", "whiten": True},
    }


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = opened(arena_of, folder, seed, settings)
    updates = {name: settings[name] for name in ("epochs", "minibatches", "eval_every")}
    return {
        arm: practise(arena, folder, arm, seed, settings, say, **{"algorithm": "ppo", **updates, **options})[1]
        for arm, options in arms(settings).items()
    }


def collapsed(arm: Numbers) -> bool:
    """Whether held-out accuracy ends below half of its best, the start's included."""
    accuracies = [accuracy for _, accuracy in arm["evaluated"]]
    return bool(accuracies[-1] < BELOW * max(accuracies))


def mean_over_run(arm: Numbers) -> float:
    """Mean held-out accuracy over the evaluations after the start."""
    after = [accuracy for _, accuracy in arm["evaluated"][1:]]
    return sum(after) / len(after)


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    names = list(arms(settings))
    rows = [
        [
            arm,
            " ".join(f"{n[arm]['held_out'][1]:.3f}" for n in numbers.values()),
            str(held_out(numbers, arm)),
            str(over_seeds([mean_over_run(n[arm]) for n in numbers.values()])),
            str(ends(numbers, arm, "kl")),
            str(ends(numbers, arm, "entropy")),
            str(sum(collapsed(n[arm]) for n in numbers.values())),
        ]
        for arm in names
    ]
    comparisons = [
        Comparison(f"held-out accuracy, {WHOLE} minus {arm}",
                   differences(numbers, WHOLE, arm, lambda n: n["held_out"][1]), at_least=0.0)
        for arm in names[1:]
    ]  # fmt: skip
    comparisons.append(
        Comparison("KL from the start at the end, no KL minus whole",
                   differences(numbers, "no KL", WHOLE, lambda n: late(n["curves"]["kl"])), at_least=0.0)
    )  # fmt: skip
    panels = [
        Panel("Held-out accuracy", "step", [through(numbers, arm) for arm in names]),
        *courses(numbers, names, {"kl": "KL from the start, nats per token", "entropy": "Entropy, nats per token"}),
    ]
    before = over_seeds([n[WHOLE]["held_out"][0] for n in numbers.values()])
    found = Finding(
        ("arm", "held-out accuracy of each seed", "held-out accuracy", "mean over the run", "KL at the end",
         "entropy at the end", "collapsed seeds"),
        rows,
        comparisons,
        panels,
        [f"Held-out accuracy of the start: {before}. A seed has collapsed if its held-out accuracy ends below half of its "
         "best. The KL without a penalty is measured with a coefficient of 1e-9. Without a critic, advantages are the "
         "rewards to go, the KL's among them, whitened over the batch as the critic's are.",
         "Published (PPO, table 1, seven tasks of control): a normalised score of 0.82 with the clip and of -0.39 without "
         "clip or penalty. InstructGPT keeps the KL against over-optimisation of a reward model; here the reward "
         "is exact."],
    )  # fmt: skip
    return with_lines(found, numbers)


UPDATES = {"epochs": 2, "minibatches": 4, "critic_lr": 2e-3, "eval_every": 10}


EXPERIMENT = Experiment(
    "ppo-ablation",
    "With several updates on the same rollouts every part of PPO is needed: without the ratio, the clip, the min, the KL "
    "term or the critic held-out accuracy ends lower; without the KL term the policy also moves further.",
    "PPO, arXiv 1707.06347, sections 3, 5 and 6.1; InstructGPT, arXiv 2203.02155, section 3.5",
    {**SIZES, **UPDATES},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
    elsewhere={CHECKED: {"settings": {**CHECKED_SIZES, **UPDATES, "steps": 40}}},
)  # fmt: skip
