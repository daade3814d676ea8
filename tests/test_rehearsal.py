"""A rehearsal warns of what could score nothing, and refuses only what cannot start."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from posttrain.data.tasks import to_tasks
from posttrain.envs.pool import EnvPool
from posttrain.training.setup import rehearse
from posttrain.types import Invalid, Reply, Task, UserError

TASKS: list[Task] = [{"id": str(i), "prompt": f"{i}+1=", "answer": answer} for i, answer in enumerate(["1", "", "3"])]


def said(env: Any, seconds: float = 5.0) -> list[str]:
    warnings: list[str] = []
    with EnvPool(env, 1, seconds) as pool:
        rehearse(pool, to_tasks(TASKS, need=()), warnings.append)
    return warnings


def test_no_sample_reply_is_empty() -> None:
    def reward(task: Task, reply: str) -> float:
        return float(reply.split()[-1] == task["answer"])

    assert said(reward) == []


def test_a_reward_that_can_read_one_form_alone_is_not_warned_of() -> None:
    assert said(lambda task, reply: float(reply.index("\\boxed"))) == []
    assert said(lambda task, reply: float(reply)) == []


def test_a_reward_that_scores_no_sample_reply_is_warned_of_with_its_reason() -> None:
    [warning] = said(lambda task, reply: Invalid("the sandbox is down"))
    assert "could score no sample reply" in warning and "the sandbox is down" in warning


def test_an_environment_that_waits_for_a_word_of_its_own_is_not_warned_of() -> None:
    def env(task: Task) -> Generator[str, Reply, float]:
        reply = yield "say open sesame"
        while "sesame" not in reply:
            reply = yield "again"
        return 1.0

    assert said(env) == []


def test_an_environment_without_a_first_turn_is_refused() -> None:
    def env(task: Task) -> Generator[str, Reply, float]:
        yield task["question"]
        return 1.0

    with pytest.raises(UserError, match="shows no first turn: KeyError: 'question'"):
        said(env)


def test_an_environment_that_hangs_costs_one_limit_for_each_task() -> None:
    def reward(task: Task, reply: str) -> float:
        while True:
            pass

    [warning] = said(reward, 0.2)
    assert "did not return within 0.2 s" in warning
