"""Rewards of rollouts and of their tokens, from which advantages are computed, and sums over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.core.batch import Scores
from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def total_reward(scores: Scores) -> Tensor:
    """Return the rewards less the KL penalty in the reward, float64 [S]."""
    reward = scores.reward.double()
    if not scores.penalty:
        return reward
    return reward - torch.stack([p.double().sum() for p in scores.penalty])


def earnings(scores: Scores, bootstrap: bool = False) -> list[Tensor]:
    """Return the reward earned at each token, float64 [n_i] for each rollout.

    The last token before a step's reward earns it (no token, if the reward came before the first one); the last token
    earns the final reward, unless `Scores.shares` redistribute it. `bootstrap`: the last token of a rollout that was cut
    off earns only the critic's value of the state before it.
    """
    out = []
    for i, length in enumerate(scores.length.long().tolist()):
        earned = torch.zeros(length, dtype=torch.float64)
        steps = scores.steps[i] if scores.steps else ()
        for before, reward in steps:
            if before:
                earned[before - 1] += reward
        add_final(earned, scores, i, scores.reward[i].item() - sum(reward for _, reward in steps))
        if scores.penalty:
            earned -= scores.penalty[i].double().cpu()
        if bootstrap and scores.truncated is not None and scores.truncated[i]:
            earned[-1] = scores.value[i][-1].item()
        out.append(earned)
    return out


def add_final(earned: Tensor, scores: Scores, i: int, reward: float) -> None:
    """Add a final reward of rollout i to the tokens that earn it; `earned` float64 [n_i] is changed in place."""
    if scores.shares:
        earned += reward * scores.shares[i]
    else:
        earned[-1] += reward


def standardised(
    values: Sequence[float], among: Sequence[float], eps: float | None, population: bool = False
) -> list[float]:
    """Return (value - mean) / (std + eps) of each value, with mean and std of `among`. `eps` None: do not divide.

    The result is exactly 0 if all numbers in `among` are equal, up to rounding, or if there is only one. `population`: the
    standard deviation divides by n, not by n - 1.
    """
    every = torch.tensor(among, dtype=torch.float64)
    if not len(every) or every.max() - every.min() <= 1e-8 * max(1.0, every.abs().max().item()):
        return [0.0] * len(values)
    scale = 1.0 if eps is None else every.std(correction=0 if population else 1).item() + eps
    return [(value - every.mean().item()) / scale for value in values]


def equal_rewards(scores: Scores) -> Tensor:
    """Return whether all rewards of the rollout's group are equal, so that it carries no signal: bool [S].

    If named parts are compared, each part must be equal: (1, 0) and (0, 1) have the same sum, and carry a signal. A
    greedy reply counts as a member of its group, since the others are compared with it.
    """
    if scores.greedy is not None:
        every = torch.cat([total_reward(scores), scores.greedy.double()])
        return equal_in_group(every, scores.group.repeat(2))[: len(scores.reward)]
    equal = [equal_in_group(x, scores.group) for x in (scores.parts.values() or [total_reward(scores)])]
    return torch.stack(equal).all(0)


def equal_in_group(reward: Tensor, group: Tensor) -> Tensor:
    """Return whether the value is equal, up to rounding, for all rollouts of the rollout's group: bool [S]."""
    _, group = group.unique(return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0
    high = torch.full((groups,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, group, reward, "amax")
    low = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce_(0, group, reward, "amin")
    scale = torch.maximum(high.abs(), low.abs()).clamp_min(1.0)
    return (high - low <= 1e-8 * scale)[group]


def discounted_sums(x: list[Tensor], discount: Tensor) -> list[Tensor]:
    """Compute y_t = x_t + discount y_(t+1) for each sequence; `discount` is one number, or one for each sequence."""
    if not x:
        return []
    last_first = torch.nn.utils.rnn.pad_sequence([own.flip(0) for own in x])  # [longest, S]: all end in row 0
    running = torch.zeros_like(last_first[0])
    for row in last_first:
        running = row + discount * running
        row.copy_(running)
    return [last_first[: len(own), i].flip(0) for i, own in enumerate(x)]


def whitened(x: list[Tensor], eps: float, open_end: Tensor | None = None) -> list[Tensor]:
    """Return (x - mean) / (std + eps), with mean and std over the tokens of all rollouts.

    `open_end`, bool [S]: rollouts whose last token has no estimate of its own. It is not counted, and gets 0.
    """
    skipped = [False] * len(x) if open_end is None else open_end.tolist()
    every = torch.cat([own[:-1] if skip else own for own, skip in zip(x, skipped, strict=True)])
    spread = every.std() if len(every) > 1 else every.new_zeros(())
    mean = every.mean() if len(every) else every.new_zeros(())
    out = [(own - mean) / (spread + eps) for own in x]
    for own, skip in zip(out, skipped, strict=True):
        if skip:
            own[-1] = 0
    return out


def per_token(advantage: Tensor | list[Tensor], scores: Scores) -> list[Tensor]:
    """Return advantages as one [n_i] for each rollout, from that form or from [S]."""
    if isinstance(advantage, list):
        return [a.to(scores.length.dtype) for a in advantage]
    lengths = scores.length.long()
    every = advantage.to(scores.length.dtype).repeat_interleave(lengths.to(advantage.device))
    return list(every.split(lengths.tolist()))
