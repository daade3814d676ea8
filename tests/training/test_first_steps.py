"""A delimiter or a service that no rollout of the first steps uses is reported once."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.algorithms.all_algorithms import find
from posttrain.config.resolve import validate
from posttrain.config.training import RL
from posttrain.core.rollouts import Rollout
from posttrain.core.types import UserError
from posttrain.system import bounded_places
from posttrain.training.adjust import adjust
from posttrain.training.sources.first_steps import LOOKED, FirstSteps
from posttrain.training.verbs.rl import notes_on_steps


def replies(*texts: str) -> list[Rollout]:
    return [Rollout({}, "g", [], 0.0, text=text) for text in texts]


def told(delimiter: str, *steps: list[Rollout]) -> list[str]:
    said: list[str] = []
    watch = FirstSteps(delimiter, {}, said.append)
    for step in steps:
        watch.look(step)
    return said


@pytest.mark.parametrize("delimiter", ["\n\n", "line", "/(?=Step [0-9])/", "ки"])
def test_a_delimiter_that_no_reply_has_is_told_once_with_the_number_of_replies(delimiter: str) -> None:
    lacks = replies("1+1=2 so 2", "a.b")
    assert told(delimiter, *[lacks] * (LOOKED - 1)) == [], "the first steps are not over"
    (line,) = told(delimiter, *[lacks] * (LOOKED + 3))
    assert f"--step-delimiter {delimiter!r} is in none of the {2 * LOOKED} replies of {LOOKED} steps" in line
    assert "posttrain rollouts" in line and "\n" not in line


@pytest.mark.parametrize(
    ("delimiter", "reply"), [("\n\n", "a\n\nb"), ("line", "a\nb"), ("/(?=Step [0-9])/", "Step 1"), (".", "a.")]
)
def test_one_reply_with_it_is_enough(delimiter: str, reply: str) -> None:
    lacks = replies("none", "other")
    assert told(delimiter, lacks, replies("none", reply), *[lacks] * LOOKED) == []


@pytest.mark.parametrize("delimiter", ["reply", "spans"])
def test_a_delimiter_that_is_not_in_the_text_is_not_looked_for(delimiter: str) -> None:
    assert told(delimiter, *[replies("none")] * LOOKED) == []


@pytest.mark.parametrize(("delimiter", "why"), [("spans", "SpanReward"), ("", "does the environment ask it?")])
def test_a_service_that_no_rollout_asked_is_told_once_and_one_that_was_asked_is_not(delimiter: str, why: str) -> None:
    said: list[str] = []
    services = {"process": "--reward-model process=prm", "judge": "--judge j.toml"}
    watch = FirstSteps(delimiter, services, said.append)
    asking = [Rollout({}, "g", [], 0.0, text="a", answers=[("judge", 1.0)])]
    for step in [replies("a"), asking, replies("a"), *[replies("a")] * LOOKED]:
        watch.look(step)
    (line,) = said
    assert line.startswith(f"--reward-model process=prm was asked in none of the 3 rollouts of {LOOKED} steps")
    assert why in line and "\n" not in line


def test_rewards_of_steps_that_are_not_read_as_steps_are_told() -> None:
    steps = {"tasks": "t", "env": "e", "reward_model": ("prm",), "step_delimiter": "line"}

    def notes(**options: Any) -> list[str]:
        config = RL(**{**steps, **options})
        return notes_on_steps(config, adjust(find(config.algorithm), config))

    (line,) = notes()
    assert line.startswith("grpo adds the rewards of steps up") and "--algorithm grpo-process" in line
    assert notes(step_aggregate="min") == notes(algorithm="grpo-process") == notes(algorithm="ppo") == []
    assert notes(step_delimiter="", reward_model=()) == []
    apart = {"algorithm": "grpo-process", "settings": {"outcome_apart": True}}
    (line,) = notes(**apart, step_aggregate="min")
    assert line.startswith("--outcome-apart has nothing to set apart with --step-aggregate min")
    assert notes(**apart) == []
    with pytest.raises(UserError, match="step-weight"):
        validate(RL(**steps, step_weight=-1.0))


def test_an_expression_that_never_ends_is_told_once_and_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_places, "SECONDS", 0.2)
    (line,) = told("/(a|a)+b/", *[replies("a" * 60)] * LOOKED)
    assert "its regular expression takes more than 0.2 s" in line and "\n" not in line
    assert told("/(a|a)+b/", replies("aab")) == [], "the next search works"
