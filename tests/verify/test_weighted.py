"""Rewards put together of parts: the sum, what is logged, gates, and parts that are invalid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from posttrain.core.types import Invalid, InvalidKind, Reply, Task, UserError
from posttrain.envs.play.env_outputs import Done, read_verdict
from posttrain.envs.play.env_pool import EnvPool
from posttrain.verify.weighted import Weighted


def constant(value: Any) -> Any:
    return lambda task, reply: value


def length(task: Task, reply: str) -> float:
    return float(len(reply))


def test_sum_is_weighted_and_parts_are_logged_without_their_weight() -> None:
    reward = Weighted({"right": (1.0, constant(True)), "format": (0.2, constant(0.5)), "long": (-0.01, length)})
    found = reward({}, "abcde")
    assert found == {"reward": pytest.approx(1.0 + 0.1 - 0.05), "right": 1.0, "format": 0.5, "long": 5.0}
    assert read_verdict(found) == Done(pytest.approx(1.05), {"right": 1.0, "format": 0.5, "long": 5.0})  # type: ignore[arg-type]


def test_a_gated_part_counts_only_where_its_gate_is_reached_and_is_not_called_elsewhere() -> None:
    called: list[str] = []

    def judge(task: Task, reply: str) -> float:
        called.append(reply)
        return 1.0

    parts = {"style": (0.5, judge), "right": (1.0, length), "brief": (0.25, constant(2.0))}
    reward = Weighted(parts, gates={"style": ("brief", 0.5), "brief": ("right", 3.0)})
    assert reward({}, "abc") == {"reward": 3 + 0.5 + 0.5, "style": 1.0, "right": 3.0, "brief": 2.0}
    assert reward({}, "ab") == {"reward": 2.0, "style": 0.0, "right": 2.0, "brief": 0.0}
    assert called == ["abc"] and list(reward({}, "")) == ["reward", "style", "right", "brief"]  # type: ignore[arg-type]


def test_a_gate_is_1_unless_it_is_given_and_holds_up_to_rounding() -> None:
    for value, expected in ((0.9, 0.0), (1.0, 1.0), (0.1 + 0.2 + 0.7, 1.0), (1.5, 1.0)):
        reward = Weighted({"a": (0.0, constant(value)), "b": (1.0, constant(1.0))}, gates={"b": "a"})
        assert reward({}, "")["b"] == expected  # type: ignore[index]


def test_an_invalid_part_makes_the_whole_invalid_with_its_name() -> None:
    down = Invalid("service is down", InvalidKind.TIMEOUT)
    reward = Weighted({"a": (1.0, constant(1.0)), "judge": (0.0, constant(down))})
    assert reward({}, "") == Invalid("judge: service is down", InvalidKind.TIMEOUT)
    closed = Weighted({"a": (1.0, constant(0.0)), "judge": (1.0, constant(down))}, gates={"judge": "a"})
    assert closed({}, "") == {"reward": 0.0, "a": 0.0, "judge": 0.0}


@pytest.mark.parametrize("value", [None, "1", math.nan, math.inf, [1.0], {"a": 1.0}, 1j])
def test_a_part_that_gives_no_number_is_unreadable(value: Any) -> None:
    found = Weighted({"a": (1.0, constant(value))})({}, "")
    assert isinstance(found, Invalid) and found.kind is InvalidKind.UNREADABLE and found.reason.startswith("a: gave ")


def test_numbers_of_libraries_are_numbers() -> None:
    found = Weighted({"a": (2, constant(np.float32(0.5))), "b": (np.float64(1.0), constant(np.bool_(True)))})({}, "")
    assert found == {"reward": 2.0, "a": 0.5, "b": 1.0}


A, B = (1.0, length), (1.0, length)


@pytest.mark.parametrize(
    ("parts", "gates", "told"),
    [
        ({}, {}, "needs a part"),
        ({"a": length}, {}, "must be \\(weight, function"),
        ({"a": (length, 1.0)}, {}, "must be \\(weight, function"),
        ({"a": (math.nan, length)}, {}, "must be \\(weight, function"),
        ({"reward": A}, {}, "the name of the sum"),
        ({"a": A}, {"a": "b"}, "gates names 'b'; the parts are a"),
        ({"a": A}, {"c": "a"}, "gates names 'c'"),
        ({"a": A}, {"a": "a"}, "waits for itself"),
        ({"a": A, "b": B}, {"a": "b", "b": "a"}, "waits for itself"),
        ({"a": A, "b": B}, {"a": ("b", "x")}, "must be a part or"),
        ({"a": A, "b": B}, {"a": ("b",)}, "must be a part or"),
        ({"a": A, "b": B}, {"a": 1.0}, "must be a part or"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(parts: Any, gates: Any, told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        Weighted(parts, gates)
    assert "\n" not in str(raised.value)


def test_a_worker_takes_it_as_a_reward() -> None:
    reward = Weighted({"long": (0.5, lambda task, reply: len(reply)), "one": (1.0, lambda task, reply: 1)})
    with EnvPool(reward, 1) as pool:
        pool.start(0, {"id": "t", "prompt": "p"})
        pool.poll(30)
        pool.send(0, Reply("abcd"))
        [(_, done)] = pool.poll(30)
    assert done == Done(3.0, {"long": 4.0, "one": 1.0})
