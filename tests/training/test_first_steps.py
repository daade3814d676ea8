"""What options name and no rollout of the first steps has is told once: a delimiter, a request to a service."""

from __future__ import annotations

import pytest

from posttrain.core.rollouts import Rollout
from posttrain.training.sources.first_steps import LOOKED, FirstSteps


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
