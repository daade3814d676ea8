"""Rollouts of other weights: a weight makes up for that, whichever option brought them, or the run is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from update_cases import WORDS, collector_of, new_learner, new_player

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.penalty import KL
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.ratio import Correction
from posttrain.algorithms.settings import change
from posttrain.config.resolve import filled
from posttrain.config.training import RL, Distill
from posttrain.core.batch import Outputs, Stats
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason, Task, UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.training.adjust import adjust
from posttrain.training.sources.collector import Size
from posttrain.training.sources.packing import collate
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.trainer import train

OLDER: dict[str, dict[str, Any]] = {
    "--async-steps": {"async_steps": 1},
    "--tokens-per-step": {"tokens_per_step": 9},
    "--replay": {"replay": 512},
    "--epsilon-greedy": {"epsilon_greedy": 0.1},
    "several updates": {"epochs": 4},
    "all": {"async_steps": 1, "tokens_per_step": 9, "epochs": 2, "minibatches": 2},
}


def row_of(name: str, **how: Any) -> Algorithm:
    row = find(name)
    kind = Distill if row.teacher else RL
    given = {"ptx": "text.jsonl"} if row.pretraining else {}
    given |= {"teacher": "somewhere", "env": "my.py:reward"} if row.teacher else {}
    given |= {"critic_warmup": 0} if row.critic else {}
    if "tokens_per_step" in how and row.sampling:
        given["dynamic_sampling"] = 0
    return adjust(row, filled(kind, {"algorithm": name, **given, **how}))


@pytest.mark.parametrize("way", OLDER)
@pytest.mark.parametrize("name", TABLE)
def test_a_row_has_a_weight_for_what_other_weights_sampled_or_is_refused(name: str, way: str) -> None:
    """Whatever the row and the option: no gradient that takes older weights' tokens for the policy's own."""
    try:
        row = row_of(name, **OLDER[way])
    except UserError as error:
        whole = (
            name == "remax" and "tokens_per_step" in OLDER[way]
        )  # its greedy reply ends in the step that it began in
        refused = "a greedy reply must be complete" if whole else "leave out --replay"
        assert refused in str(error) and (whole or way == "--replay")
        return
    if not row.reinforces or not row.surrogate.samples:
        assert row.correction is None, "what is exact over the vocabulary wants no weight"
    elif way == "several updates":
        assert row.surrogate.uses_ratio or row.correction is not None
    else:
        assert row.old == "sampler" or row.correction is not None


PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {}),
    ("reinforce-baseline", {}),
    ("gpg", {}),
    ("lite-ppo", {"surrogate": "log-probability"}),
]


@pytest.mark.parametrize(("name", "how"), PLAIN)
def test_plain_policy_gradients_are_corrected_for_replayed_rollouts(name: str, how: dict[str, Any]) -> None:
    row = row_of(name, replay=512, epochs=4, **how)
    assert row.correction == Correction("truncate", 10.0)
    chosen = row_of(name, replay=512, epochs=4, correction="icepop", **how)
    assert chosen.correction == Correction("icepop", 2.0)
    with pytest.raises(UserError, match="--replay .*which nothing corrects.*--correction"):
        row_of(name, replay=512, epochs=4, correction="none", **how)
    assert row_of(name, epochs=4, **how).correction == Correction()
    with pytest.raises(UserError, match="4 updates per step .*which nothing corrects.*--surrogate clip.*--epochs 1"):
        row_of(name, epochs=4, correction="none", **how)


def test_the_ratio_of_replayed_rollouts_is_to_the_policy_that_sampled_them() -> None:
    row = row_of("dr-grpo", replay=512)
    assert row.old == "sampler" and row.correction is None and not row.looks_back
    with pytest.raises(UserError, match="--old-policy sampler"):
        row_of("dr-grpo", replay=512, correction="truncate")
    with pytest.raises(UserError, match="which nothing corrects"):
        row_of("dr-grpo", replay=512, old_policy="start")
    with pytest.raises(UserError, match="leave out --replay"):
        row_of("trpo", replay=512)


@pytest.mark.parametrize("way", ["--async-steps", "--tokens-per-step", "--replay", "--epsilon-greedy"])
def test_products_that_nothing_clips_are_taken_to_whoever_sampled(way: str) -> None:
    """A truncated weight per token beside them would be a bias for nothing."""
    row = row_of("off-policy-pg", **OLDER[way])
    assert row.old == "sampler" and row.correction is None
    assert row_of("off-policy-pg").old == "start", "within a step the two are the same"


@pytest.mark.parametrize("way", ["--async-steps", "--tokens-per-step", "--epsilon-greedy"])
def test_a_ratio_to_the_start_of_the_step_accounts_for_the_step_s_own_updates_alone(way: str) -> None:
    assert row_of("dr-grpo", old_policy="start", epochs=4).correction is None
    with pytest.raises(UserError, match=f"rollouts of {way} were sampled by another policy, which nothing corrects"):
        row_of("dr-grpo", old_policy="start", **OLDER[way])


NO_SUMS: dict[str, tuple[str, dict[str, Any]]] = {
    "a discounted advantage": ("off-policy-pg", {"advantage": "to-go", "gamma": 0.9}),
    "rollouts that branch": ("off-policy-pg", {"branches": 1}),
    "a teacher's reward of single tokens": ("distill-k1", {"surrogate": "weighted", "weight_at": "reward"}),
}


@pytest.mark.parametrize("what", NO_SUMS)
def test_advantages_that_are_no_sums_of_rewards_are_not_weighed_where_rewards_are_earned(what: str) -> None:
    name, how = NO_SUMS[what]
    with pytest.raises(UserError, match=f"weighs each reward where it is earned, which {what} does not define"):
        row_of(name, **how)


def bandit(row: Algorithm) -> float:
    """d E[R] / d logit of the first of two arms with rewards 1 and 0.9: policy 1/2, samples from 0.1 and 0.9."""
    found = 0.0
    for arm, (sampled, reward) in enumerate([(0.1, 1.0), (0.9, 0.9)]):
        logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        transcript = Transcript()
        transcript.observe([1])
        transcript.sample(Completion(0, [arm], [math.log(sampled)], "", StopReason.EOS, 0))
        batch = collate([[transcript]], [0], weight=torch.ones(1), fields={"advantage": [torch.tensor([reward])]})
        PolicyObjective(row)(Outputs(logits.log_softmax(-1)[arm : arm + 1]), batch, Stats()).backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        found -= sampled * logits.grad[0].item()
    return found


def test_the_expected_gradient_of_replayed_arms_is_the_true_one() -> None:
    """True: 0.5 x 0.5 x (1 - 0.9). The ratios are 5 and 0.56, and truncation may not reach the first."""
    assert bandit(find("reinforce")) == pytest.approx(
        0.1 * 0.5 - 0.9 * 0.5 * 0.9
    )  # -0.355: the arms as if they were its own
    assert bandit(row_of("reinforce", replay=512, epochs=4)) == pytest.approx(0.025, abs=1e-7)
    assert bandit(row_of("off-policy-pg", replay=512)) == pytest.approx(0.025, abs=1e-7)
    assert bandit(row_of("reinforce", async_steps=1, correction="truncate", correction_cap=6.0)) == pytest.approx(
        0.025, abs=1e-7
    )


EXACT: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {}),
    ("reinforce", {"correction": "sequence-truncate"}),
    ("gpg", {}),
    ("off-policy-pg", {}),
    ("cispo", {"old_policy": "sampler"}),
    ("grpo", {"kl": 0.0}),
    ("grpo", {"kl": 0.0, "old_policy": "sampler", "surrogate": "ratio"}),
]


@pytest.mark.parametrize(("name", "how"), EXACT)
def test_the_expected_gradient_under_epsilon_greedy_sampling_is_that_of_the_policy_alone(
    name: str, how: dict[str, Any]
) -> None:
    """Summed over all tokens of a vocabulary, each with its probability b under the sampler: sum_a b(a) g(a)."""
    epsilon, logits = 0.15, torch.tensor([1.5, -0.5, 0.0, 0.7], dtype=torch.float64, requires_grad=True)
    row = row_of(name, epsilon_greedy=epsilon, **how)
    rewards = torch.tensor([1.0, 0.9, -0.5, 0.2], dtype=torch.float64)
    policy = logits.softmax(-1)
    [wanted] = torch.autograd.grad((policy * rewards).sum(), logits, retain_graph=True)
    sampled = (1 - epsilon) * policy.detach() + epsilon / 4
    found = torch.zeros(4, dtype=torch.float64)
    for arm in range(4):
        transcript = Transcript()
        transcript.observe([1])
        transcript.sample(Completion(0, [arm], [sampled[arm].log().item()], "", StopReason.EOS, 0))
        batch = collate([[transcript]], [0], weight=torch.ones(1), fields={"advantage": [rewards[arm : arm + 1]]})
        loss = PolicyObjective(row)(Outputs(logits.log_softmax(-1)[arm : arm + 1]), batch, Stats())
        found -= sampled[arm] * torch.autograd.grad(loss, logits)[0]
    assert (found - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("old", ["start", "sampler"])
def test_a_teacher_s_reward_of_a_token_is_relative_to_the_policy_and_not_to_older_weights(old: Any) -> None:
    """Summed over the samples of older weights it is the gradient of the reverse KL: it is 0 for the teacher itself."""
    logits = torch.tensor([0.4, -0.3, 0.9], dtype=torch.float64, requires_grad=True)
    older = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    row = replace(find("distill-k1"), old=old, correction=None if old == "sampler" else Correction(cap=100.0))
    for teacher in (logits.detach().softmax(-1), torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)):
        policy = logits.softmax(-1)
        [wanted] = torch.autograd.grad((policy * (policy.log() - teacher.log())).sum(), logits)
        found = torch.zeros(3, dtype=torch.float64)
        for arm in range(3):
            transcript = Transcript()
            transcript.observe([1])
            transcript.sample(Completion(0, [arm], [older[arm].log().item()], "", StopReason.EOS, 0))
            fields = {"advantage": [torch.zeros(1)], "teacher_logp": [teacher[arm].log().reshape(1)]}
            batch = collate([[transcript]], [0], weight=torch.ones(1), fields=fields)
            loss = PolicyObjective(row)(Outputs(logits.log_softmax(-1)[arm : arm + 1]), batch, Stats())
            found += older[arm] * torch.autograd.grad(loss, logits)[0]
        assert (found - wanted).abs().max() < 1e-6


def digits(task: Task, reply: str) -> float:
    return sum(c.isdigit() for c in reply) / (len(reply) + 1)


def steps(row: Algorithm, count: int, ahead: int = 0) -> list[Stats]:
    learner, tasks = new_learner(row, torch.float32), [{"id": str(i), "prompt": f"{i}+1="} for i in range(4)]
    player = new_player(digits, learner.model, 6)
    if ahead:
        player = replace(player, engine=LocalEngine(own_copy(learner.model), WORDS, own=True))
    collector = collector_of(tasks, player, row, Size(2, 3, 60))
    source = RLSource(collector, learner, row, async_steps=ahead, last=count)
    found: list[Stats] = []
    try:
        train(learner, source, PolicyObjective(row), [lambda t: found.append(t.stats)], first=1, steps=count)
    finally:
        source.queue.close()
    return found


@pytest.mark.parametrize("how", [{"minibatches": 2}, {"replay": 12}])
def test_no_update_takes_tokens_of_other_weights_for_its_own(how: dict[str, Any]) -> None:
    """Also where an option brings them that nobody has thought of: versions are compared at the update itself."""
    row = change(find("gpg"), how)
    with pytest.raises(AssertionError, match="nothing corrects for the weights that sampled"):
        steps(row, 2)
    assert len(steps(row_of("gpg", prompts=2, group=3, **how), 2)) == 2


def test_a_ratio_to_the_start_of_the_step_lets_no_update_take_tokens_of_older_weights() -> None:
    row = row_of("dr-grpo", old_policy="start", prompts=2, group=3, minibatches=2)
    assert len(steps(row, 2)) == 2
    with pytest.raises(AssertionError, match="nothing corrects for the weights that sampled"):
        steps(row, 2, ahead=1)


def test_what_steers_a_kl_is_the_mean_over_the_policy_s_own_tokens() -> None:
    """Tokens as often as the older weights choose them, 1/2, 1/4, 1/4: weighed, they are the policy's, exactly."""
    older, policy, reference = (
        torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.25, 0.25], [0.4, 0.4, 0.2], [0.2, 0.2, 0.6])
    )
    tokens = torch.tensor([0, 0, 1, 2])
    old, ref, mu = (p.log()[tokens] for p in (policy, reference, older))
    true = (policy * (policy / reference).log()).sum().item()

    class Played:
        algorithm, lags = find("grpo"), True

    assert RLSource._mean(Played, KL("k3")(old, ref), old - mu, [1] * 4) == pytest.approx(true)  # type: ignore[arg-type]
    assert KL("k3")(old, ref).mean().item() != pytest.approx(true, rel=0.02)
    Played.algorithm = change(find("grpo"), {"correction": "sequence", "correction_cap": 1.1})
    assert RLSource._mean(Played, KL("k3")(old, ref), old - mu, [1] * 4) == 0, "no token is near enough"  # type: ignore[arg-type]


def test_weights_of_the_kl_that_a_control_reads_add_up_to_one() -> None:
    class Played:
        algorithm, lags = find("grpo"), True

    weight, distance = torch.tensor([1.0, 4.0, 0.5]), torch.tensor([1.0, 2.0, 3.0])
    found = RLSource._mean(Played, distance, weight.log(), [2, 1])  # type: ignore[arg-type]
    assert found == pytest.approx((1 * 1 + 2 * 2 + 0.5 * 3) / (1 + 2 + 0.5)), "weights are at most 2"


def test_what_steers_an_entropy_played_ahead_is_the_policy_s_and_not_the_sampler_s() -> None:
    row = row_of("grpo", kl=0.0, entropy_target=5.0, minibatches=2)
    assert row.entropy is not None
    for lags, explores, measured in ((False, False, 2.0), (True, False, 3.0), (False, True, 3.0)):

        class Played:
            algorithm, coefficients = row, {"entropy": 0.5}

        Played.lags, Played.explores = lags, explores  # type: ignore[attr-defined]
        RLSource._steer(Played, None, Stats({"entropy": (8.0, 4.0), "entropy/policy": (12.0, 4.0)}))  # type: ignore[arg-type]
        assert Played.coefficients["entropy"] == row.entropy.next(0.5, measured)
