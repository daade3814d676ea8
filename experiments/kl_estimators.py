"""Schulman's table of KL estimators, and what it does not show: whose *gradient* each of them has as a loss.

Two settings. Normal distributions, as published: x ~ N(0, 1), the other one N(mean, 1), so that KL = mean^2 / 2. And a
distribution over a vocabulary, with logits as parameters, where the gradients of both directions of the KL are known in
closed form. (Normal distributions of one variance would hide the difference: there both directions are equal.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from experiments.experiment import (
    Comparison,
    Estimate,
    Experiment,
    Finding,
    Numbers,
    Say,
    Settings,
    over_seeds,
)
from experiments.figure import Panel, Series
from posttrain.algorithms.penalty import KL

PUBLISHED = {
    0.1: {"k1": (0.0, 20.0), "k2": (0.002, 1.42), "k3": (0.0, 1.42)},
    1.0: {"k1": (0.0, 2.0), "k2": (0.25, 1.73), "k3": (0.0, 1.7)},
}
"""Mean of the other distribution -> estimator -> (bias / true KL, standard deviation / true KL), from the blog."""

ESTIMATORS: tuple[Literal["k1", "k2", "k3"], ...] = ("k1", "k2", "k3")
CHUNK = 1_000_000  # samples at a time


def tolerance(published_std: float) -> tuple[float, float]:
    """How far bias and deviation may be from the published ones, which are rounded; both sides are sampled."""
    return 0.0015 * (1 + published_std), 0.01 * published_std + 0.005


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    return {
        "moments": {str(mean): moments(mean, settings["samples"], generator) for mean in PUBLISHED},
        "gradients": gradients(
            settings["vocabulary"], settings["distributions"], settings["gradient_samples"], generator
        ),
    }


def moments(mean: float, samples: int, generator: torch.Generator) -> dict[str, tuple[float, float]]:
    """Estimator -> (bias, standard deviation) of one sample, over the true KL(N(0, 1) || N(mean, 1))."""
    true = mean * mean / 2
    total = dict.fromkeys(ESTIMATORS, 0.0)
    square = dict.fromkeys(ESTIMATORS, 0.0)
    done = 0
    while done < samples:
        x = torch.randn(min(CHUNK, samples - done), generator=generator, dtype=torch.float64)
        own, other = -x.square() / 2, -(x - mean).square() / 2
        for name in ESTIMATORS:
            k = KL(name)(own, other)
            total[name] += k.sum().item()
            square[name] += k.square().sum().item()
        done += len(x)
    out: dict[str, tuple[float, float]] = {}
    for name in ESTIMATORS:
        average = total[name] / done
        out[name] = ((average - true) / true, (square[name] / done - average**2) ** 0.5 / true)
    return out


def gradients(
    vocabulary: int, distributions: int, samples: int, generator: torch.Generator
) -> dict[str, dict[str, float]]:
    """Estimator -> its mean gradient with respect to the policy's logits, on policy, beside the true ones.

    `reverse`: |mean gradient - gradient of KL(policy || reference)|, over the norm of the latter; `forward`: the same
    for KL(reference || policy); `size`: norm of the mean gradient, over the norm of the reverse gradient. Means over
    random pairs of distributions.
    """
    total: dict[str, dict[str, float]] = {
        name: dict.fromkeys(("reverse", "forward", "size"), 0.0) for name in ESTIMATORS
    }
    for _ in range(distributions):
        logits = torch.randn(vocabulary, generator=generator, dtype=torch.float64).requires_grad_()
        ref = (logits + torch.randn(vocabulary, generator=generator, dtype=torch.float64)).detach().log_softmax(0)
        logp = logits.log_softmax(0)
        drawn = torch.multinomial(logp.detach().exp(), samples, replacement=True, generator=generator)
        losses = [(logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()]
        losses += [KL(name)(logp[drawn], ref[drawn]).mean() for name in ESTIMATORS]
        reverse, forward, *means = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in losses)
        for name, mean in zip(ESTIMATORS, means, strict=True):
            total[name]["reverse"] += ((mean - reverse).norm() / reverse.norm()).item() / distributions
            total[name]["forward"] += ((mean - forward).norm() / forward.norm()).item() / distributions
            total[name]["size"] += (mean.norm() / reverse.norm()).item() / distributions
    return total


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    rows, comparisons = [], []
    for mean, published in PUBLISHED.items():
        for name in ESTIMATORS:
            pairs = [n["moments"][str(mean)][name] for n in numbers.values()]
            found = [over_seeds([pair[column] for pair in pairs]) for column in (0, 1)]
            cells = [f"{e.mean:.4f} ({p:g})" for e, p in zip(found, published[name], strict=True)]
            rows.append([f"N({mean:g}, 1), KL {mean * mean / 2:g}", name, *cells, "", ""])
            near = tolerance(published[name][1])
            comparisons += [
                Comparison(f"{name}, mean {mean:g}: {what} / true", estimate, p - away, p + away)
                for what, estimate, p, away in zip(("bias", "std"), found, published[name], near, strict=True)
            ]
    far: dict[str, dict[str, Estimate]] = {
        name: {
            which: over_seeds([n["gradients"][name][which] for n in numbers.values()])
            for which in ("reverse", "forward", "size")
        }
        for name in ESTIMATORS
    }
    for name in ESTIMATORS:
        cells = [f"{far[name][which].mean:.3f}" for which in ("reverse", "forward")]
        rows.append([f"vocabulary of {settings['vocabulary']}", name, "", "", *cells])
    comparisons += [
        Comparison("k1 as a loss: size of its mean gradient", far["k1"]["size"], at_most=0.05),
        Comparison("k2 as a loss: distance to the reverse KL's gradient", far["k2"]["reverse"], at_most=0.05),
        Comparison("k3 as a loss: distance to the reverse KL's gradient", far["k3"]["reverse"], at_least=0.2),
        Comparison("k3 as a loss: distance to the forward KL's gradient", far["k3"]["forward"], at_most=0.05),
    ]
    return Finding(
        ("distribution", "estimator", "bias / true (published)", "std / true (published)",
         "gradient: distance to reverse KL's", "to forward KL's"),
        rows,
        comparisons,
        _panels(numbers, far),
        ["The gradient of k1 is the score, whose mean is 0: as a loss it adds only noise (its distance is 1). That of k2 "
         "is the reverse KL's, that of k3 the forward KL's, both per token. The KL of a whole reply, in which a token "
         "also counts for what follows it, has the gradient of k1 in the reward."],
    )  # fmt: skip


def _panels(numbers: Mapping[int, Numbers], far: Mapping[str, Mapping[str, Estimate]]) -> list[Panel]:
    """Spread beside the published one, for each mean; distances of the gradients."""
    panels = []
    for mean, published in PUBLISHED.items():
        spread = [float(np.mean([n["moments"][str(mean)][k][1] for n in numbers.values()])) for k in ESTIMATORS]
        bars = [
            Series("published", range(3), [published[k][1] for k in ESTIMATORS], dashed=True),
            Series("measured", range(3), spread),
        ]
        panels.append(Panel(f"std / true KL, N({mean:g}, 1)", "", bars, names=ESTIMATORS))
    distances = []
    for which in ("reverse", "forward"):
        found = [far[name][which] for name in ESTIMATORS]
        ends = [e.low for e in found], [e.high for e in found]
        distances.append(Series(f"to the gradient of the {which} KL", range(3), [e.mean for e in found], *ends))
    panels.append(Panel("Mean gradient as a loss: relative distance", "", distances, names=ESTIMATORS))
    return panels


EXPERIMENT = Experiment(
    "kl-estimators",
    "k1 and k3 have no bias, k2 little; k2 and k3 vary little where the KL is small. As losses they differ: on policy "
    "the mean gradient of k1 is 0, that of k2 is the reverse KL's per token, and that of k3 is not.",
    "Schulman 2020, Approximating KL divergence, joschu.net/blog/kl-approx.html",
    {"samples": 10_000_000, "vocabulary": 16, "distributions": 24, "gradient_samples": 200_000},
    measure,
    conclude,
)
