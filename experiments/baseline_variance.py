"""How much noise each baseline, and each lambda of GAE, leaves in the policy gradient, and how much bias.

Measured at one fixed policy: many batches of fresh rollouts, and of each batch the gradient under every estimator. The
estimators see the same rollouts, so what differs is the estimator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.bench import bench, by_rollout, one_batch
from experiments.experiment import Comparison, Estimate, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import Arena, counting, learn
from posttrain.algorithms.credit import GAE, Advantage, Baselined
from posttrain.algorithms.earned_rewards import per_token
from posttrain.training.sources.scoreboard import scoreboard

LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 1.0)
REFERENCE = "leave-one-out"  # free of bias: what the others are compared with


def estimators() -> dict[str, Advantage]:
    """Name -> how credit is assigned."""
    return {
        "none": Baselined("none"),
        "batch mean": Baselined("batch"),
        "batch, length-weighted": Baselined("batch", weight="length"),
        "batch, optimal": Baselined("batch", weight="gradient"),
        "group mean": Baselined("group"),
        "group, length-weighted": Baselined("group", weight="length"),
        "group, optimal": Baselined("group", weight="gradient"),
        REFERENCE: Baselined("others"),
        **{f"GAE {lam:g}": GAE(1.0, lam) for lam in LAMBDAS},
    }


@dataclass
class Halves:
    """Gradients of one estimator, summed up over the even and the odd batches, and their squared norms."""

    sums: list[Tensor]  # two, [parameters]
    square: float = 0.0
    batches: int = 0

    def add(self, gradient: Tensor) -> None:
        self.sums[self.batches % 2] += gradient
        self.square += gradient.square().sum().item()
        self.batches += 1

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        half = self.batches // 2
        return self.sums[0] / (self.batches - half), self.sums[1] / half


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    arena = counting(folder, seed, settings)
    critic = learn_critic(arena, folder, seed, settings)
    found: dict[str, Halves] = {}
    with bench(arena, seed, settings, critic, algorithm="ppo", kl=0.0) as source:
        learner, model = source.learner, source.learner.weights()
        parameters = [p for p in model.parameters() if p.requires_grad]
        for number in range(1, settings["batches"] + 1):
            rollouts = [rollout for rollout in source.produce(number).played]
            batch = one_batch(rollouts)
            [outputs] = learner.evaluate([batch], want=frozenset({"value"}))
            assert outputs.value is not None
            scores = replace(
                scoreboard(rollouts, value=by_rollout(outputs.value, rollouts)),
                squared_gradient_norm=learner.squared_gradients([one_batch([r]) for r in rollouts]),
            )
            hidden = model.hidden(batch.layout, batch.at)
            logits = hidden @ model.head.weight.T
            logp = logits.gather(-1, batch.target[:, None]).squeeze(-1) - logits.logsumexp(-1)
            for name, advantage in estimators().items():
                credit = torch.cat(per_token(advantage(scores), scores))
                gain = (credit * logp).sum() / len(rollouts)
                gradient = torch.cat([g.flatten() for g in torch.autograd.grad(gain, parameters, retain_graph=True)])
                if name not in found:
                    found[name] = Halves([torch.zeros_like(gradient), torch.zeros_like(gradient)])
                found[name].add(gradient)
    numbers = {name: figures(halves, found[REFERENCE]) for name, halves in found.items()}
    reward = sum(scores.reward.tolist()) / len(rollouts)
    say(f"  seed {seed}: {settings['batches']} batches of {len(rollouts)} rollouts, mean reward {reward:.2f}")
    return numbers


def learn_critic(arena: Arena, folder: Path, seed: int, settings: Settings) -> Path:
    """A critic of the current policy: PPO that ends one step after the critic's warm-up."""
    warmup = settings["critic_steps"]
    run = learn(
        arena, folder / "critic", seed, algorithm="ppo", kl=0.0, steps=warmup + 1, critic_warmup=warmup,
        lr=settings["critic_lr"], prompts=settings["critic_prompts"], group=2, max_tokens=settings["max_tokens"],
    )  # fmt: skip
    assert run.checkpoint is not None
    return run.checkpoint


def figures(own: Halves, reference: Halves) -> dict[str, float]:
    """`noise`: variance of a batch's gradient (all parameters together) over the squared norm of the true one.

    `bias`: norm of the mean gradient's distance from the true one, over the latter's norm. `size`: what the mean
    gradient has of the true one along its direction. Products of independent halves keep the noise of the means out of
    all three.
    """
    a, b = own.means
    true_a, true_b = reference.means
    true = (true_a @ true_b).item() or math.nan  # no reward, no gradient
    mean_square = (own.sums[0] + own.sums[1]).div(own.batches).square().sum().item()
    variance = (own.square / own.batches - mean_square) * own.batches / (own.batches - 1)
    return {
        "noise": variance / true,
        "bias": math.sqrt(max(0.0, ((a - true_a) @ (b - true_b)).item() / true)),
        "size": ((a @ true_b) + (b @ true_a)).item() / 2 / true,
    }


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    def ratio(one: str, other: str, what: str = "noise") -> list[float]:
        return [n[one][what] / n[other][what] for n in numbers.values()]

    names = list(estimators())
    relative = {name: over_seeds(ratio(name, "none")) for name in names}
    bias = {name: over_seeds([n[name]["bias"] for n in numbers.values()]) for name in names}
    size = {name: over_seeds([n[name]["size"] for n in numbers.values()]) for name in names}
    noise = {name: over_seeds([n[name]["noise"] for n in numbers.values()]) for name in names}
    rows = [[name, str(noise[name]), str(relative[name]), str(size[name]), str(bias[name])] for name in names]
    shrunk = 1 - 1 / settings["group"]
    comparisons = [
        Comparison("variance, batch mean / none", relative["batch mean"], at_most=1.0),
        Comparison("variance, leave-one-out / batch mean", over_seeds(ratio(REFERENCE, "batch mean")), at_most=1.0),
        Comparison("variance, batch optimal / batch mean",
                   over_seeds(ratio("batch, optimal", "batch mean")), at_most=1.0),
        Comparison("variance, batch length-weighted / batch mean",
                   over_seeds(ratio("batch, length-weighted", "batch mean")), at_most=1.0),
        Comparison("size of the batch mean's gradient: 1", size["batch mean"], 0.9, 1.1),
        Comparison(f"size of the group mean's gradient: 1 - 1/{settings['group']} = {shrunk:g}", size["group mean"],
                   shrunk - 0.03, shrunk + 0.03),
        Comparison("variance, GAE 0 / GAE 1", over_seeds(ratio("GAE 0", "GAE 1")), at_most=1.0),
        Comparison("bias, GAE 0 minus GAE 1",
                   over_seeds([n["GAE 0"]["bias"] - n["GAE 1"]["bias"] for n in numbers.values()]), at_least=0.0),
        Comparison("variance, GAE 1 / leave-one-out", over_seeds(ratio("GAE 1", REFERENCE)), at_most=1.0),
    ]  # fmt: skip
    plain = names[: -len(LAMBDAS)]
    lambdas = [f"GAE {lam:g}" for lam in LAMBDAS]

    def line(chosen: Sequence[str], of: Mapping[str, Estimate], x: Sequence[float]) -> Series:
        found = [of[name] for name in chosen]
        return Series("", x, [e.mean for e in found], [e.low for e in found], [e.high for e in found])

    panels = [
        Panel("Variance / that of no baseline", "", [line(plain, relative, range(len(plain)))], names=plain),
        Panel("GAE: variance / that of no baseline", "lambda", [line(lambdas, relative, LAMBDAS)]),
        Panel("GAE: bias / true gradient", "lambda", [line(lambdas, bias, LAMBDAS)]),
    ]
    return Finding(
        ("estimator", "variance / true gradient squared", "/ that of no baseline", "size along the true gradient",
         "bias"),
        rows,
        comparisons,
        panels,
        [f"Variance of the gradient of one batch of {settings['prompts']} x {settings['group']} rollouts, over all "
         "parameters. The true gradient is the mean under leave-one-out, which has no bias. A group's own mean "
         "includes the rollout itself and shrinks the gradient by 1/G. The critic was trained at the same policy by "
         "regression on returns."],
    )  # fmt: skip


EXPERIMENT = Experiment(
    "baseline-variance",
    "A baseline lowers the gradient's variance without moving its mean; weights by squared gradient norm lower it "
    "further, with length as a cheap stand-in; GAE trades variance (lambda 1) for bias (lambda 0).",
    "Williams 1992; Peters and Schaal 2008; OPO, arXiv 2505.23585; RLOO, arXiv 2402.14740; GAE, arXiv 1506.02438",
    {"tasks": 1500, "shortest": 2, "longest": 12, "slips": 0.8, "imitation_epochs": 12.0, "batches": 64,
     "prompts": 16, "group": 8, "max_tokens": 16, "critic_steps": 80, "critic_prompts": 64, "critic_lr": 1e-3},
    measure,
    conclude,
)  # fmt: skip
