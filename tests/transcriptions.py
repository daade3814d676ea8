"""Each algorithm written down from its paper, one rollout and one token at a time, with nothing of the library's.

`loss(name, rollouts)` takes for each rollout: lp (scalars with a gradient), old and ref (numbers), its reward and its group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, stdev

from torch import Tensor

L_MAX = 20  # Dr. GRPO's constant in these tests
EPS = 1e-6


@dataclass
class Played:
    lp: list[Tensor]
    old: list[float]
    ref: list[float]
    reward: float  # in total
    group: str
    steps: list[tuple[int, float]]  # (tokens before it, step reward): part of the total


Loss = Callable[[list[Played]], Tensor]


def rewards_of(group: str, rollouts: list[Played]) -> list[float]:
    return [r.reward for r in rollouts if r.group == group]


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    bounded = ratio if 1 - low <= ratio <= 1 + high else ratio.detach() * 0 + (1 - low if ratio < 1 - low else 1 + high)
    first, second = ratio * advantage, bounded * advantage
    return first if first <= second else second


def over_group_std(rollout: Played, rollouts: list[Played]) -> float:
    rewards = rewards_of(rollout.group, rollouts)
    return (rollout.reward - mean(rewards)) / (stdev(rewards) + EPS)


def over_group(rollout: Played, rollouts: list[Played]) -> float:
    return rollout.reward - mean(rewards_of(rollout.group, rollouts))


def over_batch(rollout: Played, rollouts: list[Played]) -> float:
    return rollout.reward - mean(r.reward for r in rollouts)


def k3(lp: Tensor, ref: float) -> Tensor:
    return (ref - lp).exp() - 1 - (ref - lp)


def grpo(rollouts: list[Played]) -> Tensor:
    """DeepSeekMath, equation 3: mean over rollouts of the mean over tokens."""
    total = 0.0
    for r in rollouts:
        a, inner = over_group_std(r, rollouts), 0.0
        for lp, old, ref in zip(r.lp, r.old, r.ref, strict=True):
            inner = inner + clipped((lp - old).exp(), a, 0.2, 0.2) - 0.04 * k3(lp, ref)
        total = total + inner / len(r.lp)
    return -total / len(rollouts)  # type: ignore[return-value,operator]


def dr_grpo(rollouts: list[Played]) -> Tensor:
    total = 0.0
    for r in rollouts:
        a = over_group(r, rollouts)
        total = total + sum(clipped((lp - old).exp(), a, 0.2, 0.2) for lp, old in zip(r.lp, r.old, strict=True)) / L_MAX
    return -total / len(rollouts)  # type: ignore[return-value,operator]


def rloo(rollouts: list[Played]) -> Tensor:
    """The KL of the sequence is part of the reward: R - 0.05 log(pi_old(y) / pi_ref(y))."""
    punished = [r.reward - 0.05 * (sum(r.old) - sum(r.ref)) for r in rollouts]
    total = 0.0
    for i, r in enumerate(rollouts):
        others = [punished[j] for j, o in enumerate(rollouts) if o.group == r.group and j != i]
        a = punished[i] - mean(others)
        total = total + sum((lp - old).exp() * a for lp, old in zip(r.lp, r.old, strict=True))
    return -total / len(rollouts)  # type: ignore[return-value,operator]


def to_go(r: Played, t: int) -> float:
    """What comes after token t (0, 1, ...) was chosen: step rewards whose step ends after it, and the final reward."""
    final = r.reward - sum(reward for _, reward in r.steps)
    return final + sum(reward for before, reward in r.steps if before > t)


def reinforce(rollouts: list[Played]) -> Tensor:
    total = sum(lp * to_go(r, t) for r in rollouts for t, lp in enumerate(r.lp))
    return -total / len(rollouts)  # type: ignore[return-value]


def whitened_clip(rollouts: list[Played], returns: list[list[float]]) -> Tensor:
    every = [x for own in returns for x in own]
    centre, spread, total = mean(every), stdev(every), 0.0
    for r, own in zip(rollouts, returns, strict=True):
        for lp, old, x in zip(r.lp, r.old, own, strict=True):
            total = total + clipped((lp - old).exp(), (x - centre) / (spread + 1e-8), 0.2, 0.2)
    return total / len(every)  # type: ignore[return-value]


def reinforce_plus_plus(rollouts: list[Played]) -> Tensor:
    """A_t = r - beta sum_{s >= t} KL(s), normalised over the batch."""
    returns = []
    for r in rollouts:
        kl = [old - ref for old, ref in zip(r.old, r.ref, strict=True)]
        returns.append([to_go(r, t) - 0.01 * sum(kl[t:]) for t in range(len(r.lp))])
    return -whitened_clip(rollouts, returns)


def reinforce_plus_plus_baseline(rollouts: list[Played]) -> Tensor:
    returns = []
    for r in rollouts:
        baseline = mean(rewards_of(r.group, rollouts))
        returns.append([to_go(r, t) - baseline for t in range(len(r.lp))])
    tokens = sum(len(r.lp) for r in rollouts)
    k2 = sum((lp - ref) ** 2 / 2 for r in rollouts for lp, ref in zip(r.lp, r.ref, strict=True)) / tokens
    return -whitened_clip(rollouts, returns) + 0.01 * k2  # type: ignore[return-value]


def grpo_process(rollouts: list[Played]) -> Tensor:
    total = 0.0
    for r in rollouts:
        every = [x for o in rollouts if o.group == r.group for _, x in ended(o)]
        inner = 0.0
        for t, (lp, old, ref) in enumerate(zip(r.lp, r.old, r.ref, strict=True)):
            a = sum((x - mean(every)) / (stdev(every) + EPS) for end, x in ended(r) if end > t)
            inner = inner + clipped((lp - old).exp(), a, 0.2, 0.2) - 0.04 * k3(lp, ref)
        total = total + inner / len(r.lp)
    return -total / len(rollouts)  # type: ignore[return-value,operator]


def ended(r: Played) -> list[tuple[int, float]]:
    """(number of the token after which it ends, reward) of each step; the answer itself is the last step."""
    return [*r.steps, (len(r.lp), r.reward - sum(reward for _, reward in r.steps))]


def reinforce_baseline(rollouts: list[Played]) -> Tensor:
    return -sum(sum(r.lp) * over_batch(r, rollouts) for r in rollouts) / len(rollouts)  # type: ignore[return-value]


def off_policy_pg(rollouts: list[Played]) -> Tensor:
    total = 0.0
    for r in rollouts:
        product = 1.0
        for lp, old in zip(r.lp, r.old, strict=True):
            product = product * (lp.detach() - old).exp()
            total = total + product * lp * over_batch(r, rollouts)
    return -total / len(rollouts)  # type: ignore[return-value,operator]


def grpo_sequence(rollouts: list[Played]) -> Tensor:
    """One clipped term per response; its KL is the mean over tokens."""
    total = 0.0
    for r in rollouts:
        ratio = sum(lp - old for lp, old in zip(r.lp, r.old, strict=True)).exp()  # type: ignore[union-attr]
        kl = sum(k3(lp, ref) for lp, ref in zip(r.lp, r.ref, strict=True)) / len(r.lp)
        total = total + clipped(ratio, over_group_std(r, rollouts), 0.2, 0.2) - 0.04 * kl
    return -total / len(rollouts)  # type: ignore[return-value,operator]


def gspo(rollouts: list[Played]) -> Tensor:
    total = 0.0
    for r in rollouts:
        s = (sum(lp - old for lp, old in zip(r.lp, r.old, strict=True)) / len(r.lp)).exp()  # type: ignore[union-attr]
        total = total + clipped(s, over_group_std(r, rollouts), 3e-4, 4e-4)
    return -total / len(rollouts)  # type: ignore[return-value,operator]


def gspo_token(rollouts: list[Played]) -> Tensor:
    total = 0.0
    for r in rollouts:
        s = (sum(lp - old for lp, old in zip(r.lp, r.old, strict=True)) / len(r.lp)).exp().detach()  # type: ignore[union-attr]
        a = over_group_std(r, rollouts)
        total = total + sum(clipped(s * lp.exp() / lp.exp().detach(), a, 3e-4, 4e-4) for lp in r.lp) / len(r.lp)
    return -total / len(rollouts)  # type: ignore[return-value,operator]


def gmpo(rollouts: list[Played]) -> Tensor:
    """Equation 4 with the clip in log space: the geometric mean of the pessimistic token ratios, times A."""
    total = 0.0
    for r in rollouts:
        a, logs = over_group_std(r, rollouts), 0.0
        for lp, old in zip(r.lp, r.old, strict=True):
            x = lp - old
            bounded = x if -0.4 <= x <= 0.4 else x.detach() * 0 + (0.4 if x > 0 else -0.4)
            logs = logs + ((x if x <= bounded else bounded) if a >= 0 else (x if x >= bounded else bounded))
        total = total + (logs / len(r.lp)).exp() * a  # type: ignore[union-attr]
    return -total / len(rollouts)  # type: ignore[return-value,operator]


def gpg(rollouts: list[Played]) -> Tensor:
    tokens = sum(len(r.lp) for r in rollouts)
    useful = sum(len(set(rewards_of(r.group, rollouts))) > 1 for r in rollouts)
    scale = len(rollouts) / useful
    return -sum(sum(r.lp) * over_group(r, rollouts) * scale for r in rollouts) / tokens  # type: ignore[return-value]


def lite_ppo(rollouts: list[Played]) -> Tensor:
    tokens, spread = sum(len(r.lp) for r in rollouts), stdev(r.reward for r in rollouts)
    total = 0.0
    for r in rollouts:
        a = over_group(r, rollouts) / (spread + EPS)
        total = total + sum(clipped((lp - old).exp(), a, 0.2, 0.2) for lp, old in zip(r.lp, r.old, strict=True))
    return -total / tokens  # type: ignore[return-value,operator]


def cispo(rollouts: list[Played]) -> Tensor:
    tokens, total = sum(len(r.lp) for r in rollouts), 0.0
    for r in rollouts:
        a = over_group_std(r, rollouts)
        for lp, old in zip(r.lp, r.old, strict=True):
            total = total + min((lp.detach() - old).exp().item(), 5.0) * a * lp
    return -total / tokens  # type: ignore[return-value,operator]


LOSSES: dict[str, Loss] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce-baseline": reinforce_baseline,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "grpo-process": grpo_process,
    "off-policy-pg": off_policy_pg,
    "grpo-sequence": grpo_sequence,
    "gspo": gspo,
    "gspo-token": gspo_token,
    "gmpo": gmpo,
    "gpg": gpg,
    "lite-ppo": lite_ppo,
    "cispo": cispo,
}
