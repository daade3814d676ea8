"""GSPO's reason for ratios of whole sequences: how widely token and sequence ratios spread, by length of reply.

The policy is updated a few times on the same rollouts, as in any step of several minibatches, and then scores them
again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from experiments.bench import bench, log_probabilities
from experiments.experiment import Comparison, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import counting
from posttrain.algorithms.policy import PolicyObjective

KINDS = {
    "token": "token ratio",
    "mean": "sequence, length-normalised (GSPO)",
    "sum": "sequence, product",
}


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = counting(folder, seed, settings)
    options = {"algorithm": "grpo", "aggregate": "token-mean", "kl": 0.0, "minibatches": settings["minibatches"]}
    lengths, logs = [], []
    with bench(arena, seed, settings, epochs=settings["epochs"], **options) as source:
        objective = PolicyObjective(source.algorithm)
        for number in range(1, settings["steps"] + 1):
            step = source.produce(number)
            rollouts = [rollout for rollout in step.played]
            before = log_probabilities(source.learner, rollouts)
            for build in step.updates:
                source.learner.update(build(), objective)
            after = log_probabilities(source.learner, rollouts)
            for old, new in zip(before, after, strict=True):
                lengths.append(len(old))
                logs.append((new - old).numpy())
    accuracy = float(np.mean([r.reward for r in rollouts]))
    say(f"  seed {seed}: {len(logs)} replies, share of right digits in the last step {accuracy:.2f}")
    return {"spread": spreads(lengths, logs, settings["edges"]), "accuracy": accuracy}


def spreads(lengths: list[int], logs: list[np.ndarray], edges: list[int]) -> list[dict[str, float]]:
    """For each range of lengths [edge, next edge): number of replies, their mean length, and standard deviations.

    Those of the log ratio of a token, of its mean over a reply and of its sum over a reply. No range may be empty.
    """
    found = []
    for low, high in pairwise(edges):
        own = [x for n, x in zip(lengths, logs, strict=True) if low <= n < high]
        found.append(
            {
                "replies": len(own),
                "length": float(np.mean([len(x) for x in own])),
                "token": float(np.std(np.concatenate(own))),
                "mean": float(np.std([x.mean() for x in own])),
                "sum": float(np.std([x.sum() for x in own])),
            }
        )
    return found


def slope(spread: list[dict[str, float]], kind: str) -> float:
    """Exponent b of spread ~ length^b, by least squares on the logarithms."""
    x = [math.log(s["length"]) for s in spread]
    return float(np.polyfit(x, [math.log(s[kind]) for s in spread], 1)[0])


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    places = range(len(settings["edges"]) - 1)
    of = {
        kind: [over_seeds([n["spread"][place][kind] for n in numbers.values()]) for place in places]
        for kind in ("length", *KINDS)
    }
    rows = [[f"{of['length'][p].mean:.0f}", *(str(of[kind][p]) for kind in KINDS)] for p in places]
    slopes = {kind: over_seeds([slope(n["spread"], kind) for n in numbers.values()]) for kind in KINDS}
    rows.append(["exponent b of length^b", *(str(slopes[kind]) for kind in KINDS)])
    narrower = over_seeds([n["spread"][-1]["mean"] / n["spread"][-1]["token"] for n in numbers.values()])
    comparisons = [
        Comparison("exponent, length-normalised", slopes["mean"], at_most=0.0),
        Comparison("exponent, product", slopes["sum"], at_least=0.0),
        Comparison("longest replies: normalised spread / token spread", narrower, at_most=1.0),
    ]
    x = [e.mean for e in of["length"]]
    lines = [
        Series(title, x, [e.mean for e in of[k]], [e.low for e in of[k]], [e.high for e in of[k]])
        for k, title in KINDS.items()
    ]
    middle = len(x) // 2
    for power, kind in ((-0.5, "mean"), (0.5, "sum")):
        height = of[kind][middle].mean
        lines.append(
            Series(f"if tokens were independent: length^{power:g}", x, [height * (v / x[middle]) ** power for v in x],
                   dashed=True)
        )  # fmt: skip
    return Finding(
        ("reply length", *KINDS.values()),
        rows,
        comparisons,
        [Panel("Standard deviation of the log ratio, nats", "reply length, tokens", lines, log_x=True, log_y=True)],
        ["Published: token ratios bring noise that accumulates over long replies; the length-normalised ratio of a "
         "sequence has little, so its clip is 3e-4 instead of 0.2. The paper gives no spreads to compare with."],
    )  # fmt: skip


EXPERIMENT = Experiment(
    "gspo-variance",
    "The length-normalised ratio of a sequence varies less than a token's, the less the longer the reply; the plain "
    "product varies ever more.",
    "GSPO, arXiv 2507.18071, section 4",
    {"tasks": 1000, "shortest": 3, "longest": 64, "slips": 0.8, "imitation_epochs": 4.0, "steps": 8, "prompts": 32,
     "group": 8, "epochs": 1, "minibatches": 4, "lr": 3e-4, "max_tokens": 64, "edges": [4, 8, 16, 32, 48, 65]},
    measure,
    conclude,
)  # fmt: skip
