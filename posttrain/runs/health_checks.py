"""The faults of the health check: one function each, from the history of a run to a message, or None.

A message has two lines: the observation; then the usual cause and the remedy. An option is named only if it can help: a
clip, for example, has no effect if each step has a single update, whose ratios are all 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median

from posttrain.core.intervals import shares_fell
from posttrain.runs.metric_history import History

Check = Callable[[History], str | None]


def stalled(history: History) -> str | None:
    """Detect a run that learns nothing: it has made no update for some time."""
    limit = history.limits.stalled
    series = history.of("skipped", limit)
    if series is None or min(series.values[-limit:]) < 1:
        return None
    return (
        f"every update of the last {limit} steps was skipped because its gradient was not finite: the weights do not "
        "change\n"
        f"usual causes: {_NOT_FINITE}"
    )


def skipped(history: History) -> str | None:
    """Detect updates that were skipped."""
    series = history.of("skipped", history.limits.window)
    if series is None or series.now <= history.limits.skipped:
        return None
    return (
        f"{series.now:.0%} of the last updates were skipped because their gradient was not finite\n"
        f"usual causes: {_NOT_FINITE}"
    )


_NOT_FINITE = (
    "a learning rate that is too high, weights or rewards that are not finite or huge, half precision; "
    "try a lower --lr, --precision float32, and look at the rewards"
)


def entropy(history: History) -> str | None:
    """Detect a policy that repeats itself before the task is solved."""
    series, unsolved, limits = history.of("entropy"), history.unsolved, history.limits
    if series is None or series.start <= 0 or history.solved:
        return None
    equal = history.of("groups/no_signal", limits.window)
    if unsolved is not None and equal is not None and equal.now < limits.exploring:
        return None  # an instruct model that learns to answer briefly; rewards that are never equal say nothing
    share = series.now / series.start
    if share >= (limits.entropy_alone if unsolved is None else limits.entropy * unsolved):
        return None
    accuracy = history.of("accuracy")
    still = "" if unsolved is None or accuracy is None else f", yet {1 - accuracy.now:.0%} of the replies are wrong"
    if (top := history.of("top_mass")) is not None:
        still = f", the most likely token has {top.now:.0%} of the probability ({top.start:.0%} at the start){still}"
    cause, remedy = "", ""
    if history.clip_binds:
        cause, remedy = " or a clip that keeps rare tokens rare", " --clip-high 0.28,"
    return (
        f"entropy fell from {series.start:.2g} to {series.now:.2g} nats per token{still}: the policy has stopped exploring\n"
        f"usual causes: a learning rate that is too high{cause}; try a lower --lr,{remedy} --entropy 0.001 or --kl 0.01"
    )


def length(history: History) -> str | None:
    """Detect replies that become longer without need."""
    series, truncated, limits = history.of("length"), history.of("truncated"), history.limits
    if series is None:
        return None
    figures = f"replies grew from {series.start:.1f} to {series.now:.1f} tokens"
    if truncated is not None and truncated.now - truncated.start > limits.truncated and series.now > series.start:
        figures += f", and {truncated.now:.0%} of them are cut off ({truncated.start:.0%} at the start)"
    elif series.now > limits.length * series.start and (useless := _no_better(history)):
        figures += useless
    else:
        return None
    return (
        f"{figures}\n"
        "usual causes: a reward that pays for length, or wrong replies that cost less the longer they are; try "
        "--overlong-cache with a fifth of --max-tokens, --aggregate token-mean, or more --max-tokens if the task needs them"
    )


def _no_better(history: History) -> str | None:
    """Return a text if replies are no better than at the start; None if they are better, or if it is unknown."""
    accuracy, reward, limits = history.of("accuracy"), history.of("reward"), history.limits
    if accuracy is not None:
        told = max(accuracy.start, accuracy.now) >= limits.accurate
        if told and accuracy.now - accuracy.start < limits.gain:
            return f" but are right no more often ({accuracy.start:.0%} at the start, {accuracy.now:.0%} now)"
    elif reward is not None and reward.now - reward.start < reward.error:
        return f" but earn no more (a reward of {reward.start:.3g} at the start, {reward.now:.3g} now)"
    return None


def kl(history: History) -> str | None:
    """Detect a policy far away from its reference."""
    series, uncertainty, limits = history.of("kl"), history.of("entropy"), history.limits
    if series is None or uncertainty is None or uncertainty.start <= 0:
        return None
    # Medians: a single token that the reference never samples can give a step any mean.
    half, now = len(series) // 2, median(series.values[-limits.window :])
    before = median(series.values[max(0, half - limits.window) : half])
    share, reward = now / uncertainty.start, history.of("reward")
    paid = reward is not None and reward.now - reward.start > limits.noise * reward.error
    if share > limits.kl and not paid:
        figures = f"{share:.1f} times the entropy that the policy began with, and the reward is no better"
    elif share > limits.kl_small and len(series) >= limits.settled and now > limits.kl_growth * before:
        figures = f"up from {before:.2g} at half as many steps"
    else:
        return None
    return (
        f"the KL from the reference is {now:.2g} nats per token, {figures}\n"
        "usual causes: a learning rate that is too high, a coefficient that is too small, or a loophole in the reward; "
        f"try a lower --lr, a larger --kl, or --kl-control adaptive --kl-target {0.1 * uncertainty.start:.1g}"
    )


def signal(history: History) -> str | None:
    """Detect missing signal in an unsolved task."""
    if (reward := history.only_reward) is not None:
        return (
            f"every reply since the first step got the reward {reward:g}: there is nothing to learn from\n"
            "usual causes: a reward that cannot read the replies or ignores them, or tasks that are all too hard or too "
            "easy; read some replies (posttrain rollouts RUN), and try posttrain check"
        )
    equal = history.equal_groups
    if equal is None or history.solved:
        return None
    figures = f"{equal.share:.0%} of the rollouts are in groups whose rewards are all equal, which teach nothing"
    if equal.right is None or equal.wrong is None:
        return (
            f"{figures}; without a reward that counts as right (--success) it is unknown whether these tasks are solved\n"
            "usual causes: tasks too easy or too hard, or a policy that always says the same thing; read some replies "
            f"(posttrain rollouts RUN), and try {_tries(history, 'other tasks', 'a larger --group')}"
        )
    if equal.wrong >= equal.right:
        return (
            f"{figures}: about {equal.wrong:.0%} of the groups are all wrong\n"
            "usual causes: tasks too hard, answers that the reward cannot read, or a policy that has collapsed; "
            f"try {_tries(history, 'easier tasks', 'more sft beforehand', 'a larger --group')}"
        )
    return (
        f"{figures}: about {equal.right:.0%} of the groups are all right and {equal.wrong:.0%} all wrong\n"
        "usual causes: few tasks of medium difficulty are left, or a policy that always says the same thing; "
        f"try {_tries(history, 'other tasks', '--entropy 0.001')}"
    )


def _tries(history: History, *known: str) -> str:
    """Return the remedies, including dynamic sampling unless the run uses it already."""
    *others, last = [*known] if history.replacing else [*known, "--dynamic-sampling 4"]
    return f"{', '.join(others)}{',' if len(others) > 1 else ''} or {last}" if others else last


def solved(history: History) -> str | None:
    """Detect groups without signal in a solved task."""
    equal, accuracy = history.equal_groups, history.of("accuracy", history.limits.window)
    if equal is None or accuracy is None or not history.solved:
        return None
    more = "" if history.replacing else ", or spend the steps on what is left with --dynamic-sampling 4"
    # A critic's values of a reply do not depend on its group.
    left = "neither teaches anything" if history.of("explained_variance", 1) is None else "little is left to learn"
    return (
        f"{accuracy.now:.1%} of the replies are right: in about {equal.right:.0%} of the groups all are, in about "
        f"{equal.wrong:.0%} none is, and {left}\n"
        f"stop here or move on to harder tasks{more}; if this is a surprise, read some replies: a loophole in the reward "
        "looks the same"
    )


def jump(history: History) -> str | None:
    """Detect a jump of the reward, a sign of a loophole or a broken verifier."""
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
        "a new skill looks like this, and so does a loophole in the reward or a broken verifier: read the best replies "
        f"(posttrain rollouts RUN --step {history.step} --order best); if it is one, fix the reward and go back to an "
        "earlier checkpoint"
    )


def drop(history: History) -> str | None:
    """Detect a reward that falls again."""
    series, limits = history.of("reward"), history.limits
    if series is None:
        return None
    best = series.best[-1]
    least = max(limits.drop * (best - series.start), limits.drop_least * abs(best), limits.noise * series.error)
    if best - series.now <= least:
        return None
    others = [(name, history.of(name)) for name in ("entropy", "length", "grad_norm", "kl")]
    beside = "".join(f", {name} went from {other.start:.2g} to {other.now:.2g}" for name, other in others if other)
    fewer = " fewer --epochs and --minibatches," if history.several_updates else ""
    return (
        f"the reward fell from {best:.3g} at its best to {series.now:.3g}{beside}\n"
        "usual causes: updates that are too large, or a verifier or an environment that broke; "
        f"go back to an earlier checkpoint and try a lower --lr, more --warmup,{fewer} or --kl 0.01"
    )


def part(history: History) -> str | None:
    """Detect a part of the reward that is given up while the reward does not fall: the policy takes another part."""
    reward, limits, parts = history.of("reward"), history.limits, history.parts_of_reward()
    if reward is None or not parts or reward.start <= 0 or reward.now < reward.start - reward.error:
        return None
    lost = [
        f"{name} fell from {own.start:.2g} to {own.now:.2g}"
        for name, own in parts.items()
        if own.start > 0 and own.now < limits.part * own.start and own.start - own.now > limits.part_noise * own.error
    ]
    if not lost:
        return None
    return (
        f"a part of the reward is given up: {', '.join(lost)}, and the whole went from {reward.start:.3g} to "
        f"{reward.now:.3g}\n"
        "usual causes: another part that is easier to earn, a learning rate that is too high; read some replies "
        "(posttrain rollouts RUN), give this part a larger weight, or pay the others only together with it"
    )


def held_out(history: History) -> str | None:
    """Detect held-out accuracy that falls, and memorised training tasks."""
    unseen, tasks = history.of("eval/accuracy", 2), history.of("eval/tasks", 2)
    if unseen is not None and tasks is not None and (fall := fallen(unseen.values, min(tasks.values))):
        return (
            f"held-out accuracy {fall}\n"
            "usual causes: updates that are too large, too few tasks, seen too often, or a reward that pays for something "
            "else; go back to an earlier checkpoint and try a lower --lr, fewer --steps, or --kl 0.01 with rl"
        )
    trained, unseen, limits = history.of("accuracy"), history.of("eval/accuracy", 3), history.limits
    if trained is None or unseen is None:
        return None
    gain, expected = trained.now - trained.start, fmean(unseen.values[-2:]) - unseen.values[0]
    if gain < limits.memory or expected >= limits.memory_held_out * gain:
        return None
    return (
        f"accuracy rose by {gain:.2f} on the training tasks and by {expected:+.2f} on those held out\n"
        "usual causes: too few tasks, seen too often, or held-out tasks of another kind; "
        "try more tasks, fewer --steps, a lower --lr, or --kl 0.01"
    )


def fallen(values: Sequence[float], tasks: float) -> str:
    """Return "fell from 0.37 to 0.13" if an accuracy on so many tasks is lower, at both of the last two evaluations (at
    the last one, where there is no other), than at the first, by more than chance; else "".
    """
    if len(values) < 2 or not all(shares_fell(values[0], since, tasks) for since in values[1:][-2:]):
        return ""
    return f"fell from {values[0]:.2f} to {values[-1]:.2f}, more than {tasks:.0f} tasks do by chance"


def forgetting(history: History) -> str | None:
    """Detect that other tasks or texts suffer from the training, in the last two evaluations."""
    limits, lost = history.limits, []
    for part, series in history.parts_of_suite(3).items():
        before, since = series.values[0], max(series.values[-2:])
        tasks = history.tasks_of_suite(part)
        # Few tasks differ as much by chance; those without a number may be any.
        if tasks and before - since > limits.forgotten and shares_fell(before, since, tasks):
            lost.append(f"accuracy on {part} fell from {series.values[0]:.2f} to {series.values[-1]:.2f}")
    texts = history.of("forget/loss", 3)
    if texts is not None and min(texts.values[-2:]) - texts.values[0] > limits.forgotten_text:
        rise = f"from {texts.values[0]:.2f} to {texts.values[-1]:.2f} nats per token"
        lost.append(f"the loss of the texts of --forget rose {rise}")
    if not lost:
        return None
    return (
        f"the model forgets what it could do before: {', '.join(lost)}\n"
        "usual causes: updates that are too large, or training on one kind of task alone; try a lower --lr, fewer --steps, "
        "--lora 16, --kl 0.01 with rl, or rows of the other kinds among those for training"
    )


def invalid(history: History) -> str | None:
    """Detect a policy that learns to give replies without a valid reward."""
    series, limits = history.of("invalid"), history.limits
    if series is None or series.now - series.start <= max(limits.invalid, limits.noise * series.error):
        return None
    late = history.of("invalid/timeout", limits.window)
    slow = f" ({late.now:.0%} took too long to check)" if late is not None and late.now > 0 else ""
    return (
        f"{series.now:.0%} of the rewards are invalid{slow}, {series.start:.0%} were at the start: a reply that cannot be "
        "scored leaves its group, so the policy can dodge a bad reward\n"
        "usual causes: replies that make the reward slow or make it fail; read those "
        f"(posttrain rollouts RUN --step {history.step} --order invalid), give them a low reward instead, or raise "
        "--env-timeout"
    )


def critic(history: History) -> str | None:
    """Detect a critic that is worse than none."""
    series, limits = history.of("explained_variance", history.limits.critic_after), history.limits
    if series is None or history.equal_groups is not None:  # equal returns have no variance to explain
        return None
    explained = median(series.values[-limits.window :])  # a mean could have any value, after a single step
    if explained >= limits.critic:
        return None
    return (
        f"the critic predicts the returns worse than their mean would: its explained variance is {explained:.2g}\n"
        "usual causes: it had no time to learn, or learns too fast; try --critic-warmup 20, or another --critic-lr"
    )


def likelihood(history: History) -> str | None:
    """Detect comparisons that are won by making both responses unlikely."""
    chosen, rejected = history.of("logp_per_token/chosen"), history.of("logp_per_token/rejected")
    if chosen is None or rejected is None:
        return None
    lost, lost_too, limits = chosen.start - chosen.now, rejected.start - rejected.now, history.limits
    if lost <= max(limits.likelihood, limits.noise * chosen.error) or lost_too <= limits.noise * rejected.error:
        return None
    return (
        f"both sides of the comparisons became less likely: the better responses went from {chosen.start:.2f} to "
        f"{chosen.now:.2f} nats per token, the others from {rejected.start:.2f} to {rejected.now:.2f}\n"
        "what they lose goes to replies that nobody compared: sample some; usual causes: a learning rate that is too high, "
        "responses that differ little; try --imitation 1, a larger --beta, a lower --lr, or --algorithm apo-zero"
    )


def routing(history: History) -> str | None:
    """Detect a mixture of experts that no longer uses most of its experts."""
    series, busiest = history.of("routing/entropy"), history.of("routing/busiest")
    if series is None or busiest is None or series.start <= 0:
        return None
    if series.now >= history.limits.routing * series.start:
        return None
    return (
        f"the load of the experts has become unequal: its entropy fell from {series.start:.2f} to {series.now:.2f} of what "
        f"an equal load has, and {busiest.now:.0%} of the tokens take the busiest expert\n"
        "usual causes: a learning rate that is too high for the routers, or data of one kind; try --router-balance 0.01, "
        "or a lower --lr"
    )


_ALL = (
    stalled, skipped, drop, part, jump, entropy, length, kl, invalid, signal, solved, held_out, forgetting, critic,
    likelihood, routing,
)  # fmt: skip
CHECKS: dict[str, Check] = {check.__name__: check for check in _ALL}
"""Name of a finding -> its check: returns the message, or None without a fault."""

FATAL = frozenset({"stalled"})
"""Findings that end a run unless the health check is off: continuing would change nothing."""

GOOD = frozenset({"solved"})
"""Findings that are good news and never stop a run."""
