"""Several comparisons of one model: over tasks that both have played, and with verdicts of the corrected p."""

from __future__ import annotations

import pytest

from posttrain.core.types import UserError
from posttrain.training.model_comparison import Played, compare, with_verdicts


def test_a_verdict_is_that_of_the_corrected_p() -> None:
    """By hand: 0.004 x 3, then 0.03 x 2, then 1."""
    wins = [
        {"won": 9, "lost": 1, "tied": 2, "p": 0.03},
        {"won": 0, "lost": 9, "tied": 0, "p": 0.004},
        {"won": 5, "lost": 5, "tied": 0, "p": 1.0},
    ]
    found = with_verdicts(wins)
    assert [one["p_holm"] for one in found] == pytest.approx([0.06, 0.012, 1.0])
    assert [one["verdict"] for one in found] == ["undecided", "worse", "undecided"]
    assert [{name: one[name] for name in wins[0]} for one in found] == wins
    assert with_verdicts(wins[:1])[0]["verdict"] == "better", "alone it needs no correction"


def test_differences_are_first_minus_second_over_the_tasks_that_both_have_played() -> None:
    own = Played(
        {"a": [1.0, 0.5], "b": [1.0], "c": [0.0], "d": [], "e": [0.5]},
        {"a": [1.0, 1.0], "b": [1.0], "c": [0.0], "d": [], "e": [0.0]},
    )
    other = Played(
        {"a": [0.0], "b": [0.0], "c": [1.0, 0.0], "d": [1.0], "e": []},
        {"a": [0.0], "b": [1.0], "c": [0.0, 0.0], "d": [1.0], "e": []},
    )
    found, wins = compare(own, other, 1.0)
    assert found["reward"]["mean"] == pytest.approx((0.75 + 1 - 0.5) / 3) and found["reward"]["tasks"] == 3
    assert found["accuracy"]["mean"] == pytest.approx(1 / 3)
    assert wins == {"won": 2, "lost": 1, "tied": 0, "p": 1.0}
    assert compare(other, own, 1.0)[0]["accuracy"]["mean"] == pytest.approx(-1 / 3)
    with pytest.raises(UserError, match="no task has a valid reward for both checkpoints"):
        compare(Played({"a": [1.0]}, {"a": [1.0]}), Played({"a": []}, {"a": []}), 1.0)


def test_the_same_rewards_in_another_order_are_a_tie() -> None:
    """A sum in floating point depends on the order: 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ."""
    sides = [Played({str(n): list(own) for n in range(8)}, {}) for own in ((0.1, 0.2, 0.3), (0.3, 0.2, 0.1))]
    for own, other in (sides, sides[::-1]):
        found, wins = compare(Played(own.rewards, own.rewards), Played(other.rewards, other.rewards), None)
        assert wins == {"won": 0, "lost": 0, "tied": 8, "p": 1.0}
        assert found["reward"]["mean"] == pytest.approx(0.0, abs=1e-12)
