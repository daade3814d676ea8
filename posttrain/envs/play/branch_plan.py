"""The plan of branches: where rollouts branch, and which members of a group the branches are (ARPO, arXiv 2507.19849).

Decided here: timing decides nothing. Some members of a group begin with the prompt; the others are dealt to them
beforehand, as the share that each may begin. Where a rollout branches, its new branches begin members of its own share,
and the rest of the share is dealt again among all of them. So whether a rollout branches follows from its own replies,
and not from those of others meanwhile. Members that a rollout has not begun when it ends begin with the prompt, so
every group has all its members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BranchPlan:
    """When a rollout branches, and how many of a group begin with the prompt. Its settings: `algorithms.branching`."""

    first: float  # share of the group that begins with the prompt
    tokens: int  # of a reply, the first ones, whose entropy is estimated
    alpha: float
    beta: float
    threshold: float
    branches: int  # new ones at a time
    largest: float  # entropy that there can be, in nats: that of a uniform choice

    def begin(self, size: int) -> int:
        """Return the number of members of a group of this size that begin with the prompt."""
        return max(1, math.ceil(self.first * size - 1e-9))

    def branches_after(self, before: Sequence[float], now: Sequence[float]) -> bool:
        """Whether a rollout branches, by log-probabilities of two replies: the episode's first, and one behind a tool."""
        return self.alpha + self.beta * self.rise(before, now) > self.threshold

    def rise(self, before: Sequence[float], now: Sequence[float]) -> float:
        """By how much the entropy has risen, of the largest: E[-log p] is the entropy, so this estimates it unbiased."""
        return (self._entropy(now) - self._entropy(before)) / self.largest

    def _entropy(self, logp: Sequence[float]) -> float:
        first = logp[: self.tokens]
        return -math.fsum(first) / len(first)


class Shares:
    """The episodes that wait to begin, each as a branch of a rollout, or with the prompt when that rollout has ended."""

    def __init__(self, groups: Sequence[str], plan: BranchPlan | None) -> None:
        """`groups`: of each episode."""
        members: dict[str, list[int]] = {}
        self.member: list[int] = []  # of each episode: which of its group's it is
        for index, group in enumerate(groups):
            own = members.setdefault(group, [])
            self.member.append(len(own))
            own.append(index)
        self.first: list[int] = []  # that begin at once
        self._of: dict[int, list[int]] = {}  # by the episode that may begin them
        for own in members.values():
            count = plan.begin(len(own)) if plan else len(own)
            self.first += own[:count]
            self._deal(own[:count], own[count:])
        self.first.sort()

    def has(self, index: int) -> bool:
        """Whether it may still begin any."""
        return bool(self._of.get(index))

    def branch(self, index: int, most: int) -> list[int]:
        """Return at most so many that begin as branches of this one, and deal the rest among them all."""
        own = self._of.pop(index)
        self._deal([index, *own[:most]], own[most:])
        return own[:most]

    def end(self, index: int) -> list[int]:
        """Return the episodes that this one has left to begin with the prompt."""
        return self._of.pop(index, [])

    def _deal(self, to: Sequence[int], waiting: Sequence[int]) -> None:
        for place, index in enumerate(to):
            if own := waiting[place :: len(to)]:
                self._of[index] = list(own)
