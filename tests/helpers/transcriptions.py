"""Each algorithm written down from its paper, one rollout and one token at a time, with nothing of the library's.

`LOSSES[name](rollouts)` is the loss of an optimizer batch. Numbers stand for what is known when the rollouts were made,
scalars with a gradient for what the models say now. `TEXTS[name](texts)` is what pretraining text adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean, pstdev, stdev
from typing import Any

from torch import Tensor

L_MAX = 20  # in these tests: Dr. GRPO's constant and DAPO's longest reply
L_CACHE = 4  # DAPO's soft interval in these tests
EPS = 1e-6
ZERO: Any = 0.0  # where a sum of tensors begins


@dataclass
class Played:
    lp: list[Tensor]
    old: list[float]
    ref: list[float]
    reward: float  # in total
    group: str
    steps: list[tuple[int, float]]  # (tokens before it, step reward): part of the total
    truncated: bool = False
    correct: bool = False
    old_values: list[float] = field(default_factory=list)  # the critic's, when the rollouts were made
    values: list[Tensor] = field(default_factory=list)  # the critic's now
    pi: list[Tensor] = field(default_factory=list)  # [vocabulary] probabilities of each action now
    q: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # [vocabulary] each: the twins' action values now
    slow_q: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the same of the slow copies, without a gradient
    slow_values: list[float] = field(default_factory=list)  # of states, by the slow copy of their network
    taken: list[int] = field(default_factory=list)  # the actions
    p: list[Tensor] = field(default_factory=list)  # [vocabulary] probabilities of each action now
    tea: list[Tensor] = field(default_factory=list)  # [vocabulary] the same of the teacher, without a gradient
    greedy: float = 0.0  # the reward of a greedy reply to its prompt
    turns: list[tuple[int, tuple[int, ...]]] = field(
        default_factory=list
    )  # (tokens before it, observation behind which)


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
    total = ZERO
    for r in rollouts:
        a, inner = over_group_std(r, rollouts), ZERO
        for lp, old, ref in zip(r.lp, r.old, r.ref, strict=True):
            inner = inner + clipped((lp - old).exp(), a, 0.2, 0.2) - 0.04 * k3(lp, ref)
        total = total + inner / len(r.lp)
    return -total / len(rollouts)


def dr_grpo(rollouts: list[Played]) -> Tensor:
    total = ZERO
    for r in rollouts:
        a = over_group(r, rollouts)
        total = total + sum(clipped((lp - old).exp(), a, 0.2, 0.2) for lp, old in zip(r.lp, r.old, strict=True)) / L_MAX
    return -total / len(rollouts)


def rloo(rollouts: list[Played]) -> Tensor:
    """The KL of the sequence is part of the reward: R - 0.05 log(pi_old(y) / pi_ref(y))."""
    punished = [r.reward - 0.05 * (sum(r.old) - sum(r.ref)) for r in rollouts]
    total = ZERO
    for i, r in enumerate(rollouts):
        others = [punished[j] for j, o in enumerate(rollouts) if o.group == r.group and j != i]
        a = punished[i] - mean(others)
        total = total + sum((lp - old).exp() * a for lp, old in zip(r.lp, r.old, strict=True))
    return -total / len(rollouts)


def remax(rollouts: list[Played]) -> Tensor:
    """ReMax, algorithm 1: the log-likelihood of each reply times its reward above that of the greedy reply."""
    total = ZERO
    for r in rollouts:
        total = total + sum(r.lp) * (r.reward - r.greedy)
    return -total / len(rollouts)


def to_go(r: Played, t: int) -> float:
    """What comes after token t (0, 1, ...) was chosen: step rewards whose step ends after it, and the final reward."""
    final = r.reward - sum(reward for _, reward in r.steps)
    return final + sum(reward for before, reward in r.steps if before > t)


def reinforce(rollouts: list[Played]) -> Tensor:
    total = sum((lp * to_go(r, t) for r in rollouts for t, lp in enumerate(r.lp)), ZERO)
    return -total / len(rollouts)


def whitened_clip(rollouts: list[Played], returns: list[list[float]]) -> Tensor:
    every = [x for own in returns for x in own]
    centre, spread, total = mean(every), stdev(every), ZERO
    for r, own in zip(rollouts, returns, strict=True):
        for lp, old, x in zip(r.lp, r.old, own, strict=True):
            total = total + clipped((lp - old).exp(), (x - centre) / (spread + 1e-8), 0.2, 0.2)
    return total / len(every)


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
    return -whitened_clip(rollouts, returns) + 0.01 * k2


def grpo_process(rollouts: list[Played]) -> Tensor:
    total = ZERO
    for r in rollouts:
        every = [x for o in rollouts if o.group == r.group for _, x in ended(o)]
        inner = ZERO
        for t, (lp, old, ref) in enumerate(zip(r.lp, r.old, r.ref, strict=True)):
            a = sum((x - mean(every)) / (stdev(every) + EPS) for end, x in ended(r) if end > t)
            inner = inner + clipped((lp - old).exp(), a, 0.2, 0.2) - 0.04 * k3(lp, ref)
        total = total + inner / len(r.lp)
    return -total / len(rollouts)


def ended(r: Played) -> list[tuple[int, float]]:
    """(number of the token after which it ends, reward) of each step; the answer itself is the last step."""
    return [*r.steps, (len(r.lp), r.reward - sum(reward for _, reward in r.steps))]


def returns(r: Played) -> list[float]:
    """Of each turn: what it and later turns earned, discounted by 0.95 a turn."""
    found = []
    for turn in range(len(r.turns)):
        worth = 0.0
        for later in range(turn, len(r.turns)):
            first = r.turns[later][0]
            last = r.turns[later + 1][0] if later + 1 < len(r.turns) else len(r.lp)
            worth += 0.95 ** (later - turn) * sum(x for end, x in ended(r) if first < end <= last)
        found.append(worth)
    return found


def gigpo(rollouts: list[Played]) -> Tensor:
    """Equations 3 to 8 of GiGPO."""

    def of_token(r: Played, t: int) -> Tensor:
        turn = max(k for k, (before, _) in enumerate(r.turns) if before <= t)
        same = [
            returns(o)[k]
            for o in rollouts
            if o.group == r.group
            for k, (_, observed) in enumerate(o.turns)
            if observed == r.turns[turn][1]
        ]
        own = returns(r)[turn] - mean(same)
        a = over_group_std(r, rollouts) + (own / (stdev(same) + EPS) if len(set(same)) > 1 else 0.0)
        ratio = (r.lp[t] - r.old[t]).exp()
        return -clipped(ratio, a, 0.2, 0.2) + 0.01 * k3(r.lp[t], r.ref[t])

    return over_tokens(rollouts, of_token)


def hgpo(rollouts: list[Played]) -> Tensor:
    """HGPO: turns behind the same last one, two and three observations weigh 2, 3 and 4, without those that give 0."""

    def behind(r: Played, turn: int, k: int) -> list[tuple[int, ...]]:
        return [observed for _, observed in r.turns[turn - k + 1 : turn + 1]]

    def of_turn(r: Played, turn: int) -> float:
        weighed = weights = 0.0
        for k in (1, 2, 3):
            if turn + 1 < k:
                break
            same = []
            for o in rollouts:
                for other in range(k - 1, len(o.turns)):
                    if o.group == r.group and behind(o, other, k) == behind(r, turn, k):
                        same.append(returns(o)[other])
            own = returns(r)[turn] - mean(same)
            if abs(own) > 1e-9:
                weighed += (k + 1) * own / (pstdev(same) + EPS)
                weights += k + 1
        return weighed / weights if weights else 0.0

    def of_token(r: Played, t: int) -> Tensor:
        turn = max(k for k, (before, _) in enumerate(r.turns) if before <= t)
        ratio = (r.lp[t] - r.old[t]).exp()
        return -clipped(ratio, of_turn(r, turn), 0.2, 0.2) + 0.01 * k3(r.lp[t], r.ref[t])

    return over_tokens(rollouts, of_token)


def reinforce_baseline(rollouts: list[Played]) -> Tensor:
    return ZERO - sum(sum(r.lp) * over_batch(r, rollouts) for r in rollouts) / len(rollouts)


def off_policy_pg(rollouts: list[Played]) -> Tensor:
    """Precup et al. 2000: a reward counts by the product of ratios up to it, for each token before. Here it ends a reply."""
    total = ZERO
    for r in rollouts:
        product = 1.0 + ZERO
        for lp, old in zip(r.lp, r.old, strict=True):
            product = product * (lp.detach() - old).exp()
        total = total + product * sum(r.lp) * over_batch(r, rollouts)
    return -total / len(rollouts)


def grpo_sequence(rollouts: list[Played]) -> Tensor:
    """One clipped term per response; its KL is the mean over tokens."""
    total = ZERO
    for r in rollouts:
        ratio = sum((lp - old for lp, old in zip(r.lp, r.old, strict=True)), ZERO).exp()
        kl = sum(k3(lp, ref) for lp, ref in zip(r.lp, r.ref, strict=True)) / len(r.lp)
        total = total + clipped(ratio, over_group_std(r, rollouts), 0.2, 0.2) - 0.04 * kl
    return -total / len(rollouts)


def gspo(rollouts: list[Played]) -> Tensor:
    total = ZERO
    for r in rollouts:
        s = (sum((lp - old for lp, old in zip(r.lp, r.old, strict=True)), ZERO) / len(r.lp)).exp()
        total = total + clipped(s, over_group_std(r, rollouts), 3e-4, 4e-4)
    return -total / len(rollouts)


def gspo_token(rollouts: list[Played]) -> Tensor:
    total = ZERO
    for r in rollouts:
        s = (sum((lp - old for lp, old in zip(r.lp, r.old, strict=True)), ZERO) / len(r.lp)).exp().detach()
        a = over_group_std(r, rollouts)
        total = total + sum(clipped(s * lp.exp() / lp.exp().detach(), a, 3e-4, 4e-4) for lp in r.lp) / len(r.lp)
    return -total / len(rollouts)


def gmpo(rollouts: list[Played]) -> Tensor:
    """Equation 4 with the clip in log space: the geometric mean of the pessimistic token ratios, times A."""
    total = ZERO
    for r in rollouts:
        a, logs = over_group_std(r, rollouts), ZERO
        for lp, old in zip(r.lp, r.old, strict=True):
            x = lp - old
            bounded = x if -0.4 <= x <= 0.4 else x.detach() * 0 + (0.4 if x > 0 else -0.4)
            logs = logs + ((x if x <= bounded else bounded) if a >= 0 else (x if x >= bounded else bounded))
        total = total + (logs / len(r.lp)).exp() * a
    return -total / len(rollouts)


def gpg(rollouts: list[Played]) -> Tensor:
    tokens = sum(len(r.lp) for r in rollouts)
    useful = sum(len(set(rewards_of(r.group, rollouts))) > 1 for r in rollouts)
    scale = len(rollouts) / useful
    return ZERO - sum(sum(r.lp) * over_group(r, rollouts) * scale for r in rollouts) / tokens


def lite_ppo(rollouts: list[Played]) -> Tensor:
    tokens, spread = sum(len(r.lp) for r in rollouts), stdev(r.reward for r in rollouts)
    total = ZERO
    for r in rollouts:
        a = over_group(r, rollouts) / (spread + EPS)
        total = total + sum(clipped((lp - old).exp(), a, 0.2, 0.2) for lp, old in zip(r.lp, r.old, strict=True))
    return -total / tokens


def pass_at_k(rollouts: list[Played]) -> Tensor:
    """Over all pairs, one by one: those that hold a right rollout earn 1, and a rollout has the mean of its own."""
    tokens, total = sum(len(r.lp) for r in rollouts), ZERO
    for r in rollouts:
        own = [o for o in rollouts if o.group == r.group]
        subsets = list(combinations(range(len(own)), 2))
        earned = [float(any(own[i].correct for i in subset)) for subset in subsets]
        place = next(i for i, o in enumerate(own) if o is r)
        mine = [x for x, subset in zip(earned, subsets, strict=True) if place in subset]
        a = (mean(mine) - mean(earned)) / pstdev(earned) if pstdev(earned) else 0.0
        total = total + sum(clipped((lp - old).exp(), a, 0.2, 0.2) for lp, old in zip(r.lp, r.old, strict=True))
    return -total / tokens


def cispo(rollouts: list[Played]) -> Tensor:
    tokens, total = sum(len(r.lp) for r in rollouts), ZERO
    for r in rollouts:
        a = over_group_std(r, rollouts)
        for lp, old in zip(r.lp, r.old, strict=True):
            total = total + min((lp.detach() - old).exp().item(), 5.0) * a * lp
    return -total / tokens


def sapo(rollouts: list[Played]) -> Tensor:
    """Equations 5 and 6: a sigmoid of the ratio, steeper where A is not positive."""
    total = ZERO
    for r in rollouts:
        a, inner = over_group_std(r, rollouts), ZERO
        tau = 1.0 if a > 0 else 1.05
        for lp, old in zip(r.lp, r.old, strict=True):
            inner = inner + a * 4 / tau / (1 + (-tau * ((lp - old).exp() - 1)).exp())
        total = total + inner / len(r.lp)
    return -total / len(rollouts)


def dppo(
    rollouts: list[Played], distance: Callable[[float, float], float] | None = None, bound: float = 0.15
) -> Tensor:
    """Masked, not clipped: a token that its advantage pushes further out of the trust region has no gradient."""
    total = ZERO
    for r in rollouts:
        a, inner = over_group(r, rollouts), ZERO
        for lp, old in zip(r.lp, r.old, strict=True):
            pi, mu = math.exp(lp.item()), math.exp(old)
            far = (abs(pi - mu) if distance is None else distance(pi, mu)) > bound
            if not (far and ((a > 0 and pi > mu) or (a < 0 and pi < mu))):
                inner = inner + (lp - old).exp() * a
        total = total + inner / L_MAX
    return -total / len(rollouts)


def binary_kl(pi: float, mu: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def dppo_kl(rollouts: list[Played]) -> Tensor:
    return dppo(rollouts, binary_kl, 0.05)


def maxrl(rollouts: list[Played]) -> Tensor:
    """Algorithm 1: (r - mean) / mean over the rollouts of a prompt, 0 where none has a reward."""
    total, tokens = ZERO, sum(len(r.lp) for r in rollouts)
    for r in rollouts:
        level = mean(rewards_of(r.group, rollouts))
        a = (r.reward - level) / (level + EPS)
        total = total + sum(clipped((lp - old).exp(), a, 0.2, 0.2) for lp, old in zip(r.lp, r.old, strict=True))
    return -total / tokens


def luspo(rollouts: list[Played]) -> Tensor:
    """GSPO's clipped term of each response, times its length."""
    total = ZERO
    for r in rollouts:
        s = (sum((lp - old for lp, old in zip(r.lp, r.old, strict=True)), ZERO) / len(r.lp)).exp()
        total = total + clipped(s, over_group_std(r, rollouts), 2e-3, 2.5e-3) * len(r.lp)
    return -total / len(rollouts)


def vespo(rollouts: list[Played]) -> Tensor:
    """W^k exp(lambda (1 - W)), W the product of a response's ratios, weighs its policy gradient."""
    total, tokens = ZERO, sum(len(r.lp) for r in rollouts)
    for r in rollouts:
        a, w = over_group_std(r, rollouts), 1.0
        for lp, old in zip(r.lp, r.old, strict=True):
            w *= math.exp(lp.item() - old)
        k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        total = total + w**k * math.exp(decay * (1 - w)) * a * sum(r.lp)
    return -total / tokens


def deepseek_v3_2(rollouts: list[Played]) -> Tensor:
    """Section 3.1: GRPO's clipped terms times a mask of whole responses, less beta r (pi_ref / pi - log pi_ref / pi - 1)."""
    total = ZERO
    for r in rollouts:
        a, inner = over_group(r, rollouts), ZERO
        drift = mean(old - lp.item() for lp, old in zip(r.lp, r.old, strict=True))
        kept = not (a < 0 and drift > 0.5)
        for lp, old, ref in zip(r.lp, r.old, r.ref, strict=True):
            ratio = (lp - old).exp()
            inner = inner + kept * clipped(ratio, a, 0.2, 0.2) - 0.04 * ratio * k3(lp, ref)
        total = total + inner / len(r.lp)
    return -total / len(rollouts)


def covariances(rollouts: list[Played]) -> list[list[float]]:
    """Equation 10: (log pi - its mean) (A - its mean), over all tokens."""
    every = [(old, over_group_std(r, rollouts)) for r in rollouts for old in r.old]
    level, centre = mean(old for old, _ in every), mean(a for _, a in every)
    return [[(old - level) * (over_group_std(r, rollouts) - centre) for old in r.old] for r in rollouts]


def clip_cov(rollouts: list[Played]) -> Tensor:
    """Equation 12: r A but for some tokens with a covariance within (1, 5); one for these few tokens: that in the middle."""
    total, tokens, cov = ZERO, sum(len(r.lp) for r in rollouts), covariances(rollouts)
    within = sorted(x for own in cov for x in own if 1 < x < 5)
    dropped = within[len(within) // 2] if within else None
    for r, own in zip(rollouts, cov, strict=True):
        a = over_group_std(r, rollouts)
        for lp, old, x in zip(r.lp, r.old, own, strict=True):
            total = total + (lp - old).exp() * (0.0 if x == dropped else a)
    return -total / tokens


def kl_cov(rollouts: list[Played]) -> Tensor:
    """Equation 14: r A, less |log r| at the tokens with the highest covariance; for these few tokens one.

    Where the policy is the old one, as in a step's first update, |log r| has no slope.
    """
    total, tokens, cov = ZERO, sum(len(r.lp) for r in rollouts), covariances(rollouts)
    highest = max(x for own in cov for x in own)
    for r, own in zip(rollouts, cov, strict=True):
        a = over_group_std(r, rollouts)
        for lp, old, x in zip(r.lp, r.old, own, strict=True):
            total = total + (lp - old).exp() * a
            if x == highest and abs(lp.item() - old) > 1e-9:
                total = total - 1.0 * (lp - old).abs()
    return -total / tokens


def chord(rollouts: list[Played]) -> Tensor:
    """GRPO's clipped terms, over all tokens; the demonstrations are beside it."""
    tokens, total = sum(len(r.lp) for r in rollouts), ZERO
    for r in rollouts:
        a = over_group_std(r, rollouts)
        total = total + sum(clipped((lp - old).exp(), a, 0.2, 0.2) for lp, old in zip(r.lp, r.old, strict=True))
    return -total / tokens


def demonstrated(texts: list[list[Tensor]]) -> Tensor:
    """CHORD-phi: p (1 - p) weighs the log-probability of each token of the demonstrations; 0.1 of it."""
    every = [lp * math.exp(lp.item()) * (1 - math.exp(lp.item())) for text in texts for lp in text]
    return ZERO - 0.1 * sum(every) / len(every)


def dapo(rollouts: list[Played]) -> Tensor:
    """Equation 10 with clip-higher; equation 13 shapes the reward; truncated replies are no part of the loss."""
    for r in rollouts:
        n = len(r.lp)
        over = 0.0 if n <= L_MAX - L_CACHE else -1.0 if n > L_MAX else ((L_MAX - L_CACHE) - n) / L_CACHE
        r.reward += over
    total, tokens = ZERO, 0
    for r in rollouts:
        if r.truncated:
            continue
        a, tokens = over_group_std(r, rollouts), tokens + len(r.lp)
        total = total + sum(clipped((lp - old).exp(), a, 0.2, 0.28) for lp, old in zip(r.lp, r.old, strict=True))
    return -total / tokens


def trpo(rollouts: list[Played]) -> Tensor:
    """Equation 14, the surrogate: the mean of pi / pi_old A."""
    total, tokens = ZERO, sum(len(r.lp) for r in rollouts)
    for r in rollouts:
        a = over_group_std(r, rollouts)
        total = total + sum((lp - old).exp() * a for lp, old in zip(r.lp, r.old, strict=True))
    return -total / tokens


# -- with a critic -----------------------------------------------------------------------------------------------------


def earned(r: Played, beta: float = 0.0) -> list[float]:
    """What each token earns: a step's reward comes with the last token before it, the rest with the last of all."""
    out = [-beta * (old - ref) for old, ref in zip(r.old, r.ref, strict=True)]
    for before, reward in r.steps:
        out[max(0, before - 1)] += reward
    out[-1] += r.reward - sum(reward for _, reward in r.steps)
    return out


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 as the sum it is: A_t = sum_k (gamma lambda)^k delta_(t+k), the value after the end being 0."""
    after = [*values[1:], 0.0]
    delta = [r + gamma * later - now for r, later, now in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, len(delta))) for t in range(len(delta))]


def value_loss(rollouts: list[Played], returns: list[list[float]]) -> Tensor:
    """Mean over tokens of 1/2 max((V - R)^2, (V_old + clip(V - V_old, -0.2, 0.2) - R)^2)."""
    total, tokens = ZERO, sum(len(r.lp) for r in rollouts)
    for r, aims in zip(rollouts, returns, strict=True):
        for v, before, aim in zip(r.values, r.old_values, aims, strict=True):
            free = (v - aim) ** 2
            bounded = (
                free if abs(v.item() - before) <= 0.2 else v * 0 + (before + (0.2 if v > before else -0.2) - aim) ** 2
            )
            total = total + (free if free >= bounded else bounded) / 2
    return total / tokens


def returns_of(rollouts: list[Played], beta: float, lam: float) -> list[list[float]]:
    """A + V of the time of the rollouts, gamma 1."""
    return [
        [a + v for a, v in zip(gae(earned(r, beta), r.old_values, 1.0, lam), r.old_values, strict=True)]
        for r in rollouts
    ]


def whitened(advantages: list[list[float]]) -> list[list[float]]:
    every = [a for own in advantages for a in own]
    return [[(a - mean(every)) / (stdev(every) + 1e-8) for a in own] for own in advantages]


def clipped_mean(rollouts: list[Played], advantages: list[list[float]], low: float, high: float) -> Tensor:
    total, tokens = ZERO, sum(len(r.lp) for r in rollouts)
    for r, own in zip(rollouts, advantages, strict=True):
        total = total + sum(
            clipped((lp - old).exp(), a, low, high) for lp, old, a in zip(r.lp, r.old, own, strict=True)
        )
    return total / tokens


def a2c(rollouts: list[Played]) -> Tensor:
    """A3C, algorithm S3: R = r_t + ... + r_{t+4} + V(s_{t+5}); log pi (R - V) + 0.01 H, and 0.1 (R - V)^2 / 2."""
    aims, total, tokens = [], ZERO, sum(len(r.lp) for r in rollouts)
    for r in rollouts:
        rewards, values = earned(r), r.old_values
        own = []
        for t in range(len(r.lp)):
            own.append(sum(rewards[t : t + 5]) + (values[t + 5] if t + 5 < len(values) else 0.0))
            total = total + r.lp[t] * (own[t] - values[t]) - 0.01 * (r.p[t] * r.p[t].log()).sum()
        aims.append(own)
    loss = ZERO
    for r, own in zip(rollouts, aims, strict=True):
        loss = loss + sum((v - aim) ** 2 / 2 for v, aim in zip(r.values, own, strict=True))
    return -total / tokens + 0.1 * loss / tokens


def ppo(rollouts: list[Played], beta: float = 0.05, lam: float = 0.95) -> Tensor:
    """Equations 7 and 9, the KL to the reference taken off each token's reward; no entropy bonus."""
    advantages = whitened([gae(earned(r, beta), r.old_values, 1.0, lam) for r in rollouts])
    policy = clipped_mean(rollouts, advantages, 0.2, 0.2)
    return -policy + 0.1 * value_loss(rollouts, returns_of(rollouts, beta, lam))


def ppo_kl(rollouts: list[Played]) -> Tensor:
    """Equation 8: r A - beta KL(old, new), the KL estimated, with q = new / old, as q - 1 - log q."""
    advantages = whitened([gae(earned(r), r.old_values, 1.0, 0.95) for r in rollouts])
    total, tokens = ZERO, sum(len(r.lp) for r in rollouts)
    for r, own in zip(rollouts, advantages, strict=True):
        for lp, old, a in zip(r.lp, r.old, own, strict=True):
            q = (lp - old).exp()
            total = total + q * a - 1.0 * (q - 1 - q.log())
    return -total / tokens + 0.1 * value_loss(rollouts, returns_of(rollouts, 0.0, 0.95))


def open_reasoner_zero(rollouts: list[Played]) -> Tensor:
    """gamma = lambda = 1 and no KL: the return is the sum of the rewards that follow."""
    aims = [[to_go_of(earned(r), t) for t in range(len(r.lp))] for r in rollouts]
    advantages = [
        [aim - v for aim, v in zip(own, r.old_values, strict=True)] for r, own in zip(rollouts, aims, strict=True)
    ]
    return -clipped_mean(rollouts, whitened(advantages), 0.2, 0.2) + 0.1 * value_loss(rollouts, aims)


def to_go_of(rewards: list[float], t: int) -> float:
    return sum(rewards[t:])


def vapo(rollouts: list[Played]) -> Tensor:
    """Lambda by length for the policy (equation 8), 1 for the critic; 0.1 x the mean NLL of correct replies (12)."""
    advantages = []
    for r in rollouts:
        lam = max(0.0, 1 - 1 / (0.05 * len(r.lp)))
        advantages.append(gae(earned(r), r.old_values, 1.0, lam))
    policy = clipped_mean(rollouts, whitened(advantages), 0.2, 0.28)
    good = [lp for r in rollouts if r.correct for lp in r.lp]
    nll = -sum(good, ZERO) / len(good) if good else ZERO
    return -policy + 0.1 * nll + 0.1 * value_loss(rollouts, returns_of(rollouts, 0.0, 1.0))


def sac(rollouts: list[Played]) -> Tensor:
    """Discrete soft actor-critic (arXiv 1910.07207): equations 3, 10 and 12, with temperature 0.01 and gamma 1."""
    alpha, total, tokens = 0.01, ZERO, sum(len(r.lp) for r in rollouts)
    for r in rollouts:
        rewards = earned(r)
        for t, (pi, (one, two)) in enumerate(zip(r.pi, r.q, strict=True)):
            y = rewards[t]
            if t + 1 < len(r.pi):  # the soft value of the next state, under the slow copies
                later, (a, b) = r.pi[t + 1].detach().tolist(), r.slow_q[t + 1]
                logs = r.pi[t + 1].detach().log().tolist()
                least = [min(x, z) for x, z in zip(a.tolist(), b.tolist(), strict=True)]
                y += sum(p * (m - alpha * log) for p, m, log in zip(later, least, logs, strict=True))
            action = r.taken[t]
            total = total + (one[action] - y) ** 2 / 2 + (two[action] - y) ** 2 / 2
            for p, x, z in zip(pi, one.tolist(), two.tolist(), strict=True):
                total = total + p * (alpha * p.log() - min(x, z))
    return total / tokens


def sac_v(rollouts: list[Played]) -> Tensor:
    """Soft actor-critic (arXiv 1801.01290): equations 5 (V), 7 and 8 (Q) and 10 (policy), expectations over the vocabulary
    as in arXiv 1910.07207, with temperature 0.01 and gamma 1.
    """
    alpha, total, tokens = 0.01, ZERO, sum(len(r.lp) for r in rollouts)
    for r in rollouts:
        rewards = earned(r)
        for t, (pi, (one, two)) in enumerate(zip(r.pi, r.q, strict=True)):
            y = rewards[t] + (r.slow_values[t + 1] if t + 1 < len(r.pi) else 0.0)
            action = r.taken[t]
            total = total + (one[action] - y) ** 2 / 2 + (two[action] - y) ** 2 / 2
            soft = 0.0
            for p, x, z in zip(pi, one.tolist(), two.tolist(), strict=True):
                total = total + p * (alpha * p.log() - min(x, z))
                soft += p.item() * (min(x, z) - alpha * math.log(p.item()))
            total = total + (r.values[t] - soft) ** 2 / 2
    return total / tokens


def pretraining(texts: list[list[Tensor]]) -> Tensor:
    """InstructGPT, equation 2: minus the mean log-probability of the tokens of pretraining text, coefficient 1."""
    every = [lp for text in texts for lp in text]
    return ZERO - sum(every) / len(every)


def over_tokens(rollouts: list[Played], of_token: Callable[[Played, int], Tensor]) -> Tensor:
    """The mean over all tokens of the batch."""
    total, count = ZERO, 0
    for r in rollouts:
        for t in range(len(r.lp)):
            total, count = total + of_token(r, t), count + 1
    return total / count


def kl(p: Tensor, q: Tensor) -> Tensor:
    total = ZERO
    for a in range(len(p)):
        total = total + p[a] * (p[a].log() - q[a].log())
    return total


def distill_reverse_kl(rollouts: list[Played]) -> Tensor:
    """GKD, algorithm 1 with the reverse KL: the policy first."""
    return over_tokens(rollouts, lambda r, t: kl(r.p[t], r.tea[t]))


def distill_forward_kl(rollouts: list[Played]) -> Tensor:
    """GKD, algorithm 1 with the forward KL: the teacher first."""
    return over_tokens(rollouts, lambda r, t: kl(r.tea[t], r.p[t]))


def distill_jsd(rollouts: list[Played]) -> Tensor:
    """GKD, equation 1, with beta 1/2."""

    def of_token(r: Played, t: int) -> Tensor:
        m = 0.5 * r.tea[t] + 0.5 * r.p[t]
        return 0.5 * kl(r.tea[t], m) + 0.5 * kl(r.p[t], m)

    return over_tokens(rollouts, of_token)


def distill_k1(rollouts: list[Played]) -> Tensor:
    """On-Policy Distillation (2025): minus log p - log q is the advantage of the token, in an importance-sampled loss."""

    def of_token(r: Played, t: int) -> Tensor:
        advantage = r.tea[t][r.taken[t]].log().item() - r.old[t]
        return -(r.lp[t] - r.old[t]).exp() * advantage

    return over_tokens(rollouts, of_token)


LOSSES: dict[str, Loss] = {
    "distill-reverse-kl": distill_reverse_kl,
    "distill-forward-kl": distill_forward_kl,
    "distill-jsd": distill_jsd,
    "distill-k1": distill_k1,
    "grpo": grpo,
    "iterative-grpo": grpo,
    "arpo": grpo,
    "dr-grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce-baseline": reinforce_baseline,
    "remax": remax,
    "reinforce++": reinforce_plus_plus,
    "reinforce++-baseline": reinforce_plus_plus_baseline,
    "grpo-process": grpo_process,
    "gigpo": gigpo,
    "hgpo": hgpo,
    "off-policy-pg": off_policy_pg,
    "grpo-sequence": grpo_sequence,
    "gspo": gspo,
    "gspo-token": gspo_token,
    "gmpo": gmpo,
    "gpg": gpg,
    "lite-ppo": lite_ppo,
    "pass-at-k": pass_at_k,
    "cispo": cispo,
    "dapo": dapo,
    "sapo": sapo,
    "dppo": dppo,
    "dppo-kl": dppo_kl,
    "maxrl": maxrl,
    "luspo": luspo,
    "vespo": vespo,
    "deepseek-v3.2": deepseek_v3_2,
    "clip-cov": clip_cov,
    "kl-cov": kl_cov,
    "chord": chord,
    "trpo": trpo,
    "a2c": a2c,
    "ppo": ppo,
    "ppo-kl": ppo_kl,
    "ppo-ptx": ppo,
    "open-reasoner-zero": open_reasoner_zero,
    "vapo": vapo,
    "sac": sac,
    "sac-v": sac_v,
}
TEXTS: dict[str, Callable[[list[list[Tensor]]], Tensor]] = {"ppo-ptx": pretraining, "chord": demonstrated}
