"""Figures and their uncertainty: pass@k is unbiased and exact, intervals are over tasks and cover what they claim."""

import math
import re
from itertools import combinations, product

import numpy as np
import pytest
from places import ROOT
from recipe_modules import recipe_module

from posttrain.core.intervals import (
    FEWEST,
    change_interval,
    correlation_interval,
    holm,
    mean_interval,
    paired_interval,
    share_interval,
    shares_apart_interval,
    sign_test,
    student_interval,
    tango_interval,
    wilson_interval,
)
from posttrain.core.types import UserError
from posttrain.training.figures import differences, majority_at_k, pass_at_k, summary

coverage = recipe_module("coverage")


def test_pass_at_k_of_one_correct_in_four_is_golden() -> None:
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 4) == 1.0  # resampling with replacement says 0.684


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_equals_enumeration_of_all_subsets(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_the_majority_of_k_is_judged_in_groups_one_after_another_and_ties_are_shared() -> None:
    right = {"7": True, "8": False, "9": False}

    def voted(answers: str, k: int) -> float:
        return majority_at_k(list(answers), [right[answer] for answer in answers], k)

    assert voted("787", 3) == 1.0 and voted("887", 3) == 0.0
    assert voted("78", 2) == 0.5  # a tie
    assert voted("7989", 4) == 0.0  # two votes against one each
    assert voted("7788", 2) == 0.5 and voted("7788", 4) == 0.5 and voted("7788", 1) == 0.5
    assert voted("77798", 2) == 0.75  # the fifth does not vote
    # A verifier that asks for more than the answer: of two equal answers one is right, so the chosen reply is by half.
    assert majority_at_k(["7", "7", "8"], [True, False, True], 3) == 0.5
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"maj@{k} needs k from 1"):
            majority_at_k(["7", "8"], [True, False], k)


def test_pass_at_k_is_exactly_one_when_too_few_are_wrong_and_exactly_zero_when_none_is_right() -> None:
    assert pass_at_k(1000, 501, 500) == 1.0
    assert pass_at_k(1000, 0, 500) == 0.0
    assert pass_at_k(10_000, 1, 1) == 1e-4  # no cancellation


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_it_cannot_estimate(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


# -- shares ------------------------------------------------------------------------------------------------------------


def test_wilson_matches_the_textbook_and_never_collapses() -> None:
    assert tuple(wilson_interval(1, 10)) == pytest.approx((0.0179, 0.4042), abs=1e-4)
    assert wilson_interval(0, 20).low == 0.0 and wilson_interval(0, 20).high == pytest.approx(0.1611, abs=1e-4)
    assert wilson_interval(20, 20).low == pytest.approx(1 - 0.1611, abs=1e-4)


@pytest.mark.parametrize("right", [0, 1, 7, 20])
def test_rewards_of_0_and_1_have_wilsons_interval_as_accuracy_has(right: int) -> None:
    rewards = [1.0] * right + [0.0] * (20 - right)
    for found in (
        mean_interval(rewards),
        share_interval(rewards),
        share_interval([3 * r for r in rewards], [3.0] * 20),
    ):
        assert tuple(found) == pytest.approx(tuple(wilson_interval(right, 20)), abs=1e-12)


def test_share_of_several_samples_is_wilsons_of_the_effective_number_of_tasks() -> None:
    rates = [1.0, 0.5, 0.75, 1.0, 0.25, 0.75, 1.0, 0.5]
    p, n = sum(rates) / 8, 8
    variance = (sum((r - p) ** 2 for r in rates) + p * (1 - p)) / n**2  # with one more task, all right or all wrong
    size, t = p * (1 - p) / variance, 2.364624
    centre, width = p + t * t / (2 * size), t * math.sqrt(p * (1 - p) / size + t * t / (4 * size**2))
    ends = [(centre - width) / (1 + t * t / size), (centre + width) / (1 + t * t / size)]
    assert tuple(share_interval(rates)) == pytest.approx(ends, abs=1e-4)
    assert share_interval([8 * r for r in rates], [8.0] * 8) == share_interval(rates)


def test_shares_of_prompts_with_other_numbers_of_comparisons_weigh_every_comparison() -> None:
    sums, counts = (
        np.array([3.0, 0.0, 5.0, 1.0, 2.0, 4.0, 0.0, 1.0]),
        np.array([4.0, 1.0, 5.0, 3.0, 2.0, 6.0, 2.0, 1.0]),
    )
    found, many = share_interval(sums, counts), share_interval(np.tile(sums, 400), np.tile(counts, 400))
    p = sums.sum() / counts.sum()
    assert found.low < p < found.high
    error = math.sqrt(((sums - p * counts) ** 2).sum() / 400) / counts.sum()  # the sandwich, by hand
    assert (many.high - many.low) / 2 == pytest.approx(1.96 * error, rel=0.01)


# -- means -------------------------------------------------------------------------------------------------------------


def test_mean_of_values_of_any_size_is_students() -> None:
    values = [1.5, 2.5, -3.0, 4.0, 0.0, 7.0]
    half = 2.570582 * np.std(values, ddof=1) / math.sqrt(6)
    assert tuple(mean_interval(values)) == pytest.approx((2 - half, 2 + half), rel=1e-4)


def test_mean_within_the_scale_ends_there_and_is_students_where_the_scale_is_far() -> None:
    near = mean_interval([1.0] * 9 + [0.1])
    assert 0.0 < near.low < 0.91 < near.high < 1.0
    values = 0.8 + 0.01 * np.random.default_rng(1).standard_normal(60)
    half = 2.000995 * values.std(ddof=1) / math.sqrt(60)
    assert tuple(mean_interval(values)) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02 * half)


@pytest.mark.parametrize("value", [0.3, 5.0])
def test_equal_values_that_are_no_shares_have_words_and_no_interval(value: float) -> None:
    found = mean_interval([value] * 8)
    assert math.isnan(found.low) and found.text() == f"(no interval: all 8 tasks are at {value:g})"
    assert found.as_dict() == {"low": None, "high": None, "why": found.why}


def test_equal_shares_have_an_interval() -> None:
    found = share_interval([0.5] * 20)
    assert found.low == pytest.approx(1 - found.high) and found.high - found.low > 0.08


@pytest.mark.parametrize("number", [1, 3, FEWEST - 1])
def test_too_few_tasks_have_words_and_no_interval(number: int) -> None:
    words = f"(too few tasks for an interval: {number}, and it takes 6)"
    values = [1.0, 0.0, 0.5, 0.25, 0.75][:number]
    for found in (share_interval(values), mean_interval(values), paired_interval(values, [0.0] * number)):
        assert found.text() == words and math.isnan(found.low) and math.isnan(found.high)


def test_what_has_no_task_is_no_share() -> None:
    with pytest.raises(ValueError):
        wilson_interval(0, 0)
    assert share_interval([]).why.startswith("too few tasks")


# -- pairs -------------------------------------------------------------------------------------------------------------


def pairs(won: int, lost: int, n: int) -> tuple[list[float], list[float]]:
    """As many pairs of 0 and 1, the others equal."""
    return [1.0] * won + [0.0] * lost + [1.0] * (n - won - lost), [0.0] * won + [1.0] * lost + [1.0] * (n - won - lost)


@pytest.mark.parametrize("n", [8, 12, 20, 37, 64])
def test_paired_shares_exclude_0_exactly_where_the_exact_test_of_mcnemar_does(n: int) -> None:
    for won in range(n + 1):
        for lost in range(n + 1 - won):
            discordant = won + lost
            ways = sum(math.comb(discordant, k) for k in range(min(won, lost) + 1))
            p = min(1.0, 2 * ways / 2**discordant)
            found = paired_interval(*pairs(won, lost, n))
            assert (found.low > 0 or found.high < 0) == (p < 0.05), (won, lost)
            assert -1 <= found.low <= (won - lost) / n <= found.high <= 1 and found.high - found.low > 0.02
            assert sign_test([1.0] * won + [-1.0] * lost) == pytest.approx(p)


def test_four_wins_and_no_loss_are_no_proof_whatever_the_number_of_ties_and_samples() -> None:
    for n in range(8, 65):
        assert paired_interval(*pairs(4, 0, n)).low <= 0.0
        half = [0.5] * n
        several = paired_interval([1.0, 0.75, 1.0, 1.0, *half[4:]], half, share=True)
        other = paired_interval([3.0, 2.5, 4.0, 3.5, *half[4:]], half)
        assert several.low <= 0.0 and other.low <= 0.0


@pytest.mark.parametrize(("won", "lost", "n"), [(0, 0, 20), (7, 1, 25), (12, 3, 15), (0, 5, 40), (20, 0, 20)])
def test_tangos_interval_holds_the_differences_that_the_score_test_does_not_reject(won: int, lost: int, n: int) -> None:
    """The nuisance, the share that is lost, is found by trying: whatever makes the counts likeliest."""
    found, z = tango_interval(won, lost, n), 1.959964

    def statistic(difference: float) -> float:
        q = np.linspace(max(0.0, -difference), (1 - difference) / 2, 200_001)[1:-1]
        likelihood = won * np.log(q + difference) + lost * np.log(q) + (n - won - lost) * np.log(1 - 2 * q - difference)
        best = q[np.nanargmax(likelihood)]
        return abs(won - lost - n * difference) / math.sqrt(n * (2 * best + difference * (1 - difference)))

    for end, inwards in ((found.low, 1), (found.high, -1)):
        if abs(end) < 1:
            assert statistic(end) == pytest.approx(z, abs=2e-3)
            assert statistic(end + inwards * 0.01) < z


def test_sign_test_of_unequal_differences_tries_every_sign() -> None:
    values = [0.5, 0.25, -0.1, 0.7, 0.0, 0.3]
    signs = list(product([-1, 1], repeat=5))
    sizes = [abs(v) for v in values if v]
    extreme = [abs(sum(s * x for s, x in zip(own, sizes, strict=True))) >= sum(values) - 1e-12 for own in signs]
    assert sign_test(values) == pytest.approx(sum(extreme) / len(signs))
    assert sign_test([0.0, 0.0]) == 1.0 and sign_test([1.0] * 6) == pytest.approx(2 / 64)
    many = np.random.default_rng(0).standard_normal(40) + 0.3
    assert sign_test(many) == pytest.approx(2 * (1 - phi(many.sum() / math.sqrt((many**2).sum()))))


def phi(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


def test_pairing_removes_the_difficulty_that_both_models_share() -> None:
    generator = np.random.default_rng(2)
    difficulty = generator.random(200)
    a = difficulty + 0.05 + 0.01 * generator.standard_normal(200)
    low, high = paired_interval(a, difficulty)
    assert 0.045 < low < 0.05 < high < 0.055
    # Apart, the two cannot be told from each other.
    assert mean_interval(a).low < mean_interval(difficulty).high
    with pytest.raises(ValueError, match="same tasks"):
        paired_interval([1.0], [1.0, 2.0])


# -- changes and correlations ------------------------------------------------------------------------------------------


def test_shares_apart_have_newcombes_interval() -> None:
    """From the two roots of each score equation, as in the paper (method 10)."""
    z = 1.959963984540054

    def ends(p: float, n: float) -> tuple[float, float]:
        half = z * math.sqrt(z * z + 4 * n * p * (1 - p))
        return (2 * n * p + z * z - half) / (2 * (n + z * z)), (2 * n * p + z * z + half) / (2 * (n + z * z))

    (low, high), (other_low, other_high) = ends(0.8, 75), ends(0.6, 75)
    found = shares_apart_interval(0.8, 0.6, 75)
    assert found.low == pytest.approx(0.2 - math.hypot(0.8 - low, other_high - 0.6), abs=1e-12)
    assert found.high == pytest.approx(0.2 + math.hypot(high - 0.8, 0.6 - other_low), abs=1e-12)
    assert shares_apart_interval(1.0, 1.0, 5).low < 0 < shares_apart_interval(1.0, 1.0, 5).high


def test_change_of_the_same_prompts_is_that_of_pairs_and_of_others_that_of_independent_means() -> None:
    generator, ones = np.random.default_rng(3), np.ones(80)
    level = 3 * generator.standard_normal(80)
    a, b = level + generator.standard_normal(80), level + generator.standard_normal(80)
    paired, none = mean_interval(a - b), np.zeros(80)
    assert tuple(change_interval((a, ones), (b, ones))) == pytest.approx(tuple(paired), rel=0.02)
    apart = change_interval((np.r_[a, none], np.r_[ones, none]), (np.r_[none, b], np.r_[none, ones]))
    width = math.hypot(*(own.high - own.low for own in (mean_interval(a), mean_interval(b))))
    assert apart.high - apart.low == pytest.approx(width, rel=1e-6) and width > 2 * (paired.high - paired.low)


def test_change_of_shares_that_are_all_0_still_has_an_interval() -> None:
    found = change_interval((np.zeros(20), np.ones(20)), (np.zeros(20), np.ones(20)), share=True)
    assert found.low == -found.high and found.high == pytest.approx(wilson_interval(0, 20).high)


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_a_correlation_has_the_jackknifes_interval_on_fishers_scale() -> None:
    draw = np.random.default_rng(8)
    x = draw.normal(size=9)
    y = 0.6 * x + draw.normal(size=9)

    def figure(sums: np.ndarray) -> np.ndarray:
        n, a, b, aa, bb, ab = sums.T
        return (ab - a * b / n) / np.sqrt((aa - a * a / n) * (bb - b * b / n))

    found = correlation_interval(np.stack([np.ones(9), x, y, x * x, y * y, x * y], axis=1), figure)
    left = [math.atanh(np.corrcoef(np.delete(x, i), np.delete(y, i))[0, 1]) for i in range(9)]
    half = 2.306004 * math.sqrt(8 / 9 * sum((z - np.mean(left)) ** 2 for z in left))  # Student's, 8 degrees
    whole = math.atanh(np.corrcoef(x, y)[0, 1])
    assert tuple(found) == pytest.approx((math.tanh(whole - half), math.tanh(whole + half)), abs=1e-6)


def test_seeds_have_students_interval_or_words() -> None:
    assert tuple(student_interval([0.1, 0.2, 0.3])) == pytest.approx((0.2 - 0.248414, 0.2 + 0.248414), abs=1e-5)
    assert student_interval([0.5]).text() == "(1 of at least 2 seeds)"
    assert student_interval([0.5, 0.5, 0.5]).text() == "(the same in all 3 seeds)"


# -- coverage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "least"),
    [
        (name, n, 0.92)
        for name in (
            "share .5",
            "share .9",
            "share .97",
            "8 samples .9",
            "8 samples .97",
            "pairs .05 .05",
            "pairs .3 .1",
        )
        for n in (10, 20, 50)
    ],
)
def test_intervals_cover_the_truth_as_often_as_they_say(name: str, n: int, least: float) -> None:
    """500 seeded repetitions of `recipes/coverage.py`, whose table is docs/results/intervals.md."""
    assert least <= coverage.covered(coverage.CASES[name], n, 500, seed=1).share


def test_intervals_over_samples_would_not_cover_the_truth() -> None:
    """300 evaluations of 40 tasks x 8 samples, task difficulty uniform: the true accuracy is 1/2."""
    generator, seen = np.random.default_rng(0), {"tasks": 0, "samples": 0}
    for _ in range(300):
        hits = generator.random((40, 8)) < generator.random((40, 1))
        for unit, values in {"tasks": hits.mean(axis=1), "samples": hits.ravel()}.items():
            low, high = share_interval(values.astype(float))
            seen[unit] += low <= 0.5 <= high
    assert 0.92 <= seen["tasks"] / 300 <= 0.99
    assert seen["samples"] / 300 < 0.85


def test_nothing_else_makes_an_interval() -> None:
    """Neither a quantile of resamples or of the normal distribution, nor a constant for one."""
    root = ROOT
    own = {root / "posttrain/core/intervals.py", root / "recipes/coverage.py"}
    files = {
        file for place in ("posttrain", "recipes", "benchmarks", "examples") for file in (root / place).rglob("*.py")
    }
    files |= set((root / "posttrain/view/static").glob("*.js"))
    signs = re.compile(r"\b1\.96|NormalDist|0?\.975|0?\.025\b|student_quantile|inv_cdf")
    found = [str(file) for file in sorted(files - own) if signs.search(file.read_text(encoding="utf-8"))]
    assert found == []


# -- figures -----------------------------------------------------------------------------------------------------------


def test_summary_counts_every_task_once_and_pass_at_1_is_the_accuracy() -> None:
    result = summary([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0], [0.7 + 0.2 + 0.1, 0.4], []] * 2, ks=(1, 2, 4))
    assert (result["tasks"], result["samples"]) == (6, 16)
    assert result["accuracy"]["mean"] == pytest.approx((0.25 + 1.0 + 0.5) / 3)
    assert result["pass@1"] == result["accuracy"]
    assert result["reward"]["mean"] == pytest.approx((0.25 + 1.0 + 0.7) / 3)
    assert result["pass@2"]["mean"] == pytest.approx((0.5 + 1.0 + 1.0) / 3)
    assert result["pass@4"] == {
        "mean": 1.0, "low": None, "high": None, "why": "too few tasks for an interval: 2, and it takes 6", "tasks": 2,
    }  # fmt: skip
    for name in ("reward", "accuracy", "pass@1", "pass@2"):
        assert result[name]["low"] <= result[name]["mean"] <= result[name]["high"]


def test_summary_of_a_perfect_score_still_has_an_interval() -> None:
    accuracy = summary([[1.0, 1.0]] * 20)["accuracy"]
    assert accuracy["mean"] == accuracy["high"] == 1.0
    assert accuracy["low"] == pytest.approx(0.8389, abs=1e-4)


@pytest.mark.parametrize("samples", [1, 4])
def test_rewards_that_only_say_right_or_wrong_have_the_interval_of_the_accuracy(samples: int) -> None:
    draw = np.random.default_rng(samples)
    result = summary((draw.random((30, samples)) < 0.8).astype(float).tolist())
    assert result["reward"] == result["accuracy"]
    both = [((draw.random(4) < 0.8).astype(float), (draw.random(4) < 0.5).astype(float)) for _ in range(30)]
    found = differences(both)
    assert found["reward"] == found["accuracy"] and found["reward"]["low"] > 0
    assert found["reward"]["mean"] == pytest.approx(np.mean([a.mean() - b.mean() for a, b in both])), "the first's lead"


def test_rewards_of_which_one_checkpoint_has_other_values_are_no_shares() -> None:
    draw = np.random.default_rng(3)
    pairs = [((draw.random(4) < 0.8).astype(float), draw.random(4)) for _ in range(12)]
    for way in (pairs, [(b, a) for a, b in pairs]):
        means = [[float(np.mean(side)) for side in pair] for pair in way]
        found = differences(way, None)["reward"]
        assert (found["low"], found["high"]) == tuple(paired_interval(*zip(*means, strict=True)))


def test_a_checkpoint_against_itself_has_words_or_an_interval_around_0() -> None:
    values = np.random.default_rng(5).random((12, 2))
    assert differences([(v, v) for v in values], None)["reward"]["why"] == "no interval: all 12 tasks are at 0"
    right = differences([([1.0], [1.0])] * 20)["accuracy"]
    assert (right["low"], right["high"]) == pytest.approx((-0.1611, 0.1611), abs=1e-4)


def test_summary_says_what_to_do_when_nothing_can_be_estimated() -> None:
    with pytest.raises(UserError, match="smaller k"):
        summary([[1.0, 0.0]], ks=(4,))
    with pytest.raises(UserError, match="verifier"):
        summary([[], []])


def test_accuracy_and_its_difference_are_of_outcomes_where_rewards_hold_more() -> None:
    rewards, outcomes = [[1.4, 0.9], [0.2, 1.3]], [[1.0, 0.0], [0.0, 0.0]]
    found = summary(rewards, [2], 1.0, outcomes=outcomes)
    assert found["reward"]["mean"] == pytest.approx(np.mean(rewards))
    assert (found["accuracy"]["mean"], found["pass@2"]["mean"]) == (0.25, 0.5)
    other = [[0.0, 0.0], [1.0, 1.0]]
    apart = differences(list(zip(rewards, other, strict=True)), 1.0, outcomes=list(zip(outcomes, other, strict=True)))
    assert apart["accuracy"]["mean"] == pytest.approx(0.25 - 0.5)
    assert apart["reward"]["mean"] == pytest.approx(np.mean(rewards) - 0.5)


def test_holm_corrects_as_by_hand_and_keeps_the_order() -> None:
    """0.01 x 3, then 0.02 x 2, then 0.03 x 1, which may not fall below the one before."""
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([0.04]) == [0.04] and holm([]) == []


def test_holm_rejects_falsely_at_most_at_its_level() -> None:
    """Four true hypotheses, whose p are uniform: one is rejected at 5% in at most 5% of draws, and in 18% uncorrected."""
    drawn = np.random.default_rng(0).random((4000, 4))
    assert np.mean([min(holm(list(row))) <= 0.05 for row in drawn]) == pytest.approx(0.05, abs=0.01)
    assert np.mean(drawn.min(axis=1) <= 0.05) > 0.16
