"""Every metric that a run logs: its name, meaning and unit, and where it is shown.

All displays of metrics read this table: the plots, the terminal, the overview of `view`, the health check, and the
reference page. `METRICS` is in the order of display. A name with a placeholder, such as `reward/{part}`, denotes a
family. A user may log a metric of any other name, preferably `own/NAME`; it has a curve in `view` and TensorBoard under
that name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from posttrain.core.types import InvalidKind

LEARNING, HONEST, EXPLORING, STABLE = QUESTIONS = (
    "Is it learning?", "Is it honest?", "Does it still explore?", "Is it stable?",
)  # fmt: skip
"""The groups of the overview."""

HELD_OUT = "eval/"
MEASURED = (HELD_OUT, "suite/", "forget/")  # beginnings of the names of what an evaluation measures
REWARDS = "reward/{part}"
SUITE = "Suite"  # the panel of its parts
OF_PARTS = "Held-out: parts"  # the panel of parts of a mixture, and of sets of held-out tasks
_PART = re.compile(r"mixture/(.+)/(\w+)")  # a figure of a part of a mixture, or of a set of held-out tasks
SPOKEN = ("", "count", "share")  # units that a title contains already


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of them."""

    name: str  # as in metrics.jsonl or timing.jsonl
    title: str
    unit: str
    meaning: str  # one sentence
    group: str = ""  # group in the overview; "": among the other metrics
    panel: str = ""  # panel of the overview that several metrics share
    line: str = ""  # name in the panel
    colour: str = "blue"
    zero: bool = False  # whether the axis starts at 0
    log: bool = False  # whether the axis is logarithmic
    plotted: bool = False  # whether `curves` plots it, and `view` where it compares runs
    silent: bool = False  # whether it is hidden while it is 0
    terminal: str = ""  # label on the terminal
    form: str = ".3f"  # format of the value on the terminal
    checked: bool = False  # whether the health check reads it
    unless: tuple[str, ...] = ()  # more exact metrics: it is hidden if one of these is logged

    @property
    def label(self) -> str:
        return self.title if self.unit in SPOKEN else f"{self.title}, {self.unit}"

    @property
    def pattern(self) -> re.Pattern[str]:
        """A pattern for names of the family; its groups are the values of the placeholders."""
        parts = re.split(r"{(\w+)}", self.name)
        return re.compile("".join(f"(?P<{x}>.+)" if i % 2 else re.escape(x) for i, x in enumerate(parts)))

    def hidden(self, logged: Container[str]) -> bool:
        """Return whether a more exact metric is logged."""
        return any(name in logged for name in self.unless)


_SIDES = {"chosen": ("Better", "better", "blue"), "rejected": ("Other", "other", "red")}
_RESPONSES = "Responses, nats per token"
MEMORY = "Peak memory of GPUs, GB"
_LOST = "Cut off, invalid"
_RATIO = "Ratio, least and greatest"

_OF_PARTS = (
    ("reward", "reward", "", "Mean reward of the rollouts"), ("accuracy", "accuracy", "share", "Share of right rollouts"),
    ("length", "reply length", "tokens", "Mean number of sampled tokens of a rollout"), ("invalid", "invalid rewards", "share", "Share of invalid rewards"),
)  # fmt: skip

_OF_SUITE = (
    ("reward/{name}", "part {name} of the reward", "", "Mean of this part of the reward of the rollouts", False, ()), ("accuracy", "accuracy", "share", "Share of right rollouts", True, ()),
    ("reward", "reward", "", "Mean reward of the rollouts", True, ("suite/{part}/accuracy",)), ("length", "reply length", "tokens", "Mean number of sampled tokens of a rollout", False, ()),
    ("truncated", "replies cut off", "share", "Share of the rollouts that a limit ended", False, ()), ("invalid", "invalid rewards", "share", "Share of invalid rewards", False, ()),
    ("tasks", "tasks", "count", "Number of tasks with a valid reward", False, ()), ("win_rate", "win rate", "share", "Win rate by `--scorer` against the model that the run starts from, ties half, on the tasks", False, ()),
    ("score", "score", "", "Mean score by `--scorer` of the rollouts", False, ()), ("{kind}@{k}", "{kind}@{k}", "share", "Share of right results of k replies: of any (pass@k), of the most frequent answer (maj@k) or of the best score (best@k), on the tasks", False, ()),
    ("tool_calls", "tool calls", "", "Mean number of tool calls of a rollout", False, ()), ("valid_calls", "well-formed tool calls", "share", "Share of tool calls that are well-formed", False, ()),
    ("successful_calls", "successful tool calls", "share", "Share of answers to tool calls that are results and no error", False, ()),
)  # fmt: skip
"""name, title, unit, meaning, whether it is in the overview, more exact metrics"""

_TRAINING = (
    Metric("reward", "Reward", "", "Mean reward of the rollouts of a step, invalid ones left out.", LEARNING, plotted=True, terminal="reward", checked=True),
    Metric("reward_greedy", "Reward of greedy replies", "", "Mean reward of the greedy replies that are baselines of their groups.", LEARNING),
    Metric("reward/shaping", "Shaping of the reward", "", "Mean of what shaping, such as the overlong penalty, adds to the reward."),
    Metric(REWARDS, "Reward: {part}", "", "Mean of one part of the reward, by the name that the environment gives it, or the reward of one side of a game.", HONEST, "Parts of the reward", plotted=True, checked=True),
    Metric("divergence", "KL from the teacher", "nats per token", "Distance of the policy from its teacher that distillation minimises.", LEARNING, colour="red", plotted=True, terminal="divergence", form=".4f", checked=True),
    Metric("eval/accuracy", "Held-out accuracy", "share", "Accuracy on the held-out tasks or comparisons.", LEARNING, colour="green", plotted=True, checked=True),
    Metric("eval/tasks", "Held-out tasks", "count", "Number of held-out tasks, or examples with comparisons, that the held-out accuracy is a mean of.", checked=True, unless=("eval/accuracy",)),
    Metric("suite/mean", "Mean over the suite", "", "Mean over the parts of `--eval-suite`: of their accuracy, or of their reward where nothing defines a right reply.", LEARNING, SUITE, "mean", "green", plotted=True, terminal="suite mean"),
    *(Metric(f"suite/{{part}}/{what}", f"Suite: {title} of {{part}}", unit, f"{meaning} of this part of `--eval-suite`.", LEARNING if shown else "", SUITE if shown else "", "{part}", unless=unless, checked=what in ("accuracy", "tasks")) for what, title, unit, meaning, shown, unless in _OF_SUITE),
    Metric("eval/loss", "Held-out loss", "nats per token", "Negative log-likelihood of the held-out responses.", LEARNING, colour="green", plotted=True),
    Metric("forget/loss", "Loss of the texts of --forget", "nats per token", "Negative log-likelihood of texts that are not trained on: it rises where training makes the model forget.", LEARNING, colour="red", plotted=True, terminal="loss of --forget", checked=True),
    Metric("eval/divergence", "Held-out KL from the teacher", "nats per token", "KL(policy || teacher) at the policy's replies to held-out tasks, whatever distillation minimises.", LEARNING, colour="green", plotted=True),
    Metric("accuracy", "Accuracy", "share", "Share of the rollouts whose reward counts as success; of comparisons, share that the model decides as the data do.", LEARNING, colour="green", plotted=True, terminal="accuracy", checked=True),
    Metric("eval/reward", "Held-out reward", "", "Mean reward on the held-out tasks.", LEARNING, colour="green", plotted=True),
    Metric("accuracy/{side}", "Accuracy: {side}", "share", "Accuracy of one side of a game."),
    Metric("margin", "Margin of the better responses", "", "Mean reward (implicit, or of the reward model) of the chosen response less that of the rejected one.", LEARNING, plotted=True, terminal="margin", form=".3g"),
    Metric("nll", "Training loss", "nats per token", "Negative log-likelihood of the responses of the rows.", LEARNING, plotted=True, terminal="loss", form=".4f"),
    Metric("loss", "Loss", "", "Loss of an update, mean over the updates of the step; with policy gradients it does not measure progress.", LEARNING, plotted=True, terminal="loss", form=".4f", unless=("reward", "nll", "divergence")),
    Metric("entropy", "Entropy", "nats per token", "Entropy of the policy when it sampled, estimated from the log-probabilities of what it sampled; with --epsilon-greedy that of the mixture.", EXPLORING, zero=True, plotted=True, terminal="entropy", form=".2f", checked=True),
    Metric("top_mass", "Mass of the most likely token", "share", "Probability of the most likely token at the sampled positions that updates learn from, mean over the updates of a step: near 1 where the policy hardly has a choice left. Distillation from whole distributions does not log it.", EXPLORING, colour="pink", plotted=True, checked=True),
    Metric("length", "Reply length", "tokens", "Mean number of sampled tokens of a rollout.", HONEST, zero=True, plotted=True, terminal="length", form=".1f", checked=True),
    Metric("kl", "KL from the reference", "nats per token", "KL(policy || reference), k3 estimate at the sampled tokens, mean over the updates of a step: too large where an earlier update has lowered their probability.", STABLE, colour="pink", zero=True, plotted=True, silent=True, terminal="KL", form=".4f", checked=True),
    *(Metric(f"logp_per_token/{side}", f"{word} responses", "nats per token", f"Mean log-probability per token of the {side} responses.", HONEST, _RESPONSES, line, colour, plotted=True, terminal=f"lp {side}", checked=True) for side, (word, line, colour) in _SIDES.items()),
    Metric("truncated", "Share of replies cut off", "share", "Share of the rollouts that a limit of tokens or turns ended.", HONEST, _LOST, "cut off", "red", zero=True, plotted=True, silent=True, checked=True),
    Metric("invalid", "Share of rewards that are invalid", "share", "Share of the rollouts whose reward could not be computed; they are left out of their groups.", HONEST, _LOST, "invalid", "pink", zero=True, plotted=True, silent=True, terminal="invalid", form=".3g", checked=True),
    *(Metric(f"invalid/{kind}", f"Invalid rewards: {kind}", "share", f"Share of the rollouts whose reward is invalid because {why}.", checked=kind == InvalidKind.TIMEOUT)
      for kind, why in {InvalidKind.REPORTED: "the environment reported it", InvalidKind.RAISED: "its code raised",
                        InvalidKind.UNREADABLE: "what it returned is no reward", InvalidKind.TIMEOUT: "it took too long",
                        InvalidKind.DIED: "its process ended", InvalidKind.UNANSWERED: "a service had no answer",
                        InvalidKind.TOO_LONG: "it was too long for the model that scores it",
                        InvalidKind.DIVERGED: "a second play went another way"}.items()),
    Metric("diversity/similarity", "Similarity of replies within a group", "share", "Mean similarity of two replies of a group: 1 for the same reply every time, 0 for no token in common.", EXPLORING, colour="pink", plotted=True),
    Metric("diversity/distinct_1", "Distinct tokens of a group", "share", "Distinct tokens of a group's replies over all of them (distinct-1)."),
    Metric("diversity/distinct_2", "Distinct pairs of tokens of a group", "share", "Distinct pairs of neighbouring tokens of a group's replies over all of them (distinct-2)."),
    Metric("groups/no_signal", "Share of groups without signal", "share", "Share of the rollouts in groups whose rewards are all equal, which teach nothing.", plotted=True, silent=True, terminal="equal groups", form=".0%", checked=True),
    Metric("groups/played", "Groups played", "count", "Groups that dynamic sampling played for the step.", checked=True),
    Metric("groups/kept", "Groups kept", "count", "Groups that dynamic sampling kept for the step."),
    Metric("dropped", "Share of rollouts dropped", "share", "Share of the rollouts left out because they, or too many of their group, cannot be learned from."),
    Metric("rollouts", "Rollouts", "count", "Rollouts that were sampled for the step."),
    Metric("unfinished", "Unfinished rollouts", "count", "Rollouts that go on in a later step, under newer weights."),
    Metric("too_long", "Tasks too long", "count", "Tasks or rows that were left out because they do not fit the context."),
    Metric("unwanted", "Unwanted rows", "count", "Recorded episodes left out because their reward is below `--min-reward`."),
    Metric("teacher/too_long", "Too long for the teacher", "share", "Share of the rollouts that do not fit the context of the teacher."),
    Metric("epoch", "Epoch", "", "How often the training rows have been gone through."),
    Metric("curriculum/solve_rate", "Curriculum: solve rate", "share", "Mean running solve rate of the tasks that were sampled so far (`--curriculum solve-rate`).", zero=True),
    Metric("curriculum/seen", "Curriculum: share of tasks seen", "share", "Share of the tasks that have a running solve rate."),
    Metric("curriculum/stage", "Curriculum: stage", "", "Number of the stage or level of the step (`--curriculum stages`, `levels`).", LEARNING, terminal="stage", form=".0f"),
    Metric("curriculum/accuracy", "Curriculum: accuracy of the stage", "share", "Running accuracy on the tasks of the stage or level, which ends it.", zero=True),
    Metric("curriculum/share", "Curriculum: share of the floor", "share", "Share of the prompts of a step that the floor of the curriculum takes: tasks in turn, or tasks of earlier stages or levels."),
    Metric("mixture/{part}/share", "Mixture: share of {part}", "share", "Share of the prompts of a step that are of this part of a mixture."),
    Metric("mixture/{part}/progress", "Mixture: learning progress of {part}", "share", "Absolute difference of a fast and a slow running solve rate of this part, by which `--mixture-weights progress` divides the prompts.", zero=True),
    *(Metric(f"mixture/{{part}}/{what}", f"Mixture: {title} of {{part}}", unit, f"{meaning} of this part of a mixture, or of this set of held-out tasks.", zero=True) for what, title, unit, meaning in _OF_PARTS),
    Metric("branches", "Branches", "count", "Branches from within a rollout, mean over groups."),
    Metric("branches/shared", "Tokens shared by branches", "share", "Share of the tokens that branches took over from what they branched off."),
    Metric("ratio/max", "Greatest ratio", "", "Greatest importance ratio, new policy to old, of a token (or sequence) of the step.", STABLE, _RATIO, "greatest", "red", log=True),
    Metric("ratio/min", "Least ratio", "", "Least importance ratio, new policy to old, of a token (or sequence) of the step.", STABLE, _RATIO, "least", log=True),
    Metric("ratio", "Ratio", "", "Mean importance ratio, new policy to old."),
    Metric("ratio/first", "Ratio of the first update", "", "Mean importance ratio before the first update of a step, exactly 1 where the engine has the learner's weights."),
    Metric("ratio/clipped_low", "Share clipped below", "share", "Share of the tokens whose ratio the lower clip bounds, or that a mask leaves out, with A < 0."),
    Metric("ratio/clipped_high", "Share clipped above", "share", "Share of the tokens whose ratio the upper clip bounds, or that a mask leaves out, with A > 0.", checked=True),
    Metric("kl/step", "KL to the policy before the step", "nats per token", "Estimate of KL(old || policy) over the updates of the step, k3, which --target-kl bounds."),
    Metric("ratio/masked", "Share masked as off-policy", "share", "Share of the tokens with a negative advantage that the off-policy mask leaves out."),
    Metric("ratio/clipped_dual", "Share clipped by the dual clip", "share", "Share of the tokens with a negative advantage whose ratio the dual clip bounds."),
    Metric("grad_norm", "Gradient norm", "", "Norm of the policy's gradient before clipping.", STABLE, zero=True, plotted=True, checked=True),
    Metric("grad_norm/{model}", "Gradient norm: {model}", "", "Norm of the gradient of another model that learns, such as the critic."),
    Metric("sampler/gap/max", "Engine against learner, greatest gap", "nats", "Greatest absolute difference of log-probabilities of a token between engine and learner.", STABLE, colour="pink", zero=True),
    Metric("sampler/gap", "Engine against learner", "nats per token", "Mean absolute difference of log-probabilities of a token between engine and learner."),
    Metric("sampler/kl", "KL of the engine from the learner", "nats per token", "KL(engine || learner), k3 estimate at the sampled tokens."),
    Metric("sampler/ratio", "Learner over engine", "", "Mean of the learner's probability of a sampled token over the engine's."),
    Metric("sampler/ess", "Effective sample size", "share", "Effective sample size of the weights learner over engine, as a share of the tokens."),
    Metric("explained_variance", "Explained variance of the critic", "", "Share of the variance of the returns that the critic predicts; 0 is what a constant does, below 0 is worse.", STABLE, colour="green", plotted=True, checked=True),
    Metric("advantage/std", "Spread of advantages", "", "Standard deviation of the advantages of the scored tokens.", STABLE, zero=True),
    Metric("advantage/abs", "Size of advantages", "", "Mean absolute advantage of the scored tokens.", checked=True),
    Metric("skipped", "Updates skipped", "share", "Share of the updates that were skipped because their gradient was not finite.", STABLE, colour="red", zero=True, checked=True),
    Metric("updates", "Updates", "count", "Optimizer updates of the step.", STABLE, checked=True),
    Metric("lr", "Learning rate", "", "Learning rate of the step's updates.", STABLE),
    Metric("staleness", "Staleness", "updates", "Mean number of updates between the weights that sampled a token and those that learn from it."),
    Metric("staleness/max", "Greatest staleness", "updates", "Most updates between the weights that sampled a token and those that learn from it."),
    Metric("entropy/policy", "Entropy, exact", "nats per token", "Entropy of the policy's distributions in its updates, over the whole vocabulary."),
    Metric("kl/exact", "KL from the reference, exact", "nats per token", "KL(policy || reference) over the whole vocabulary."),
    Metric("kl/old", "KL from the old policy", "nats per token", "KL(old policy || policy), k3 estimate at the sampled tokens."),
    Metric("kl/measured", "KL that is controlled", "nats per token", "KL by which the adaptive controller sets the coefficient, measured over the whole step."),
    Metric("kl/data", "KL from the reference at the data", "nats per token", "KL from the reference, k2 estimate at the tokens of the data."),
    Metric("coefficient/{term}", "Coefficient: {term}", "", "Coefficient of a term of the loss, as it is in this step."),
    Metric("value", "Value", "", "Mean value that the critic predicts."),
    Metric("return", "Return", "", "Mean return that the critic learns."),
    Metric("value/loss", "Loss of the critic", "", "Mean loss of the critic of a token."),
    Metric("value/clipped", "Share of values clipped", "share", "Share of the tokens whose change of value the clip bounds."),
    Metric("q", "Action value", "", "Mean action value of the sampled tokens (soft actor-critic)."),
    Metric("q/loss", "Loss of the action values", "", "Mean loss of the twin action values of a token."),
    Metric("ptx/nll", "Loss of the pretraining mix", "nats per token", "Negative log-likelihood of the mixed-in text (PPO-ptx)."),
    Metric("trust_region/kl", "KL of the natural step", "nats per token", "KL between the policy before the natural step and after it (TRPO)."),
    Metric("trust_region/gain", "Gain of the natural step", "", "By how much the natural step raised the surrogate (TRPO)."),
    Metric("trust_region/no_step", "Natural steps not taken", "share", "Share of the updates for which the line search found no step (TRPO)."),
    Metric("routing/entropy", "Entropy of the experts' load", "", "Entropy of the load, between 0 (all tokens take the same experts) and 1 (an equal load), mean over layers.", checked=True),
    Metric("routing/busiest", "Load of the busiest expert", "share", "Share of the tokens that take the busiest expert of any layer.", checked=True),
    Metric("routing/dead", "Share of dead experts", "share", "Share of the experts that no token of an update took."),
    Metric("routing/moved", "Share of choices moved", "share", "With replay: share of the choices that the router would make otherwise by now."),
    Metric("routing/balance", "Load-balancing loss", "", "The load-balancing loss of the routers, without its coefficient; 1 for an equal load."),
    Metric("routing/z", "Router z-loss", "", "The z-loss of the routers, without its coefficient."),
    *(m for side in _SIDES for m in (
        Metric(f"logp/{side}", f"Log-probability, {side}", "nats", f"Mean log-probability of a {side} response."),
        Metric(f"implicit_reward/{side}", f"Implicit reward, {side}", "", f"Mean implicit reward of a {side} response: beta times its log-probability over the reference's."))),
    Metric("score", "Score", "", "Mean score that the reward model gives the responses of the step."),
    Metric("score/training", "Score of the training rows", "", "Mean score of a fixed sample of the training rows, which is what a reward is centred by."),
    Metric("squared_error", "Squared error", "", "Mean squared difference of score and label."),
)  # fmt: skip


def _of_held_out(name: str) -> Metric:
    own = next(metric for metric in _TRAINING if metric.name == name)
    return Metric(
        HELD_OUT + name, f"Held-out: {own.title}", own.unit, f"On what is held out: {own.meaning}", form=own.form
    )


_EVALUATED = (
    *(replace(_of_held_out(f"implicit_reward/{side}"), group=LEARNING, unless=("eval/accuracy",)) for side in _SIDES),
    *(replace(_of_held_out(f"mixture/{{part}}/{what}"), group=LEARNING, panel=OF_PARTS, line="{part}", unless=unless) for what, unless in (("accuracy", ()), ("reward", ("eval/mixture/{part}/accuracy",)))),
    *map(_of_held_out, (REWARDS, "length", "invalid", "margin", "kl/data", "squared_error",
                        "mixture/{part}/length", "mixture/{part}/invalid",
                        *(f"{name}/{side}" for name in ("logp_per_token", "logp") for side in _SIDES))),
    Metric("eval/longer_wins", "Longer wins", "share", "Held-out accuracy of always preferring the longer response."),
    Metric("eval/shorter_wins", "Shorter wins", "share", "Held-out accuracy of always preferring the shorter response."),
    Metric("eval/bag_of_words", "Bag of words", "share", "Held-out accuracy of a perceptron on the words of a response."),
    Metric("eval/calibration_error", "Calibration error", "share", "Expected calibration error of the reward model as a probability of preference."),
    Metric("eval/squared_error_of_a_constant", "Squared error of a constant", "", "Held-out squared error of the mean label."),
    Metric("eval/always_the_commoner", "Always the commoner", "share", "Held-out accuracy of always giving the commoner label."),
    Metric("eval/area_under_the_curve", "Area under the curve", "share", "Chance that the reward model scores a good response above a bad one (ROC AUC)."),
    Metric("eval/verdict_on_solutions", "Verdict on solutions", "share", "Share of the held-out solutions of which the process reward model says as their labels do that all steps are good, or that one is not."),
)  # fmt: skip
_TIMING = (
    Metric("tokens_per_second/sampled", "Speed of sampling", "tokens per second", "Sampled tokens of a step over its seconds.", LEARNING, zero=True, plotted=True, terminal="tok/s", form=",.0f"),
    Metric("tokens_per_second/read", "Speed of reading", "tokens per second", "Tokens of the updates' micro-batches over the seconds of the step.", LEARNING, zero=True, plotted=True, terminal="tok/s read", form=",.0f"),
    Metric("tokens_per_second/learned", "Speed of learning", "tokens per second", "Tokens of responses that are learned over the seconds of the step.", LEARNING, zero=True, plotted=True, terminal="tok/s learned", form=",.0f"),
    Metric("mfu", "MFU of the updates", "share", "Model FLOP utilization: TFLOP/s of the updates over the peak of the card's dense products in bfloat16, by its data sheet.", LEARNING, zero=True, plotted=True),
    Metric("update/tflops", "Arithmetic of the updates", "TFLOP/s", "FLOP that the updates' micro-batches need, over the seconds of the updates and the training processes: 2 for each token and matrix weight, 2 for each scored token and weight of the output head, 4 x heads x head size for each pair in attention; three times that, or twice with adapters, for the backward pass. Of policy and critic, on native decoders. Recomputed layers, padding, references and teachers do not count."),
    *(Metric(f"seconds/{stage}", f"Seconds: {stage}", "seconds", f"Time of a step {what}.") for stage, what in {
        "rollout": "until its batches are ready: sampling, rewards, credit", "update": "for its updates", "load": "for weight sync to the engine",
        "play": "for rollouts in progress", "credit": "for old and reference log-probabilities, values and advantages",
        "waiting": "in which nothing was sampled because environments were waited for", "services": "in which nothing was sampled because judges, reward models or retrievers were waited for",
        "between": "between the update before and this one: record, evaluation, checkpoint"}.items()),
    *(Metric(f"seconds/turn/{who}{end}", f"Seconds of a turn: {who}{word}", "seconds", f"{of} time of a turn of {whose}.")
      for who, whose in {"reply": "the policy", "environment": "the environment"}.items() for end, word, of in (("", "", "Mean"), ("/max", ", longest", "Longest"))),
    Metric("memory/{role}", "Peak memory: GPU of {role}", "GB", "Most memory that tensors had since the step before on the GPU of a role: of the policy and all that is with it, or of one of `--role-devices`; of several training processes, in the one with the most.", STABLE, MEMORY, "{role}", zero=True),
    Metric("engines/memory", "Peak memory: GPU of an engine", "GB", "Most memory that tensors had since the weight sync before in an engine of `--replicas` with a process of its own, the one with the most.", STABLE, MEMORY, "engine", "green", zero=True),
    Metric("update/tokens", "Tokens of the updates", "tokens", "Tokens that went through the updates of a step, prompts among them."),
    Metric("decoding/{requests}/steps", "Decoding steps at {requests} requests", "count", "Decoding steps with this number of running requests, up to twice as many."),
    Metric("decoding/{requests}/rows", "Tokens decoded at {requests} requests", "tokens", "Tokens sampled in those steps."),
    Metric("decoding/{requests}/seconds", "Seconds of decoding at {requests} requests", "seconds", "Time of those steps."),
    Metric("decoding/preempted", "Preempted requests", "count", "Times that a running request had to wait again, because the KV cache was full (`--engine-cache`)."),
    Metric("reading/tokens", "Tokens of prefill", "tokens", "Tokens of prompts and observations that the engine read."),
    Metric("reading/seconds", "Seconds of prefill", "seconds", "Time in which the engine read them."),
    *(Metric(f"engines/{what}", f"Engines: {what.replace('_', ' ')}", "count", meaning) for what, meaning in {
        "ready": "Engines of the pool that take requests.", "restarts": "Engines started again since the beginning.",
        "resubmitted": "Requests given to another engine because the first one failed.", "duplicate_answers": "Requests that two engines answered.",
        "placeholders": "Times that a token which stands for a picture would have been sampled."}.items()),
    Metric("engines/probe_gap", "Engines: off the learner", "nats", "Greatest difference of log-probabilities between engines and learner at the last weight sync."),
    *(Metric(f"services/{{service}}/{what}", f"{{service}}: {what.replace('/', ' of a ')}", "count", meaning) for what, meaning in {
        "asked": "Questions put to a judge or retriever.", "invalid": "Questions without an answer.", "votes": "Replies of a generative judge.",
        "unreadable": "Replies of a judge without a verdict.", "cached": "Questions answered from what was asked before.",
        "disagreements": "Pairs on which the two orders disagree.", "rubbish": "Replies of an endpoint that could not be read.",
        "tokens/prompt": "Tokens of a judge's prompts.", "tokens/reply": "Tokens of a judge's replies.", "cost": "Cost of the tokens at the prices of the recipe.",
        "scored": "Texts that a reward model scored.", "tokens": "Tokens that a reward model read.", "requests": "Requests to an endpoint.",
        "retries": "Requests made again.", "failures": "Requests given up."}.items()),
)  # fmt: skip


METRICS: tuple[Metric, ...] = (*_TRAINING, *_EVALUATED, *_TIMING)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def measured(logged: Collection[str]) -> list[str]:
    """Return the figures of evaluations by which a run is judged, of those that it has logged, in the order of the table:
    of a family those of each part.
    """
    own = {name: metric for name in logged if name.startswith(MEASURED) and (metric := metric_named(name)) is not None}
    shown = [name for name, metric in own.items() if metric.group == LEARNING and not metric.hidden(logged)]
    return sorted(shown, key=_place)


@cache
def _place(name: str) -> int:
    """Return the place of a metric, or of its family, in the table."""
    exact = (place for place, metric in enumerate(METRICS) if metric.name == name)
    families = (place for place, m in enumerate(METRICS) if "{" in m.name and m.pattern.fullmatch(name))
    return next(chain(exact, families))


def on_terminal(name: str) -> str:
    """Return the label of a figure on the terminal, in words: of training data and of held-out data, of a step and of a
    run, or of a part of an evaluation. `name`: without "eval/".
    """
    metric = BY_NAME.get(name) or BY_NAME.get(HELD_OUT + name)
    if metric is None and (family := metric_named(name)) is not None and family.panel == SUITE:
        return f"suite {family.line}"
    if metric is None:
        return _PART.sub(r"\1 \2", name)
    words = metric.title.replace(",", "")
    return metric.terminal or (words if words[:2].isupper() else words[0].lower() + words[1:])


@cache
def metric_named(name: str) -> Metric | None:
    """Return the table's row for a logged metric, with placeholders filled in; None for a user's own metric."""
    if (exact := BY_NAME.get(name)) is not None:
        return exact
    for metric in METRICS:
        if "{" in metric.name and (found := metric.pattern.fullmatch(name)):
            filled = found.groupdict()
            better = tuple(other.format(**filled) for other in metric.unless)
            return replace(
                metric, name=name, title=metric.title.format(**filled), line=metric.line.format(**filled), unless=better
            )
    return None
