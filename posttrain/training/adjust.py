"""The algorithm of a run: the chosen algorithm with the run's settings and their consequences.

Refuses contradictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from posttrain.algorithms.credit import GAE, Baselined, Decoupled, Earned, PassAtK, StepRewards, Unrewarded
from posttrain.algorithms.critic_loss import SoftQ, Value
from posttrain.algorithms.policy import Algorithm, Pretraining
from posttrain.algorithms.settings import change, check_ranges, choose
from posttrain.algorithms.surrogate import ExpectedQ
from posttrain.algorithms.teacher import Distillation
from posttrain.config.training import RL, Distill
from posttrain.core.component import Need, RunLimits
from posttrain.core.messages import dashed
from posttrain.core.types import UserError
from posttrain.training import older_weights


def adjust(algorithm: Algorithm, run: RL, single_turn: bool = True, by_group: bool = False) -> Algorithm:
    """Return the algorithm with the settings of a run.

    Raises UserError, in one line, where settings do not exist, do not fit or contradict each other. `single_turn`: whether
    an episode is one reply; `by_group`: whether the reward scores whole groups.
    """
    if run.ptx and algorithm.pretraining is None:
        algorithm = replace(algorithm, pretraining=Pretraining())
    if isinstance(run, Distill) and algorithm.teacher is None:
        algorithm = replace(algorithm, teacher=Distillation())
    algorithm = change(_with_required_components(choose(algorithm, run.settings), run), run.settings)
    if algorithm.kl is None and not run.chooses("reference_every"):
        algorithm = replace(algorithm, moving=None)
    if not run.chooses("minibatches") and algorithm.replay is None:
        # An update needs a group, and a paper's number of updates is for larger steps.
        algorithm = replace(algorithm, minibatches=min(algorithm.minibatches, run.prompts))
    algorithm = older_weights.add_importance_weight(algorithm, run)
    algorithm = algorithm.configured(RunLimits(_episode_tokens(run, single_turn)))
    if Need.EPISODE_TOKENS in algorithm.needs:
        counting = algorithm.needing(Need.EPISODE_TOKENS)
        parts = f"{' and '.join(counting)} {'counts' if len(counting) == 1 else 'count'}"
        raise UserError(
            f"{algorithm.name}: its {parts} the tokens of an episode, which here may have several replies: set their "
            "maximum with --max-episode-tokens"
        )
    check_ranges(algorithm)
    problems = (
        *_contradictions(algorithm, run),
        *_contradictions_of_partial_replies(algorithm, run, single_turn, by_group),
        *_ineffective_settings(algorithm, run, single_turn),
    )
    if problems:
        raise UserError(f"{algorithm.name}: {problems[0]}")
    return algorithm


def _episode_tokens(run: RL, single_turn: bool) -> int | None:
    """Return the most tokens that the policy may sample in an episode; None: no limit."""
    if single_turn or run.max_turns == 1:
        return min(run.max_tokens, run.max_episode_tokens or run.max_tokens)
    return run.max_episode_tokens


def _with_required_components(algorithm: Algorithm, run: RL) -> Algorithm:
    """Add the components that the chosen ones require, and remove those that nothing uses any more."""
    if not algorithm.surrogate.uses_ratio and not run.chooses("ratio"):
        algorithm = replace(algorithm, ratio=())
    # a paper's number of updates assumes its ratio
    if algorithm.reinforces and not algorithm.surrogate.uses_ratio and algorithm.replay is None:
        algorithm = replace(algorithm, epochs=1, minibatches=1)
    if isinstance(algorithm.advantage, GAE) and run.chooses("gae_lambda"):  # the same for every length
        algorithm = replace(algorithm, advantage=replace(algorithm.advantage, alpha=None))
    if Need.VALUE in algorithm.advantage.needs and algorithm.critic is None:
        algorithm = replace(algorithm, critic=Value())
    if isinstance(algorithm.critic, Value) and Need.VALUE not in algorithm.advantage.needs:
        algorithm = replace(algorithm, critic=None)
    return algorithm


def _contradictions(algorithm: Algorithm, run: RL) -> Iterator[str]:
    """Yield the reason for each contradiction between settings."""
    soft = isinstance(algorithm.critic, SoftQ)
    baselined = algorithm.advantage if isinstance(algorithm.advantage, Baselined) else None
    comparing = algorithm.needing(Need.GROUP)
    if Need.GROUP in algorithm.needs and run.group < 2:
        yield (
            f"its {' and '.join(comparing)} {'compares' if len(comparing) == 1 else 'compare'} the rollouts of a group: "
            f"--group must be at least 2, not {run.group}"
        )
    of_k = algorithm.advantage.k if isinstance(algorithm.advantage, PassAtK) else 0
    if 0 < run.group <= of_k:
        yield f"a group of {run.group} has at most one subset of {of_k} to compare: set --group above --advantage-k"
    if algorithm.ratio and not algorithm.surrogate.uses_ratio:
        yield f"it has no ratio, it maximises {algorithm.surrogate.formula}: leave out --ratio, or see --surrogate"
    if run.chooses("minibatches") and algorithm.replay is None and algorithm.minibatches > run.prompts:
        yield f"an update needs a group: --minibatches {algorithm.minibatches} is above --prompts {run.prompts}"
    if soft != isinstance(algorithm.surrogate, ExpectedQ) or soft != isinstance(algorithm.advantage, Earned):
        yield "action values, their expectation and rewards per token need each other: see posttrain algorithms sac"
    if run.recompute == "layers" and algorithm.trust_region is not None:
        yield (
            "its second derivatives need the activations of all layers at once: leave out --recompute, and lower "
            "--tokens-per-microbatch"
        )
    if run.float8 and algorithm.trust_region is not None:
        yield "its second derivatives need products that have them: leave out --float8"
    if "activations" in run.offload and algorithm.trust_region is not None:
        yield "its second derivatives read the activations again and again: leave out --offload activations"
    if algorithm.trust_region is not None and (run.optimizer, run.optimizer_options) != ("adamw", {}):
        yield (
            "its policy takes natural gradient steps instead of an optimizer's: leave out --optimizer and "
            "--optimizer-options"
        )
    if soft and not algorithm.widens:
        yield "its temperature must be above 0: set --entropy-target, which tunes it"
    if soft and algorithm.select:
        yield f"its critic learns from every token: leave out {_selecting(algorithm)}"
    if run.chooses("gae_lambda") and run.chooses("gae_alpha"):
        yield "--gae-lambda already sets one lambda for every length: leave out --gae-alpha"
    if baselined is not None and baselined.baseline in ("none", "greedy") and baselined.weight != "equal":
        yield "--baseline-weight has no effect with --baseline none or greedy, which take no mean: leave it out"
    if Need.GREEDY in algorithm.needs and algorithm.branching is not None:
        yield "rollouts that branch include no greedy reply: leave out --baseline greedy"
    if baselined is not None and (baselined.baseline, baselined.scale) == ("none", "batch"):
        yield "without a baseline equal rewards would be divided by 0: set --scale none, or choose a --baseline"
    if algorithm.trust_region is not None and (run.router_balance or run.router_z):
        yield "its line search does not include the routers' losses: leave out --router-balance and --router-z"
    yield from older_weights.contradictions(algorithm, run)
    yield from _contradictions_of_redistribution(algorithm)
    yield from _contradictions_of_penalty(algorithm, run)
    yield from _contradictions_of_teacher(algorithm, run)


def _contradictions_of_redistribution(algorithm: Algorithm) -> Iterator[str]:
    spread = algorithm.redistribution is not None
    if spread and not algorithm.advantage.by_token:
        yield (
            "its advantage reads only the total reward of a reply: leave out --redistribution, or choose "
            "--advantage to-go, process, gae or k-step"
        )
    if spread and getattr(algorithm.advantage, "bootstrap", False):
        yield (
            "--bootstrap-truncated replaces the final reward of truncated replies by the critic's value, which cannot be "
            "redistributed: leave out --redistribution, or --bootstrap-truncated"
        )


def _contradictions_of_partial_replies(
    algorithm: Algorithm, run: RL, single_turn: bool, by_group: bool
) -> Iterator[str]:
    """Yield the contradictions of replies that are continued in a later step."""
    told, tokens = "--tokens-per-step", run.tokens_per_step
    if tokens > 0 and not single_turn:
        yield (
            f"{told} needs episodes of one reply, as an episode of several turns cannot be interrupted: leave it out"
        )
    if tokens > 0 and by_group:
        yield (
            f"the reward scores whole groups, and with {told} their replies would end in different steps: leave it out"
        )
    if tokens > 0 and algorithm.sampling is not None:
        yield f"incomplete groups cannot be replaced: leave out {told}"
    if tokens > 0 and Need.GREEDY in algorithm.needs:
        yield f"a greedy reply must be complete before its group: leave out {told}"
    if by_group and Need.GREEDY in algorithm.needs:
        yield "the reward scores whole groups, and a greedy reply would be one of them: leave out --baseline greedy"
    if tokens >= run.max_tokens:
        yield f"{told} {tokens} would have no effect: no reply has more than --max-tokens {run.max_tokens}"


def _contradictions_of_penalty(algorithm: Algorithm, run: RL) -> Iterator[str]:
    kl = algorithm.kl
    if kl is not None and kl.estimator == "exact" and kl.against == "old":
        yield "the old policy's full distributions are not kept: leave out --kl-estimator exact"
    if kl is not None and kl.where == "reward" and kl.against == "old":
        yield "its KL is to the policy that sampled, so it is 0 in the reward: leave out --kl-where"
    if kl is not None and kl.unit == "response" and (kl.where == "reward" or kl.estimator == "exact" or kl.weighed):
        yield "--kl-unit response works only in the loss, with an unweighed estimate: leave it out"
    if kl is not None and kl.weighed and (kl.where == "reward" or kl.against == "old" or kl.estimator == "exact"):
        yield "--kl-weighed works only for an estimate of the KL to the reference, in the loss: leave it out"
    for option, name in _in_the_reward(algorithm):
        if isinstance(algorithm.advantage, StepRewards):
            yield f"compares the rewards of steps, from which no {name} is subtracted: leave out {option}"
        if isinstance(algorithm.advantage, PassAtK):
            yield f"reads only whether replies are right, from which no {name} is subtracted: leave out {option}"
        if isinstance(algorithm.advantage, Decoupled):
            yield f"compares the named parts of rewards, from which no {name} is subtracted: leave out {option}"
        if algorithm.replay is not None:
            yield f"the {name} of rollouts of earlier steps is unknown: leave out --replay, or {option}"
    entropy = algorithm.entropy
    if entropy is not None and entropy.where == "reward" and entropy.target is not None:
        yield "--entropy-target tunes only a bonus in the loss: leave out --entropy-where reward, or --entropy-target"
    if algorithm.moving is not None and Need.REFERENCE not in algorithm.needs:
        yield "--reference-every has no effect without a reference: give it a KL penalty, such as --kl 0.01"
    yield from _contradictions_of_reward_parts(algorithm)
    yield from _contradictions_of_replay(algorithm, run)
    yield from _contradictions_of_critic(algorithm, run)
    yield from _contradictions_of_sharding(algorithm, run)
    if algorithm.pretraining is not None and not run.ptx:
        yield "needs texts whose likelihood it adds to the loss: give them with --ptx FILE"


def _contradictions_of_teacher(algorithm: Algorithm, run: RL) -> Iterator[str]:
    taught = isinstance(run, Distill)
    unrewarded = isinstance(algorithm.advantage, Unrewarded)
    divergence = algorithm.teacher.divergence if algorithm.teacher is not None else "jensen-shannon"
    if algorithm.teacher is not None and not taught:
        yield "learns from a teacher: run it with posttrain distill --teacher FOLDER"
    teacher_moves = algorithm.teacher is not None and algorithm.teacher.every > 0
    if run.chooses("teacher_update_rate") and not teacher_moves:
        yield "--teacher-update-rate has no effect on a fixed teacher: leave it out, or give --teacher-every"
    if teacher_moves and isinstance(run, Distill) and (run.teachers or not run.teacher):
        yield "--teacher-every updates only the teacher of --teacher: leave out --teachers, or --teacher-every"
    if unrewarded and algorithm.teacher is None:
        yield "--advantage none has nothing to learn from without a teacher: leave it out, or run posttrain distill"
    if taught and not unrewarded and not run.env:
        yield "learns from rewards and its teacher: give --env, or --advantage none to learn only from the teacher"
    if algorithm.teacher is not None and algorithm.replay is not None:
        yield "a teacher scores only the step's own rollouts: leave out --replay"
    rewarding = {
        "--dynamic-sampling": algorithm.sampling,
        **dict(_in_the_reward(algorithm)),
        "what shapes the reward": algorithm.shaping,
    }
    told = " and ".join(name for name, there in rewarding.items() if there)
    if unrewarded and told:
        yield f"learns nothing from rewards, so {told} would change nothing: leave it out"
    if (
        (algorithm.select or algorithm.covariance)
        and unrewarded
        and algorithm.teacher is not None
        and not algorithm.teacher.sampled
    ):
        yield (
            f"{_selecting(algorithm)} selects where rewards are learned from, and this algorithm learns from none: leave "
            "it out"
        )
    if algorithm.teacher is not None and algorithm.teacher.sampled and algorithm.teacher.top_k:
        yield "--teacher-top-k has no effect with sampled, which reads the sampled tokens alone: leave it out"
    if run.chooses("jsd_beta") and divergence != "jensen-shannon":
        yield f"--jsd-beta has no effect with {divergence}, only with jensen-shannon: leave it out"


def _in_the_reward(algorithm: Algorithm) -> list[tuple[str, str]]:
    """Return (option, name in messages) of each term that is subtracted from tokens' rewards."""
    kl, entropy = algorithm.kl, algorithm.entropy
    found = [
        ("--kl-where reward", "KL", kl is not None and kl.where == "reward"),
        ("--entropy-where reward", "entropy bonus", entropy is not None and entropy.where == "reward"),
    ]
    return [(option, name) for option, name, there in found if there]


def _contradictions_of_reward_parts(algorithm: Algorithm) -> Iterator[str]:
    advantage = algorithm.advantage
    if not isinstance(advantage, Decoupled):
        return
    advantage.weight_of()  # raises for invalid weights
    if algorithm.shaping:
        yield (
            "compares the named parts of rewards, and rewards for length are no part: set --overlong-cache 0, leave out "
            "--length-reward, and return length as a part of your reward"
        )


def _contradictions_of_replay(algorithm: Algorithm, run: RL) -> Iterator[str]:
    kl, replay, rollouts = algorithm.kl, algorithm.replay, run.prompts * run.group
    if replay is None:
        return
    if algorithm.trust_region is not None:
        yield "its trust region needs tokens of the current policy, not of older weights: leave out --replay"
    if isinstance(algorithm.critic, Value):
        yield "the values of rollouts of earlier steps are unknown: leave out --replay, or --advantage gae"
    weighed = kl is not None and kl.weighed
    if (
        algorithm.covariance is not None
        or algorithm.early_stop is not None
        or (algorithm.old == "start" and (weighed or algorithm.off_policy_mask is not None))
    ):
        yield (
            "compares with the policy at the step's start, which is unknown for rollouts of earlier steps: leave out "
            "--replay"
        )
    if replay.capacity < rollouts:
        yield f"--replay {replay.capacity} is below a step's {rollouts} rollouts: raise it"


def _contradictions_of_critic(algorithm: Algorithm, run: RL) -> Iterator[str]:
    critic, shared = algorithm.critic, run.critic == "shared"
    own = [name for name in ("critic", "critic_lr", "critic_model") if getattr(run, name) is not None]
    told = ", ".join(dashed(name) for name in own)
    if critic is None and own:
        yield f"{told} has no effect without a critic: leave it out, or add a critic with --advantage gae"
    warmup = critic.warmup if critic is not None else 0
    if warmup >= run.steps:
        yield (
            f"its critic warms up for {warmup} of {run.steps} steps, so the policy would not train: set --critic-warmup "
            "below --steps"
        )
    if shared and warmup > 0:
        yield (
            "a warm-up of a shared critic would move the policy's backbone: give --critic separate, or --critic-warmup 0"
        )
    if shared and isinstance(critic, SoftQ):
        yield "its moving-average targets need a backbone of the critic's own: leave out --critic shared"
    if shared and algorithm.trust_region is not None:
        yield "a trust region needs a backbone of the policy's own: give --critic separate"
    if shared and run.critic_model:
        yield "a shared critic has the policy's backbone: leave out --critic-model"


def _contradictions_of_sharding(algorithm: Algorithm, run: RL) -> Iterator[str]:
    options = " and ".join(run.divisions)
    missing = "whole gradients" if run.in_parts else "gradients of whole micro-batches"
    if options and algorithm.trust_region is not None:
        yield f"its step needs {missing}, which no process has: leave out {options}"
    if options and Need.GRADIENT_NORM in algorithm.needs:
        yield (
            f"it weighs rollouts by their own gradients, which no process has whole: leave out {options}, or choose another "
            "baseline"
        )


def _selecting(algorithm: Algorithm) -> str:
    """Return the options of the algorithm's components that select tokens."""
    chosen = [part.option for part in algorithm.select]
    return " and ".join([*chosen, *(["--kl-cov"] if algorithm.covariance else [])])


def _ineffective_settings(algorithm: Algorithm, run: RL, single_turn: bool) -> Iterator[str]:
    """Yield the chosen settings that would have no effect."""
    own = ("branches", "branch_first", "branch_tokens", "branch_threshold", "branch_credit")
    branching = [dashed(name) for name in own if run.chooses(name)]
    if branching and algorithm.branching is not None and (single_turn or run.max_turns == 1):
        yield (
            f"{', '.join(branching)} would have no effect: rollouts branch after tool results, and here an episode is one "
            "reply: leave it out"
        )
    clips = [dashed(name) for name in ("clip_low", "clip_high", "clip_dual") if run.chooses(name)]
    if clips and algorithm.surrogate.clips and algorithm.on_policy and algorithm.old == "start":
        yield (
            f"{', '.join(clips)} would have no effect: with one update per step every ratio is exactly 1, and nothing is "
            "clipped; set more, such as --minibatches 4, or leave it out"
        )
    compared = {
        "off_policy_mask": algorithm.off_policy_mask,
        "kl_cov": algorithm.covariance,
        "target_kl": algorithm.early_stop,
    }
    still = [dashed(name) for name, part in compared.items() if run.chooses(name) and part is not None]
    if still and algorithm.on_policy and algorithm.old == "start":
        yield (
            f"{', '.join(still)} would have no effect: with one update per step old and current log-probabilities are the "
            "same; set more, such as --minibatches 4, or leave it out"
        )
