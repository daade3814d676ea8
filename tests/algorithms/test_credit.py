"""Credit and what surrounds it, against figures worked out by hand and against definitions enumerated to the end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import mean, pstdev, stdev
from typing import Any

import pytest
import torch
from conftest import make_rollouts
from heads import KINDS, new_head, plain_logits
from rl_sources import digits
from torch import Tensor, nn
from update_cases import WORDS, chosen_row, collector_of, new_case, new_learner, new_player

from posttrain.algorithms.aggregate import ConstantLength, PromptMean
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.credit import GAE, Advantage, Baselined, Earned, KStep, PassAtK, StepRewards, ToGo
from posttrain.algorithms.critic_loss import SoftQ, Value
from posttrain.algorithms.earned_rewards import earnings, equal_rewards, whitened
from posttrain.algorithms.filters import CovarianceClip, CovariancePenalty, DynamicSampling, OverlongFilter, TopEntropy
from posttrain.algorithms.penalty import KL, Adaptive, Entropy, HalvingDoubling
from posttrain.algorithms.policy import PolicyObjective
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.ratio import Causal, Correction
from posttrain.algorithms.redistribution import Redistribution
from posttrain.algorithms.shaping import GroupLength, LengthPenalty, RewardFloor, SoftOverlong
from posttrain.algorithms.surrogate import Clip, DivergenceMask, WeightedLogProbability
from posttrain.core.batch import Batch, Outputs, Scores, Stats
from posttrain.core.component import Need, RunLimits
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason, Task, UserError
from posttrain.learners.forward_pass import REFERENCE
from posttrain.models.losses.likelihood import Hidden, exact_kl, soft_values
from posttrain.models.native.decoder import causal
from posttrain.models.native.head import Head
from posttrain.training.loop import train
from posttrain.training.sources.collector import Size
from posttrain.training.sources.credit_assignment import Credited, credit
from posttrain.training.sources.model_outputs import evaluate_rollouts
from posttrain.training.sources.packing import collate, pack
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.scoreboard import scoreboard


def scores_of(
    reward: Sequence[float], length: Sequence[int], group: Sequence[int] | None = None, **more: Any
) -> Scores:
    groups = torch.tensor(group if group is not None else [0] * len(reward))
    return Scores(doubles(*reward), groups, doubles(*length), **more)


def doubles(*x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def flat_batch(logp: Tensor, **more: Any) -> Batch:
    """One rollout of these tokens, for parts that look at nothing but flat tensors."""
    one = torch.zeros(len(logp), dtype=torch.int64)
    share = torch.full((len(logp),), 1 / len(logp), dtype=logp.dtype)
    return Batch(None, one, one, **{"rollout": one, "transcript": one, "weight": share, **more})  # type: ignore[arg-type]


# -- pass@k ------------------------------------------------------------------------------------------------------------


def right_ones(*groups: Sequence[bool]) -> Scores:
    """A scoreboard of these groups; rewards are shares that say nothing of what is right."""
    success = [right for group in groups for right in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    return scores_of([0.5] * len(success), [1] * len(success), numbers, success=torch.tensor(success))


def by_subsets(right: Sequence[bool], k: int) -> list[float]:
    """The advantage by its definition: all subsets of k, each with its reward, one after the other."""
    subsets = list(combinations(range(len(right)), k))
    earned = [float(any(right[i] for i in subset)) for subset in subsets]
    spread = pstdev(earned)
    own = [[x for x, subset in zip(earned, subsets, strict=True) if i in subset] for i in range(len(right))]
    return [(mean(mine) - mean(earned)) / spread if spread else 0.0 for mine in own]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_advantage_is_the_mean_over_all_subsets(k: int) -> None:
    groups = [[i >= wrong for i in range(size)] for size in range(k, 8) for wrong in range(size + 1)]
    mixed = [[False, True, False, False, True, False]]
    found = PassAtK(k)(right_ones(*groups, *mixed)).tolist()
    expected = [x for group in (*groups, *mixed) for x in by_subsets(group, k)]
    assert found == pytest.approx(expected, abs=1e-12)


def test_golden_pass_at_k_advantage() -> None:
    """4 replies of which 1 is right, k = 2: R = 1 - 3 / 6, sigma = 0.5; a wrong one is with the right one in 1 of 3."""
    found = PassAtK(2)(right_ones([True, False, False, False])).tolist()
    assert found == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], abs=1e-12)


def test_pass_at_k_advantages_of_a_group_add_up_to_nothing_and_are_nothing_where_every_subset_is_the_same() -> None:
    for wrong in range(9):
        found = PassAtK(3)(right_ones([i >= wrong for i in range(8)]))
        assert found.sum().item() == pytest.approx(0.0, abs=1e-12)
        assert bool((found == 0).all()) == (wrong in (0, 1, 2, 8))
    assert PassAtK(3)(right_ones([True, False])).tolist() == [0.0, 0.0]  # what invalid rewards have left of a group


def test_pass_at_k_advantage_does_not_look_at_rewards_but_at_what_is_right() -> None:
    plain = right_ones([True, False, False, False])
    assert PassAtK(2)(replace(plain, reward=doubles(0.0, 3.0, 2.0, 1.0))).equal(PassAtK(2)(plain))


# -- generalized advantage estimation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "lam", "expected"), [(1.0, 1.0, (0.5, 0.4, 0.3)), (0.9, 0.8, (0.21712, 0.246, 0.3))])
def test_golden_gae(gamma: float, lam: float, expected: tuple[float, ...]) -> None:
    scores = scores_of([1.0], [3], value=(doubles(0.5, 0.6, 0.7),))
    (advantage,) = GAE(gamma, lam)(scores)
    assert advantage.tolist() == pytest.approx(list(expected), abs=1e-12)
    (aim,) = GAE(gamma, lam).returns(scores, None)
    assert aim.tolist() == pytest.approx([a + v for a, v in zip(expected, (0.5, 0.6, 0.7), strict=True)])


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_gae_is_the_temporal_difference_at_lambda_0_and_the_return_minus_the_value_at_lambda_1(lam: float) -> None:
    value = (doubles(0.1, -0.2, 0.4, 0.3), doubles(0.7))
    scores = scores_of([2.0, -1.0], [4, 1], value=value, steps=(((2, 0.5),), ()))
    earned = [[0.0, 0.5, 0.0, 1.5], [-1.0]]
    for found, r, v in zip(GAE(0.9, lam)(scores), earned, value, strict=True):
        for t in range(len(r)):
            if lam == 0:
                later = v[t + 1].item() if t + 1 < len(r) else 0.0
                expected = r[t] + 0.9 * later - v[t].item()
            else:
                expected = sum(0.9 ** (s - t) * r[s] for s in range(t, len(r))) - v[t].item()
            assert found[t].item() == pytest.approx(expected)


def test_tool_text_between_sampled_tokens_costs_no_discount() -> None:
    """Two turns with 1 or 30 observed tokens between them have the same advantages: an observation is no action."""

    def played(observed: int) -> Rollout:
        transcript = Transcript()
        transcript.observe([5, 6])
        transcript.sample(Completion(0, [7, 8], [-1.0, -1.0], "", StopReason.STOP, 0))
        transcript.observe([9] * observed)
        transcript.sample(Completion(0, [10, 11, 2], [-1.0] * 3, "", StopReason.EOS, 0))
        return Rollout({}, "g", [transcript], 1.5, steps=[(2, 0.5)])

    value = (doubles(0.3, 0.1, 0.4, 0.2, 0.6),)
    few, many = (GAE(0.9, 0.8)(scoreboard([played(n)], value=value))[0] for n in (1, 30))
    assert torch.equal(few, many) and len(few) == 5
    (alone,) = GAE(0.9, 0.8)(scores_of([1.5], [5], value=value, steps=(((2, 0.5),),)))
    assert torch.allclose(few, alone)
    assert torch.equal(*(ToGo(gamma=0.9)(scoreboard([played(n)]))[0] for n in (1, 30)))


def test_lambda_by_length_of_vapo() -> None:
    lengths = [10, 20, 40, 200]
    value = tuple(torch.linspace(0, 1, n, dtype=torch.float64) for n in lengths)
    scores = scores_of([1.0, 0.0, 1.0, 0.5], lengths, value=value)
    row = TABLE["vapo"].advantage
    assert isinstance(row, GAE) and row.alpha == 0.05
    found = GAE(1.0, alpha=0.05)(scores)
    for i, lam in enumerate([0.0, 0.0, 0.5, 0.9]):
        own = GAE(1.0, lam)(scores.of(torch.tensor([i])))[0]
        assert torch.allclose(found[i], own, atol=1e-12)


def test_earnings_add_up_to_the_reward_less_the_penalty() -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 3, 4, WORDS.vocab_size)
    penalty = [torch.rand(r.n_sampled, generator=torch.Generator().manual_seed(i)) for i, r in enumerate(rollouts)]
    scores = scoreboard(rollouts, penalty)
    totals = [float(r.reward) - p.double().sum().item() for r, p in zip(rollouts, penalty, strict=True)]  # type: ignore[arg-type]
    assert [e.sum().item() for e in earnings(scores)] == pytest.approx(totals)
    assert [x[0].item() for x in ToGo()(scores)] == pytest.approx(totals)


def test_where_a_rollout_was_cut_off_the_critic_s_value_replaces_the_penalty_of_the_last_token_too() -> None:
    value, penalty = [doubles(0.5, -0.25), doubles(0.75, 1.5)], [doubles(0.1, 0.2), doubles(0.3, 0.4)]
    scores = scores_of(
        [1.0, 1.0], [2, 2], penalty=tuple(penalty), value=tuple(value), truncated=torch.tensor([True, False])
    )
    cut, ended = earnings(scores, bootstrap=True)
    assert cut.tolist() == pytest.approx([-0.1, -0.25]) and ended.tolist() == pytest.approx([-0.3, 1 - 0.4])


def test_penalty_in_the_reward_reaches_every_advantage_that_takes_one() -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 3, 4, WORDS.vocab_size)
    generator = torch.Generator().manual_seed(1)
    penalty = [torch.rand(r.n_sampled, generator=generator) for r in rollouts]
    value = [torch.zeros(r.n_sampled) for r in rollouts]
    plain, punished = scoreboard(rollouts, value=value), scoreboard(rollouts, penalty, value)
    for advantage in (Baselined("none"), Baselined("group"), Baselined("others"), ToGo(), GAE()):
        before, after = (torch.cat([torch.as_tensor(a).flatten() for a in advantage(s)]) for s in (plain, punished))
        assert not torch.allclose(before, after), advantage


def test_scoreboards_of_processes_are_joined_in_their_order_and_share_no_group() -> None:
    boards = [
        scores_of([1.0, 2.0, 3.0], [1, 2, 1], [0, 1, 0], steps=(((1, 0.5),), (), ()), sampled=doubles(4, 5, 6)),
        scores_of([], [], []),
        scores_of([4.0, 5.0], [1, 1], [0, 2], steps=((), ((1, 0.25),)), sampled=doubles(7, 8)),
    ]
    boards[1] = replace(boards[1], group=torch.zeros(0, dtype=torch.int64), sampled=doubles())
    joined = Scores.join(boards)
    assert joined.reward.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0] and joined.length.tolist() == [1, 2, 1, 1, 1]
    assert joined.group.tolist() == [0, 1, 0, 2, 4] and joined.steps == (((1, 0.5),), (), (), (), ((1, 0.25),))
    assert joined.sampled is not None and joined.sampled.tolist() == [4, 5, 6, 7, 8] and joined.truncated is None
    assert Scores.join([boards[0], replace(boards[2], sampled=None)]).sampled is None
    some = joined.of(torch.tensor([4, 1]))
    assert some.reward.tolist() == [5.0, 2.0] and some.steps == (((1, 0.25),), ()) and some.penalty == ()
    assert some.sampled is not None and some.sampled.tolist() == [8, 5] and some.truncated is None


def test_metrics_are_sums_over_counts_or_extremes_by_name_in_alphabetical_order() -> None:
    stats, other = Stats(), Stats()
    stats.add("loss", 3.0, 2.0)
    stats.add("gap/max", 1.0, 5.0)
    stats.add("gap/min", 1.0, 5.0)
    other.add("loss", 5.0)
    other.add("gap/max", 4.0)
    other.add("gap/min", 4.0)
    other.add("empty", 0.0, 0)
    stats.merge(other)
    assert stats == {"loss": (8.0, 3.0), "gap/max": (4.0, 1.0), "gap/min": (1.0, 1.0), "empty": (0.0, 0.0)}
    assert list(stats.means().items()) == [("gap/max", 4.0), ("gap/min", 1.0), ("loss", 8.0 / 3.0)]


# -- the critic's loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [
        (
            0.5,
            0.5 * 0.64,
            0.0,
            1.0,
        ),  # moved too far towards the return of 1: as bad as the bound of 0.2, and no gradient
        (0.1, 0.5 * 0.81, -0.9, 0.0),  # within the clip: the plain square
        (-0.5, 0.5 * 2.25, -1.5, 0.0),  # moved away: the plain square is the larger one and pulls back
    ],
)
def test_golden_value_loss(value: float, loss: float, slope: float, clipped: float) -> None:
    v, stats = doubles(value).requires_grad_(), Stats()
    batch = flat_batch(v, value=doubles(0.0), returns=doubles(1.0))
    found = Value(clip=0.2)(Outputs(v, value=v), batch, stats)
    found.sum().backward()
    assert v.grad is not None
    assert found.item() == pytest.approx(loss) and v.grad.item() == pytest.approx(slope)
    assert stats["value/clipped"] == (clipped, 1.0) and stats["value/loss"] == (pytest.approx(loss), 1.0)


def test_no_value_within_the_clip_counts_as_clipped_by_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = (0.1 * torch.rand(4000, generator=generator) for _ in range(2))
    returns = torch.randn(4000, generator=generator)
    batch, stats = flat_batch(new, value=old, returns=returns), Stats()
    loss = Value(clip=0.2)(Outputs(new, value=new), batch, stats)
    assert stats["value/clipped"] == (0.0, 4000.0) and torch.equal(loss, (new - returns).square() / 2)


def test_golden_soft_action_values() -> None:
    """y_t = r_t + gamma (Q'_(t+1) + alpha H_(t+1)) within a rollout, r_t alone after its last token."""
    q = torch.stack([doubles(1.0, 2.0, 3.0), doubles(0.0, 2.5, 7.0)]).requires_grad_()
    slow, entropy = doubles(9.0, 4.0, 5.0).requires_grad_(), doubles(8.0, 2.0, 6.0).requires_grad_()
    rollout = torch.tensor([0, 0, 1])
    batch = flat_batch(slow, rollout=rollout, advantage=doubles(0.1, 0.2, 0.3), coefficients={"entropy": 0.5})
    stats = Stats()
    loss = SoftQ(gamma=0.9)(Outputs(slow, q=q, target_q=slow, entropy=entropy), batch, stats)
    y = [0.1 + 0.9 * (4.0 + 0.5 * 2.0), 0.2, 0.3]
    expected = [((a - t) ** 2 + (b - t) ** 2) / 2 for a, b, t in zip((1.0, 2.0, 3.0), (0.0, 2.5, 7.0), y, strict=True)]
    assert loss.tolist() == pytest.approx(expected)
    gradients = torch.autograd.grad(loss.sum(), (q, slow, entropy), allow_unused=True)
    assert torch.allclose(gradients[0], q.detach() - doubles(*y)) and gradients[1] is gradients[2] is None
    assert stats["q/loss"] == (pytest.approx(sum(expected)), 3.0)
    assert stats["q"] == (pytest.approx(0.5 + 2.25 + 5.0), 3.0)


# -- dual clip, corrections --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "moves"),
    [(-1.0, 4.0, -3.0, False), (-1.0, 2.0, -2.0, True), (-1.0, 0.5, -0.8, False), (1.0, 4.0, 1.2, False)],
)
def test_golden_dual_clip(advantage: float, ratio: float, value: float, moves: bool) -> None:
    r = doubles(ratio).requires_grad_()
    batch, stats = flat_batch(r, advantage=doubles(advantage)), Stats()
    gain = Clip(0.2, 0.2, dual=3.0)(r, Outputs(r.log()), batch)
    gain.sum().backward()
    Clip(0.2, 0.2, dual=3.0).measure(r.detach(), Outputs(r.log()), batch, stats)
    assert gain.item() == pytest.approx(value) and r.grad is not None and bool(r.grad != 0) is moves
    assert stats["ratio/clipped_dual"] == (float((advantage, ratio) == (-1.0, 4.0)), 1.0)


@pytest.mark.parametrize(("divergence", "high", "low"), [("kl", 0.45, 0.6), ("tv", 0.3, 0.5)])
def test_golden_divergence_mask(divergence: Any, high: float, low: float) -> None:
    """From 0.5 to 0.9 or to 0.1: KL(old || new) is 0.511, KL(new || old) 0.368, the total variation 0.4.

    So the bound of A > 0 is passed and that of A < 0 is not; a token that moves against its advantage is never masked.
    """
    old, new = doubles(0.5, 0.5, 0.5).log(), doubles(0.9, 0.1, 0.1).log()
    batch, mask = flat_batch(new, advantage=doubles(1, -1, 1), old_logp=old), DivergenceMask(divergence, low, high)
    assert mask((new - old).exp(), Outputs(new), batch).tolist() == pytest.approx([0, -0.2, 0.2])
    swapped = DivergenceMask(divergence, high, low)
    assert swapped((new - old).exp(), Outputs(new), batch).tolist() == pytest.approx([1.8, 0, 0.2])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("truncate", [[0.25, 1.0, 2.0], [1.5, 2.0], [0.8, 0.25]]),
        ("icepop", [[0.0, 1.0, 0.0], [1.5, 0.0], [0.8, 0.0]]),
        ("sequence", [[1.0, 1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
        ("sequence-truncate", [[1.0, 1.0, 1.0], [2.0, 2.0], [0.2, 0.2]]),
    ],
)
def test_golden_corrections(kind: Any, expected: list[list[float]]) -> None:
    """Rollouts with pi_old / mu of (1/4, 1, 4), geometric mean 1, (1.5, 6), 3, and (0.8, 0.25), 0.45; the cap is 2."""
    gap = doubles(0.25, 1.0, 4.0, 1.5, 6.0, 0.8, 0.25).log()
    batch = flat_batch(gap, rollout=torch.tensor([0, 0, 0, 1, 1, 2, 2]))
    assert Correction(kind, 2.0)(gap, batch.rollout).tolist() == pytest.approx([c for own in expected for c in own])


@pytest.mark.parametrize(("gap", "kept"), [(0.99, 1.0), (1.01, 0.0), (-0.99, 1.0), (-1.01, 0.0)])
def test_a_sequence_is_masked_by_the_mean_gap_of_its_tokens(gap: float, kept: float) -> None:
    logs = gap * math.log(2.0) * doubles(0.5, 1.5, 1.0)  # of this mean, whatever each token's
    batch = flat_batch(logs, rollout=torch.tensor([0, 0, 0]))
    assert Correction("sequence", 2.0)(logs, batch.rollout).tolist() == [kept] * 3


def test_correction_multiplies_the_gain_outside_of_the_clip_and_has_no_gradient() -> None:
    row = chosen_row(find("dr-grpo"), correction="truncate", correction_cap=2.0)
    logp = doubles(-1.0, -2.0).requires_grad_()
    batch = flat_batch(logp, advantage=doubles(1.0, 1.0), old_logp=logp.detach() - 0.5)
    batch = replace(batch, sampler_logp=logp.detach() - 0.5 - doubles(3.0, 0.5).log())
    loss = PolicyObjective(row)(Outputs(logp), batch, Stats())
    loss.backward()
    assert loss.item() == pytest.approx(-(2.0 * 1.2 + 0.5 * 1.2) / 2)  # exp(0.5) is clipped to 1.2, 3 is cut to 2
    assert logp.grad is not None and not logp.grad.any()


def test_share_of_capped_weights_is_logged() -> None:
    stats = Stats()
    for high, ratio in ((0.5, doubles(1.5, 1.6, 0.2, 9.0, 1.0)), (None, doubles(9.0))):
        logp = torch.zeros_like(ratio)
        WeightedLogProbability(high).measure(ratio, Outputs(logp), flat_batch(logp), stats)
    assert stats == {"ratio/clipped_high": (2.0, 5.0)}


# -- aggregation, baselines --------------------------------------------------------------------------------------------


def test_golden_prompt_mean_weights() -> None:
    weight = PromptMean()(scores_of([0, 0, 0], [2, 6, 4], [0, 0, 1]))
    assert weight.tolist() == pytest.approx([1 / 16, 1 / 16, 1 / 8])
    assert (weight * doubles(2, 6, 4)).sum().item() == pytest.approx(1.0)


def test_length_of_one_s_own_wins_over_the_budget_of_episodes() -> None:
    limits = RunLimits(episode_tokens=20)
    assert ConstantLength(7).configured(limits) == ConstantLength(7) and not ConstantLength(7).needs
    assert ConstantLength().configured(limits) == ConstantLength(20)
    assert ConstantLength().needs == SoftOverlong().needs == {Need.EPISODE_TOKENS}
    assert SoftOverlong(9, 2).configured(limits) == SoftOverlong(9, 2) and not SoftOverlong(9, 2).needs
    assert SoftOverlong().configured(limits) == SoftOverlong(20, 4)
    assert SoftOverlong().configured(RunLimits(4)) == SoftOverlong(4, 1)
    assert SoftOverlong().configured(RunLimits(None)) == SoftOverlong()
    with pytest.raises(UserError, match="--overlong-cache 20 must be below .* 20"):
        SoftOverlong(cache=20).configured(limits)


def test_groups_without_signal_do_not_dilute_the_advantage_where_that_is_asked_for() -> None:
    scores = scores_of([1.0, 0.0, 0.7, 0.7, 0.25, 0.75], [1] * 6, [0, 0, 1, 1, 2, 2])
    centred = [0.5, -0.5, 0.0, 0.0, -0.25, 0.25]
    assert Baselined("group")(scores).tolist() == pytest.approx(centred)
    assert Baselined("group", signal=True)(scores).tolist() == pytest.approx([6 / 4 * a for a in centred])
    equal = scores_of([0.7, 0.7, 0.3, 0.3], [1] * 4, [0, 0, 1, 1])
    assert Baselined("group", signal=True)(equal).tolist() == [0.0] * 4


def test_golden_length_baseline() -> None:
    """b = sum of n R / sum of n: (2 + 6 - 6) / 14 within the group, and without the rollout itself among the others."""
    scores = scores_of([1.0, 1.0, -1.0], [2, 6, 6])
    group = Baselined("group", weight="length")(scores)
    assert group.tolist() == pytest.approx([1 - 2 / 14, 1 - 2 / 14, -1 - 2 / 14])
    others = Baselined("others", weight="length")(scores)
    assert others.tolist() == pytest.approx([1 - 0 / 12, 1 - (2 - 6) / 8, -1 - 8 / 8])
    assert Baselined("batch", weight="length")(scores).tolist() == pytest.approx(group.tolist())


def test_optimal_baseline_has_the_least_variance_of_all() -> None:
    """g (R - b) over three outcomes with known probabilities, of a one-parameter policy: enumerated, not sampled."""
    theta = doubles(0.7).requires_grad_()
    logs = (theta * doubles(1.0, -0.5, 2.0)).log_softmax(0)
    reward, p = doubles(1.0, 0.2, -1.0), logs.exp().detach()
    g = torch.stack([torch.autograd.grad(x, theta, retain_graph=True)[0][0] for x in logs])

    def variance(b: float) -> float:
        x = g * (reward - b)
        return ((p * x.square()).sum() - (p * x).sum().square()).item()

    counts = [round(1000 * x) for x in p.tolist()]
    outcome = torch.arange(3).repeat_interleave(torch.tensor(counts))
    scores = scores_of(reward[outcome].tolist(), [1] * len(outcome), squared_gradient_norm=g[outcome].square())
    advantage = Baselined("group", weight="gradient")(scores)
    b = (scores.reward - advantage)[0].item()
    assert b == pytest.approx(((p * g.square() * reward).sum() / (p * g.square()).sum()).item(), abs=2e-3)
    assert variance(b) < min(variance(b + d) for d in (-0.05, 0.05)) and variance(b) < variance(float(reward @ p))


def test_gradients_are_asked_for_where_rewards_are_weighed_by_them() -> None:
    assert Need.GRADIENT_NORM in Baselined(weight="gradient").needs and not Baselined("none").needs
    source = new_source("reinforce-baseline", baseline_weight="gradient")
    source.produce(1)
    assert source._watched is not None
    scores = source._watched.scores
    norms = source.learner.squared_gradients([pack([r.transcripts], [0]) for r in source._watched.rollouts])
    assert scores.squared_gradient_norm is not None and torch.allclose(scores.squared_gradient_norm, norms)
    base = (norms * scores.reward).sum() / norms.sum()
    told = torch.stack([a[0] for a in source._watched.per_token["advantage"]])
    assert torch.allclose(told.double(), scores.reward - base, atol=1e-6)


def test_squared_gradients_equal_those_of_each_sequence_alone() -> None:
    case = new_case(chosen_row(find("reinforce-baseline"), baseline_weight="gradient"), groups=2, size=2)
    model, found = case.learner.model, []
    for rollout in case.rollouts:
        (transcript,) = rollout.transcripts
        tokens = torch.tensor(transcript.tokens)
        logs = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T).log_softmax(-1)
        model.zero_grad()
        torch.stack([logs[t - 1, tokens[t]] for t in transcript.scored.tolist()]).sum().backward()
        found.append(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    model.zero_grad()
    batches = [pack([r.transcripts], [i]) for i, r in enumerate(case.rollouts)]
    assert case.learner.squared_gradients(batches).tolist() == pytest.approx(found, rel=1e-10)
    assert all(p.grad is None for p in model.parameters())  # nothing is left for the next update


# -- controllers -------------------------------------------------------------------------------------------------------


def test_golden_adaptive_control() -> None:
    control = Adaptive(target=0.1, horizon=1000.0)
    assert control(0.5, 0.1, 64) == 0.5
    assert control(0.5, 0.11, 64) == pytest.approx(0.5 * (1 + 0.1 * 64 / 1000))
    assert control(0.5, 9.0, 64) == pytest.approx(0.5 * (1 + 0.2 * 64 / 1000))
    assert control(0.5, 0.0, 64) == pytest.approx(0.5 * (1 - 0.2 * 64 / 1000))


def test_golden_halving_and_doubling() -> None:
    control = HalvingDoubling(target=0.03)
    assert [control(1.0, d, 64) for d in (0.03 / 1.6, 0.03, 0.03 * 1.6)] == [0.5, 1.0, 2.0]
    assert [control(1.0, d, 64) for d in (0.03 / 1.4, 0.03 * 1.4)] == [1.0, 1.0]


def test_entropy_coefficient_rises_below_its_target_and_falls_above_it_to_no_less_than_0() -> None:
    entropy = Entropy(0.01, target=1.0, rate=0.02)
    assert entropy.next(0.01, 0.5) == pytest.approx(0.02)
    assert entropy.next(0.01, 1.2) == pytest.approx(0.006)
    assert entropy.next(0.01, 3.0) == 0.0
    assert Entropy(0.01).next(0.01, 3.0) == 0.01


# -- which tokens and rollouts -----------------------------------------------------------------------------------------


def test_golden_overlong() -> None:
    sampled = doubles(1, 80, 90, 95, 100, 101)
    penalty = SoftOverlong(limit=100, cache=20)(scores_of([0.0] * 6, [1] * 6, sampled=sampled))
    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.5, -0.75, -1.0, -1.0])


def test_golden_group_length() -> None:
    success = torch.tensor([True, True, False, False, True])
    scores = scores_of([1, 1, 0, 0, 1], [10, 20, 10, 30, 7], [0, 0, 0, 0, 1], success=success)
    assert GroupLength(2.0)(scores).tolist() == pytest.approx([1.0, 0.0, 0.0, -1.0, 0.0])


def test_overlong_filter_takes_truncated_rollouts_out_of_the_loss_and_its_denominators_but_not_out_of_their_group() -> (
    None
):
    row = chosen_row(find("dr-grpo"), aggregate="token-mean", overlong_filter=True)
    truncated = torch.tensor([False, True, False, False])
    scores = scores_of([1.0, 0.0, 1.0, 0.0], [2, 20, 3, 5], truncated=truncated)
    kept = OverlongFilter()(scores)
    assert kept.tolist() == [True, False, True, True]
    assert row.aggregate(scores.of(kept.nonzero().flatten())).tolist() == pytest.approx([1 / 10] * 3)
    assert row.advantage(scores)[0].item() == 0.5


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
def test_top_entropy_keeps_exactly_the_share(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    entropy = [torch.rand(n, generator=generator) for n in (30, 50, 20)]
    kept = torch.cat(TopEntropy(share)({"entropy": entropy}, []))
    every = torch.cat(entropy)
    assert kept.sum() == max(1, round(share * 100))
    assert every[kept].min() > every[~kept].max() if share < 1 else bool(kept.all())


def test_golden_k_step() -> None:
    """Rewards 0, 0, 1, values 0.5, 0.6, 0.7: two steps ahead the critic counts for the first token alone."""
    scores = Scores(doubles(1), torch.tensor([0]), torch.tensor([3.0]), value=(doubles(0.5, 0.6, 0.7),))
    of = {k: KStep(k)(scores)[0].tolist() for k in (1, 2, 9)}
    assert of[1] == pytest.approx([0.1, 0.1, 0.3]) and of[1] == pytest.approx(GAE(1.0, 0.0)(scores)[0].tolist())
    assert of[2] == pytest.approx([0.7 - 0.5, 1 - 0.6, 1 - 0.7])
    assert of[9] == pytest.approx([0.5, 0.4, 0.3]) and of[9] == pytest.approx(GAE(1.0, 1.0)(scores)[0].tolist())
    assert KStep(2, 0.9)(scores)[0].tolist() == pytest.approx([0.81 * 0.7 - 0.5, 0.9 - 0.6, 1 - 0.7])
    assert KStep(2).returns(scores, None)[0].tolist() == pytest.approx([0.7, 1, 1])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_a_rollout_that_was_cut_off_is_worth_what_the_critic_gives_its_last_state(gamma: float) -> None:
    """As if the rollout were one token shorter and the value of the state behind it were earned there."""
    value = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps = (((2, 0.25), (6, 0.5)),)  # the second one at the cut, where nothing earned counts
    whole = Scores(doubles(0.75), torch.tensor([0]), doubles(6), steps, value=(value,), truncated=torch.tensor([True]))
    for lam in (0.0, 0.7, 1.0):
        expected = [0.0] * 6
        for t in reversed(range(5)):
            delta = (0.25 if t == 1 else 0.0) + gamma * value[t + 1] - value[t]
            expected[t] = float(delta) + gamma * lam * expected[t + 1]
        found = GAE(gamma, lam, bootstrap=True)
        assert found(whole)[0].tolist() == pytest.approx(expected, abs=1e-12)
        assert found.returns(whole, None)[0][-1] == value[-1]  # nothing is known of what would have followed
    for k in (1, 2, 9):
        ends = [min(t + k, 5) for t in range(6)]
        expected = [
            sum(gamma ** (j - t) * (0.25 if j == 1 else 0.0) for j in range(t, end))
            + gamma ** (end - t) * float(value[end])
            - float(value[t])
            for t, end in enumerate(ends)
        ]
        assert KStep(k, gamma, bootstrap=True)(whole)[0].tolist() == pytest.approx(expected, abs=1e-12)
    ended = replace(whole, truncated=torch.tensor([False]))
    for advantage in (GAE(gamma, 0.7), KStep(2, gamma)):
        assert torch.equal(replace(advantage, bootstrap=True)(ended)[0], advantage(whole)[0])


def test_returns_with_a_lambda_of_their_own_end_at_the_critic_s_value_where_a_rollout_was_cut_off() -> None:
    """Lambda 1: the discounted rewards before the cut, and the value of the last state in place of what earned there."""
    value = doubles(0.3, -0.2, 0.8, 0.6)
    scores = Scores(
        doubles(0.75), torch.tensor([0]), doubles(4), (((2, 0.25),),), value=(value,), truncated=torch.tensor([True])
    )
    found = GAE(0.9, alpha=0.05, bootstrap=True).returns(scores, 1.0)[0].tolist()
    assert found == pytest.approx([0.9 * 0.25 + 0.9**3 * 0.6, 0.25 + 0.9**2 * 0.6, 0.9 * 0.6, 0.6], abs=1e-12)
    ended = replace(scores, truncated=torch.tensor([False]))
    assert GAE(0.9, alpha=0.05, bootstrap=True).returns(ended, 1.0)[0][-1] == 0.5  # the final reward: 0.75 - 0.25


@pytest.mark.parametrize("advantage", [GAE(1.0, 0.9, bootstrap=True), KStep(2, bootstrap=True)])
def test_whitening_neither_counts_nor_moves_the_token_at_which_a_rollout_was_cut_off(advantage: GAE | KStep) -> None:
    draws = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = {"group": torch.tensor([0, 0]), "length": doubles(4, 3)}
    scores = Scores(doubles(1, 0), **lengths, value=draws.split([4, 3]), truncated=torch.tensor([False, True]))
    plain = advantage(scores)
    counted = torch.cat([plain[0], plain[1][:2]])
    found = replace(advantage, whiten=True)(scores)
    assert torch.allclose(torch.cat(found)[:6], (counted - counted.mean()) / (counted.std() + 1e-8), atol=1e-12)
    assert found[1][2] == 0


def test_golden_reward_floor() -> None:
    """Under -1..1 a right reply at the limit of DAPO's penalty is worth 0, half of the way to a wrong one."""
    lengths = {"group": torch.tensor([0, 0]), "length": doubles(10, 3), "sampled": doubles(10, 3)}
    scores = Scores(doubles(1, 0), **lengths)
    assert RewardFloor(-1.0)(scores).tolist() == [0.0, -1.0] and RewardFloor(-0.25)(scores).tolist() == [0.0, -0.25]
    shaped = scores.reward + RewardFloor(-1.0)(scores) + SoftOverlong(10, 2)(scores)
    assert shaped.tolist() == [0.0, -1.0]
    half = Scores(doubles(0.5, 0.25), **lengths)
    assert (half.reward + RewardFloor(-1.0)(half)).tolist() == [0.0, -0.5]
    with pytest.raises(UserError, match=r"--reward-floor needs rewards of 0..1, and this step's are -1 to 2"):
        RewardFloor()(Scores(doubles(2, -1), **lengths))


def test_golden_length_penalty() -> None:
    scores = Scores(doubles(1, 1), torch.tensor([0, 0]), torch.tensor([3.0, 8.0]), sampled=torch.tensor([3.0, 10.0]))
    assert LengthPenalty(0.01)(scores).tolist() == pytest.approx([-0.03, -0.1])


def test_kl_of_a_response_is_that_of_its_whole_ratio_at_each_of_its_tokens() -> None:
    """Two responses, of two tokens and one: k3 of x = sum (ref - lp), which a mean over tokens counts once each."""
    lp, ref = doubles(-1, -2, -3).requires_grad_(), doubles(-1.5, -1, -2.5)
    batch = replace(
        flat_batch(lp, advantage=doubles(0, 0, 0)),
        weight=doubles(0.25, 0.25, 0.5),
        ref_logp=ref,
        rollout=torch.tensor([0, 0, 1]),
    )
    row = replace(TABLE["grpo"], kl=KL("k3", 0.1, unit="response"))
    loss = PolicyObjective(row)(Outputs(lp), batch, Stats())
    expected = 0.1 * sum(math.exp(x) - 1 - x for x in (0.5, 0.5)) / 2
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    loss.backward()
    slope = 0.1 * (1 - math.exp(0.5)) / 2
    assert lp.grad is not None and lp.grad.tolist() == pytest.approx([slope] * 3, abs=1e-12)


def test_golden_covariances_choose_tokens() -> None:
    """log p -1 -3 | -2 -6 with A 3, -1: its part in the covariance is 4, 0 | -2, 6 (means -3 and 1)."""
    own, advantage = {"logp": [doubles(-1, -3), doubles(-2, -6)]}, [doubles(3, 3), doubles(-1, -1)]
    assert [k.tolist() for k in CovarianceClip(0.5)(own, advantage)] == [[False, True], [True, True]]
    assert [k.tolist() for k in CovarianceClip(0.5, high=7)(own, advantage)] == [[False, True], [True, False]]
    assert [k.tolist() for k in CovarianceClip(0.25, high=7)(own, advantage)] == [[True, True], [True, False]]
    assert [w.tolist() for w in CovariancePenalty(0.5)(own, advantage)] == [[1, 0], [0, 1]]
    assert [w.tolist() for w in CovariancePenalty(0.25, 3.0)(own, advantage)] == [[0, 0], [0, 3]]
    assert all(k.all() for k in CovarianceClip(0.5, 10, 20)(own, advantage)), "none has such a covariance"


def test_mean_advantages_of_a_step_are_those_of_each_rollout_and_need_a_token_of_each() -> None:
    scores = scores_of([0.0] * 3, [3, 1, 2])
    credited = Credited([None] * 3, scores, {"advantage": [doubles(1, -1, 0), doubles(-2), doubles(0, 0)]}, {})  # type: ignore[list-item]
    assert credited.advantages() == ([0.0, -2.0, 0.0], [True, True, False])
    empty = replace(credited, scores=scores_of([0.0] * 3, [3, 0, 2]))
    with pytest.raises(AssertionError, match="without a scored token"):
        empty.advantages()


TASKS = [{"id": str(i), "prompt": f"{i}+1="} for i in range(8)]


def new_source(name: str, env: Any = digits, tokens: int = 200, prompts: int = 3, **settings: Any) -> RLSource:
    row = chosen_row(find(name), **{"max_tokens": 8, "prompts": prompts, **settings})
    learner = new_learner(row, torch.float32)
    player = new_player(env, learner.model, 8)
    return RLSource(collector_of(TASKS, player, row, Size(prompts, 4, tokens), success=1.0), learner, row)


def run(source: RLSource, first: int, last: int) -> list[dict[str, float]]:
    seen: list[dict[str, float]] = []
    objective = PolicyObjective(source.algorithm)
    train(source.learner, source, objective, [lambda t: seen.append(t.stats.means())], first=first, steps=last)
    return seen


def test_updates_of_a_step_end_once_the_policy_is_far_enough() -> None:
    """Six updates of one step: the first has KL 0, and the second shows how far the first one went."""
    whole, ended = new_source("lite-ppo", epochs=6), new_source("lite-ppo", epochs=6, target_kl=1e-9)
    (every,), (some,) = run(whole, 1, 1), run(ended, 1, 1)
    assert (every["updates"], some["updates"]) == (6, 2) and "kl/step" not in every and some["kl/step"] > 1e-10
    far = new_source("lite-ppo", epochs=6, target_kl=1e3)
    (all_of_them,) = run(far, 1, 1)
    assert all_of_them["updates"] == 6 and all_of_them["loss"] == every["loss"]


def test_an_update_ends_a_step_by_its_own_kl_and_not_by_the_mean_of_the_updates_so_far() -> None:
    """The first has KL 0, so the second is twice the mean of both; the limit is between the two."""
    (two,) = run(new_source("lite-ppo", epochs=2, target_kl=1e3), 1, 1)
    (some,) = run(new_source("lite-ppo", epochs=6, target_kl=1.5 * two["kl/step"]), 1, 1)
    assert (two["updates"], some["updates"]) == (2, 2) and some["kl/step"] == two["kl/step"] > 0


def test_groups_of_updates_that_are_not_made_are_told_as_such() -> None:
    """The early stop is asked after each update, and what no update drew keeps that as its fate."""
    source = new_source("lite-ppo", minibatches=3, target_kl=1e-9)
    told: list[list[str]] = []
    train(
        source.learner,
        source,
        PolicyObjective(source.algorithm),
        [lambda t: told.append([o.why for o in t.step.outcomes])],
        first=1,
        steps=1,
    )
    assert "no update drew it" in told[0] and any(why.startswith("in update") for why in told[0])


def test_top_entropy_leaves_every_denominator_as_it_was() -> None:
    plain, chosen = new_source("lite-ppo"), new_source("lite-ppo", top_entropy=0.25)
    whole, some = ([b for build in s.produce(1).updates for b in build()] for s in (plain, chosen))
    tokens = sum(len(b.target) for b in whole)
    assert {w for b in some for w in b.weight.tolist()} == {w for b in whole for w in b.weight.tolist()}
    assert math.isclose(sum(b.weight.sum().item() for b in whole), 1.0, abs_tol=1e-6)
    moved = sum(int((b.advantage != 0).sum()) for b in some if b.advantage is not None)
    assert moved <= round(0.25 * tokens)


def test_dynamic_sampling_keeps_groups_that_differ_and_may_ask_for_a_share_of_successes() -> None:
    success = torch.tensor([True, True, True, False, False, False])
    scores = scores_of([1, 1, 1, 0, 0.5, 0.25], [3] * 6, [0, 0, 1, 1, 2, 2], success=success)
    assert DynamicSampling()(scores).tolist() == [False, False, True, True, True, True]
    assert DynamicSampling(low=0.1, high=0.9)(scores).tolist() == [False, False, True, True, False, False]
    quarters = torch.tensor([True] + [False] * 3 + [True, True, False, False] + [True] * 3 + [False])
    scores = scores_of([0.1 * i for i in range(12)], [3] * 12, [i // 4 for i in range(12)], success=quarters)
    for low, high, kept in ((0.25, 1.0, [1, 2]), (0.0, 0.75, [0, 1]), (0.25, 0.75, [1]), (0.2, 0.8, [0, 1, 2])):
        assert DynamicSampling(low=low, high=high)(scores).tolist() == [i // 4 in kept for i in range(12)]


def uneven(task: Task, reply: str) -> float:
    """Only some tasks have a signal."""
    return digits(task, reply) if int(task["id"]) % 3 == 0 else 1.0


def test_dynamic_sampling_replaces_groups_until_the_step_is_full_or_the_budget_is_spent() -> None:
    source = new_source("dr-grpo", uneven, dynamic_sampling=4)
    step = source.produce(1)
    figures = step.stats.means()
    assert figures["groups/kept"] == 3 and 3 < figures["groups/played"] <= 12
    assert source.queue.collector.position.order == {"cursor": figures["groups/played"]}  # the next goes on there
    assert {b.advantage is not None and bool(b.advantage.any()) for b in step.updates[0]()} == {True}
    poor = new_source("dr-grpo", lambda task, reply: 1.0, dynamic_sampling=2)
    figures = poor.produce(1).stats.means()
    assert (
        figures["groups/played"] == 6
        and figures["groups/kept"] == 0
        and poor.queue.collector.position.order == {"cursor": 6}
    )


def test_resumed_dynamic_sampling_plays_the_tasks_that_an_uninterrupted_run_plays() -> None:
    whole = new_source("dr-grpo", uneven, dynamic_sampling=3)
    played = []
    for number in range(1, 6):
        played.append([r.task["id"] for r in whole.produce(number).played])
    parted = new_source("dr-grpo", uneven, dynamic_sampling=3)
    for number in (1, 2):
        parted.produce(number)
    resumed = new_source("dr-grpo", uneven, dynamic_sampling=3)
    resumed.restore(json.loads(json.dumps(parted.state())))
    again = [[r.task["id"] for r in resumed.produce(number).played] for number in (3, 4, 5)]
    assert again == played[2:] and len({len(p) for p in played}) > 1


def test_overlong_filter_of_a_real_step_feeds_no_truncated_rollout_and_weighs_the_rest() -> None:
    source = new_source("dr-grpo", aggregate="token-mean", overlong_filter=True, minibatches=1)
    step = source.produce(1)
    cut_off = [r for r in step.played if r.stop.truncated]
    rest = [r for r in step.played if not r.stop.truncated]
    assert cut_off and rest
    weights = {round(1 / w) for b in step.updates[0]() for w in b.weight.tolist()}
    assert weights == {sum(r.n_sampled for r in rest)}


# -- KL ----------------------------------------------------------------------------------------------------------------


def two_policies() -> tuple[Tensor, Tensor]:
    """Log-probabilities of a policy (from logits with a gradient) and of a reference over five actions."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)


def expected_gradient(logits: Tensor, penalty: Tensor, p: Tensor) -> Tensor:
    """Of a penalty [5] in the loss, when actions are sampled with probability p: the samples have no gradient."""
    return torch.autograd.grad((p.detach() * penalty).sum(), logits, retain_graph=True)[0]


def test_gradient_in_the_loss_of_k2_is_that_of_the_reverse_kl_and_of_k3_is_not() -> None:
    logits, ref = two_policies()
    logp = logits.log_softmax(0)
    p = logp.exp()
    (true,) = torch.autograd.grad((p * (logp - ref)).sum(), logits, retain_graph=True)
    assert torch.allclose(expected_gradient(logits, KL("k2")(logp, ref), p), true, atol=1e-12)
    assert not torch.allclose(expected_gradient(logits, KL("k3")(logp, ref), p), true, atol=1e-2)
    assert torch.allclose(expected_gradient(logits, KL("k1")(logp, ref), p), torch.zeros(5).double(), atol=1e-12)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), logits, retain_graph=True)
    assert torch.allclose(expected_gradient(logits, KL("k3")(logp, ref), p), forward, atol=1e-12)


def test_estimators_have_the_means_they_should_over_all_actions() -> None:
    logits, ref = two_policies()
    logp = logits.detach().log_softmax(0)
    p, reverse = logp.exp(), (logp.exp() * (logp - ref)).sum()
    for name in ("k1", "k3"):
        assert torch.isclose((p * KL(name)(logp, ref)).sum(), reverse)
    forward = (ref.exp() * (ref - logp)).sum()
    assert torch.isclose((p * KL("forward")(logp, ref)).sum(), forward)
    assert not torch.isclose((p * KL("k2")(logp, ref)).sum(), reverse)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_exact_kl_equals_the_closed_form_and_the_mean_of_k1_within_its_error(temperature: float) -> None:
    learner = new_learner(chosen_row(find("grpo"), kl_estimator="exact"))
    learner.temperature = temperature
    transcript = Transcript()
    transcript.observe([5, 6, 7])
    transcript.sample(Completion(0, [9, 4, 3], [-1.0] * 3, "", StopReason.EOS, 0))
    batch = pack([[transcript]], [0])
    (found,) = learner.evaluate([batch], want=frozenset({"kl"}))
    assert found.kl is not None
    tokens, place = torch.tensor(transcript.tokens), torch.arange(6)
    with torch.no_grad():
        own, other = (
            (m(tokens, place, causal) @ m.head.weight.T / temperature).log_softmax(-1)[2:5]
            for m in (learner.model, learner.others[REFERENCE])
        )
    assert torch.allclose(found.kl, (own.exp() * (own - other)).sum(-1), atol=1e-12)
    assert torch.allclose(found.logp, own.gather(1, batch.target[:, None])[:, 0], atol=1e-12)
    action = own.exp().multinomial(20_000, replacement=True, generator=torch.Generator().manual_seed(0))
    k1 = KL("k1")(own.gather(1, action), other.gather(1, action))
    error = k1.std(1) / 20_000**0.5
    assert ((k1.mean(1) - found.kl).abs() < 4 * error).all()


def test_exact_kl_in_the_loss_has_the_gradient_of_its_closed_form() -> None:
    generator = torch.Generator().manual_seed(0)
    states, head = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (3, 6))
    other = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    states.requires_grad_()
    own, theirs = ((states.detach().requires_grad_() @ h.T / 0.7).log_softmax(-1) for h in (head, other))
    mine = states.detach().requires_grad_()
    plain = (mine @ head.T / 0.7).log_softmax(-1)
    value = (plain.exp() * (plain - (states.detach() @ other.T / 0.7).log_softmax(-1))).sum()
    (want,) = torch.autograd.grad(value, mine)
    found = exact_kl(Hidden(states, Head(head)), Hidden(states.detach(), Head(other)), 0.7).sum()
    assert torch.allclose(torch.autograd.grad(found, states)[0], want, atol=1e-12)
    assert torch.isclose(found, (own.exp() * (own - theirs)).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 4, 7])
def test_what_is_worked_out_in_chunks_of_tokens_is_what_it_is_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, rows: int, graded: bool, kind: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    one, two = (
        Hidden(torch.randn(rows, 3, generator=generator).double(), new_head(kind, 6, 3, generator)) for _ in range(2)
    )
    own, other = ((plain_logits(h.states, h.head) / 0.7).log_softmax(-1) for h in (one, two))
    expected = (own.exp() * (own - other)).sum(-1)
    monkeypatch.setattr("posttrain.models.losses.likelihood.CHUNK_LOGITS", 12)
    monkeypatch.setattr("posttrain.models.losses.likelihood.CHUNK_ROWS", 2)
    with torch.set_grad_enabled(graded):
        assert torch.allclose(exact_kl(one, two, 0.7), expected, atol=1e-12)
        q = torch.minimum(*(plain_logits(h.states, h.head) for h in (two, one)))
        values = soft_values(one, (one, two), (two, two), 0.7)
    assert torch.allclose(values[0], (own.exp() * q).sum(-1), atol=1e-12)
    assert torch.allclose(values[1], (own.exp() * plain_logits(two.states, two.head)).sum(-1), atol=1e-12)


def test_two_kinds_of_shaping_add_up() -> None:
    def shaping(**options: Any) -> float:
        return new_source("grpo", **options).produce(1).stats["reward/shaping"][0]

    soft: dict[str, Any] = {"overlong_cache": 4}
    length: dict[str, Any] = {"length_reward": 0.5}
    each = shaping(**soft), shaping(**length)
    assert all(each) and shaping(**soft, **length) == pytest.approx(sum(each))


def test_what_credit_comes_to_is_logged_by_token_and_by_rollout() -> None:
    source = new_source("dapo", overlong_cache=4, dynamic_sampling=0)
    step, credited = source.produce(1), source._watched
    assert credited is not None and len(credited.rollouts) == 12
    added = [min(0.0, max(-1.0, (8 - 4 - r.n_sampled) / 4)) for r in credited.rollouts]
    assert step.stats["reward/shaping"] == (pytest.approx(sum(added)), 12.0) and len(set(added)) > 1
    shaped = [float(r.reward) + a for r, a in zip(credited.rollouts, added, strict=True)]  # type: ignore[arg-type]
    assert credited.scores.reward.tolist() == pytest.approx(shaped)
    every = torch.cat(credited.per_token["advantage"]).tolist()
    assert step.stats["advantage/abs"] == (pytest.approx(sum(map(abs, every)), rel=1e-5), float(len(every)))
    assert step.stats["advantage/std"] == (pytest.approx(pstdev(every), rel=1e-5), 1.0)


def test_controls_follow_the_kl_and_the_entropy_of_the_step_in_nats_per_token() -> None:
    control = Adaptive(target=0.05, horizon=100.0)
    source = new_source(
        "grpo", kl_control="adaptive", kl_target=0.05, kl_horizon=100.0, entropy=0.3, entropy_target=2.0
    )
    rate, learner = source.algorithm.entropy.rate, source.learner  # type: ignore[union-attr]
    first = source.produce(1)
    rollouts = [r for r in first.played]
    batch = [pack([r.transcripts for r in rollouts], range(len(rollouts)))]
    own, other = learner.evaluate(batch)[0].logp, learner.evaluate(batch, of="reference")[0].logp
    x = (other - own).double()
    measured = (x.exp() - 1 - x).mean().item()
    stats = Stats(first.stats)
    source.learned(first, stats)
    assert stats["kl/measured"] == (pytest.approx(measured, rel=1e-4), 1.0)
    assert source.coefficients["kl"] == pytest.approx(control(0.04, measured, 12), rel=1e-5)
    entropy = -mean(x for r in rollouts for x in r.transcripts[0].logp)
    assert first.stats["entropy"] == (pytest.approx(entropy * len(own), rel=1e-5), len(own))
    assert source.coefficients["entropy"] == pytest.approx(max(0.0, 0.3 + rate * (2.0 - entropy)), rel=1e-5)
    held = dict(source.coefficients)
    source.learned(first, Stats(first.stats))  # nothing is known of the KL of a step that is over
    assert source.coefficients["kl"] == held["kl"]
    source.restore({"cursor": 0, "coefficients": held})
    for broken in ({"cursor": -1}, {"cursor": 1.0}, {"coefficients": {}}, {"coefficients": {**held, "kl": math.inf}}):
        with pytest.raises(ValueError):
            source.restore({"cursor": 0, "coefficients": held, **broken})


def test_rollouts_of_a_step_are_of_the_weights_that_the_learner_has() -> None:
    source = new_source("dr-grpo", minibatches=3)
    run(source, 1, 2)
    (version,) = {s.version for r in source.produce(3).played for s in r.transcripts[0].spans if s.learned}
    assert version == source.learner.version == 6


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {"kl_control": "adaptive", "kl_target": 1e-4, "kl_horizon": 50.0}),
        ("ppo-kl", {"kl_target": 1e-6}),
        ("dr-grpo", {"entropy": 0.01, "entropy_target": 0.5}),
        ("ppo", {"critic_warmup": 2}),
        ("grpo", {"reference_every": 2}),
    ],
)
def test_what_moves_from_step_to_step_goes_on_after_a_resume(
    tmp_path: Any, name: str, settings: dict[str, Any]
) -> None:
    whole = new_source(name, **settings)
    seen = run(whole, 1, 5)
    if name == "grpo" and "reference_every" in settings:
        assert seen[2]["kl"] < seen[1]["kl"]  # a new reference
    else:
        coefficient = "coefficient/" + ("policy" if name == "ppo" else "entropy" if name == "dr-grpo" else "kl")
        assert len({m[coefficient] for m in seen}) > 1
    parted = new_source(name, **settings)
    run(parted, 1, 3)
    parted.learner.save(tmp_path)
    resumed = new_source(name, **settings)
    resumed.learner.model.load_state_dict(parted.learner.model.state_dict())
    resumed.learner.load(tmp_path)
    resumed.restore(json.loads(json.dumps(parted.state())))
    assert run(resumed, 4, 5) == seen[3:]
    assert torch.equal(*(nn.utils.parameters_to_vector(s.learner.model.parameters()) for s in (whole, resumed)))


def test_advantages_of_a_batch_are_whitened_over_all_of_its_tokens() -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 2, 3, WORDS.vocab_size)
    value = [torch.rand(r.n_sampled, generator=torch.Generator().manual_seed(i)) for i, r in enumerate(rollouts)]
    every = torch.cat(GAE(whiten=True)(scoreboard(rollouts, value=value))).tolist()
    assert mean(every) == pytest.approx(0.0, abs=1e-9)
    assert torch.tensor(every).std().item() == pytest.approx(1.0, abs=1e-5)


def test_whitened_advantage_of_the_only_token_of_a_batch_is_0() -> None:
    """A single number has no spread, and n - 1 is 0."""
    assert [own.tolist() for own in whitened([doubles(), doubles(3.0)], 1e-8)] == [[], [0.0]]


def test_penalty_is_taken_once_off_what_is_left_to_go() -> None:
    scores = Scores(
        doubles(1.0, 0.0), torch.tensor([0, 0]), doubles(2.0, 2.0), penalty=(doubles(0.1, 0.2), doubles(0.0, 0.4))
    )  # fmt: skip
    one, other = ToGo("group")(scores)  # less the mean of 0.7 and -0.4
    assert one.tolist() == pytest.approx([0.2, 0.3]) and other.tolist() == pytest.approx([-0.9, -0.9])


def test_step_reward_before_the_first_learned_token_is_earned_by_none() -> None:
    scores = scores_of([1.5], [3], steps=(((0, 0.5),),))
    (earned,) = earnings(scores)
    assert earned.tolist() == [0.0, 0.0, 1.0]
    (to_go,) = ToGo()(scores)
    assert to_go.tolist() == [1.0, 1.0, 1.0]


def test_final_reward_belongs_to_the_step_that_ends_with_the_reply() -> None:
    """Steps that all earned the same have no advantage, however many there are."""
    steps = (((3, 0.9),), ((1, 0.9), (2, 0.9), (3, 0.9)))
    for found in StepRewards()(scores_of([0.9, 2.7], [3, 3], steps=steps)):
        assert found.tolist() == [0.0, 0.0, 0.0]


def test_outcomes_are_normalised_among_outcomes_and_steps_among_steps_where_they_are_apart() -> None:
    """By hand: outcomes 1, 0, 1 and steps .5, .1 | .2 | none, of one group; another group has one outcome and no steps."""
    steps = (((1, 0.5), (3, 0.1)), ((2, 0.2),), (), ())
    scores = scores_of([1.6, 0.2, 1.0, 5.0], [3, 4, 2, 2], [0, 0, 0, 1], steps=steps)
    found = StepRewards(outcome_apart=True)(scores)
    outcomes, every = [1.0, 0.0, 1.0], [0.5, 0.1, 0.2]

    def among(value: float, values: list[float]) -> float:
        return (value - mean(values)) / (stdev(values) + 1e-6)

    first = [among(0.5, every) + among(0.1, every), *[among(0.1, every)] * 2]
    second = [among(0.2, every)] * 2 + [0.0] * 2
    expected = [[x + among(1.0, outcomes) for x in first], [x + among(0.0, outcomes) for x in second]]
    expected += [[among(1.0, outcomes)] * 2, [0.0, 0.0]]
    for own, by_hand in zip(found, expected, strict=True):
        assert own.tolist() == pytest.approx(by_hand, abs=1e-12)
    together = StepRewards()(scores)
    assert any(not torch.allclose(a, b) for a, b in zip(found, together, strict=True))


def test_a_group_of_equal_rewards_has_a_signal_where_its_greedy_reply_earned_another() -> None:
    scores = replace(
        scores_of([1.0, 1.0, 0.0, 0.0, 1.0], [2] * 5, [0, 0, 1, 1, 2]), greedy=doubles(0.5, 0.5, 0.0, 0.0, 1.0)
    )
    assert equal_rewards(scores).tolist() == [False, False, True, True, True]
    assert Baselined("greedy")(scores).tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]
    pairs = replace(scores_of([1.0, 1.0, 0.0, 1.0], [2] * 4, [0, 0, 1, 1]), greedy=doubles(0.5, 0.5, 0.25, 0.25))
    found = Baselined("greedy", "group")(pairs).tolist()
    assert found[:2] == [0.0, 0.0] and found[2:] == pytest.approx(
        [-0.25 / stdev([0, 1]), 0.75 / stdev([0, 1])], rel=1e-5
    )


def test_ratios_of_one_rollout_say_nothing_of_those_of_the_next() -> None:
    log_ratio = doubles(-math.inf, 0.0, 0.1, 0.2)
    batch = flat_batch(log_ratio, rollout=torch.tensor([0, 0, 1, 1]))
    found = Causal()(log_ratio, batch)
    assert found[:2].tolist() == [-math.inf, -math.inf] and found[2:].tolist() == pytest.approx([0.1, 0.3])


@pytest.mark.parametrize("part", [{"entropy": Entropy(0.3)}, {"kl": KL("exact", 0.3)}, {"kl": KL("k3", 0.3)}], ids=str)
def test_coefficient_of_a_step_holds_and_not_that_of_the_row(part: dict[str, Any]) -> None:
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 1, 2, 40)
    values = torch.linspace(0.1, 1, sum(r.n_scored for r in rollouts))
    (name,) = part
    objective = PolicyObjective(replace(find("dr-grpo"), **part))

    def loss(coefficient: float) -> float:
        fields = {
            "advantage": [torch.ones(r.n_scored) for r in rollouts],
            "ref_logp": [torch.full((r.n_scored,), -1.0) for r in rollouts],
        }
        batch = collate(
            [r.transcripts for r in rollouts], [0, 1], weight=torch.ones(2), coefficients={name: coefficient},
            fields=fields,
        )  # fmt: skip
        return objective(Outputs(-values, entropy=values, kl=values), batch, Stats()).item()

    assert loss(1.4) - loss(0.0) == pytest.approx(2 * (loss(0.7) - loss(0.0))) != 0


def test_share_of_uncertain_tokens_is_of_the_step_and_not_of_each_rollout() -> None:
    source = new_source("dr-grpo", top_entropy=0.2)
    rollouts = [r for r in source.produce(1).played]
    found = credit(source.algorithm, rollouts, source.learner, 64, {}, None, Stats())
    own = evaluate_rollouts(source.learner, rollouts, 64, want=frozenset({"entropy"}))["entropy"]
    every = torch.cat(own)
    least = every.topk(round(0.2 * len(every))).values[-1]
    for entropy, advantage in zip(own, found.per_token["advantage"], strict=True):
        assert not advantage[entropy < least].any()


def test_kl_in_the_reward_weighs_the_coefficient_of_the_step() -> None:
    source = new_source("rloo")
    rollouts = [r for r in source.produce(1).played]

    def penalty(beta: float) -> Tensor:
        return torch.cat(
            credit(source.algorithm, rollouts, source.learner, 64, {"kl": beta}, None, Stats()).scores.penalty
        )

    assert torch.allclose(penalty(0.3), 3 * penalty(0.1)) and penalty(0.3).any()


def test_nothing_is_steered_while_a_critic_warms_up_alone() -> None:
    how: dict[str, Any] = {"kl_control": "adaptive", "kl_target": 0.05, "kl_horizon": 10.0}
    source = new_source("ppo", critic_warmup=2, entropy=0.3, entropy_target=9.0, **how)
    before = dict(source.coefficients)
    for number in (1, 2, 3):
        step = source.produce(number)
        source.learned(step, Stats(step.stats))
        assert [source.coefficients[name] == value for name, value in before.items()] == [number <= 2] * len(before)


# -- a final reward that is redistributed ------------------------------------------------------------------------------

SPREAD_STEPS = (((0, 0.2), (2, 0.5)), (), ((1, -0.3), (3, 0.25)), ())
SPREAD_ENTROPY = ((0.4, 1.2, 0.1), (0.0, 0.0), (0.9, 0.3, 0.6), (2.0, 0.5, 0.5, 1.0))


def spread_scores() -> Scores:
    draw = torch.Generator().manual_seed(5)
    lengths = (3, 2, 3, 4)

    def each() -> tuple[Tensor, ...]:
        return tuple(torch.rand(n, generator=draw, dtype=torch.float64) for n in lengths)

    return scores_of([1.3, 0.4, -0.2, 0.9], lengths, [0, 0, 1, 1], steps=SPREAD_STEPS, penalty=each(), value=each())


def by_hand(scores: Scores, weight: str, share: float) -> tuple[list[list[float]], list[list[float]]]:
    """A redistributed reward gives each token its share, and all shares add up to the reward."""
    finals, every = [], []
    for i, entropy in enumerate(SPREAD_ENTROPY):
        n, steps = len(entropy), SPREAD_STEPS[i]
        final = scores.reward[i].item() - sum(r for _, r in steps)
        weights = [1 / n] * n if weight == "even" or sum(entropy) == 0 else [h / sum(entropy) for h in entropy]
        own = [final * share * w + (final * (1 - share) if t == n - 1 else 0.0) for t, w in enumerate(weights)]
        finals.append(own)
        of_steps = [sum(r for end, r in steps if end == t + 1) for t in range(n)]
        every.append([own[t] + of_steps[t] - scores.penalty[i][t].item() for t in range(n)])
    return finals, every


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("weight", ["even", "entropy"])
def test_advantages_of_a_redistributed_reward_are_those_of_loops_over_what_each_token_earns(
    weight: Any, share: float
) -> None:
    scores = spread_scores()
    entropy = [doubles(*own) for own in SPREAD_ENTROPY]
    given = replace(scores, shares=Redistribution(weight, share)(scores, entropy))
    finals, earned = by_hand(scores, weight, share)
    values = [v.tolist() for v in scores.value]

    def same(advantage: Advantage, expected: list[list[float]]) -> None:
        found = advantage(given)
        assert isinstance(found, list)
        for own, right in zip(found, expected, strict=True):
            assert own.tolist() == pytest.approx(right, abs=1e-10)

    same(Earned(), earned)
    same(
        ToGo(gamma=0.9), [[sum(0.9 ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in earned]
    )
    centred = []  # less the group's mean reward, of which each token has the same part as of the final reward
    for i, own in enumerate(earned):
        base = mean([scores.reward[j].item() for j in range(4) if j // 2 == i // 2])
        final = scores.reward[i].item() - sum(r for _, r in SPREAD_STEPS[i])
        parts = [x / final for x in finals[i]]
        centred.append([sum(own[k] - base * parts[k] for k in range(t, len(own))) for t in range(len(own))])
    same(ToGo("group"), centred)
    deltas = [
        [r[t] + 0.9 * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(r))]
        for r, v in zip(earned, values, strict=True)
    ]
    same(
        GAE(0.9, 0.8), [[sum(0.72 ** (k - t) * d[k] for k in range(t, len(d))) for t in range(len(d))] for d in deltas]
    )
    ahead = []
    for r, v in zip(earned, values, strict=True):
        n = len(r)
        ahead.append(
            [
                r[t] + (0.9 * r[t + 1] if t + 1 < n else 0) + (0.81 * v[t + 2] if t + 2 < n else 0) - v[t]
                for t in range(n)
            ]
        )
    same(KStep(2, 0.9), ahead)


@pytest.mark.parametrize("apart", [False, True])
def test_process_rewards_take_every_token_for_a_step_where_the_final_reward_is_redistributed(apart: bool) -> None:
    scores = spread_scores()
    given = replace(scores, shares=Redistribution("entropy")(scores, [doubles(*own) for own in SPREAD_ENTROPY]))
    finals, _ = by_hand(scores, "entropy", 1.0)
    for i, found in enumerate(StepRewards(eps=1e-6, outcome_apart=apart)(given)):
        expected = [0.0] * len(found)
        for kind in range(2 if apart else 1):
            steps = []
            for j in range(4):
                parts = [(t + 1, x) for t, x in enumerate(finals[j])]
                if apart:
                    steps.append(parts if kind else list(SPREAD_STEPS[j]))
                    continue
                steps.append([(end, x + sum(r for e, r in SPREAD_STEPS[j] if e == end)) for end, x in parts])
                steps[-1] += [(0, r) for e, r in SPREAD_STEPS[j] if e == 0]
            every = [r for j in range(4) if j // 2 == i // 2 for _, r in steps[j]]
            for end, r in steps[i]:
                worth = (r - mean(every)) / (stdev(every) + 1e-6)
                expected = [x + worth * (t < end) for t, x in enumerate(expected)]
        assert found.tolist() == pytest.approx(expected, abs=1e-10)


def test_equal_rewards_under_a_group_baseline_are_exactly_nothing_when_redistributed() -> None:
    scores = scores_of([0.7, 0.7, 0.7], [3, 7, 11], [0, 0, 0])
    given = replace(scores, shares=Redistribution()(scores, []))
    assert all(not own.any() for own in ToGo("group")(given))


def test_entropies_of_a_redistribution_are_those_of_the_policy_that_sampled() -> None:
    case = new_case(chosen_row(find("reinforce"), redistribution="entropy"), groups=2, size=2)
    credited = credit(case.row, case.rollouts, case.learner, 40, {}, None, Stats())
    model = case.learner.model
    for rollout, found in zip(case.rollouts, credited.per_token["advantage"], strict=True):
        (transcript,) = rollout.transcripts
        tokens = torch.tensor(transcript.tokens)
        with torch.no_grad():
            logs = (model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T).log_softmax(-1)  # type: ignore[operator]
        entropy = [-(logs[t - 1].exp() * logs[t - 1]).sum().item() for t in transcript.scored.tolist()]
        steps = list(rollout.steps)
        assert isinstance(rollout.reward, float)
        final = rollout.reward - sum(r for _, r in steps)
        expected = [
            final * sum(entropy[t:]) / sum(entropy) + sum(r for end, r in steps if end > t) for t in range(len(entropy))
        ]
        assert found.tolist() == pytest.approx(expected, abs=1e-6)
