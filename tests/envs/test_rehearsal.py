"""A rehearsal warns of what could score nothing, and refuses only what cannot start."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from posttrain.core.types import Invalid, Reply, Task, UserError
from posttrain.data.tasks import to_tasks
from posttrain.envs.play.env_pool import EnvPool
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.row_warnings import warn_unknown_tokens
from posttrain.training.setup import rehearse

TASKS: list[Task] = [{"id": str(i), "prompt": f"{i}+1=", "answer": answer} for i, answer in enumerate(["1", "", "3"])]


def said(env: Any, seconds: float = 5.0) -> list[str]:
    warnings: list[str] = []
    with EnvPool(env, 1, seconds) as pool:
        rehearse(pool, to_tasks(TASKS, need=()), warnings.append)
    return warnings


@pytest.mark.parametrize(("letters", "share"), [("0123456789+=", None), ("012345678+=", "6%"), ("+=", "60%")])
def test_text_that_the_tokenizer_has_no_tokens_for_is_warned_of(letters: str, share: str | None) -> None:
    warnings: list[str] = []
    tasks = to_tasks([{"prompt": f"{i}+{i}=", "response": str(i)} for i in range(10)], need=("prompt", "response"))
    warn_unknown_tokens(Tokenizer.train([letters], 50, "characters"), tasks, warnings.append)
    assert bool(warnings) == (share is not None)
    if share is not None:
        assert (
            f"no token for {share} of the tasks' text" in warnings[0]
            and f"as in '{9 if '0' in letters else 0}+" in warnings[0]
        )


def test_a_character_that_is_rare_among_the_tasks_is_not_worth_a_warning() -> None:
    warnings: list[str] = []
    tasks = to_tasks([{"prompt": f"{i:030}" + "x" * (i == 7)} for i in range(20)])
    warn_unknown_tokens(Tokenizer.train(["0123456789"], 50, "characters"), tasks, warnings.append)
    assert warnings == []


def test_tokenizer_that_knows_every_byte_has_nothing_to_warn_of() -> None:
    warnings: list[str] = []
    warn_unknown_tokens(Tokenizer.train(["abc"], 300), to_tasks([{"prompt": "\u4f60\u597d"}]), warnings.append)
    assert warnings == []


def test_no_sample_reply_is_empty() -> None:
    def reward(task: Task, reply: str) -> float:
        return float(reply.split()[-1] == task["answer"])

    assert said(reward) == []


def test_a_reward_that_can_read_one_form_alone_is_not_warned_of() -> None:
    assert said(lambda task, reply: float(reply.index("\\boxed"))) == []
    assert said(lambda task, reply: float(reply)) == []


def test_a_reward_that_scores_no_sample_reply_is_warned_of_with_its_reason() -> None:
    [warning] = said(lambda task, reply: Invalid("the sandbox is down"))
    assert "scored no sample reply" in warning and "the sandbox is down" in warning


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (lambda task, reply: task["lable"], "KeyError: 'lable'"),
        (lambda task, reply: reply, "returned"),
        (lambda task, reply: None, "is a return missing"),
    ],
)
def test_a_reward_whose_code_fails_for_every_reply_is_refused(reward: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"fails with every sample reply: .*{reason}") as caught:
        said(reward)
    assert ("let it return 0" in str(caught.value)) == ("KeyError" in reason), (
        "only an exception may be about the reply"
    )


def test_a_reward_whose_exceptions_depend_on_the_reply_is_warned_of() -> None:
    def reward(task: Task, reply: str) -> float:
        raise ValueError(f"no form of mine in {reply}")

    [warning] = said(reward)
    assert "scored no sample reply" in warning


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

    with pytest.raises(UserError, match="fails before its first prompt: KeyError: 'question'"):
        said(env)


def test_an_environment_that_hangs_costs_one_limit_for_each_task() -> None:
    def reward(task: Task, reply: str) -> float:
        while True:
            pass

    [warning] = said(reward, 0.2)
    assert "did not return within 0.2 s" in warning
