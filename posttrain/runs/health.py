"""What goes wrong in a run, named when it happens: from the metrics of its steps and nothing else.

Decides what counts as a fault. A run is measured by itself: its last steps are compared with its first or best ones, in
units of its own noise, its own entropy and its own share of wrong replies, so no limit has to know the model, the task
or the scale of the reward. What steps report follows from configuration and seed alone, and so do the findings: a
resumed run that replays its metrics finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something that goes wrong, or is done."""

    step: int
    name: str  # a key of CHECKS
    message: str  # what was seen, the usual causes, what to try: one or two lines


@dataclass(frozen=True)
class Limits:
    """From where on something is a fault. Shares are from 0 to 1."""

    first: int = 5
    """Steps that count as the start of the run."""
    window: int = 10
    """Steps that count as now. A comparison with the start needs both, that is 15 steps."""
    again: int = 30
    """Steps for which a fault must have been away before it is told again."""
    noise: float = 6.0
    """Standard errors beyond which a change of the reward is none of its noise. High, for thousands of looks."""
    entropy: float = 0.33
    """Entropy has collapsed below this share of its start, times the share of wrong replies that is left: solving a
    task takes entropy, about in proportion. Healthy runs stayed above 0.48."""
    entropy_alone: float = 0.1
    """The same where no accuracy says how much is solved."""
    accurate: float = 0.05
    """Accuracy from which on it tells how much is solved; below, rewards seldom reach what counts as correct."""
    length: float = 2.0
    """Replies have blown up if they are so many times longer than at the start and no more accurate."""
    gain: float = 0.02
    """What counts as more accurate."""
    truncated: float = 0.2
    """Replies have also blown up if they grew and the share that is cut off rose by so much."""
    kl: float = 2.0
    """KL per token has blown up above so many times the entropy at the start, unless it has paid in reward."""
    kl_growth: float = 5.0
    """It has also blown up if it is so many times that of half as many steps: steady learning gives 2 to 4."""
    kl_small: float = 0.3
    """But not while it is below so many times the entropy at the start."""
    settled: int = 40
    """Steps before which a leap of the reward or of the KL is no surprise: a format is learned in a few."""
    no_signal: float = 0.9
    """Share of rollouts in groups whose rewards are all equal, above which there is little left to learn from."""
    solved: float = 0.8
    """Share of groups that are all right, above which that is because the task is solved."""
    drop: float = 0.5
    """Share of what the reward had gained that must be lost again."""
    drop_least: float = 0.1
    """And share of its best value."""
    memory: float = 0.2
    """Gain in accuracy on the training tasks from which on held-out ones should gain too."""
    memory_held_out: float = 0.1
    """At least so much of it."""
    skipped: float = 0.1
    """Share of updates whose gradient was not finite."""
    critic: float = -0.1
    """Explained variance below which the critic does harm; 0 is what a constant explains."""
    critic_after: int = 30
    """Steps that it has to learn first."""


class Series:
    """The values of one metric so far, and its means over windows."""

    def __init__(self, limits: Limits) -> None:
        self.values: list[float] = []
        self.best: list[float] = []  # highest mean of a window, until each value
        self.constant = True
        self._moved = 0.0  # sum of the squared differences of neighbouring values
        self._limits = limits

    def add(self, value: float) -> None:
        self._moved += (value - self.values[-1]) ** 2 if self.values else 0.0
        self.values.append(value)
        self.constant = self.constant and value == self.values[0]
        whole = len(self) >= self._limits.first  # fewer values are no window
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
        variance = max(lately, self._moved / (len(self) - 1)) / 2  # of one value: neighbours share what changes slowly
        return math.sqrt(variance * (1 / self._limits.first + 1 / self._limits.window))


class History:
    """The metrics of a run so far, for the checks to look at."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.step = 0
        self._series: dict[str, Series] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """What is not finite, which metrics.jsonl holds as null, is left out."""
        self.step = step
        for name in READ & metrics.keys():
            value = metrics[name]
            if value is not None and math.isfinite(value):
                self._series.setdefault(name, Series(self.limits)).add(value)

    def of(self, name: str, least: int | None = None) -> Series | None:
        """The metric, if it has at least so many values; without a number: enough for a start and a now."""
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
        """The reward of every reply of the run, if there is but one."""
        reward, share = self.of("reward", self.limits.window), self.of("groups/no_signal", self.limits.window)
        if reward is None or share is None:
            return None
        return reward.now if reward.constant and share.constant and share.now == 1 else None

    @property
    def equal_groups(self) -> tuple[float, float, float] | None:
        """Shares of rollouts in groups of equal rewards, of groups all right, of groups all wrong; None: most differ.

        The last two follow from the accuracy, if the groups that differ are half right; without one they are 0.
        """
        window = self.limits.window
        share, advantage = self.of("groups/no_signal", window), self.of("advantage/abs", window)
        if share is None or share.now < self.limits.no_signal:
            return None
        if share.constant and share.now == 1 and advantage is not None and advantage.now > 0:
            return None  # groups of one, or credit that comes from elsewhere
        accuracy, mixed = self.of("accuracy", window), (1 - share.now) / 2
        if accuracy is None:
            return share.now, 0.0, 0.0
        return share.now, max(0.0, accuracy.now - mixed), max(0.0, 1 - accuracy.now - mixed)

    @property
    def solved(self) -> bool:
        """Whether the groups have equal rewards because they are all right."""
        return self.only_reward is None and self.equal_groups is not None and self.equal_groups[1] >= self.limits.solved


def entropy(history: History) -> str | None:
    """The policy repeats itself before the task is solved."""
    series, unsolved, limits = history.of("entropy"), history.unsolved, history.limits
    if series is None or series.start <= 0 or history.solved:
        return None
    share = series.now / series.start
    if share >= (limits.entropy_alone if unsolved is None else limits.entropy * unsolved):
        return None
    accuracy = history.of("accuracy")
    still = "" if unsolved is None or accuracy is None else f", but {1 - accuracy.now:.0%} of the replies are wrong"
    return (
        f"entropy fell from {series.start:.2g} to {series.now:.2g} nats per token{still}: the policy explores no more\n"
        "usual causes: too high a learning rate, or clipping that keeps rare tokens rare; "
        "try a lower --lr, --clip-high 0.28, --entropy 0.001 or --kl 0.01"
    )


def length(history: History) -> str | None:
    """Replies become longer without need."""
    series, truncated, limits = history.of("length"), history.of("truncated"), history.limits
    accuracy = history.of("accuracy")
    if series is None:
        return None
    figures = f"replies grew from {series.start:.1f} to {series.now:.1f} tokens"
    if truncated is not None and truncated.now - truncated.start > limits.truncated and series.now > series.start:
        figures += f", and {truncated.now:.0%} of them are cut off ({truncated.start:.0%} at the start)"
    elif (
        series.now > limits.length * series.start
        and accuracy is not None
        and max(accuracy.start, accuracy.now) >= limits.accurate
        and accuracy.now - accuracy.start < limits.gain
    ):
        figures += f", and are no more often right ({accuracy.start:.0%} at the start, {accuracy.now:.0%} now)"
    else:
        return None
    return (
        f"{figures}\n"
        "usual causes: a reward that pays for length, or wrong replies that cost less the longer they are; try "
        "--overlong-cache with a fifth of --max-tokens, --aggregate token-mean, or more --max-tokens if it needs them"
    )


def kl(history: History) -> str | None:
    """The policy runs away from its reference."""
    series, uncertainty, limits = history.of("kl"), history.of("entropy"), history.limits
    if series is None or uncertainty is None or uncertainty.start <= 0:
        return None
    # Medians: a single token that the reference never says makes the mean of a step anything.
    half, now = len(series) // 2, median(series.values[-limits.window :])
    before = median(series.values[max(0, half - limits.window) : half])
    share, reward = now / uncertainty.start, history.of("reward")
    paid = reward is not None and reward.now - reward.start > limits.noise * reward.error
    if share > limits.kl and not paid:
        figures = f"{share:.1f} times the entropy that the policy began with, and the reward is no better"
    elif share > limits.kl_small and len(series) >= limits.settled and now > limits.kl_growth * before:
        figures = f"after half as many steps it was {before:.2g}"
    else:
        return None
    return (
        f"the KL from the reference is {now:.2g} nats per token: {figures}\n"
        "usual causes: too high a learning rate, too small a coefficient, or a loophole that draws the policy away; "
        f"try a lower --lr, a larger --kl, or --kl-control adaptive --kl-target {0.1 * uncertainty.start:.1g}"
    )


def signal(history: History) -> str | None:
    """Nothing to learn from, though not solved."""
    if (reward := history.only_reward) is not None:
        return (
            f"every reply since the first step got the reward {reward:g}: there is nothing to learn from\n"
            "usual causes: a reward that cannot read the replies or ignores them, tasks all too hard or too easy; "
            "read some in rollouts/, and try posttrain check"
        )
    equal = history.equal_groups
    if equal is None or history.solved:
        return None
    share, right, wrong = equal
    figures = f"{share:.0%} of the rollouts are in groups whose rewards are all equal and teach nothing"
    if wrong >= right:
        return (
            f"{figures}: about {wrong:.0%} of the groups are all wrong\n"
            "usual causes: tasks too hard, answers that the reward cannot read, or a policy that collapsed; "
            "try easier tasks or more sft before, a larger --group, --dynamic-sampling 4"
        )
    return (
        f"{figures}: about {right:.0%} of the groups are all right and {wrong:.0%} all wrong\n"
        "usual causes: few tasks of middling difficulty are left, or the policy always says the same; "
        "try other tasks, --dynamic-sampling 4, --entropy 0.001"
    )


def solved(history: History) -> str | None:
    """Nothing to learn from, because all is right."""
    equal, accuracy = history.equal_groups, history.of("accuracy", history.limits.window)
    if equal is None or accuracy is None or not history.solved:
        return None
    return (
        f"{accuracy.now:.1%} of the replies are right: about {equal[1]:.0%} of the groups are all right, "
        f"{equal[2]:.0%} all wrong; they teach nothing\n"
        "stop here, give it harder tasks, or spend the steps on what is left with --dynamic-sampling 4; if this is a "
        "surprise, read some replies: a loophole in the reward looks the same"
    )


def jump(history: History) -> str | None:
    """The reward leaps: a hint that a loophole was found, or that the verifier broke."""
    limits = history.limits
    series = history.of("reward", max(limits.settled, limits.first + limits.window))
    if series is None:
        return None
    before = series.best[-limits.window - 1]
    leap = series.now - before
    if leap <= max(before - series.start, limits.noise * series.error):
        return None
    return (
        f"the reward leapt from {before:.3g} to {series.now:.3g}, more in {limits.window} steps than in all before\n"
        "a skill may come like that, and so does a loophole in the reward or a broken verifier: read the best replies "
        f"in rollouts/step-{history.step:06d}.jsonl; if it is one, mend the reward and begin from a checkpoint before"
    )


def drop(history: History) -> str | None:
    """The reward is lost again."""
    series, limits = history.of("reward"), history.limits
    if series is None:
        return None
    best = series.best[-1]
    least = max(limits.drop * (best - series.start), limits.drop_least * abs(best), limits.noise * series.error)
    if best - series.now <= least:
        return None
    others = [(name, history.of(name)) for name in ("entropy", "length", "grad_norm", "kl")]
    beside = "".join(f", {name} went from {other.start:.2g} to {other.now:.2g}" for name, other in others if other)
    return (
        f"the reward fell from {best:.3g} at its best to {series.now:.3g}{beside}\n"
        "usual causes: updates too large for the policy, or a verifier or environment that broke; "
        "try a lower --lr, more --warmup, fewer --epochs and --minibatches, --kl 0.01, from a checkpoint before"
    )


def held_out(history: History) -> str | None:
    """Training tasks are learned by heart."""
    trained, unseen, limits = history.of("accuracy"), history.of("eval/accuracy", 3), history.limits
    if trained is None or unseen is None:
        return None
    gain, expected = trained.now - trained.start, fmean(unseen.values[-2:]) - unseen.values[0]
    if gain < limits.memory or expected >= limits.memory_held_out * gain:
        return None
    return (
        f"accuracy rose by {gain:.2f} on the training tasks and by {expected:+.2f} on those held out\n"
        "usual causes: too few tasks, seen too often, or held-out ones of another kind; "
        "try more tasks, fewer --steps, a lower --lr or --kl 0.01"
    )


def skipped(history: History) -> str | None:
    """Updates that could not be made."""
    series = history.of("skipped", history.limits.window)
    if series is None or series.now <= history.limits.skipped:
        return None
    return (
        f"{series.now:.0%} of the last updates were skipped: their gradient was not finite\n"
        "usual causes: too high a learning rate, or half precision; try a lower --lr, --precision float32"
    )


def critic(history: History) -> str | None:
    """A critic that is worse than none."""
    series, limits = history.of("explained_variance", history.limits.critic_after), history.limits
    if series is None or history.equal_groups is not None:  # equal returns have no variance to explain
        return None
    explained = median(series.values[-limits.window :])  # it has no lower end: one step makes the mean anything
    if explained >= limits.critic:
        return None
    return (
        f"the critic predicts the returns worse than their mean would: explained variance {explained:.2g}\n"
        "usual causes: it had no time to learn, or learns too fast; try --critic-warmup 20, another --critic-lr"
    )


_ALL = (skipped, drop, jump, entropy, length, kl, signal, solved, held_out, critic)
CHECKS: dict[str, Callable[[History], str | None]] = {check.__name__: check for check in _ALL}
"""Name of the finding -> its message, or None as long as all is well."""

READ = frozenset((
    "reward", "accuracy", "eval/accuracy", "entropy", "length", "truncated", "groups/no_signal", "advantage/abs", "kl",
    "grad_norm", "skipped", "explained_variance",
))  # fmt: skip
"""The metrics that the checks read."""


class Health:
    """Looks at each step of a run, in order, and tells each fault once, until it has been away for a while."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.history = History(limits or Limits())
        self._seen: dict[str, int] = {}  # finding -> the last step at which it held

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[Finding]:
        """What is newly found after this step, whose metrics are as in metrics.jsonl; those it lacks are not judged."""
        self.history.add(step, metrics)
        findings = []
        for name, check in CHECKS.items():
            message = check(self.history)
            if message is None:
                continue
            if name not in self._seen or step - self._seen[name] > self.history.limits.again:
                findings.append(Finding(step, name, message))
            self._seen[name] = step
        return findings

    @classmethod
    def replay(cls, rows: Iterable[Mapping[str, Any]], limits: Limits | None = None) -> Health:
        """As after these steps, in order: the rows of metrics.jsonl, each with its "step", of a run that is resumed."""
        health = cls(limits)
        for row in rows:
            health.look(int(row["step"]), row)
        return health
