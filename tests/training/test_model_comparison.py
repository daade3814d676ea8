"""Models are compared by tasks, whose sides are no independent results."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import comb

import pytest

from posttrain.cli.evaluation_tables import short_names
from posttrain.training.model_comparison import Played, compare


def played(rewards: Sequence[Sequence[float]]) -> Played:
    """One sample of each side of each task."""
    keys = {f"{task} as {side}": str(task) for task, own in enumerate(rewards) for side in range(len(own))}
    flat = iter([reward for own in rewards for reward in own])
    found = {key: [next(flat)] for key in keys}
    return Played(found, found, keys)


def exact(won: int, lost: int) -> float:
    number = won + lost
    return min(1.0, 2 * sum(comb(number, k) for k in range(min(won, lost) + 1)) / 2**number) if number else 1.0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sides_of_a_task_that_agree_are_one_result(count: int) -> None:
    gaps = [1.0] * 6 + [-1.0] + [0.0]
    found, wins = compare(played([[gap] * count for gap in gaps]), played([[0.0] * count for _ in gaps]), None)
    assert wins == {"by": "reward", "won": 6, "lost": 1, "tied": 1, "p": exact(6, 1)}
    one, _ = compare(played([[gap] for gap in gaps]), played([[0.0] for _ in gaps]), None)
    assert found == one and found["reward"]["tasks"] == 8


def test_a_task_is_won_by_the_mean_over_its_sides() -> None:
    own = [[1.0, -1.0], [1.0, 0.0], [0.5, -1.0], [2.0, -1.0]]
    _, wins = compare(played(own), played([[0.0, 0.0]] * 4), None)
    assert (wins["won"], wins["lost"], wins["tied"]) == (2, 1, 1)


def test_sides_without_a_valid_reward_of_both_are_left_out() -> None:
    own, other = played([[1.0, 5.0], [1.0, 1.0]]), played([[0.0, 9.0], [2.0, 2.0]])
    other.rewards["0 as 1"].clear()
    found, wins = compare(own, other, None)
    assert (wins["won"], wins["lost"]) == (1, 1)
    assert found["reward"]["mean"] == pytest.approx((1.0 - 0.0 + 1.0 - 2.0) / 2)


def test_a_mean_is_over_the_valid_samples_of_each_model() -> None:
    own, other = {"0": [0.9], "1": [0.9]}, {"0": [0.5, 0.5], "1": [0.5, 0.5, 0.5]}
    tasks = {key: key for key in own}
    _, wins = compare(Played(own, own, tasks), Played(other, other, tasks), None)
    assert (wins["won"], wins["lost"]) == (2, 0)


def test_a_side_with_more_valid_samples_of_one_model_weighs_no_more_in_the_difference() -> None:
    own, other = {"0 as x": [1.0] * 4, "0 as y": [0.0]}, {"0 as x": [1.0], "0 as y": [0.0] * 4}
    keys = dict.fromkeys(own, "0")
    found, wins = compare(Played(own, own, keys), Played(other, other, keys), 1.0)
    assert wins["tied"] == 1
    assert found["reward"]["mean"] == found["accuracy"]["mean"] == 0.0


def test_with_a_success_threshold_a_task_is_won_by_accuracy_whatever_the_rewards_say() -> None:
    own = {"0": [0.4, 0.4], "1": [1.0, 0.0], "2": [0.3, 0.3]}  # right: 0, 1/2 and 0 of 2
    other = {"0": [0.0, 0.0], "1": [0.9, 0.9], "2": [1.0, 0.0]}  # 0, 0 and 1/2 of 2
    tasks = {key: key for key in own}
    both = Played(own, own, tasks), Played(other, other, tasks)
    assert compare(*both, 1.0)[1] == {"by": "accuracy", "won": 1, "lost": 1, "tied": 1, "p": 1.0}
    assert compare(*both, None)[1] == {"by": "reward", "won": 1, "lost": 2, "tied": 0, "p": 1.0}


def test_equal_models_are_seldom_told_apart_however_much_the_sides_of_a_task_depend_on_each_other() -> None:
    draw, rejected = random.Random(0), 0
    for _ in range(400):
        own, other = ([[draw.gauss(0, 1)] * 2 for _ in range(20)] for _ in range(2))  # a task's sides are alike
        rejected += compare(played(own), played(other), None)[1]["p"] <= 0.05
    assert rejected <= 0.05 * 400 + 2 * (400 * 0.05 * 0.95) ** 0.5
    assert exact(28, 12) < 0.05 < exact(14, 6), "as independent results the sides of 14 tasks of 20 would tell"


def test_models_are_called_by_the_last_parts_of_their_paths_that_tell_them_apart() -> None:
    paths = [
        "runs/a/checkpoints/step-000009",
        "/home/me/SmolLM2.gguf",
        "runs/b/checkpoints/step-000009",
        "sft",
        "old/sft/",
    ]
    assert [*short_names(paths).values()] == [
        "a/checkpoints/step-000009", "SmolLM2.gguf", "b/checkpoints/step-000009", "sft", "old/sft",
    ]  # fmt: skip
    assert short_names(["runs/grpo", "runs/grpo"]) == {"runs/grpo": "grpo"}
