"""A game of letters whose gold reward is known, proxies of it learned from comparisons, and best-of-N by a proxy.

Replies are lists of letters. The gold reward knows what each letter is worth, that anything else costs, be it
a repeated letter or no letter at all, and whether the letter that was asked for is among them. It is defined on
everything that a policy can write: a proxy may like what no comparison holds, such as special tokens. Comparisons of the
start's replies have little to do with lists that repeat far more, or are far shorter, than those. Rewards are in standard
deviations of the start's replies, their mean at 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, log
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experiment import Settings
from experiments.harness import QUIET, checkpoint_of
from posttrain.config.inference import Evaluation
from posttrain.config.training import RewardModelling
from posttrain.core.types import Ask, Reply, Task, Turn
from posttrain.services.reward_model_service import RewardModelService
from posttrain.training.training_run import run_training
from posttrain.training.verbs import evaluate

LETTERS = "abcdefghijklmnop"
ASKED = 2.0  # what the letter of the prompt is worth beyond its own value
BESIDES = -1.0  # what anything else is worth: a letter that was said before, or what is no letter
SYMBOL = re.compile(r"<\|\w+\|>|.", re.DOTALL)  # a special token is one thing, not the letters of its name
CHOICES = (1, 2, 4, 8, 16, 32, 64)
"""The N of best-of-N."""

MEMBERS = ("one", "two")


@dataclass(frozen=True)
class Join:
    """How the standardised scores of proxies that differ in their seed become one."""

    members: tuple[str, ...]
    how: Callable[[Sequence[float]], float]

    def __call__(self, scores: Mapping[str, float]) -> float:
        return self.how([scores[name] for name in self.members])


JOIN: dict[str, Join] = {
    "single": Join(MEMBERS[:1], max),
    "second": Join(MEMBERS[1:], max),
    "mean of two": Join(MEMBERS, lambda scores: sum(scores) / len(scores)),
    "worst of two": Join(MEMBERS, min),
}
ENSEMBLES = tuple(name for name, join in JOIN.items() if len(join.members) > 1)


# -- what is true ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gold:
    """The worth of replies."""

    values: Mapping[str, float]  # of each letter when it is said first

    @classmethod
    def drawn(cls, seed: int) -> Gold:
        """Values from N(0, 1), moved so that their mean is 0."""
        draw = random.Random(f"values {seed}")
        values = [draw.gauss(0, 1) for _ in LETTERS]
        mean = sum(values) / len(values)
        return cls({letter: value - mean for letter, value in zip(LETTERS, values, strict=True)})

    def __call__(self, task: Task, reply: str) -> float:
        """Values of the letters that are there, a price for everything else, a prize for the letter asked for."""
        said = symbols(reply)
        kinds = self.values.keys() & set(said)
        worth = sum(self.values[letter] for letter in sorted(kinds)) + BESIDES * (len(said) - len(kinds))
        return worth + ASKED * (task["prompt"][0] in kinds)


def symbols(reply: str) -> list[str]:
    """The symbols of a reply, one token each: letters, other characters, special tokens."""
    found: list[str] = SYMBOL.findall(reply)
    return found


def demonstrations(settings: Settings, seed: int) -> list[Task]:
    """Replies of 6 to 12 letters: mostly different ones, a share `repeats` of them repeated."""
    draw = random.Random(f"demonstrations {seed}")
    rows = []
    for number in range(settings["demonstrations"]):
        fresh, said = draw.sample(LETTERS, len(LETTERS)), list[str]()
        for _ in range(draw.randint(6, 12)):
            said.append(draw.choice(said) if said and draw.random() < settings["repeats"] else fresh.pop())
        rows.append({"id": str(number), "prompt": f"{draw.choice(LETTERS)}:", "response": "".join(said)})
    return rows


# -- the proxy ---------------------------------------------------------------------------------------------------------

PROMPTS: list[Task] = [{"id": letter, "prompt": f"{letter}:"} for letter in LETTERS]


def sampled(start: str, gold: Gold, samples: int, seed: int, settings: Settings) -> list[list[tuple[str, float]]]:
    """(reply, gold) of the start's replies to every prompt."""
    config = Evaluation(
        tasks="generated", env="gold", model=start, samples=samples, seed=seed, max_tokens=settings["max_tokens"],
        env_workers=0, threads=1,
    )  # fmt: skip
    found: dict[str, list[tuple[str, float]]] = {}
    for rollout in evaluate.evaluate(config, PROMPTS, gold.__call__).rollouts:
        found.setdefault(rollout.task["id"], []).append((rollout.text, float(rollout.reward)))  # type: ignore[arg-type]
    return [found[task["id"]] for task in PROMPTS]


def comparisons(replies: Sequence[Sequence[tuple[str, float]]], noise: float, seed: int) -> list[Task]:
    """Replies to one prompt two by two, the better one chosen but for a share `noise`, where it is the other one."""
    draw = random.Random(f"labels {seed}")
    rows = []
    for task, own in zip(PROMPTS, replies, strict=True):
        for one, other in zip(own[::2], own[1::2], strict=True):
            if one[0] == other[0] or one[1] == other[1]:
                continue
            better, worse = (one, other) if (one[1] > other[1]) != (draw.random() < noise) else (other, one)
            rows.append({"prompt": task["prompt"], "chosen": better[0], "rejected": worse[0]})
    return rows


def trained(rows: Sequence[Task], start: str, folder: Path, seed: int, settings: Settings) -> str:
    """A reward model that starts from the policy's own start."""
    config = RewardModelling(
        tasks="generated", model=start, out=str(folder), seed=seed, rows=16, epochs=settings["proxy_epochs"],
        lr=settings["proxy_lr"], health="off", **QUIET,
    )  # fmt: skip
    return checkpoint_of(run_training(config, rows))


def scores_of(folder: str, replies: Sequence[Sequence[tuple[str, float]]]) -> list[list[float]]:
    """A reward model's scores of these replies to the prompts."""
    service = RewardModelService(folder)
    asked = [(task["prompt"], text) for task, own in zip(PROMPTS, replies, strict=True) for text, _ in own]
    for place, (prompt, text) in enumerate(asked):
        service.submit(place, {"prompt": prompt, "response": text})
    answers: dict[int, float] = {}
    while len(answers) < len(asked):
        answers |= dict(service.poll())
    service.close()
    every = iter(answers[place] for place in range(len(asked)))
    return [[next(every) for _ in own] for own in replies]


@dataclass(frozen=True)
class Scale:
    """Rewards in standard deviations of the start's replies, whose mean is 0."""

    mean: float
    spread: float

    @classmethod
    def of(cls, values: Any) -> Scale:
        return cls(float(np.mean(values)), float(np.std(values)))

    def __call__(self, value: float) -> float:
        return (value - self.mean) / self.spread


@dataclass(frozen=True)
class Judges:
    """Gold and the proxies, each on the scale of the start's replies."""

    gold: Gold
    of_gold: Scale
    folders: Mapping[str, str]  # of the proxies
    of_proxies: Mapping[str, Scale]

    def environment(self, join: str) -> Callable[[Task], Generator[Any, Any, dict[str, float]]]:
        """One reply, whose reward is the proxies' score; gold is noted beside it."""
        chosen = JOIN[join]

        def proxied(task: Task) -> Generator[Any, Any, dict[str, float]]:
            reply: Reply = yield Turn(task["prompt"])
            scores = {}
            for name in chosen.members:
                score = yield Ask(name, {"prompt": task["prompt"], "response": str(reply)})
                scores[name] = self.of_proxies[name](score)
            return {"reward": chosen(scores), "gold": self.of_gold(self.gold(task, reply))}

        return proxied


# -- best of N ---------------------------------------------------------------------------------------------------------


def best_of(count: int, proxy: Sequence[float], value: Sequence[float]) -> float:
    """Mean `value` of the reply that `proxy` likes best of `count`: over every choice of `count` from these replies.

    Without bias for replies drawn independently (WebGPT, arXiv 2112.09332, appendix I): the reply of rank i, the worst
    having rank 1, is the best of C(i - 1, count - 1) of the C(n, count) choices.
    """
    order = np.argsort(np.asarray(proxy), kind="stable")
    every = comb(len(order), count)
    chance = [comb(place, count - 1) / every for place in range(len(order))]
    return float(np.dot(chance, np.asarray(value, dtype=float)[order]))


def kl_of_best(count: int) -> float:
    """KL of best-of-N from what it chooses among, in nats (arXiv 2210.10760, section 2.2)."""
    return log(count) - (count - 1) / count


def choices(proxy: Sequence[Sequence[float]], gold: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Proxy and gold reward of best-of-N, means over the prompts."""
    return {
        "kl": [kl_of_best(count) for count in CHOICES],
        "proxy": [float(np.mean([best_of(count, p, p) for p in proxy])) for count in CHOICES],
        "gold": [float(np.mean([best_of(count, p, g) for p, g in zip(proxy, gold, strict=True)])) for count in CHOICES],
    }


def accuracy(proxy: Sequence[Sequence[float]], gold: Sequence[Sequence[float]]) -> float:
    """How often the proxy prefers the better of two of the start's replies; ties in gold are left out."""
    right = [
        (p[a] > p[b]) == (g[a] > g[b])
        for p, g in zip(proxy, gold, strict=True)
        for a, b in combinations(range(min(len(p), 40)), 2)
        if g[a] != g[b]
    ]
    return sum(right) / len(right)


def correlation(one: Any, other: Any) -> float | None:
    """Pearson's; None where one of them does not vary."""
    if np.std(one) == 0 or np.std(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])
