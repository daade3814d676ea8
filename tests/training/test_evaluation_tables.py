"""The tables of `posttrain eval`: what they have room for, and the rates beside the figures."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from posttrain import Rollout
from posttrain.cli.evaluation_tables import _further, _rates, _suite_tables
from posttrain.config.inference import Evaluation
from posttrain.core.rollouts import PlayedTurn
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Completion, Invalid, Reply, StopReason, ToolCall, Turn
from posttrain.envs.play.env_outputs import read_turn
from posttrain.envs.play.tools import Tools
from posttrain.training.rollout_figures import rates
from posttrain.training.sources.rollout_state import _played, _turn
from posttrain.training.verbs.suite import EvaluatedSuite


def side(names: list[str], draw: random.Random, **own: float) -> dict[str, Any]:
    figures: dict[str, Any] = {name: {"mean": draw.random()} for name in ("reward", "accuracy", *names)}
    return {"figures": {"tasks": 8, "samples": 64, **figures}, "rates": {"length": 5.0, "invalid": 0.0, **own}}


@pytest.mark.parametrize("count", [0, 1, 3, 8, 20])
def test_a_suite_shows_every_mean_beside_the_headline_within_80_columns(
    count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, names = random.Random(count), [f"{kind}@{2**k}" for k in range(7) for kind in ("pass", "maj", "best")][:count]
    sides = {"arithmetic": side(names, draw, **{"part/format": 0.25}), "code": side(names[:2], draw, tool_calls=1.5)}
    _further("model", sides)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    shown: dict[str, dict[str, str]] = {part: {} for part in sides}
    for line in lines:
        cells = line.replace("tool calls", "tool-calls").split()
        if cells[0] == "part":
            head = cells[1:]
        elif cells[0] in shown:
            shown[cells[0]] |= dict(zip(head, cells[1:], strict=True))
    for part, own in sides.items():
        means = {name: own["figures"][name]["mean"] for name in names if name in own["figures"]}
        assert {name: shown[part][name] for name in means} == {name: f"{mean:.4g}" for name, mean in means.items()}
    assert all(shown["code"][name] == "-" for name in names[2:])
    assert (shown["arithmetic"]["format"], shown["code"]["tool-calls"]) == ("0.25", "1.5")


@pytest.mark.parametrize("apart", [False, True])
def test_the_distribution_of_parts_has_a_column_where_they_differ(
    apart: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = {"mean": 0.125, "low": 0.1, "high": 0.15, "level": 0.95}
    part = {
        "figures": {"tasks": 100, "accuracy": figure, "reward": figure},
        "rates": {"length": 12.5, "truncated": 0.005, "invalid": 0.0},
    }
    parts = {"word problems": {**part, "in_distribution": True}, "other": {**part, "in_distribution": not apart}}
    _suite_tables(Evaluation(model="m"), EvaluatedSuite(parts, {}, {}))
    head, first, second = capsys.readouterr().out.splitlines()[2:5]
    assert ("distribution" in head) is apart and (second.split()[-1] == "out") is apart
    assert first.split()[-2 - apart :][:2] == ["0.5%", "0.0%"] and len(first) <= (90 if apart else 76)


def test_a_suite_without_further_means_has_no_second_table(capsys: pytest.CaptureFixture[str]) -> None:
    _further("model", {"sums": side([], random.Random(0))})
    assert capsys.readouterr().out == ""


def test_well_formed_tool_calls_are_counted_over_all_rollouts() -> None:
    good, bad = ToolCall("add", {"a": 1}), ToolCall("", {}, problem="no JSON")
    calls: list[list[tuple[ToolCall, ...]]] = [[(good, bad), (good,)], [()], [(good,)], []]
    made = [
        Rollout(
            {"id": "t"}, "t", [], 1.0, turns=[PlayedTurn(SpanKind.SAMPLED, "", 0, 0, 0, calls=own) for own in turns]
        )
        for turns in calls
    ]
    found = rates(made)
    assert (found["tool_calls"], found["valid_calls"]) == (1.0, 0.75)
    assert "1 tool calls (75.0% well-formed)" in _rates(found)
    assert "tool_calls" not in rates(made[1:2]) and "tool" not in _rates(rates(made[1:2]))


def test_calls_succeed_where_tools_answer_them_with_a_result() -> None:
    def ratio(a: int, b: int) -> float:
        """A ratio.

        Args:
            a: Numerator.
            b: Denominator.
        """
        return a / b

    def call(name: str, **arguments: int) -> ToolCall:
        return ToolCall(name, arguments)

    tools = Tools(ratio)
    reply = Reply(
        "", tool_calls=(call("ratio", a=1, b=2), call("ratio", a=1, b=0), call("nothing"), call("ratio", a=4, b=2))
    )
    turn = tools.answer(reply)
    assert turn is not None and turn.failed == 2
    read = read_turn(turn)
    assert isinstance(read, Turn) and read.failed == 2
    plain = PlayedTurn(SpanKind.SAMPLED, "", 0, 0, 0, calls=reply.tool_calls)
    told = PlayedTurn(SpanKind.TOOL, "", 0, 0, 0, answered=(4, 2))
    rollout = Rollout({"id": "t"}, "t", [], 1.0, turns=[plain, told])
    found = rates([rollout, rollout])
    assert (found["valid_calls"], found["successful_calls"]) == (1.0, 0.5)
    assert "8 tool calls (100.0% well-formed, 50.0% of those answered succeeded)" in _rates(
        {**found, "tool_calls": 8.0}
    )
    assert _played(_turn(told)) == told
    assert isinstance(read_turn(replace(turn, failed=5)), Invalid)


def test_the_price_of_a_million_tokens_gives_the_cost_of_the_sampled_ones() -> None:
    transcript = Transcript()
    transcript.sample(Completion(0, [1, 2, 3], [-1.0] * 3, "abc", StopReason.EOS, 0))
    rollout = Rollout({"id": "t"}, "t", [transcript], 1.0)
    assert rates([rollout] * 4, 250_000.0)["cost"] == 3.0 and "cost" not in rates([rollout])
    assert _rates(rates([rollout], 0.0)).endswith("cost 0")
