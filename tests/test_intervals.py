"""Figures and their uncertainty: pass@k is unbiased and exact, intervals resample tasks and cover what they claim."""

import math
from itertools import combinations

import numpy as np
import pytest

from posttrain.core.types import UserError
from posttrain.training.intervals import (
    bootstrap_interval,
    clustered_interval,
    paired_interval,
    pass_at_k,
    summary,
    wilson_interval,
)


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


def test_pass_at_k_is_exactly_one_when_too_few_are_wrong_and_exactly_zero_when_none_is_right() -> None:
    assert pass_at_k(1000, 501, 500) == 1.0
    assert pass_at_k(1000, 0, 500) == 0.0
    assert pass_at_k(10_000, 1, 1) == 1e-4  # no cancellation


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_it_cannot_estimate(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_bootstrap_agrees_with_normal_theory_for_means() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    half = 1.96 * values.std() / math.sqrt(len(values))
    low, high = bootstrap_interval(values.tolist(), resamples=4000)
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_bootstrap_is_a_function_of_its_arguments_and_widens_with_the_level() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0, 0.25]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    inner, outer = bootstrap_interval(values, level=0.5), bootstrap_interval(values, level=0.99)
    assert outer[0] < inner[0] < inner[1] < outer[1]


def test_bootstrap_in_blocks_draws_all_resamples_and_stays_within_the_values() -> None:
    values = np.linspace(0.0, 1.0, 2**12).tolist()  # 256 resamples to a block
    low, high = bootstrap_interval(values, resamples=600)
    assert 0.48 < low < 0.5 < high < 0.52


def test_intervals_over_tasks_cover_the_truth_and_intervals_over_samples_do_not() -> None:
    """300 evaluations of 40 tasks x 8 samples, task difficulty uniform: the true accuracy is 1/2."""
    generator = np.random.default_rng(0)
    covered = {"tasks": 0, "samples": 0}
    for _ in range(300):
        hits = generator.random((40, 8)) < generator.random((40, 1))
        for unit, values in {"tasks": hits.mean(axis=1), "samples": hits.ravel()}.items():
            low, high = bootstrap_interval(values.astype(float).tolist(), resamples=300)
            covered[unit] += low <= 0.5 <= high
    assert 0.90 <= covered["tasks"] / 300 <= 0.98
    assert covered["samples"] / 300 < 0.85


def test_pairing_removes_the_difficulty_that_both_models_share() -> None:
    generator = np.random.default_rng(2)
    difficulty = generator.random(200)
    a = difficulty + 0.05 + 0.01 * generator.standard_normal(200)
    low, high = paired_interval(a.tolist(), difficulty.tolist())
    assert 0.045 < low < 0.05 < high < 0.055
    # Apart, the two cannot be told from each other.
    assert bootstrap_interval(a.tolist())[0] < bootstrap_interval(difficulty.tolist())[1]
    with pytest.raises(ValueError, match="same tasks"):
        paired_interval([1.0], [1.0, 2.0])


def test_wilson_matches_the_textbook_and_never_collapses() -> None:
    assert wilson_interval(1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)
    assert wilson_interval(0, 20)[0] == 0.0 and wilson_interval(0, 20)[1] == pytest.approx(0.1611, abs=1e-4)
    assert wilson_interval(20, 20)[0] == pytest.approx(1 - 0.1611, abs=1e-4)


def test_a_figure_that_most_resamples_do_not_have_has_no_interval() -> None:
    """One of 20 prompts is drawn at least once in 64% of the resamples, and twice in 26%."""
    totals = np.eye(20)[:, :1]

    def from_on(least: int) -> tuple[float, float]:
        return clustered_interval(totals, lambda sums: np.where(sums[:, 0] >= least, sums[:, 0], math.nan))

    assert from_on(1)[0] == 1.0 and all(math.isnan(end) for end in from_on(2))


def test_rates_that_are_equal_and_neither_0_nor_1_are_no_count_of_successes() -> None:
    accuracy = summary([[1.0, 0.0]] * 20)["accuracy"]
    assert accuracy["low"] == accuracy["mean"] == accuracy["high"] == 0.5


def test_summary_counts_every_task_once_and_pass_at_1_is_the_accuracy() -> None:
    result = summary([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0], [0.7 + 0.2 + 0.1, 0.4], []], ks=(1, 2, 4))
    assert (result["tasks"], result["samples"]) == (3, 8)
    assert result["accuracy"]["mean"] == pytest.approx((0.25 + 1.0 + 0.5) / 3)
    assert result["pass@1"] == result["accuracy"]
    assert result["reward"]["mean"] == pytest.approx((0.25 + 1.0 + 0.7) / 3)
    assert result["pass@2"]["mean"] == pytest.approx((0.5 + 1.0 + 1.0) / 3)
    assert (result["pass@4"]["mean"], result["pass@4"]["tasks"]) == (1.0, 1)
    for name in ("reward", "accuracy", "pass@1", "pass@2"):
        assert result[name]["low"] <= result[name]["mean"] <= result[name]["high"]


def test_summary_of_a_perfect_score_still_has_an_interval() -> None:
    accuracy = summary([[1.0, 1.0]] * 20)["accuracy"]
    assert accuracy["mean"] == accuracy["high"] == 1.0
    assert accuracy["low"] == pytest.approx(0.8389, abs=1e-4)


def test_one_task_has_no_interval_between_tasks() -> None:
    assert all(math.isnan(end) for end in bootstrap_interval([0.5]))
    with pytest.raises(ValueError):
        bootstrap_interval([])


def test_summary_says_what_to_do_when_nothing_can_be_estimated() -> None:
    with pytest.raises(UserError, match="smaller k"):
        summary([[1.0, 0.0]], ks=(4,))
    with pytest.raises(UserError, match="verifier"):
        summary([[], []])
