"""Bias and variance of the policy gradient: rewards to go, the size of a batch, and rollouts of older weights.

Sums with the working written out earn a reward for each right line. At one policy, gradients of many small batches are
measured and averaged into larger ones. Then older weights of the same run sample, and what is left of the gradient is
compared with the one of a large sample of the policy's own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.baseline_variance import Halves, figures
from experiments.bench import bench, one_batch
from experiments.experiment import Comparison, Estimate, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import Arena, imitate
from posttrain.algorithms.credit import Baselined, ToGo
from posttrain.algorithms.earned_rewards import per_token
from posttrain.algorithms.policy import policy_objective
from posttrain.algorithms.ratio import Correction
from posttrain.core.types import Graded, Invalid, Reply, Rollout, Task
from posttrain.envs.builtin import worked_sums
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.scoreboard import scoreboard

WHOLE, TO_GO = "whole reward", "rewards to go"
UNCAPPED = 1e9
FORMS: dict[str, Correction | None] = {
    "none": None,
    "truncate": Correction("truncate"),
    "sequence-truncate": Correction("sequence-truncate"),
    "per token, no cap": Correction("truncate", UNCAPPED),
    "per sequence, no cap": Correction("sequence-truncate", UNCAPPED),
}
"""--correction, and two controls without its cap."""


def worked(task: Task, reply: Reply) -> dict[str, float] | Graded | Invalid:
    """A right answer earns 1, all right lines together 1 as well, each at its end."""
    return worked_sums.reward(task, str(reply), lines=1.0)


def worked_arena(folder: Path, seed: int, settings: Mapping[str, Any]) -> Arena:
    """Sums of a few numbers, and a model that has imitated workings with slips."""
    draw = random.Random(f"workings {seed}")
    tasks = worked_sums.tasks(settings["tasks"], seed, numbers=settings["numbers"])
    shown = [
        {**task, "response": worked_sums.working(draw, task["numbers"], slips=settings["slips"])} for task in tasks
    ]
    start = imitate(shown, folder, seed, context=settings["max_tokens"] + 16, epochs=settings["imitation_epochs"])
    return Arena(tasks, worked, start)


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = worked_arena(folder, seed, settings)
    sizes = {**settings, "prompts": settings["unit"] * settings["units"] // settings["parts"], "group": 1}
    with bench(arena, seed, sizes, algorithm="reinforce-baseline") as source:
        weights = snapshots(source, max(settings["ages"]), settings)
        model = source.learner.weights()
        now = weights[-1]
        model.load_state_dict(now)
        number = len(weights) * settings["parts"]
        own, number = sampled(source, number, settings["parts"])
        reward = float(np.mean([r.reward for r in own]))
        found: Numbers = {"reward": reward, "tokens": float(np.mean([r.n_scored for r in own]))}
        scores = scoreboard(own)
        credits = {WHOLE: per_token(Baselined("none")(scores), scores), TO_GO: per_token(ToGo()(scores), scores)}
        units = unit_gradients(source, own, credits, settings["unit"])
        found |= {"to go": together(units), "batches": by_batch(units[WHOLE], settings)}
        centred = [torch.full((r.n_scored,), float(r.reward) - reward) for r in own]
        reference = halved(unit_gradients(source, own, {"": centred}, settings["unit"])[""])
        found["stale"] = {}
        for age in settings["ages"]:
            model.load_state_dict(weights[-1 - age])
            old, number = sampled(source, number, settings["parts"])
            model.load_state_dict(now)
            found["stale"][str(age)] = stale(source, old, reward, reference, settings["unit"])
            none, whole = (found["stale"][str(age)]["forms"][name]["bias"] for name in ("none", "per sequence, no cap"))
            say(f"  seed {seed}, {age} updates older: bias without correction {none:.2f}, of the exact one {whole:.2f}")
    return found


def snapshots(source: RLSource, updates: int, settings: Settings) -> list[dict[str, Tensor]]:
    """Weights before the first of some updates and after each, the last ones being the policy's."""
    learner, objective = source.learner, policy_objective(source.algorithm)
    found = [copied(learner.weights().state_dict())]
    for number in range(1, updates + 1):
        step = source.produce(number)
        for build in step.updates:
            learner.update(build(), objective)
        found.append(copied(learner.weights().state_dict()))
    return found


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def sampled(source: RLSource, number: int, parts: int) -> tuple[list[Rollout], int]:
    """Rollouts of the weights as they are, from steps that nothing learns from; and the number of the last step."""
    found = [rollout for k in range(1, parts + 1) for rollout in source.produce(number + k).played]
    return found, number + parts


# -- gradients ---------------------------------------------------------------------------------------------------------


def unit_gradients(
    source: RLSource, rollouts: Sequence[Rollout], credits: Mapping[str, Sequence[Tensor]], unit: int
) -> dict[str, list[Tensor]]:
    """Name -> the gradient of each `unit` rollouts, given a credit for each of their tokens, which is held fixed."""
    parameters = [p for p in source.learner.weights().parameters() if p.requires_grad]
    found: dict[str, list[Tensor]] = {name: [] for name in credits}
    for first in range(0, len(rollouts) - unit + 1, unit):
        part = slice(first, first + unit)
        logp = log_probability(source, rollouts[part])
        for name, credit in credits.items():
            gain = (torch.cat(list(credit[part])).to(logp.dtype) * logp).sum() / unit
            parts = torch.autograd.grad(gain, parameters, retain_graph=True)
            found[name].append(torch.cat([g.flatten() for g in parts]))
    return found


def log_probability(source: RLSource, rollouts: Sequence[Rollout]) -> Tensor:
    """The policy's log-probability of each sampled token, with its gradient: [N]."""
    model, batch = source.learner.weights(), one_batch(rollouts)
    logits = model.head.logits(model.hidden(batch.layout, batch.at))
    return logits.log_softmax(-1).gather(-1, batch.target[:, None]).squeeze(-1)


def halved(gradients: Sequence[Tensor]) -> Halves:
    found = Halves([torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])])
    for gradient in gradients:
        found.add(gradient)
    return found


def together(units: Mapping[str, Sequence[Tensor]]) -> Numbers:
    """Of both credits: noise, bias and size against the whole reward's gradient."""
    reference = halved(units[WHOLE])
    return {name: figures(halved(gradients), reference) for name, gradients in units.items()}


def by_batch(units: Sequence[Tensor], settings: Settings) -> Numbers:
    """Variance of the gradient of a batch, over all parameters, by its number of rollouts; and the noise scale.

    A batch is a mean of units, no unit in two batches. Noise scale: tr(variance of one rollout) / |gradient|^2
    (arXiv 1812.06162, appendix A.1), from the smallest batches with middle ones, and from these with the largest.
    """
    stacked = torch.stack(list(units))
    sizes, variances, squares = list[int](), list[float](), list[float]()
    size = 1
    while len(stacked) // size >= 4:
        batches = stacked[: len(stacked) // size * size].view(-1, size, stacked.shape[1]).mean(1)
        sizes.append(size * settings["unit"])
        variances.append(batches.var(0).sum().item())
        squares.append(batches.square().sum(1).mean().item())
        size *= 2
    middle = len(sizes) // 2
    return {
        "sizes": sizes,
        "variances": variances,
        "scales": [noise_scale(sizes, squares, 0, middle), noise_scale(sizes, squares, middle, len(sizes) - 1)],
    }


def noise_scale(sizes: Sequence[int], squares: Sequence[float], small: int, big: int) -> float:
    """tr(S) / |G|^2 from the mean squared norms of the gradients of two batch sizes."""
    one, other = sizes[small], sizes[big]
    true = (other * squares[big] - one * squares[small]) / (other - one)
    spread = (squares[small] - squares[big]) / (1 / one - 1 / other)
    return spread / true if true else float("nan")


def stale(source: RLSource, old: Sequence[Rollout], reward: float, reference: Halves, unit: int) -> Numbers:
    """Of each form of correction: noise, bias and size of the gradient from older weights' rollouts.

    The advantage is R less a constant, the mean reward of the policy's own rollouts.
    """
    with torch.no_grad():
        logp = [log_probability(source, [rollout]) for rollout in old]
    gaps = []
    for own, rollout in zip(logp, old, strict=True):
        told = np.concatenate([t.sampler_logp for t in rollout.transcripts if t.sampler_logp is not None])
        gaps.append(own.double() - torch.from_numpy(told).double())
    credits: dict[str, list[Tensor]] = {name: [] for name in FORMS}
    for gap, rollout in zip(gaps, old, strict=True):
        centred = torch.full((len(gap),), float(rollout.reward) - reward, dtype=torch.float64)
        for name, correction in FORMS.items():
            weight = 1.0 if correction is None else correction(gap, torch.zeros(len(gap), dtype=torch.int64))
            credits[name].append(weight * centred)
    units = unit_gradients(source, old, credits, unit)
    return {
        "kl": float(np.mean([-gap.sum().item() for gap in gaps])),
        "forms": {name: figures(halved(gradients), reference) for name, gradients in units.items()},
    }


# -- conclusions -------------------------------------------------------------------------------------------------------


def slope(own: Numbers) -> float:
    """Of log variance over log batch size; nan where no gradient varies."""
    if min(own["variances"]) <= 0:
        return float("nan")
    return float(np.polyfit(np.log(own["sizes"]), np.log(own["variances"]), 1)[0])


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    ages = [str(age) for age in settings["ages"]]
    oldest = ages[-1]

    def form(name: str, what: str, age: str = oldest) -> list[float]:
        return [n["stale"][age]["forms"][name][what] for n in numbers.values()]

    def over(name: str, what: str, age: str) -> Estimate:
        return over_seeds(form(name, what, age))

    def ratio(one: Sequence[float], other: Sequence[float]) -> Estimate:
        return over_seeds([a / b for a, b in zip(one, other, strict=True)])

    def minus(one: Sequence[float], other: Sequence[float]) -> Estimate:
        return over_seeds([a - b for a, b in zip(one, other, strict=True)])

    def credit(name: str, what: str) -> list[float]:
        return [n["to go"][name][what] for n in numbers.values()]

    rows = [[name, "", *(str(over_seeds(credit(name, what))) for what in ("noise", "size", "bias"))]
            for name in (WHOLE, TO_GO)]  # fmt: skip
    for age in ages:
        far = str(over_seeds([n["stale"][age]["kl"] for n in numbers.values()]))
        rows += [[f"{age} updates older: {name}", far, *(str(over(name, what, age)) for what in ("noise", "size", "bias"))]
                 for name in FORMS]  # fmt: skip
    scales = [[n["batches"]["scales"][k] for n in numbers.values()] for k in (0, 1)]
    exact = "per sequence, no cap"
    claims = [
        Comparison("variance, rewards to go / whole reward", ratio(credit(TO_GO, "noise"), credit(WHOLE, "noise")),
                   at_most=1.0),
        Comparison("size of the gradient of rewards to go: 1", over_seeds(credit(TO_GO, "size")), 0.85, 1.15),
        Comparison("slope of log variance over log batch size: -1",
                   over_seeds([slope(n["batches"]) for n in numbers.values()]), -1.1, -0.9),
        Comparison("noise scale from small batches / from large ones", ratio(*scales), 0.5, 2.0),
        Comparison(f"bias, none: {oldest} updates older minus {ages[0]}",
                   minus(form("none", "bias"), form("none", "bias", ages[0])), at_least=0.0),
        Comparison(f"{oldest} updates older, bias, none minus truncate",
                   minus(form("none", "bias"), form("truncate", "bias")), at_least=0.0),
        Comparison(f"{oldest} updates older, bias, none minus sequence-truncate",
                   minus(form("none", "bias"), form("sequence-truncate", "bias")), at_least=0.0),
        Comparison(f"{oldest} updates older, bias, per token minus per sequence, both without cap",
                   minus(form("per token, no cap", "bias"), form(exact, "bias")), at_least=0.0),
        Comparison(f"{oldest} updates older, variance, per sequence without cap / truncate",
                   ratio(form(exact, "noise"), form("truncate", "noise")), at_least=1.0),
        Comparison(f"{oldest} updates older, variance, sequence-truncate / per sequence without cap",
                   ratio(form("sequence-truncate", "noise"), form(exact, "noise")), at_most=1.0),
    ]  # fmt: skip
    scale = over_seeds(scales[0])
    return Finding(
        ("gradient", "KL of a reply to the older weights, nats", "variance / true gradient squared",
         "size along the true gradient", "bias"),
        rows,
        claims,
        panels(numbers, settings),
        [f"Variance of the gradient of {settings['unit']} rollouts, over all parameters; noise scale {scale} rollouts. "
         "Bias: distance of the mean gradient from that of the policy's own rollouts, over the latter's norm, by products "
         "of independent halves. The advantages of older rollouts are R less a constant."],
    )  # fmt: skip


def panels(numbers: Mapping[int, Numbers], settings: Settings) -> list[Panel]:
    sizes = next(iter(numbers.values()))["batches"]["sizes"]
    found = [over_seeds(column) for column in zip(*(n["batches"]["variances"] for n in numbers.values()), strict=True)]
    mean = [e.mean for e in found]
    lines = [
        Series("measured", sizes, mean, [e.low for e in found], [e.high for e in found]),
        Series("1 / B", sizes, [mean[0] * sizes[0] / size for size in sizes], dashed=True),
    ]
    drawn = [Panel("Variance of the gradient", "rollouts of a batch", lines, log_x=True, log_y=True)]
    for what, title in (("bias", "Bias / true gradient"), ("noise", "Variance / true gradient squared")):
        of_forms = []
        for name in FORMS:
            each = [over_seeds([n["stale"][str(age)]["forms"][name][what] for n in numbers.values()])
                    for age in settings["ages"]]  # fmt: skip
            of_forms.append(Series(name, settings["ages"], [e.mean for e in each]))
        drawn.append(Panel(title, "updates older", of_forms, log_x=True, log_y=what == "noise"))
    return drawn


EXPERIMENT = Experiment(
    "causality",
    "Rewards to go leave the gradient where it is and lower its variance, which falls as 1 / B; rollouts of older weights "
    "bias it, a weight per token removes a part of that, the weight of the whole reply all of it at a higher variance, "
    "and a cap trades the one for the other.",
    "Sutton et al. 2000; McCandlish et al., arXiv 1812.06162; Yao et al. 2025; Liu et al. 2025, When speed kills stability",
    {"tasks": 600, "numbers": 3, "slips": 0.3, "imitation_epochs": 14.0, "max_tokens": 20, "lr": 1e-3, "ages": [1, 4, 16],
     "unit": 8, "units": 64, "parts": 4},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
