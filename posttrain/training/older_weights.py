"""Rollouts sampled by another policy than the one that learns from them: an importance weight corrects it, or the run is
refused.

A gradient that is a mean over sampled tokens is the policy's own only for tokens that the policy sampled. Tokens of older
weights, and tokens that were drawn uniformly, need a weight, whichever option causes them (see
`options_of_older_rollouts`). `Minibatches` checks this for every update, by the versions of the weights that sampled its
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from posttrain.algorithms.credit import GAE, KStep, ToGo
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.ratio import Correction
from posttrain.algorithms.surrogate import WeightedLogProbability
from posttrain.config.training import RL

REPLAYED = Correction(cap=10.0)
"""Default correction with replay, where ratios far from 1 are real, not noise (ACER, arXiv 1611.01224, 3.1, c = 10)."""


def options_of_older_rollouts(algorithm: Algorithm, run: RL) -> list[str]:
    """Return the options by which a step learns from rollouts of another policy than that at its start: of older weights,
    or with tokens that were drawn uniformly.
    """
    options = {
        "--async-steps": run.async_steps > 0,
        "--tokens-per-step": run.tokens_per_step > 0,
        "--replay": algorithm.replay is not None,
        "--epsilon-greedy": run.epsilon_greedy > 0,
    }
    return [option for option, there in options.items() if there]


def add_importance_weight(algorithm: Algorithm, run: RL) -> Algorithm:
    """Add the importance weight for rollouts of other weights, if there are such rollouts and the user chose no weight.

    It is a ratio to the sampler if that is exact, or if nothing else is known about the rollouts; else a correction.
    """
    lags, chosen = options_of_older_rollouts(algorithm, run), run.chooses("correction")
    weighed = algorithm.weighs_older if lags else algorithm.weighs_updates or _updates(algorithm) == 1
    if weighed or run.chooses("old_policy"):
        return algorithm
    if algorithm.surrogate.uses_ratio and (chosen or algorithm.multiplies or algorithm.replay is not None):
        return replace(algorithm, old="sampler")
    if chosen:
        return algorithm
    return replace(algorithm, correction=REPLAYED if algorithm.replay is not None else Correction())


def contradictions(algorithm: Algorithm, run: RL) -> Iterator[str]:
    """Yield the contradictions between rollouts of other weights and the chosen corrections."""
    lags = options_of_older_rollouts(algorithm, run)
    updates, ratio = _updates(algorithm), algorithm.surrogate.uses_ratio
    ways = ["--old-policy sampler"] if ratio else ["a ratio with --surrogate clip and --old-policy sampler"]
    if not (ratio and algorithm.replay is not None):
        ways.insert(0, "--correction truncate")
    if lags and not algorithm.weighs_older:
        yield (
            f"rollouts of {' and '.join(lags)} were sampled by another policy, which nothing corrects: give "
            f"{' or '.join(ways)}"
        )
    if updates > 1 and not algorithm.weighs_updates:
        yield (
            f"{updates} updates per step learn from samples of earlier weights, which nothing corrects: give "
            "--correction truncate or a ratio with --surrogate clip, or set --epochs 1 --minibatches 1"
        )
    sampler = algorithm.old == "sampler"
    if sampler and not ratio:
        yield f"it has no ratio, as it maximises {algorithm.surrogate.formula}: leave out --old-policy"
    if sampler and algorithm.correction is not None:
        yield (
            "a ratio to the sampler's own probabilities leaves nothing to correct: leave out --correction, or --old-policy"
        )
    if ratio and algorithm.replay is not None and not sampler:
        yield (
            "rollouts of earlier steps have only the sampler's probabilities: leave out --correction, and give --old-policy "
            "sampler"
        )
    yield from _contradictions_of_reward_weights(algorithm)


def _contradictions_of_reward_weights(algorithm: Algorithm) -> Iterator[str]:
    """Yield the contradiction of weights on single rewards with advantages that are not sums of rewards."""
    at_rewards = isinstance(algorithm.surrogate, WeightedLogProbability) and algorithm.surrogate.at == "reward"
    discounted = isinstance(algorithm.advantage, GAE | KStep) or (
        isinstance(algorithm.advantage, ToGo) and algorithm.advantage.gamma != 1
    )
    told = {
        "a discounted advantage": discounted,
        " and ".join(chosen.option for chosen in algorithm.select): bool(algorithm.select),
        "a teacher's reward of single tokens": algorithm.teacher is not None and algorithm.teacher.sampled,
        "rollouts that branch": algorithm.branching is not None,
    }
    if at_rewards and any(told.values()):
        yield (
            f"weighs each reward where it is earned, which {' and '.join(k for k, there in told.items() if there)} does not "
            "define: --weight-at token with --ratio sequence-sum weighs the whole reply"
        )


def _updates(algorithm: Algorithm) -> int:
    return algorithm.epochs * algorithm.minibatches
