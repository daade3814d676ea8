"""Baselines of reward models that are computed here alone: a bag of words by logistic regression, and rules of length.

V    known words    C    comparisons
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.core.types import Task

WORD = re.compile(r"\w+|[^\w\s]")
RIDGE = 1e-3  # weight of the squares of the weights


def baselines(learned: Sequence[Task], unseen: Sequence[Task]) -> dict[str, float]:
    """Shares of held-out comparisons that are won without a model: by a bag of words, by the longer and the shorter one."""
    names = {
        word: place for place, word in enumerate(sorted({w for t in learned for x in t["responses"] for w in words(x)}))
    }
    weight = logistic_regression(torch.stack(differences(learned, names)))
    bag = torch.stack(differences(unseen, names)) @ weight
    longer = [
        won(len(words(task["responses"][int(better)])) - len(words(task["responses"][int(worse)])))
        for task in unseen
        for better, worse, *_ in task["comparisons"]
    ]
    return {"bag": mean([won(x) for x in bag.tolist()]), "longer": mean(longer), "shorter": 1 - mean(longer)}


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def differences(tasks: Sequence[Task], names: dict[str, int]) -> list[Tensor]:
    """Counts of words in the better response less those in the worse one, [V] a comparison; unknown words left out."""
    found = []
    for task in tasks:
        counts = [torch.zeros(len(names), dtype=torch.float64) for _ in task["responses"]]
        for count, text in zip(counts, task["responses"], strict=True):
            for word, times in Counter(words(text)).items():
                if word in names:
                    count[names[word]] = times
        found += [counts[int(better)] - counts[int(worse)] for better, worse, *_ in task["comparisons"]]
    return found


def logistic_regression(inputs: Tensor) -> Tensor:
    """Weights [V] of inputs [C, V] that are all of the better side: mean of -log sigma(x w) + RIDGE |w|^2, least."""
    weight = torch.zeros(inputs.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=500, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.softplus(-(inputs @ weight)).mean() + RIDGE * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach()


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def won(difference: float) -> float:
    return 0.5 if difference == 0 else float(difference > 0)
