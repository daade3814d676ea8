"""The plan of branches: where rollouts branch, and which members of a group are branches (ARPO, arXiv 2507.19849).

The plan does not depend on timing. Some members of a group begin with the prompt; the others are assigned to them in
advance, as the share that each may begin. When a rollout branches, the new branches begin members of its own share, and
the rest of the share is divided among it and the branches. So whether a rollout branches follows from its own replies,
not from others in progress. Members that a rollout has not begun when it ends begin with the prompt, so every group is
complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BranchPlan:
    """Settings of branching, from `algorithms.branching`, and the decision whether a rollout branches."""

    first: float  # share of the group that begins with the prompt
    tokens: int  # first tokens of a reply, by which its entropy is estimated
    alpha: float
    beta: float
    threshold: float
    branches: int  # new branches at a time
    largest: float  # greatest possible entropy in nats, that of a uniform choice

    def begin(self, size: int) -> int:
        """Return the number of members of a group of this size that begin with the prompt."""
        return max(1, math.ceil(self.first * size - 1e-9))

    def branches_after(self, before: Sequence[float], now: Sequence[float]) -> bool:
        """Return whether a rollout branches. `before`, `now`: log-probabilities of the episode's first reply, and of
        one after a tool.
        """
        return self.alpha + self.beta * self.rise(before, now) > self.threshold

    def rise(self, before: Sequence[float], now: Sequence[float]) -> float:
        """Return the rise of the entropy as a share of the largest.

        As E[-log p] is the entropy, the estimate is unbiased.
        """
        return (self._entropy(now) - self._entropy(before)) / self.largest

    def _entropy(self, logp: Sequence[float]) -> float:
        first = logp[: self.tokens]
        return -math.fsum(first) / len(first)


class Shares:
    """Episodes waiting to begin, each as a branch of a rollout, or with the prompt once that rollout has ended."""

    def __init__(self, groups: Sequence[str], plan: BranchPlan | None) -> None:
        """`groups`: the group of each episode."""
        members: dict[str, list[int]] = {}
        self.member: list[int] = []  # of each episode: its number in its group
        for index, group in enumerate(groups):
            own = members.setdefault(group, [])
            self.member.append(len(own))
            own.append(index)
        self.first: list[int] = []  # episodes that begin at once
        self._of: dict[int, list[int]] = {}  # episode -> episodes that it may begin
        for own in members.values():
            count = plan.begin(len(own)) if plan else len(own)
            self.first += own[:count]
            self._deal(own[:count], own[count:])
        self.first.sort()

    def has(self, index: int) -> bool:
        """Return whether this episode may still begin others."""
        return bool(self._of.get(index))

    def branch(self, index: int, most: int) -> list[int]:
        """Return at most `most` episodes that begin as branches of this one, and divide its other episodes among all
        of them.
        """
        own = self._of.pop(index)
        self._deal([index, *own[:most]], own[most:])
        return own[:most]

    def end(self, index: int) -> list[int]:
        """Return the episodes that this one has not begun; they begin with the prompt."""
        return self._of.pop(index, [])

    def _deal(self, to: Sequence[int], waiting: Sequence[int]) -> None:
        for place, index in enumerate(to):
            if own := waiting[place :: len(to)]:
                self._of[index] = list(own)
