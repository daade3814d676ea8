"""How near policy gradients and preference losses come to the optimum of the KL-regularised reward, known exactly.

Every reply of a tiny task is listed, so KL(pi || pi*) of each checkpoint is exact, and beta times it is what the
regularised reward falls short by. Where a form of an algorithm has another optimum, the distance to that one is measured
too. Replies of one token are the control: there the KL of a token is the KL of the reply.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.bench import BETAS, bench, comparisons, examples, frozen, trained
from experiments.enumerated import (
    LETTERS,
    LONGEST,
    PROMPTS,
    World,
    demonstrations,
    forward_optimum,
    identity_optimum,
    kl,
    normalised,
    optimum,
    scaled_optimum,
    worths,
)
from experiments.experiment import Comparison, Estimate, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import Arena, imitate
from posttrain.algorithms.all_algorithms import find_preference
from posttrain.algorithms.policy import PolicyObjective
from posttrain.algorithms.preference import PreferenceObjective
from posttrain.algorithms.settings import change
from posttrain.core.protocols import Model
from posttrain.core.types import Task
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.tokenizer.tokenizer import Tokenizer

NEAR = 0.2
"""Share of the start's distance to an optimum below which a policy counts as there: few steps leave some of it."""

PAIRED = "dpo"
ANY = "dpo, half of the replies drawn from all"
FEW = "dpo, an eighth of the pairs"
IN_REWARD = {"kl_where": "reward", "kl_estimator": "k1"}
EXACT = {"kl_where": "loss", "kl_estimator": "exact"}
SUM = {"scale": "none", "baseline": "others", "aggregate": "sequence-sum"}  # without the shrinking by 1 - 1 / G

Law = Callable[..., Tensor]
"""(reference, worth, beta, ...) -> log-probabilities of the optimum that is predicted."""


@dataclass(frozen=True)
class Arm:
    """One algorithm with its options, on replies of at most `longest` tokens."""

    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    longest: int = LONGEST
    law: Law | None = None  # its own optimum, where that is another one and known
    pairs: float = 0.0  # share of the pairs that a preference loss learns from; 0: reinforcement learning
    anything: bool = False  # whether every second pair is of replies drawn evenly from all of them


ARMS: dict[str, Arm] = {
    "rloo, k1 in the reward": Arm("rloo", IN_REWARD),
    "ppo, k1 in the reward": Arm("ppo", IN_REWARD),
    "ppo, exact KL in the loss": Arm("ppo", EXACT),
    "grpo (std, k3 in the loss)": Arm("grpo"),
    "grpo, k1 in the reward": Arm("grpo", IN_REWARD),
    "grpo, no std, sum over tokens": Arm("grpo", SUM),
    "grpo, no std, sum, exact KL in the loss": Arm("grpo", {**SUM, **EXACT}),
    "one token: grpo, exact KL in the loss": Arm("grpo", EXACT, 1, scaled_optimum),
    "one token: grpo, no std, exact KL in the loss": Arm("grpo", {**SUM, **EXACT}, 1),
    "one token: grpo, no std, k3 in the loss": Arm("grpo", SUM, 1, forward_optimum),
    "one token: grpo, no std, weighted k3 in the loss": Arm("grpo", {**SUM, "kl_weighed": True}, 1),
    PAIRED: Arm("dpo", pairs=1.0),
    ANY: Arm("dpo", pairs=1.0, anything=True),
    FEW: Arm("dpo", pairs=0.125),
    "ipo, summed over tokens": Arm("ipo", {"length_normalised": False}, law=identity_optimum, pairs=1.0),
    "kto": Arm("kto", pairs=1.0),
}  # fmt: skip


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    worth = worths(seed)
    start = imitate(
        demonstrations(settings["demonstrations"], seed), folder, seed, context=8, epochs=settings["imitation_epochs"],
    )  # fmt: skip
    tokenizer, model = Tokenizer.load(start), frozen(start)
    [end] = model.eos_ids
    worlds = {longest: World.of(tokenizer, end, worth, longest) for longest in (1, LONGEST)}
    ref = worlds[LONGEST].logp(model)
    rows = {anything: compared(worlds[LONGEST], ref, settings["pairs"], seed, anything) for anything in (False, True)}
    found: Numbers = {}
    for beta in settings["betas"]:
        for name, arm in ARMS.items():
            world = worlds[arm.longest]
            if arm.pairs:
                own = compare(rows[arm.anything], start, world, seed, arm, beta, settings)
            else:
                own = climb(world, start, seed, arm, beta, settings)
            found[f"{name}; beta {beta:g}"] = own
            last = f"KL to the optimum {own['optimum'][0]:.3f} -> {own['optimum'][-1]:.4f}"
            say(f"  seed {seed}, beta {beta:g}, {name}: {last}, to its own {own['own'][-1]:.4f}")
    return found


def climb(world: World, start: str, seed: int, arm: Arm, beta: float, settings: Settings) -> Numbers:
    """Reinforcement learning: its course."""
    tasks = [{"id": prompt, "prompt": prompt} for prompt in PROMPTS]
    sizes = {"prompts": len(PROMPTS), "group": settings["group"], "max_tokens": world.longest}
    steps = settings["steps"] if world.longest > 1 else max(1, settings["steps"] // 2)
    with bench(
        Arena(tasks, world.reward(), start), seed, sizes, player=world.player(), 
        optimization=decaying(settings["lr"], steps),
        algorithm=arm.algorithm, kl=beta, minibatches=1, **arm.options,
    ) as source:  # fmt: skip
        learner, objective = source.learner, PolicyObjective(source.algorithm)
        assert isinstance(learner, LocalLearner)
        figures = measures(start, world, arm, beta, settings["group"])
        return trained(source, learner, objective, steps, figures, settings["points"])


def compare(
    rows: Sequence[Task], start: str, world: World, seed: int, arm: Arm, beta: float, settings: Settings
) -> Numbers:
    """Learning from pairs: its course. Fewer pairs are seen as many more times."""
    algorithm = change(find_preference(arm.algorithm), {"beta": beta, **arm.options})
    some = rows[: int(arm.pairs * len(rows))]
    steps = max(1, settings["pairs"] // settings["rows"] * settings["passes"])
    items = examples(some, start, algorithm.reads_labels)
    optimization = decaying(settings["pair_lr"], steps)
    source, learner = comparisons(items, start, algorithm, seed, min(settings["rows"], len(some)), optimization)
    figures = measures(start, world, arm, beta, settings["group"])
    return trained(source, learner, PreferenceObjective(algorithm), steps, figures, settings["points"])


def decaying(lr: float, updates: int) -> Optimization:
    return Optimization(lr=lr, schedule="linear", updates=updates, betas=BETAS)


def compared(world: World, ref: Tensor, count: int, seed: int, anything: bool) -> list[Task]:
    """Pairs of different replies of letters that the reference drew, labelled by Bradley and Terry's model.

    `anything`: in every second pair of a prompt the replies are drawn evenly from all but the empty one.
    """
    draw, rows = random.Random(f"pairs {seed}"), list[Task]()
    texts, worth = world.texts, world.worth.tolist()
    chance = (ref.exp() * proper(world)).tolist()
    filled = [float(bool(text.strip())) for text in texts]
    while len(rows) < count:
        own, turn = len(rows) % len(PROMPTS), len(rows) // len(PROMPTS) % 2
        one, other = draw.choices(range(len(texts)), filled if anything and turn else chance[own], k=2)
        if one == other:
            continue
        if draw.random() > torch.sigmoid(torch.tensor(worth[own][one] - worth[own][other])).item():
            one, other = other, one
        pair = {"prompt": PROMPTS[own], "chosen": texts[one], "rejected": texts[other]}
        pair |= {f"{side}_stop": "length" for side in ("chosen", "rejected") if len(pair[side]) == world.longest}
        rows.append(
            {"id": str(len(rows)), **pair}
        )  # without an id, equal rows would be merged, and shares of labels lost
    return rows


def proper(world: World) -> Tensor:
    """Return whether each reply consists of letters, bool [Y]: a row of preferences has no empty reply."""
    return torch.tensor([bool(text) and set(text) <= set(LETTERS) for text in world.texts])


def measures(start: str, world: World, arm: Arm, beta: float, group: int) -> Callable[[Model], dict[str, float]]:
    """Return a function that measures a policy: its KL to the optimum, to the arm's own optimum and to the start, its mean
    reward, and how much regularised reward it lacks. For pairs also its distance on the replies that a pair can hold, and
    the probability of all others."""
    ref = world.logp(frozen(start))
    best = optimum(ref, world.worth, beta)
    inside = proper(world).expand_as(ref)
    if arm.law is identity_optimum:
        own = identity_optimum(ref, world.worth, beta, inside)
    elif arm.law is scaled_optimum:
        own = scaled_optimum(ref, world.worth, beta, group)
    else:
        own = best if arm.law is None else arm.law(ref, world.worth, beta)

    def objective(policy: Tensor) -> float:
        return (policy.exp() * world.worth).sum(-1).mean().item() - beta * kl(policy, ref)

    def among(policy: Tensor) -> Tensor:
        return normalised(policy.masked_fill(~inside, -100.0))

    def figures(model: Model) -> dict[str, float]:
        policy = world.logp(model)
        return {
            "optimum": kl(policy, best),
            "own": kl(policy, own),
            "inside": kl(among(policy), among(own)),
            "outside": 1 - (policy.exp() * inside).sum(-1).mean().item(),
            "start": kl(policy, ref),
            "reward": (policy.exp() * world.worth).sum(-1).mean().item(),
            "short": objective(best) - objective(policy),
        }

    return figures


# -- conclusions -------------------------------------------------------------------------------------------------------


def left(own: Numbers, which: str = "optimum") -> float:
    """Share of the start's distance that is left at the end."""
    return float(own[which][-1] / own[which][0])


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    def over(arm: str, beta: float, figure: Callable[[Numbers], float]) -> Estimate:
        return over_seeds([figure(n[f"{arm}; beta {beta:g}"]) for n in numbers.values()])

    rows, claimed = [], []
    for beta in settings["betas"]:
        for name, arm in ARMS.items():
            own = str(over(name, beta, lambda n: n["own"][-1])) if arm.law else ""
            cells = [over(name, beta, figure) for figure in (
                lambda n: n["optimum"][0], lambda n: n["optimum"][-1], left, lambda n: n["short"][-1],
                lambda n: n["outside"][-1])]  # fmt: skip
            rows.append([f"{beta:g}", name, *map(str, cells), own])
        claimed += claims(numbers, beta)
    return Finding(
        ("beta", "algorithm", "KL to the optimum at the start, nats", "at the end", "share left",
         "regularised reward below the optimum", "probability of non-letters", "KL to its own optimum at the end"),
        rows,
        claimed,
        panels(numbers, settings),
        [f"{len(PROMPTS)} prompts; replies of up to {LONGEST} tokens, or of one. The optimum is pi_ref exp(r / beta), "
         "normalised; its own is the optimum that theory predicts for that form: with rewards divided by their group's "
         "deviation, that of beta times that deviation; with k3 in the loss, that of the forward KL; for IPO, that of "
         "the share of comparisons won. Nothing is predicted for KTO."],
    )  # fmt: skip


def claims(numbers: Mapping[int, Numbers], beta: float) -> list[Comparison]:
    """Return the claims for one beta, which were written before any figure was seen."""

    def each(arm: str, figure: Callable[[Numbers], float]) -> list[float]:
        return [figure(n[f"{arm}; beta {beta:g}"]) for n in numbers.values()]

    def own(arm: str) -> Estimate:
        which = "inside" if ARMS[arm].pairs else "own"
        return over_seeds(each(arm, lambda n: left(n, which)))

    def minus(one: str, other: str) -> Estimate:
        pairs = zip(each(one, left), each(other, left), strict=True)
        return over_seeds([a - b for a, b in pairs])

    exact = [name for name, arm in ARMS.items() if arm.options == IN_REWARD or name in (PAIRED, ANY)]
    exact += ["one token: grpo, no std, exact KL in the loss", "one token: grpo, no std, weighted k3 in the loss"]
    found = [
        Comparison(f"beta {beta:g}, {name}: share of the distance left", over_seeds(each(name, left)), at_most=NEAR)
        for name in exact
    ]
    found += [
        Comparison(f"beta {beta:g}, {name}: share left to its own optimum", own(name), at_most=NEAR)
        for name, arm in ARMS.items()
        if arm.law is not None
    ]
    found.append(
        Comparison(f"beta {beta:g}, dpo: share left among the replies that pairs can hold", own(PAIRED), at_most=NEAR)
    )
    farther = {
        ("grpo (std, k3 in the loss)", "rloo, k1 in the reward"),
        ("grpo, no std, sum over tokens", "grpo, no std, sum, exact KL in the loss"),
        ("grpo, no std, sum, exact KL in the loss", "rloo, k1 in the reward"),
        (FEW, PAIRED),
    }
    return found + [
        Comparison(f"beta {beta:g}, share left, {one} minus {other}", minus(one, other), at_least=0.0)
        for one, other in sorted(farther)
    ]


def panels(numbers: Mapping[int, Numbers], settings: Settings) -> list[Panel]:
    """Distance to the optimum over training, for each beta: reinforcement learning, one token, preferences."""
    found = []
    for beta in settings["betas"]:
        kinds = {
            f"beta {beta:g}, up to {LONGEST} tokens": [n for n, a in ARMS.items() if not a.pairs and a.longest > 1],
            f"beta {beta:g}, one token": [n for n, a in ARMS.items() if not a.pairs and a.longest == 1],
            f"beta {beta:g}, pairs": [n for n, a in ARMS.items() if a.pairs],
        }
        for title, names in kinds.items():
            lines = []
            for name in names:
                curves = torch.tensor([n[f"{name}; beta {beta:g}"]["optimum"] for n in numbers.values()]).mean(0)
                share = [place / (len(curves) - 1) for place in range(len(curves))]
                lines.append(Series(name, share, curves.tolist()))
            found.append(Panel(f"KL to the optimum: {title}", "share of the training", lines, log_y=True))
    return found


EXPERIMENT = Experiment(
    "closed-form",
    "With the KL's k1 in the reward, policy gradients end at pi_ref exp(r / beta), and so does DPO on pairs labelled by "
    "that reward; a division by the group's deviation, k3 in the loss, and a KL per token each lead to another optimum, "
    "which theory predicts.",
    "DPO, arXiv 2305.18290, eq. 4; Korbak et al., arXiv 2205.11275; IPO, arXiv 2310.12036; GRPO, arXiv 2402.03300",
    {"betas": [1.0, 0.4], "steps": 120, "group": 16, "lr": 3e-3, "pairs": 4096, "rows": 128, "pair_lr": 2e-3,
     "passes": 2, "points": 8, "demonstrations": 2048, "imitation_epochs": 2.0},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
