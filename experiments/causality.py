"""Bias and variance of the policy gradient, exactly: rewards to go, and rollouts of older weights.

Every reply of a tiny task is listed, so the mean and the variance of an estimate are sums over all replies, without a
sample. The task pays a part of a reply's worth at its first letter and the rest at its end. Older weights are those of the
same policy before its last updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from experiments.bench import bench, frozen
from experiments.closed_form import decaying
from experiments.enumerated import LETTERS, LONGEST, PROMPTS, World, demonstrations, kl, worths
from experiments.experiment import Comparison, Estimate, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import Arena, imitate
from posttrain.algorithms.policy import PolicyObjective
from posttrain.algorithms.ratio import Correction
from posttrain.core.protocols import Model
from posttrain.models.tokenizer.tokenizer import Tokenizer

WHOLE, TO_GO = "whole reward", "rewards to go"
UNCAPPED = 1e9
EXACT = "per reply, no cap"
FORMS: dict[str, Correction | None] = {
    "none": None,
    "truncate": Correction("truncate"),
    "sequence-truncate": Correction("sequence-truncate"),
    "per token, no cap": Correction("truncate", UNCAPPED),
    EXACT: Correction("sequence-truncate", UNCAPPED),
}
"""--correction, and two controls without its cap."""


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    start = imitate(
        demonstrations(settings["demonstrations"], seed), folder, seed, context=8, epochs=settings["imitation_epochs"],
    )  # fmt: skip
    tokenizer = Tokenizer.load(start)
    tasks = [{"id": prompt, "prompt": prompt} for prompt in PROMPTS]
    sizes = {"prompts": len(PROMPTS), "group": settings["group"], "max_tokens": LONGEST}
    [end] = frozen(start).eos_ids
    world = World.of(tokenizer, end, worths(seed), LONGEST)
    updates = max(settings["ages"])
    with bench(
        Arena(tasks, world.reward(), start), seed, sizes, player=world.player(),
        optimization=decaying(settings["lr"], 1_000_000), algorithm="reinforce-baseline",
    ) as source:  # fmt: skip
        learner, objective = source.learner, PolicyObjective(source.algorithm)
        past = [tokens_of(world, learner.weights())]
        for number in range(1, updates + 1):
            for build in source.produce(number).updates:
                learner.update(build(), objective)
            past.append(tokens_of(world, learner.weights()))
        now = past[-1]
        slopes = gradients(world, learner.weights())
    earned = rewards(world, seed)
    whole = centred(world, now, earned.sum(-1, keepdim=True).expand_as(earned))
    to_go = centred(world, now, earned.flip(-1).cumsum(-1).flip(-1))
    true = estimate(now, slopes, whole)[0]
    found: Numbers = {
        "credit": {WHOLE: told(now, slopes, whole, true), TO_GO: told(now, slopes, to_go, true)},
        "stale": {},
    }
    for age in settings["ages"]:
        old = past[-1 - age]
        forms = {name: told(old, slopes, weights(form, now, old) * whole, true) for name, form in FORMS.items()}
        found["stale"][str(age)] = {"kl": kl(old.sum(-1), now.sum(-1)), "forms": forms}
        say(f"  seed {seed}, {age} updates older: bias " + ", ".join(f"{n} {f['bias']:.3f}" for n, f in forms.items()))
    return found


@torch.no_grad()
def tokens_of(world: World, model: Model) -> Tensor:
    """Log-probability of every token of every reply, float64 [P, Y, T]."""
    return world.each(model)


def gradients(world: World, model: Model) -> Tensor:
    """Gradient of the log-probability of every token of every reply, [P, Y, T, parameters]."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    logp = world.each(model)
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(one, parameters, retain_graph=True)])
        for one in logp.flatten()
    ]
    return torch.stack(rows).view(*logp.shape, -1).double()


def rewards(world: World, seed: int) -> Tensor:
    """Return the reward of each token of each reply, float64 [P, Y, T]: a part at the first letter, the rest
    at the last token.

    The part is the mean worth of the replies of letters that begin with it.
    """
    found = torch.zeros(*world.worth.shape, world.longest, dtype=torch.float64)
    last = world.there.sum(-1) - 1
    for row, prompt in enumerate(PROMPTS):
        first = {
            letter: sum(own) / len(own)
            for letter in LETTERS
            if (own := [w for (asked, said), w in worths(seed).items() if asked == prompt and said[0] == letter])
        }
        for place, text in enumerate(world.texts):
            part = first.get(text[:1], 0.0)
            found[row, place, 0] += part
            found[row, place, last[place]] += world.worth[row, place] - part
    return found


def centred(world: World, drawn: Tensor, credit: Tensor) -> Tensor:
    """Credit [P, Y, T] less its mean over the replies to a prompt that have a token there: a baseline, which is unbiased."""
    chance = drawn.sum(-1, keepdim=True).exp() * world.there  # [P, Y, T]
    return credit - (chance * credit).sum(1, keepdim=True) / chance.sum(1, keepdim=True)


def weights(form: Correction | None, now: Tensor, old: Tensor) -> Tensor:
    """Importance weight of every token of every reply that older weights drew, [P, Y, T]."""
    gap = now - old
    if form is None:
        return torch.ones_like(gap)
    replies = torch.arange(gap[..., 0].numel()).repeat_interleave(gap.shape[-1])
    return form(gap.flatten(), replies).view_as(gap)


def estimate(drawn: Tensor, slopes: Tensor, credit: Tensor) -> tuple[Tensor, float]:
    """Mean [parameters] and variance, over all parameters, of the gradient of a rollout of a random prompt.

    `drawn`: log-probabilities of the tokens by the weights that draw the replies; `credit`: [P, Y, T].
    """
    chance = drawn.sum(-1).exp() / len(drawn)  # [P, Y], of all together 1
    each = torch.einsum("pyt,pytd->pyd", credit, slopes)
    mean = torch.einsum("py,pyd->d", chance, each)
    return mean, ((chance * each.square().sum(-1)).sum() - mean.square().sum()).item()


def told(drawn: Tensor, slopes: Tensor, credit: Tensor, true: Tensor) -> dict[str, float]:
    """Variance of one rollout's gradient, bias of its mean and its size, in units of the true gradient's norm."""
    mean, variance = estimate(drawn, slopes, credit)
    norm = true.norm()
    return {
        "noise": variance / norm.square().item(),
        "bias": ((mean - true).norm() / norm).item(),
        "size": ((mean @ true) / norm.square()).item(),
    }


# -- conclusions -------------------------------------------------------------------------------------------------------


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    ages = [str(age) for age in settings["ages"]]
    oldest = ages[-1]

    def form(name: str, what: str, age: str = oldest) -> list[float]:
        return [n["stale"][age]["forms"][name][what] for n in numbers.values()]

    def credit(name: str, what: str) -> list[float]:
        return [n["credit"][name][what] for n in numbers.values()]

    def pairs(one: list[float], other: list[float], divided: bool = False) -> Estimate:
        return over_seeds([a / b if divided else a - b for a, b in zip(one, other, strict=True)])

    rows = [[name, "", *(str(over_seeds(credit(name, what))) for what in ("noise", "size", "bias"))]
            for name in (WHOLE, TO_GO)]  # fmt: skip
    for age in ages:
        far = str(over_seeds([n["stale"][age]["kl"] for n in numbers.values()]))
        for name in FORMS:
            told_of = [str(over_seeds(form(name, what, age))) for what in ("noise", "size", "bias")]
            rows.append([f"{age} updates older: {name}", far, *told_of])
    claims = [
        Comparison("variance, rewards to go / whole reward", pairs(credit(TO_GO, "noise"), credit(WHOLE, "noise"), True),
                   at_most=1.0),
        Comparison(f"bias, none: {oldest} updates older minus {ages[0]}",
                   pairs(form("none", "bias"), form("none", "bias", ages[0])), at_least=0.0),
        Comparison(f"{oldest} updates older, bias, none minus truncate",
                   pairs(form("none", "bias"), form("truncate", "bias")), at_least=0.0),
        Comparison(f"{oldest} updates older, bias, none minus sequence-truncate",
                   pairs(form("none", "bias"), form("sequence-truncate", "bias")), at_least=0.0),
        Comparison(f"{oldest} updates older, bias, per token without cap",
                   over_seeds(form("per token, no cap", "bias")), at_least=0.01),
        Comparison(f"{oldest} updates older, variance, per reply without cap / truncate",
                   pairs(form(EXACT, "noise"), form("truncate", "noise"), True), at_least=1.0),
        Comparison(f"{oldest} updates older, variance, sequence-truncate / per reply without cap",
                   pairs(form("sequence-truncate", "noise"), form(EXACT, "noise"), True), at_most=1.0),
    ]  # fmt: skip
    scale = over_seeds(credit(WHOLE, "noise"))
    off = max(*credit(TO_GO, "bias"), *(bias for age in ages for bias in form(EXACT, "bias", age)))
    return Finding(
        ("gradient", "KL to the older weights, nats", "variance / true gradient squared", "size along the true gradient",
         "bias"),
        rows,
        claims,
        panels(numbers, settings),
        [f"All figures are exact sums over all replies. Variance: of the gradient of one rollout, so {scale} is the noise "
         "scale (arXiv 1812.06162): a batch of that many rollouts has as much noise as gradient. Bias: distance of the mean "
         "gradient from the true one, over its norm. Rewards to go, and the weight of the whole reply without a cap, have a "
         f"bias of at most {off:.1e}, as theory predicts. The advantage is the credit less its mean at that place of a "
         "reply."],
    )  # fmt: skip


def panels(numbers: Mapping[int, Numbers], settings: Settings) -> list[Panel]:
    ages, drawn = settings["ages"], []
    for what, title in (("bias", "Bias / true gradient"), ("noise", "Variance / true gradient squared")):
        lines = []
        for name in FORMS:
            each = [over_seeds([n["stale"][str(age)]["forms"][name][what] for n in numbers.values()]) for age in ages]
            lines.append(Series(name, ages, [e.mean for e in each]))
        drawn.append(Panel(title, "updates older", lines, log_x=True))
    return drawn


EXPERIMENT = Experiment(
    "causality",
    "Rewards to go leave the mean gradient unchanged and lower its variance; rollouts of older weights bias it; a weight "
    "per token removes a part of that bias, the weight of the whole reply all of it at a higher variance, and a cap trades "
    "bias for variance.",
    "Sutton et al. 2000; McCandlish et al., arXiv 1812.06162; Yao et al. 2025; Liu et al. 2025, When speed kills stability",
    {"demonstrations": 2048, "imitation_epochs": 2.0, "group": 16, "lr": 1e-3, "ages": [1, 4, 16]},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
