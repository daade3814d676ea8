"""A row as a run has it: with the run's settings and what they imply. Contradictions are refused here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from posttrain.algorithms.credit import GAE, Baselined, Decoupled, Earned, PassAtK, StepRewards, Unrewarded
from posttrain.algorithms.critic_loss import SoftQ, Value
from posttrain.algorithms.policy import Algorithm, Pretraining
from posttrain.algorithms.ratio import Correction
from posttrain.algorithms.settings import change, check_ranges, choose, flags
from posttrain.algorithms.surrogate import ExpectedQ
from posttrain.algorithms.teacher import Distillation
from posttrain.config import RL, Distill
from posttrain.core.component import Need, RunLimits
from posttrain.core.types import UserError


def adjust(row: Algorithm, run: RL, single_turn: bool = True) -> Algorithm:
    """The row of a run. Raises UserError, in one line, where settings do not exist, do not fit or contradict each other.

    `single_turn`: whether an episode is one reply.
    """
    if run.ptx and row.pretraining is None:
        row = replace(row, pretraining=Pretraining())
    if isinstance(run, Distill) and row.teacher is None:
        row = replace(row, teacher=Distillation())
    row = change(_completed(choose(row, run.settings), run), run.settings)
    if _lags(run):
        row = _accounting(row, run)
    if row.kl is None and not _given(run, "reference_every"):
        row = replace(row, refresh=0)
    if not _given(run, "minibatches") and row.replay is None:
        # An update needs a group, and a paper's number of updates is one of larger steps.
        row = replace(row, minibatches=min(row.minibatches, run.prompts))
    row = row.configured(RunLimits(_episode_tokens(run, single_turn), run.temperature))
    if Need.EPISODE_TOKENS in row.needs:
        counting = row.needing(Need.EPISODE_TOKENS)
        parts = f"{' and '.join(counting)} {'counts' if len(counting) == 1 else 'count'}"
        raise UserError(
            f"{row.name}: its {parts} the tokens of an episode, which in this environment may have several replies: "
            "say with --max-episode-tokens how many there are at most"
        )
    check_ranges(row)
    problems = (
        *_contradictions(row, run),
        *_of_unfinished(row, run, single_turn),
        *_without_effect(row, run, single_turn),
    )
    for broken, reason in problems:
        if broken:
            raise UserError(f"{row.name}: {reason}")
    return row


def _episode_tokens(run: RL, single_turn: bool) -> int | None:
    """Most tokens that the policy may sample in an episode; None: there is no bound."""
    if single_turn or run.max_turns == 1:
        return min(run.max_tokens, run.max_episode_tokens or run.max_tokens)
    return run.max_episode_tokens


def _given(run: RL, flag: str) -> bool:
    """Whether a setting is the run's own choice, by its flag or by its place."""
    known = flags(Algorithm)[flag]
    named = {flag, *(".".join(place) for place, _ in known.places)}
    return any(name.replace("-", "_") in named or name in named for name in run.settings)


def _completed(row: Algorithm, run: RL) -> Algorithm:
    """With what the chosen parts bring, and without what nothing uses any more."""
    if not row.surrogate.uses_ratio and not _given(run, "ratio"):
        row = replace(row, ratio=())
    if row.reinforces and not row.surrogate.uses_ratio and row.replay is None:  # each update assumes fresh rollouts
        row = replace(row, epochs=1, minibatches=1)
    if isinstance(row.advantage, GAE) and _given(run, "gae_lambda"):  # the same for every length
        row = replace(row, advantage=replace(row.advantage, alpha=None))
    if Need.VALUE in row.advantage.needs and row.critic is None:
        row = replace(row, critic=Value())
    if isinstance(row.critic, Value) and Need.VALUE not in row.advantage.needs:
        row = replace(row, critic=None)
    return row


def _contradictions(row: Algorithm, run: RL) -> Iterator[tuple[bool, str]]:
    """(whether it holds, why it cannot be) of all that no single setting can see."""
    soft, updates = isinstance(row.critic, SoftQ), row.epochs * row.minibatches
    baselined = row.advantage if isinstance(row.advantage, Baselined) else None
    comparing = row.needing(Need.GROUP)
    yield (
        Need.GROUP in row.needs and run.group < 2,
        f"its {' and '.join(comparing)} {'compares' if len(comparing) == 1 else 'compare'} the rollouts of a group: "
        f"--group must be at least 2, not {run.group}",
    )
    of_k = row.advantage.k if isinstance(row.advantage, PassAtK) else 0
    yield (
        0 < run.group <= of_k,
        f"a group of {run.group} has one subset of {of_k} at most, and nothing to compare: --group must be above "
        f"--advantage-k",
    )
    yield (
        bool(row.ratio) and not row.surrogate.uses_ratio,
        f"it has no ratio, it maximises {row.surrogate.formula}: leave out --ratio, or see --surrogate",
    )
    yield (
        row.reinforces and not row.surrogate.uses_ratio and not row.on_policy and row.replay is None,
        f"maximises {row.surrogate.formula}, which assumes fresh rollouts: {updates} updates per step need a ratio "
        "(--surrogate ratio or clip), or set --epochs 1 --minibatches 1",
    )
    yield (
        _given(run, "minibatches") and row.replay is None and row.minibatches > run.prompts,
        f"an update needs a group: --minibatches {row.minibatches} is above --prompts {run.prompts}",
    )
    yield (
        soft != isinstance(row.surrogate, ExpectedQ) or soft != isinstance(row.advantage, Earned),
        "action values, their expectation and what a token earns belong together: see posttrain algorithms sac",
    )
    yield soft and row.entropy is None, "its temperature must be above 0: tune it with --entropy-target"
    yield soft and row.select is not None, "its critic learns from every token: leave out --top-entropy"
    yield (
        _given(run, "gae_lambda") and _given(run, "gae_alpha"),
        "--gae-lambda already says lambda, the same for every length: leave out --gae-alpha",
    )
    yield (
        baselined is not None and baselined.baseline == "none" and baselined.weight != "equal",
        "--baseline-weight weighs a baseline that --baseline none leaves out",
    )
    yield (
        baselined is not None and (baselined.baseline, baselined.scale) == ("none", "batch"),
        "without a baseline equal rewards would be divided by nothing: set --scale none, or choose a --baseline",
    )
    yield (
        row.trust_region is not None and bool(run.router_balance or run.router_z),
        "its line search knows nothing of the routers' losses: leave out --router-balance and --router-z",
    )
    yield from _of_staleness(row, run)
    yield from _of_penalty(row, run)
    yield from _of_teacher(row, run)


def _accounting(row: Algorithm, run: RL) -> Algorithm:
    """With what accounts for older weights, where nothing was chosen for that."""
    if row.correction is not None or _given(run, "old_policy"):
        return row
    if not _given(run, "correction"):
        return replace(row, correction=Correction())
    return replace(row, old="sampler") if row.surrogate.uses_ratio else row


def _lags(run: RL) -> bool:
    """Whether older weights than those that learn sample."""
    return run.async_steps > 0 or run.tokens_per_step > 0


def _of_unfinished(row: Algorithm, run: RL, single_turn: bool) -> Iterator[tuple[bool, str]]:
    """What cannot be left in the middle of a reply."""
    told, tokens = "--tokens-per-step", run.tokens_per_step
    yield (
        tokens > 0 and not single_turn,
        f"{told} is for environments whose episodes are one reply: one of several turns cannot be left and taken up again",
    )
    yield tokens > 0 and row.sampling is not None, f"groups that are not whole cannot be replaced: leave out {told}"
    yield (
        tokens >= run.max_tokens,
        f"{told} {tokens} would have no effect: no reply has more than --max-tokens {run.max_tokens}",
    )


def _of_staleness(row: Algorithm, run: RL) -> Iterator[tuple[bool, str]]:
    """What there must be where the weights that learn are not those that have sampled."""
    accounted = row.old == "sampler" or row.correction is not None
    yield (
        _lags(run) and row.reinforces and not accounted,
        f"rollouts of {'--async-steps' if run.async_steps else '--tokens-per-step'} were sampled by older weights, for "
        "which nothing accounts: give --correction truncate"
        + ("" if row.surrogate.uses_ratio else ", or a ratio with --surrogate clip and --old-policy sampler")
        + (", or --old-policy sampler" if row.surrogate.uses_ratio else ""),
    )
    sampler = row.old == "sampler"
    yield (
        sampler and not row.surrogate.uses_ratio,
        f"it has no ratio, it maximises {row.surrogate.formula}: leave out --old-policy",
    )
    yield (
        sampler and row.correction is not None,
        "a ratio to the sampler's own probabilities leaves nothing to correct: leave out --correction, or --old-policy",
    )


def _of_penalty(row: Algorithm, run: RL) -> Iterator[tuple[bool, str]]:
    kl = row.kl
    yield (
        kl is not None and kl.estimator == "exact" and kl.against == "old",
        "the old policy's whole distributions are not kept: leave out --kl-estimator exact",
    )
    yield (
        kl is not None and kl.where == "reward" and kl.against == "old",
        "its KL is to the policy that sampled, and 0 when rewards are given: leave out --kl-where",
    )
    yield (
        kl is not None and kl.where == "reward" and isinstance(row.advantage, StepRewards),
        "compares the rewards of steps, from which no KL is subtracted: leave out --kl-where reward",
    )
    yield (
        kl is not None and kl.where == "reward" and isinstance(row.advantage, PassAtK),
        "looks at what is right alone, from which no KL is subtracted: leave out --kl-where reward",
    )
    yield (
        bool(row.refresh) and Need.REFERENCE not in row.needs,
        "it has no reference that --reference-every could replace: give it a KL penalty, such as --kl 0.01",
    )
    yield from _of_named_parts(row)
    yield from _contradictions_of_replay(row, run)
    yield from _contradictions_of_critic(row, run)
    yield from _contradictions_of_sharding(row, run)
    yield (
        row.pretraining is not None and not run.ptx,
        "mixes in the likelihood of text of your own: give it with --ptx FILE",
    )


def _of_teacher(row: Algorithm, run: RL) -> Iterator[tuple[bool, str]]:
    taught = isinstance(run, Distill)
    unrewarded = isinstance(row.advantage, Unrewarded)
    yield (
        row.teacher is not None and not taught,
        "learns from a teacher: posttrain distill --teacher FOLDER runs it",
    )
    yield unrewarded and row.teacher is None, "--advantage none learns nothing from rewards, and there is no teacher"
    yield (
        taught and not unrewarded and not run.env,
        "learns from rewards beside its teacher: give --env, or --advantage none for the teacher alone",
    )
    yield (
        row.teacher is not None and row.replay is not None,
        "a teacher reads the step's own rollouts: leave out --replay",
    )
    rewarding = {
        "--dynamic-sampling": row.sampling,
        "--kl-where reward": row.kl is not None and row.kl.where == "reward",
        "what shapes the reward": row.shaping,
    }
    told = " and ".join(name for name, there in rewarding.items() if there)
    yield unrewarded and bool(told), f"learns nothing from rewards, so {told} would change nothing: leave it out"
    yield (
        row.select is not None and unrewarded and row.teacher is not None and not row.teacher.sampled,
        "--top-entropy chooses where rewards are learned from, and none are: leave it out",
    )
    yield (
        _given(run, "jsd_beta") and row.teacher is not None and row.teacher.divergence != "jensen-shannon",
        f"--jsd-beta is of jensen-shannon, not of {row.teacher.divergence if row.teacher else 'nothing'}: leave it out",
    )


def _of_named_parts(row: Algorithm) -> Iterator[tuple[bool, str]]:
    advantage, kl = row.advantage, row.kl
    if not isinstance(advantage, Decoupled):
        return
    advantage.weight_of()  # raises for one that cannot be read
    compares = "compares the named parts of rewards"
    yield kl is not None and kl.where == "reward", f"{compares}, from which no KL is subtracted: set --kl-where loss"
    yield (
        bool(row.shaping),
        f"{compares}, to which a reward for length adds nothing: set --overlong-cache 0, leave out --length-reward, "
        "and return it as a part of your own",
    )


def _contradictions_of_replay(row: Algorithm, run: RL) -> Iterator[tuple[bool, str]]:
    kl, replay, rollouts = row.kl, row.replay, run.prompts * run.group
    yield (
        replay is not None and row.surrogate.uses_ratio,
        "rollouts of earlier steps have no old log-probabilities to make a ratio of: leave out --replay",
    )
    yield (
        replay is not None and ((kl is not None and kl.where == "reward") or isinstance(row.critic, Value)),
        "of rollouts of earlier steps neither a KL nor a state's value is known: "
        "leave out --replay, or --kl-where reward and --advantage gae",
    )
    yield (
        replay is not None and replay.capacity < rollouts,
        f"--replay {replay.capacity if replay else 0} is less than a step's {rollouts} rollouts",
    )


def _contradictions_of_critic(row: Algorithm, run: RL) -> Iterator[tuple[bool, str]]:
    critic, shared = row.critic, run.critic == "shared"
    own = [name for name in ("critic", "critic_lr", "critic_model") if getattr(run, name) is not None]
    told = ", ".join(f"--{name.replace('_', '-')}" for name in own)
    yield critic is None and bool(own), f"it has no critic, {told} would change nothing: --advantage gae brings one"
    warmup = critic.warmup if critic is not None else 0
    yield (
        warmup >= run.steps,
        f"its critic warms up for {warmup} of {run.steps} steps, the policy would learn nothing: "
        "set --critic-warmup below --steps",
    )
    yield (
        shared and warmup > 0,
        "a critic that warms up alone would move the policy's backbone: --critic separate, or --critic-warmup 0",
    )
    yield (
        shared and isinstance(critic, SoftQ),
        "its moving-average targets need a backbone of the critic's own: leave out --critic shared",
    )
    yield shared and row.trust_region is not None, "a trust region is for the policy alone: --critic separate"
    yield (
        shared and bool(run.critic_model),
        "a shared critic has the policy's backbone: leave out --critic-model",
    )


def _contradictions_of_sharding(row: Algorithm, run: RL) -> Iterator[tuple[bool, str]]:
    yield (
        run.shard and row.trust_region is not None,
        "its step is found from whole gradients, and no process has one: leave out --shard",
    )
    yield (
        run.shard and Need.GRADIENT_NORM in row.needs,
        "it weighs rollouts by their own gradients, which no process has whole: leave out --shard, or choose another "
        "baseline",
    )


def _without_effect(row: Algorithm, run: RL, single_turn: bool) -> Iterator[tuple[bool, str]]:
    """Settings that were chosen and would change nothing."""
    own = ("branches", "branch_first", "branch_tokens", "branch_threshold", "branch_credit")
    branching = [f"--{name.replace('_', '-')}" for name in own if _given(run, name)]
    yield (
        bool(branching) and row.branching is not None and (single_turn or run.max_turns == 1),
        f"{', '.join(branching)} would have no effect: rollouts branch behind answers of tools, and here an episode is one "
        "reply: leave it out",
    )
    clips = [f"--{name.replace('_', '-')}" for name in ("clip_low", "clip_high", "clip_dual") if _given(run, name)]
    yield (
        bool(clips) and row.surrogate.clips and row.on_policy and row.old == "start",
        f"{', '.join(clips)} would have no effect: with one update per step every ratio is exactly 1, and nothing is "
        "clipped; take several, such as --minibatches 4, or leave it out",
    )
