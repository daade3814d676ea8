"""The metrics of a run so far, as the health check looks at them: windows, noise, groups and replies.

A run is measured by itself: its last steps are compared with its first or best ones, in units of its own noise, its own
entropy and its own share of wrong replies, so no limit has to know the model, the task or the scale of the reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from posttrain.runs.metrics_table import METRICS

READ = frozenset(metric.name for metric in METRICS if metric.checked)
"""The metrics that the checks read."""

HUGE = 1e100  # the squares of larger values would overflow


@dataclass(frozen=True)
class HealthLimits:
    """The thresholds from which on something is a fault. Shares are from 0 to 1."""

    first: int = 5
    """Steps that count as the start of the run."""
    window: int = 10
    """Steps that count as now. A comparison with the start needs both, that is 15 steps."""
    again: int = 30
    """Steps for which a fault must have been absent before it is reported again."""
    noise: float = 6.0
    """Standard errors beyond which a change of the reward is none of its noise. High, for thousands of looks."""
    entropy: float = 0.33
    """Entropy has collapsed below this share of its start, times the share of wrong replies that is left: solving a
    task takes entropy, about in proportion. Healthy runs stayed above 0.48."""
    entropy_alone: float = 0.1
    """The same where no accuracy measures the progress."""
    accurate: float = 0.05
    """Accuracy from which on it measures the progress; below, rewards seldom reach the threshold of success."""
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
    skipped: float = 0.1
    """Share of updates whose gradient was not finite."""
    stalled: int = 5
    """Steps in a row without any update, because all gradients were not finite."""
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
    """Groups whose rewards are all equal."""

    share: float  # of the rollouts, that are in such groups
    right: float | None = None  # share of the groups that are all right; None: unknown
    wrong: float | None = None


class Series:
    """The values of one metric so far, and its means over windows."""

    def __init__(self, limits: HealthLimits) -> None:
        self.values: list[float] = []
        self.best: list[float] = []  # highest mean of a window, until each value
        self.constant = True
        self._moved = 0.0  # sum of the squared differences of neighbouring values
        self._limits = limits

    def add(self, value: float) -> None:
        self._moved += (value - self.values[-1]) ** 2 if self.values else 0.0
        self.values.append(value)
        self.constant = self.constant and value == self.values[0]
        whole = len(self) >= self._limits.first  # fewer values do not make a window
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
        """Standard error of the difference of now and the start, from how much neighbouring values differ.

        Lately or in the whole run, whichever is more: there may be no success lately where successes are rare.
        """
        lately = fmean((a - b) ** 2 for a, b in pairwise(self.values[-3 * self._limits.window :]))
        variance = max(lately, self._moved / (len(self) - 1)) / 2  # of one value: neighbours share slow changes
        return math.sqrt(variance * (1 / self._limits.first + 1 / self._limits.window))


class History:
    """The metrics of a run so far, for the checks to look at."""

    def __init__(self, limits: HealthLimits) -> None:
        self.limits = limits
        self.step = 0
        self._series: dict[str, Series] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add a step. Huge and non-finite values, which metrics.jsonl holds as null, are left out."""
        self.step = step
        for name in READ & metrics.keys():
            value = metrics[name]
            if value is not None and abs(value) < HUGE:
                self._series.setdefault(name, Series(self.limits)).add(value)

    def of(self, name: str, least: int | None = None) -> Series | None:
        """Return the metric, if it has at least so many values; without a number: enough for a start and a now."""
        assert name in READ, f"{name}: the table of metrics does not mark it as checked"
        series = self._series.get(name)
        enough = self.limits.first + self.limits.window if least is None else least
        return series if series and len(series) >= enough else None

    @property
    def unsolved(self) -> float | None:
        """Share of wrong replies now / at the start, at most 1. None: no reward ever counted as right, or all did."""
        accuracy = self.of("accuracy")
        if accuracy is None or max(accuracy.start, accuracy.now) < self.limits.accurate or accuracy.start == 1:
            return None
        return min(1.0, (1 - accuracy.now) / (1 - accuracy.start))

    @property
    def only_reward(self) -> float | None:
        """The reward of every reply of the run, if there is but one and nothing else to learn from."""
        if self.taught:
            return None
        reward, share = self.of("reward", self.limits.window), self.of("groups/no_signal", self.limits.window)
        if reward is None or share is None:
            return None
        return reward.now if reward.constant and share.constant and share.now == 1 else None

    @property
    def equal_groups(self) -> EqualGroups | None:
        """The groups whose rewards are all equal; None: most groups have a signal, or a teacher gives one.

        The number that is all right follows from the accuracy, if the groups that differ are half right.
        """
        if self.taught:
            return None
        window = self.limits.window
        share, advantage = self.of("groups/no_signal", window), self.of("advantage/abs", window)
        if share is None or share.now < self.limits.no_signal:
            return None
        if share.constant and share.now == 1 and advantage is not None and advantage.now > 0:
            return None  # groups of one, or credit that comes from elsewhere
        accuracy, mixed = self.of("accuracy", window), (1 - share.now) / 2
        if accuracy is None:
            return EqualGroups(share.now)
        return EqualGroups(share.now, max(0.0, accuracy.now - mixed), max(0.0, 1 - accuracy.now - mixed))

    @property
    def solved(self) -> bool:
        """Whether the groups have equal rewards because they are all right."""
        equal = self.equal_groups if self.only_reward is None else None
        return equal is not None and equal.right is not None and equal.right >= self.limits.solved

    @property
    def replacing(self) -> bool:
        """Whether groups without signal are replaced by others."""
        return self.of("groups/played", 1) is not None

    @property
    def taught(self) -> bool:
        """Whether a teacher gives every token its signal, whatever the rewards."""
        return self.of("divergence", 1) is not None

    @property
    def several_updates(self) -> bool:
        """Whether a step makes several updates: with a single one the ratio is 1, and no bound on it has an effect."""
        updates = self.of("updates", 1)
        return updates is not None and updates.now > 1

    @property
    def clip_binds(self) -> bool:
        """Whether the upper clip has left tokens without a gradient lately."""
        clipped = self.of("ratio/clipped_high", 1)
        return self.several_updates and clipped is not None and clipped.now > 0
