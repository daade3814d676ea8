"""The metrics of a run so far, in the form that the health check needs: windows, noise, groups and replies.

A run is compared with itself: its last steps with its first or best ones, in units of its own noise, entropy and share
of wrong replies. So no limit depends on the model, the task or the scale of the reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from posttrain.runs.metrics_table import METRICS, REWARDS, SUITE, metric_named

READ = frozenset(metric.name for metric in METRICS if metric.checked)
"""The metrics that the checks read, families by their name with a placeholder."""

HUGE = 1e100  # the squares of larger values would overflow


@dataclass(frozen=True)
class HealthLimits:
    """The thresholds of faults. Shares are from 0 to 1."""

    first: int = 5
    """Steps that count as the start of the run."""
    window: int = 10
    """Steps that count as now. A comparison with the start needs both, that is 15 steps."""
    again: int = 30
    """Steps for which a fault must have been absent before it is reported again."""
    noise: float = 6.0
    """Standard errors beyond which a change of the reward is not noise. High, as there are thousands of checks."""
    entropy: float = 0.33
    """Entropy has collapsed below this share of its start, times the share of wrong replies that is left: solving a
    task takes entropy, about in proportion. Healthy runs stayed above 0.48."""
    entropy_alone: float = 0.1
    """The same where no accuracy measures the progress."""
    exploring: float = 0.67
    """No collapse of the entropy is reported while the share of rollouts in groups with equal rewards is below this. Three
    runs of an instruct model lost five sixths of their entropy to brief answers, and their reward rose on."""
    accurate: float = 0.05
    """Accuracy from which it measures progress; below, rewards seldom reach the threshold of success."""
    length: float = 2.0
    """Replies have blown up if they are so many times longer than at the start and no more accurate."""
    gain: float = 0.02
    """Least gain in accuracy."""
    truncated: float = 0.2
    """Replies have also blown up if they grew and the share that is cut off rose by so much."""
    kl: float = 2.0
    """KL per token has blown up above so many times the entropy at the start, unless it has paid in reward."""
    kl_growth: float = 5.0
    """It has also blown up if it is so many times that of half as many steps: steady learning gives 2 to 4."""
    kl_small: float = 0.3
    """But not while it is below so many times the entropy at the start."""
    settled: int = 40
    """Steps before which a leap of the reward or of the KL is not a surprise: a format is learned in a few."""
    no_signal: float = 0.9
    """Share of rollouts in groups whose rewards are all equal, above which there is little left to learn from."""
    all_wrong: float = 0.75
    """The same where most of these groups are all wrong, and it was so from the start: with a quarter of the rollouts,
    the gradient is twice as noisy."""
    solved: float = 0.8
    """Share of groups that are all right, above which that is because the task is solved."""
    drop: float = 0.5
    """Share of the reward's gain that must be lost again."""
    drop_least: float = 0.1
    """And share of its best value."""
    memory: float = 0.2
    """Gain in accuracy on the training tasks from which on held-out ones should gain too."""
    memory_held_out: float = 0.1
    """At least so much of it."""
    forgotten: float = 0.15
    """By how much the accuracy of a part of --eval-suite may fall. A fall must also exceed what chance does to a part of
    so many tasks."""
    forgotten_text: float = 0.1
    """By how many nats per token the loss of the texts of --forget may rise."""
    skipped: float = 0.1
    """Share of updates whose gradient was not finite."""
    stalled: int = 5
    """Steps in a row without any update, because all gradients were not finite."""
    part: float = 0.33
    """A part of the reward is lost below this share of its start, if the reward as a whole has not fallen."""
    part_noise: float = 3.0
    """And by so many standard errors: both together are no chance."""
    invalid: float = 0.05
    """By how much the share of invalid rewards may rise."""
    likelihood: float = 0.3
    """Nats per token that responses which are preferred may lose, while those that are not lose too."""
    routing: float = 0.5
    """Routers have collapsed below this share of the entropy that the load of the experts had at the start."""
    critic: float = -0.1
    """Explained variance below which the critic does harm; a constant explains 0."""
    critic_after: int = 30
    """Steps that it has to learn first."""


@dataclass(frozen=True)
class EqualGroups:
    """Groups in which all rewards are equal."""

    share: float  # share of rollouts in such groups
    right: float | None = None  # share of these groups in which all are right; None: unknown
    wrong: float | None = None

    def __str__(self) -> str:
        told = f"{self.share:.0%} of the rollouts were in groups whose rewards are all equal, which teach nothing"
        if self.right is None or self.wrong is None:
            return told
        return f"{told}: about {self.wrong:.0%} of the groups were all wrong, {self.right:.0%} all right"

    @property
    def fails(self) -> bool:
        """Whether most of these groups are all wrong."""
        return self.right is not None and self.wrong is not None and self.wrong > self.right


class Series:
    """The values of one metric so far, and their means over windows."""

    def __init__(self, limits: HealthLimits) -> None:
        self.values: list[float] = []
        self.best: list[float] = []  # for each value, the highest window mean up to it
        self.constant = True
        self._moved = 0.0  # sum of the squared differences between successive values
        self._limits = limits

    def add(self, value: float) -> None:
        self._moved += (value - self.values[-1]) ** 2 if self.values else 0.0
        self.values.append(value)
        self.constant = self.constant and value == self.values[0]
        whole = len(self) >= self._limits.first  # fewer values make no window
        self.best.append(max(self.best[-1] if self.best else -math.inf, self.now if whole else -math.inf))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def start(self) -> float:
        return fmean(self.values[: self._limits.first])

    @property
    def now(self) -> float:
        return fmean(self.values[-self._limits.window :])

    @property
    def error(self) -> float:
        """Standard error of the difference between now and the start, from differences of successive values.

        It is the larger of those of the last window and of the whole run: where successes are rare, a window may have
        none.
        """
        lately = fmean((a - b) ** 2 for a, b in pairwise(self.values[-3 * self._limits.window :]))
        variance = max(lately, self._moved / (len(self) - 1)) / 2  # of one value: successive ones share slow changes
        return math.sqrt(variance * (1 / self._limits.first + 1 / self._limits.window))


class History:
    """The metrics of a run so far, as input of the checks."""

    def __init__(self, limits: HealthLimits) -> None:
        self.limits = limits
        self.step = 0
        self._series: dict[str, Series] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add a step. Values that are huge or not finite (null in metrics.jsonl) are left out."""
        self.step = step
        for name, value in metrics.items():
            metric = metric_named(name)
            if metric is not None and metric.checked and value is not None and abs(value) < HUGE:
                self._series.setdefault(name, Series(self.limits)).add(value)

    def of(self, name: str, least: int | None = None) -> Series | None:
        """Return the metric if it has at least `least` values; by default, enough for a start and a now."""
        assert name in READ, f"{name}: the table of metrics does not mark it as checked"
        series = self._series.get(name)
        enough = self.limits.first + self.limits.window if least is None else least
        return series if series and len(series) >= enough else None

    def parts_of_reward(self) -> dict[str, Series]:
        """Return the parts of the reward by their names, if it is their sum and there are several; else {}."""
        reward, prefix = self.of("reward"), REWARDS.partition("{")[0]
        parts = {name.removeprefix(prefix): own for name, own in self._series.items() if name.startswith(prefix)}
        if reward is None or len(parts) < 2 or {len(own) for own in parts.values()} != {len(reward)}:
            return {}
        sums = sum(own.start for own in parts.values()), sum(own.now for own in parts.values())
        is_sum = all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(sums, (reward.start, reward.now), strict=True))
        return parts if is_sum else {}

    def parts_of_suite(self, least: int) -> dict[str, Series]:
        """Return the accuracy of each part of the suite that has at least `least` values."""
        found = ((metric_named(name), own) for name, own in self._series.items() if len(own) >= least)
        return {metric.line: own for metric, own in found if metric is not None and metric.panel == SUITE}

    def tasks_of_suite(self, part: str) -> float:
        """Return the number of tasks of a part of the suite that had a valid reward, the least so far; 0: unknown."""
        series = self._series.get(f"suite/{part}/tasks")
        return min(series.values) if series else 0

    @property
    def unsolved(self) -> float | None:
        """Share of wrong replies now / at the start, at most 1. None: no reward ever counted as right, or all did."""
        accuracy = self.of("accuracy")
        if accuracy is None or max(accuracy.start, accuracy.now) < self.limits.accurate or accuracy.start == 1:
            return None
        return min(1.0, (1 - accuracy.now) / (1 - accuracy.start))

    @property
    def only_reward(self) -> float | None:
        """The reward of all replies of the run, if they are all equal and there is nothing else to learn from; else
        None.
        """
        if self.taught:
            return None
        reward, share = self.of("reward", self.limits.window), self.of("groups/no_signal", self.limits.window)
        if reward is None or share is None:
            return None
        return reward.now if reward.constant and share.constant and share.now == 1 else None

    @property
    def equal_groups(self) -> EqualGroups | None:
        """The groups with equal rewards; None if most groups have a signal, or a teacher gives one.

        The share that is all right follows from the accuracy, if the other groups are half right.
        """
        if self.taught:
            return None
        window = self.limits.window
        share, advantage = self.of("groups/no_signal", window), self.of("advantage/abs", window)
        if share is None or share.now < min(self.limits.no_signal, self.limits.all_wrong):
            return None
        if share.constant and share.now == 1 and advantage is not None and advantage.now > 0:
            return None  # groups of one rollout, or credit from another source
        accuracy, mixed, equal = self.of("accuracy", window), (1 - share.now) / 2, EqualGroups(share.now)
        if accuracy is not None:
            right = min(max(0.0, accuracy.now - mixed), share.now)
            equal = EqualGroups(share.now, right, share.now - right)
        failing = equal.fails and share.start >= self.limits.all_wrong
        return equal if share.now >= (self.limits.all_wrong if failing else self.limits.no_signal) else None

    @property
    def solved(self) -> bool:
        """Whether groups have equal rewards because all their replies are right."""
        equal = self.equal_groups if self.only_reward is None else None
        return equal is not None and equal.right is not None and equal.right >= self.limits.solved

    @property
    def replacing(self) -> bool:
        """Whether groups without signal are replaced."""
        return self.of("groups/played", 1) is not None

    @property
    def taught(self) -> bool:
        """Whether a teacher gives every token a signal, independent of rewards."""
        return self.of("divergence", 1) is not None

    @property
    def several_updates(self) -> bool:
        """Whether a step makes several updates: with a single one, ratios are 1 and bounds on them have no effect."""
        updates = self.of("updates", 1)
        return updates is not None and updates.now > 1

    @property
    def clip_binds(self) -> bool:
        """Whether the upper clip has recently left tokens without a gradient."""
        clipped = self.of("ratio/clipped_high", 1)
        return self.several_updates and clipped is not None and clipped.now > 0


def equal_groups(rows: Sequence[Mapping[str, Any]], least: float) -> EqualGroups | None:
    """Return the groups with equal rewards of a whole run, from the rows of metrics.jsonl; None if their share of the
    rollouts is below `least`.
    """
    rows = [row for row in rows if row.get("groups/no_signal") is not None]
    history = History(HealthLimits(window=len(rows), no_signal=least, all_wrong=least))
    for row in rows:
        history.add(int(row["step"]), row)
    return history.equal_groups
