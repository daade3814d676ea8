"""Worked sums: a line is right if its numbers are left and its sum is theirs, and a working earns as much short as long."""

from __future__ import annotations

import random

import pytest

from posttrain.core.types import Graded, Invalid, UserError
from posttrain.envs.builtin.worked_sums import checked, reward, tasks, working
from posttrain.envs.play.load_env import load_env


def right(numbers: list[int], reply: str) -> list[bool]:
    return [line.right for line in checked(numbers, reply)]


def test_every_task_is_answered_by_its_response_and_no_held_out_task_is_trained_on() -> None:
    made, held = tasks(200, 3, numbers=5), tasks(50, 3, numbers=5, held_out=True)
    assert not {t["prompt"] for t in made} & {t["prompt"] for t in held}
    for task in made:
        assert reward(task, task["response"]) == {"outcome": 1.0} and task["answer"] == sum(task["numbers"])
        assert all(right(task["numbers"], task["response"])) and task["response"].count("\n") == 3
    assert tasks(5, 3) == tasks(5, 3) != tasks(5, 4)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("7+9=16\n16+4=20", [True, True]),
        ("7+4+9=20", [True]),
        ("7+9=15\n15+4=19", [False, True]),  # goes on from what it wrote
        ("7+9=16\n9+4=13", [True, False]),  # 9 is gone
        ("7+7=14", [False]),  # there is one 7
        ("7+9=16\n7+4=11", [True, False]),
        ("7=7", [False]),
        ("", [False]),
        ("7+9=16\n", [True, False]),
        ("7+9=+16", [False]),
        ("\u0667+9=16", [False]),  # digits of another script
    ],
)
def test_a_line_is_right_if_its_numbers_are_left_and_its_sum_is_theirs(reply: str, expected: list[bool]) -> None:
    assert right([7, 4, 9], reply) == expected


@pytest.mark.parametrize(
    "reply", ["7+9=16\n16+4=20\n20+1=21", "7+4=11\n11+9=20\n20+1=21", "7+4+9+1=21", "9+4=13\n13+7+1=21"]
)
def test_a_whole_right_working_earns_the_same_however_long_it_is(reply: str) -> None:
    found = reward({"numbers": [7, 4, 9, 1]}, reply, lines=0.5)
    assert isinstance(found, Graded) and found.reward == {"outcome": 1.0}
    assert sum(span.reward for span in found.spans) == pytest.approx(0.5)
    assert [span.end for span in found.spans] == [i for i, c in enumerate(reply + "\n") if c == "\n"]


def test_a_wrong_answer_never_earns_what_a_right_one_does() -> None:
    rng = random.Random(5)
    for task in tasks(200, 1, numbers=5):
        found = reward(task, working(rng, task["numbers"], 0.3, 0.4), lines=1.0)
        assert isinstance(found, Graded) and isinstance(found.reward, dict)
        whole = found.reward["outcome"] + sum(span.reward for span in found.spans)
        assert (whole >= 1.0) == bool(found.reward["outcome"])


def test_demonstrators_slip_and_add_three_numbers_as_often_as_asked() -> None:
    rng = random.Random(0)
    shown = [(t["numbers"], working(rng, t["numbers"], 0.3, 0.12)) for t in tasks(2000, 0, numbers=5)]
    lines = [line for numbers, reply in shown for line in checked(numbers, reply)]
    assert sum(not line.right for line in lines) / len(lines) == pytest.approx(0.12, abs=0.01)
    assert all(line.joined in (1, 2) for line in lines)
    assert all(right(t["numbers"], working(rng, t["numbers"])) == [True] * 4 for t in tasks(20, 1, numbers=5))


def test_working_modulo_ten_ends_in_the_sums_last_digit_and_adds_what_its_lines_left() -> None:
    for task in tasks(50, 0, numbers=5):
        lines = [line.split("=") for line in working(random.Random(1), task["numbers"], 0.3, modulus=10).split("\n")]
        assert all(sum(map(int, left.split("+"))) % 10 == int(result) for left, result in lines)
        assert int(lines[-1][1]) == task["answer"] % 10


def test_what_is_not_understood_is_invalid_or_refused() -> None:
    assert isinstance(reward({"numbers": "7 4"}, "11"), Invalid) and isinstance(reward({}, "11"), Invalid)
    for count, most in ((1, 9), (31, 9), (5, 0)):
        with pytest.raises(UserError, match="worked sums need"):
            tasks(1, 0, numbers=count, largest=most)
    with pytest.raises(UserError, match="lines is 2"):
        load_env("worked-sums,lines=2")


@pytest.mark.parametrize("reply", ["", "\n7+9=16", "\n\n"])
def test_reply_that_begins_with_an_empty_line_is_scored_as_none_of_its_tokens_is_before_that_line(reply: str) -> None:
    found = reward({"numbers": [7, 9]}, reply, lines=1.0)
    assert isinstance(found, Graded)
    assert all(1 <= span.end <= len(reply) for span in found.spans)
    assert sum(span.reward for span in found.spans) == float("7+9=16" in reply)
