"""Each preference row written down from its paper, one response and one token at a time, with nothing of the library's.

`LOSSES[name](items)` is the loss of an optimizer batch: a mean over its comparisons, which weigh their shares, or over its
labels. What papers leave to a part of the family (divergence, tail, denominators, imitation) stands in functions of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

ZERO: Any = 0.0  # where a sum of tensors begins
DRIFT = 0.3  # KTO's reference point in these tests
SHIFT = 0.2  # BCO's


@dataclass
class Said:
    """A response: what the policy says of each of its tokens, and what the reference said."""

    lp: list[Tensor]
    ref: list[float]
    squares: list[float]  # sum over the vocabulary of p^2 at each token

    @property
    def ratio(self) -> Tensor:
        total = ZERO
        for lp, ref in zip(self.lp, self.ref, strict=True):
            total = total + (lp - ref)
        return total

    @property
    def likelihood(self) -> Tensor:
        total = ZERO
        for lp in self.lp:
            total = total + lp
        return total

    @property
    def n(self) -> int:
        return len(self.lp)


@dataclass
class Asked:
    """A prompt: responses to it, and (better, worse, share, margin) of each comparison."""

    responses: list[Said]
    compared: list[tuple[int, int, float, float]]


Loss = Callable[[list[Asked]], Tensor]


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def over_pairs(items: list[Asked], loss: Callable[[Said, Said], Tensor]) -> Tensor:
    """The mean over comparisons, each counting its share."""
    total, count = ZERO, 0.0
    for item in items:
        for better, worse, share, _ in item.compared:
            total = total + share * loss(item.responses[better], item.responses[worse])
            count += share
    return total / count


def labels(item: Asked) -> list[tuple[Said, bool]]:
    """Each response that won more than it lost is good, each that lost more is bad."""
    found = []
    for place, response in enumerate(item.responses):
        won = sum(share for better, _, share, _ in item.compared if better == place)
        lost = sum(share for _, worse, share, _ in item.compared if worse == place)
        if won != lost:
            found.append((response, won > lost))
    return found


def best(item: Asked) -> list[Said]:
    """Responses that are better than another and worse than none."""
    better = {better for better, _, _, _ in item.compared}
    worse = {worse for _, worse, _, _ in item.compared}
    return [item.responses[place] for place in sorted(better - worse)]


def dpo(items: list[Asked]) -> Tensor:
    """DPO, equation 7."""
    return over_pairs(items, lambda w, v: -torch.log(sigma(0.1 * w.ratio - 0.1 * v.ratio)))


def cdpo(items: list[Asked]) -> Tensor:
    """Mitchell's note: a tenth of the labels are flipped."""

    def loss(w: Said, v: Said) -> Tensor:
        x = 0.1 * (w.ratio - v.ratio)
        return -0.9 * torch.log(sigma(x)) - 0.1 * torch.log(sigma(-x))

    return over_pairs(items, loss)


def robust(items: list[Asked]) -> Tensor:
    """Robust DPO: ((1 - e) L(w, v) - e L(v, w)) / (1 - 2 e)."""

    def plain(w: Said, v: Said) -> Tensor:
        return -torch.log(sigma(0.1 * (w.ratio - v.ratio)))

    return over_pairs(items, lambda w, v: (0.9 * plain(w, v) - 0.1 * plain(v, w)) / 0.8)


def dpo_norm(items: list[Asked]) -> Tensor:
    """Tulu 3, section 5.1.2."""
    return over_pairs(items, lambda w, v: -torch.log(sigma(5.0 / w.n * w.ratio - 5.0 / v.n * v.ratio)))


def ipo(items: list[Asked]) -> Tensor:
    """IPO, equation 17, tau = 0.1, per token."""
    return over_pairs(items, lambda w, v: (w.ratio / w.n - v.ratio / v.n - 1 / (2 * 0.1)) ** 2)


def hinge(items: list[Asked]) -> Tensor:
    def loss(w: Said, v: Said) -> Tensor:
        x = 0.1 * w.ratio - 0.1 * v.ratio
        return 1 - x if x < 1 else 0 * x

    return over_pairs(items, loss)


def kto(items: list[Asked]) -> Tensor:
    """KTO, equation 8, both weights 1."""
    told, total = [pair for item in items for pair in labels(item)], ZERO
    for y, good in told:
        value = sigma(0.1 * (y.ratio - DRIFT)) if good else sigma(0.1 * (DRIFT - y.ratio))
        total = total + (1 - value)
    return total / len(told)


def imitated(items: list[Asked], per: str) -> Tensor:
    """Negative log-likelihood of the best responses, under one of three denominators."""
    chosen = [y for item in items for y in best(item)]
    if per == "tokens":
        return -sum((y.likelihood for y in chosen), ZERO) / sum(y.n for y in chosen)
    if per == "responses":
        return -sum((y.likelihood / y.n for y in chosen), ZERO) / len(chosen)
    return -sum((y.likelihood for y in chosen), ZERO) / len(chosen)


def orpo(items: list[Asked]) -> Tensor:
    """ORPO, equations 3, 4, 6 and 7, lambda = 0.1."""

    def odds(y: Said) -> Tensor:
        p = torch.exp(y.likelihood / y.n)
        return p / (1 - p)

    return imitated(items, "tokens") + 0.1 * over_pairs(
        items, lambda w, v: -torch.log(sigma(torch.log(odds(w) / odds(v))))
    )


def cpo(items: list[Asked]) -> Tensor:
    preferred = over_pairs(items, lambda w, v: -torch.log(sigma(0.1 * w.likelihood - 0.1 * v.likelihood)))
    return preferred + imitated(items, "tokens")


def simpo(items: list[Asked]) -> Tensor:
    """SimPO, equation 6, beta = 2, gamma = 1."""
    return over_pairs(items, lambda w, v: -torch.log(sigma(2 / w.n * w.likelihood - 2 / v.n * v.likelihood - 1)))


def alphapo(items: list[Asked]) -> Tensor:
    """Equation 9: r = (1 - p^(-alpha)) / alpha with p the geometric mean of the tokens' probabilities."""

    def reward(y: Said) -> Tensor:
        return (1 - (y.likelihood / y.n).exp() ** -0.25) / 0.25

    return over_pairs(items, lambda w, v: -sigma(2.5 * (reward(w) - reward(v)) - 0.1).log())


def rpo(items: list[Asked]) -> Tensor:
    """Iterative RPO, equation 1, alpha = 1."""
    return dpo(items) + imitated(items, "responses")


def sppo(items: list[Asked]) -> Tensor:
    """SPPO, equation 4.7, eta = 1000: P is 1 for a win and 0 for a loss."""
    return over_pairs(items, lambda w, v: (w.ratio - 1000 * (1 - 0.5)) ** 2 + (v.ratio - 1000 * (0 - 0.5)) ** 2)


def apo_zero(items: list[Asked]) -> Tensor:
    return over_pairs(items, lambda w, v: 1 - sigma(0.1 * w.ratio) + sigma(0.1 * v.ratio))


def apo_down(items: list[Asked]) -> Tensor:
    return over_pairs(items, lambda w, v: sigma(0.1 * w.ratio) + 1 - sigma(0.1 * (w.ratio - v.ratio)))


def nca(items: list[Asked]) -> Tensor:
    """NCA for pairs: log sigma of the winner, and half of log sigma of the negative of both."""

    def loss(w: Said, v: Said) -> Tensor:
        falls = torch.log(sigma(-0.1 * w.ratio)) + torch.log(sigma(-0.1 * v.ratio))
        return -torch.log(sigma(0.1 * w.ratio)) - falls / 2

    return over_pairs(items, loss)


def exo(items: list[Asked]) -> Tensor:
    """EXO, equation 16: KL(softmax of both rewards || labels smoothed by 0.001)."""

    def loss(w: Said, v: Said) -> Tensor:
        both = torch.exp(0.1 * w.ratio) + torch.exp(0.1 * v.ratio)
        first, second = torch.exp(0.1 * w.ratio) / both, torch.exp(0.1 * v.ratio) / both
        return first * torch.log(first / 0.999) + second * torch.log(second / 0.001)

    return over_pairs(items, loss)


def bco(items: list[Asked]) -> Tensor:
    """BCO: a classifier whose threshold is the shift."""

    def loss(w: Said, v: Said) -> Tensor:
        return -torch.log(sigma(0.1 * w.ratio - SHIFT)) - torch.log(sigma(-(0.1 * v.ratio - SHIFT)))

    return over_pairs(items, loss)


def quantile(weighed: list[tuple[Tensor, float]], level: float) -> Tensor:
    """The smallest value with at least this share of all the weight at or below it."""
    total, below = sum(weight for _, weight in weighed), 0.0
    for value, weight in sorted(weighed, key=lambda pair: pair[0].item()):
        below += weight / total
        if below >= level:
            return value
    raise AssertionError("a level is below 1")


def between_quantiles(one: list[tuple[Tensor, float]], other: list[tuple[Tensor, float]]) -> Tensor:
    """AOT: the integral over t from 0 to 1 of -log sigma(0.1 (the t-quantile of the one - that of the other))."""
    levels = {0.0}
    for side in (one, other):
        below, total = 0.0, sum(weight for _, weight in side)
        for _, weight in sorted(side, key=lambda pair: pair[0].item()):
            below += weight / total
            levels.add(min(below, 1.0))
    integral, borders = ZERO, sorted(levels)
    for low, high in pairwise(borders):
        if high - low > 1e-12:
            middle = (low + high) / 2
            cost = -torch.log(sigma(0.1 * (quantile(one, middle) - quantile(other, middle))))
            integral = integral + (high - low) * cost
    return integral


def aot(items: list[Asked]) -> Tensor:
    """Paired: log pi(y_w) - log pi(y_l) of every comparison against the same of the reference."""
    policy, reference = [], []
    for item in items:
        for better, worse, share, _ in item.compared:
            w, v = item.responses[better], item.responses[worse]
            policy.append((w.likelihood - v.likelihood, share))
            reference.append((torch.tensor(sum(w.ref) - sum(v.ref), dtype=torch.float64), share))
    return between_quantiles(policy, reference)


def aot_unpaired(items: list[Asked]) -> Tensor:
    told = [pair for item in items for pair in labels(item)]
    good, bad = ([(y.ratio, 1.0) for y, is_good in told if is_good is side] for side in (True, False))
    return between_quantiles(good, bad)


def desensitised(tail: float) -> Loss:
    """LD-DPO: what lies behind the length of the shorter one counts `tail`."""

    def ratio(y: Said, public: int) -> Tensor:
        total = ZERO
        for place, (lp, ref) in enumerate(zip(y.lp, y.ref, strict=True), 1):
            total = total + (lp - ref) * (1 if place <= public else tail)
        return total

    def loss(w: Said, v: Said) -> Tensor:
        public = min(w.n, v.n)
        return -torch.log(sigma(0.1 * (ratio(w, public) - ratio(v, public))))

    return lambda items: over_pairs(items, loss)


def by_policy(items: list[Asked], beta: float = 0.1) -> Tensor:
    """WPO, equation 2, sampled alignment: a constant for each response."""

    def weight(y: Said) -> float:
        logs = [lp.item() - math.log(square) for lp, square in zip(y.lp, y.squares, strict=True)]
        return math.exp(sum(logs) / len(logs))

    def loss(w: Said, v: Said) -> Tensor:
        return -weight(w) * weight(v) * torch.log(sigma(beta * (w.ratio - v.ratio)))

    return over_pairs(items, loss)


def wpo(items: list[Asked]) -> Tensor:
    return by_policy(items, 0.01)


LOSSES: dict[str, Loss] = {
    "dpo": dpo,
    "tr-dpo": dpo,  # whose reference moves between updates
    "cdpo": cdpo,
    "robust": robust,
    "dpo-norm": dpo_norm,
    "ld-dpo": desensitised(0.5),
    "wpo": wpo,
    "ipo": ipo,
    "hinge": hinge,
    "kto": kto,
    "orpo": orpo,
    "cpo": cpo,
    "simpo": simpo,
    "alphapo": alphapo,
    "rpo": rpo,
    "sppo": sppo,
    "apo-zero": apo_zero,
    "apo-down": apo_down,
    "nca": nca,
    "exo": exo,
    "bco": bco,
    "aot": aot,
    "aot-unpaired": aot_unpaired,
}


# -- what rows may be changed to -----------------------------------------------------------------------------------------


def derivative(name: str, ratio: Tensor) -> Tensor:
    """f'(u) of a divergence at u = exp(ratio) (f-DPO, table 1), less what it is at u = 1; its alpha is 0.3."""
    u = torch.exp(ratio)
    return {
        "reverse-kl": lambda: (torch.log(u) + 1) - 1,
        "forward-kl": lambda: -1 / u + 1,
        "jensen-shannon": lambda: torch.log(2 * u / (1 + u)),
        "alpha": lambda: (1 - u**-0.3) / 0.3,
    }[name]()


def diverging(name: str) -> Loss:
    def loss(w: Said, v: Said) -> Tensor:
        return -torch.log(sigma(0.1 * derivative(name, w.ratio) - 0.1 * derivative(name, v.ratio)))

    return lambda items: over_pairs(items, loss)


def labelled_by_policy(items: list[Asked]) -> Tensor:
    """The same for KTO: each label counts the weight of its one response."""
    told, total = [pair for item in items for pair in labels(item)], ZERO
    for y, good in told:
        logs = [lp.item() - math.log(square) for lp, square in zip(y.lp, y.squares, strict=True)]
        value = sigma(0.1 * (y.ratio - DRIFT)) if good else sigma(0.1 * (DRIFT - y.ratio))
        total = total + math.exp(sum(logs) / len(logs)) * (1 - value)
    return total / len(told)


def with_margins(constant: float, scale: float) -> Loss:
    def loss(items: list[Asked]) -> Tensor:
        total, count = ZERO, 0.0
        for item in items:
            for better, worse, share, margin in item.compared:
                x = 0.1 * (item.responses[better].ratio - item.responses[worse].ratio)
                total = total - share * torch.log(sigma(x - constant - scale * margin))
                count += share
        return total / count

    return loss


def per_prompt(items: list[Asked]) -> Tensor:
    """InstructGPT, equation 1: the mean over prompts of the mean over the prompt's comparisons."""
    total = ZERO
    for item in items:
        total = total + dpo([item])
    return total / len(items)


def of_rankings(items: list[Asked], rankings: list[list[int]], beta: float) -> Tensor:
    """DPO, appendix A.3: -log of the product over ranks k of e^(r_k) / sum over j >= k of e^(r_j), a mean over its factors.

    The last factor is 1 and is not counted: nothing is chosen from one.
    """
    total, count = ZERO, 0
    for item, ranking in zip(items, rankings, strict=True):
        rewards = [beta * item.responses[place].ratio for place in ranking]
        for k in range(len(rewards) - 1):
            below = sum((torch.exp(r) for r in rewards[k:]), ZERO)
            total = total - torch.log(torch.exp(rewards[k]) / below)
            count += 1
    return total / count
