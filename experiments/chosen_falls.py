"""Preference losses may lower the chosen response too: when, and what each of them does about it.

A small model continues the alphabet, forwards or backwards, after demonstrations with slips. Pairs prefer the right reply
to one with a single wrong letter, or to one with nothing but wrong letters. Every row of the preference table learns from
the same pairs at the same rate. Changes are those of log-probabilities of whole responses to prompts that are held out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase as LETTERS

import torch
from torch import Tensor

from experiments.bench import BETAS, comparisons, examples, trained
from experiments.experiment import Comparison, Estimate, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import imitate
from posttrain.algorithms.links import Pairs, PreferenceLink
from posttrain.algorithms.preference import PreferenceAlgorithm, PreferenceObjective
from posttrain.algorithms.preference_table import PREFERENCES
from posttrain.core.protocols import Model
from posttrain.core.types import Task
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.training.sources.packing import pack
from posttrain.training.sources.preferences import PreferenceExamples

FORWARDS = {"1": 1, "2": -1}
LONG = 6  # letters of a reply
LITTLE, MUCH = "one letter wrong", "all letters wrong"
POSITIVE = "dpo-positive"
KEPT = (POSITIVE, "rpo", "orpo", "cpo", "nca", "apo-zero")
"""Rows that say that they keep chosen responses likely, or whose loss has their likelihood."""


@dataclass(frozen=True)
class Positive(PreferenceLink):
    """DPO with a penalty where the better response falls below the reference (DPO-Positive, arXiv 2402.13228, eq. 3)."""

    beta: float = 0.1
    penalty: float = 50.0
    source = "DPO-Positive, arXiv 2402.13228, eq. 3"

    @property
    def formula(self) -> str:
        return f"-log sigma({self.beta:g} (s_w - s_l - {self.penalty:g} max(0, -s_w)))"

    def compare(self, pairs: Pairs) -> Tensor:
        fallen = self.penalty * torch.relu(-pairs.better)
        return -torch.nn.functional.logsigmoid(self.beta * (pairs.better - pairs.worse - fallen))


def table() -> dict[str, PreferenceAlgorithm]:
    """Every preference algorithm, and DPO-Positive."""
    return {**PREFERENCES, POSITIVE: replace(PREFERENCES["dpo"], name=POSITIVE, link=Positive())}


# -- the task ----------------------------------------------------------------------------------------------------------

PROMPTS = tuple(f"{way}{letter}:" for letter in LETTERS for way in FORWARDS)
HELD_OUT = PROMPTS[::5]


def right(prompt: str) -> str:
    """The letters after that of the prompt, or before it."""
    first, step = LETTERS.index(prompt[1]), FORWARDS[prompt[0]]
    return "".join(LETTERS[(first + step * k) % len(LETTERS)] for k in range(1, LONG + 1))


def wrong(draw: random.Random, reply: str, places: Sequence[int]) -> str:
    """The reply with another letter at each of these places."""
    said = list(reply)
    for place in places:
        said[place] = draw.choice([letter for letter in LETTERS if letter != reply[place]])
    return "".join(said)


def demonstrations(count: int, slips: float, seed: int) -> list[Task]:
    """Replies of which a share `slips` of the letters is wrong."""
    draw, rows = random.Random(f"demonstrations {seed}"), []
    for number in range(count):
        prompt = draw.choice(PROMPTS)
        slipped = [place for place in range(LONG) if draw.random() < slips]
        rows.append({"id": str(number), "prompt": prompt, "response": wrong(draw, right(prompt), slipped)})
    return rows


def pairs(kind: str, prompts: Sequence[str], count: int, seed: int) -> list[Task]:
    """Pairs of the right reply and a wrong one."""
    draw, rows = random.Random(f"pairs {kind} {seed}"), []
    for number in range(count):
        reply = right(prompt := prompts[number % len(prompts)])
        places = [draw.randrange(LONG)] if kind == LITTLE else range(LONG)
        rows.append(
            {"id": str(number), "prompt": prompt, "chosen": reply, "rejected": wrong(draw, reply, list(places))}
        )
    return rows


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    start = imitate(
        demonstrations(settings["demonstrations"], settings["slips"], seed), folder, seed, context=16,
        epochs=settings["imitation_epochs"],
    )  # fmt: skip
    learned = [prompt for prompt in PROMPTS if prompt not in HELD_OUT]
    found: Numbers = {}
    for kind in (LITTLE, MUCH):
        rows = pairs(kind, learned, settings["pairs"], seed)
        unseen = examples(pairs(kind, HELD_OUT, settings["unseen"], seed + 1000), start, labels=False)
        for name, algorithm in table().items():
            items = examples(rows, start, algorithm.reads_labels)
            own = found[f"{name}; {kind}"] = learn(items, unseen, start, algorithm, seed, settings)
            moved = f"chosen {change(own):+.2f}, rejected {change(own, 'rejected'):+.2f} nats"
            say(f"  seed {seed}, {kind}, {name}: {moved}, accuracy {own['accuracy'][-1]:.2f}")
    return found


def learn(
    items: PreferenceExamples,
    unseen: PreferenceExamples,
    start: str,
    algorithm: PreferenceAlgorithm,
    seed: int,
    settings: Settings,
) -> Numbers:
    """The course of one algorithm on the pairs."""
    steps = max(1, settings["pairs"] // settings["rows"] * settings["epochs"])
    how = Optimization(lr=settings["lr"], schedule="linear", updates=steps, betas=BETAS)
    source, learner = comparisons(items, start, algorithm, seed, settings["rows"], how)
    figures = watched(unseen, learner)
    return trained(source, learner, PreferenceObjective(algorithm), steps, figures, settings["points"])


def watched(unseen: PreferenceExamples, learner: LocalLearner) -> Callable[[Model], dict[str, float]]:
    """Log-probabilities of the responses of held-out pairs, and the share of pairs whose margin has grown."""
    found = [item for place in range(len(unseen)) if (item := unseen[place]) is not None]
    packed = pack([item.responses for item in found], range(len(found)))
    sides = torch.tensor([comparison.better for item in found for comparison in item.comparisons])
    before: list[Tensor] = []

    def figures(model: Model) -> dict[str, float]:
        [outputs] = learner.evaluate([packed])
        total = torch.zeros(2 * len(found), dtype=torch.float64)
        total.index_add_(0, packed.transcript, outputs.logp.double())
        both = total.view(-1, 2)
        chosen = both.gather(1, sides[:, None]).squeeze(1)
        margin = 2 * chosen - both.sum(1)
        before.append(margin)
        grown = (margin > before[0]).double() + 0.5 * (margin == before[0]).double()
        return {
            "chosen": chosen.mean().item(),
            "rejected": (both.sum(1) - chosen).mean().item(),
            "accuracy": grown.mean().item(),
        }

    return figures


# -- conclusions -------------------------------------------------------------------------------------------------------


def change(own: Numbers, which: str = "chosen") -> float:
    return float(own[which][-1] - own[which][0])


def sign(estimate: Estimate) -> str:
    """Return the direction in which the chosen response moved, if the interval excludes 0."""
    return "up" if estimate.low > 0 else "down" if estimate.high < 0 else "unclear"


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    def over(name: str, kind: str, figure: Callable[[Numbers], float]) -> Estimate:
        return over_seeds([figure(n[f"{name}; {kind}"]) for n in numbers.values()])

    def minus(one: tuple[str, str], other: tuple[str, str]) -> Estimate:
        return over_seeds([change(n["; ".join(one)]) - change(n["; ".join(other)]) for n in numbers.values()])

    rows = []
    for kind in (LITTLE, MUCH):
        for name in table():
            chosen = over(name, kind, change)
            cells = [over(name, kind, figure) for figure in (
                lambda n: change(n, "rejected"), lambda n: change(n) - change(n, "rejected"),
                lambda n: n["accuracy"][-1])]  # fmt: skip
            rows.append([kind, name, sign(chosen), str(chosen), *map(str, cells)])
    claims = [
        Comparison(f"dpo, {LITTLE}: change of the chosen response", over("dpo", LITTLE, change), at_most=0.0),
        Comparison(f"dpo: that change, {LITTLE} minus {MUCH}", minus(("dpo", LITTLE), ("dpo", MUCH)), at_most=0.0),
        Comparison(f"apo-down, {LITTLE}: change of the chosen response", over("apo-down", LITTLE, change), at_most=0.0),
    ]
    for name in KEPT:
        what = f"{name}, {LITTLE}: change of the chosen response"
        claims.append(Comparison(what, over(name, LITTLE, change), at_least=0.0))
        claims.append(Comparison(f"{what}, minus dpo's", minus((name, LITTLE), ("dpo", LITTLE)), at_least=0.0))
    return Finding(
        ("rejected has", "algorithm", "chosen goes", "change of log p, chosen", "rejected", "margin", "accuracy"),
        rows,
        claims,
        panels(numbers),
        [f"Log-probabilities are those of whole responses of {LONG + 1} tokens to {len(HELD_OUT)} held-out prompts, in "
         "nats. Accuracy: share of held-out pairs whose margin is above the start's. All algorithms have the same "
         "learning rate, pairs and order, and each its own beta; a rate that suits one does not suit all."],
    )  # fmt: skip


def panels(numbers: Mapping[int, Numbers]) -> list[Panel]:
    """Chosen and rejected over the training for some rows, and the change at the end for all."""
    shown = ("dpo", POSITIVE, "rpo", "ipo", "kto", "simpo", "orpo", "cpo")
    found = []
    for kind in (LITTLE, MUCH):
        for which in ("chosen", "rejected"):
            lines = []
            for name in shown:
                curve = torch.tensor([n[f"{name}; {kind}"][which] for n in numbers.values()], dtype=torch.float64)
                moved = (curve - curve[:, :1]).mean(0).tolist()
                lines.append(Series(name, [k / (len(moved) - 1) for k in range(len(moved))], moved))
            found.append(Panel(f"Change of log p of the {which}: {kind}", "share of the training", lines))
    return found


EXPERIMENT = Experiment(
    "chosen-falls",
    "DPO lowers the chosen response too where the rejected one differs little from it; losses with a likelihood term or "
    "with a target of its own for the chosen response raise it.",
    "DPO-Positive, arXiv 2402.13228; Razin et al., arXiv 2410.08847; RPO, arXiv 2404.19733; NCA, arXiv 2402.05369",
    {"demonstrations": 1536, "slips": 0.2, "imitation_epochs": 4.0, "pairs": 320, "rows": 16, "epochs": 1, "lr": 3e-4,
     "unseen": 44, "points": 6},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
