"""Steps of replies are scored by a process reward model on top of any environment, and earn what options say."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from posttrain.config.inference import Check
from posttrain.core.reply_steps import SCORED_STEPS, scored_steps
from posttrain.core.types import (
    Ask,
    Graded,
    Invalid,
    InvalidKind,
    Reply,
    Sides,
    SpanReward,
    StopReason,
    Task,
    Turn,
    UserError,
)
from posttrain.envs.play.env_outputs import Done, read_verdict
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.load_env import is_async, is_generator_env
from posttrain.envs.step_rewards import Step, StepScoring, split_at, split_steps, with_step_rewards

SCORES = {"good": 2.0, "bad": -1.0}
HOW = {"service": "reward-model", "delimiter": "line", "probability": False}


def exact(task: Task, reply: str) -> float:
    return float(reply.endswith(task["answer"]))


def parts(task: Task, reply: str) -> dict[str, float]:
    return {"correct": 1.0, "style": 0.25}


async def waiting(task: Task, reply: str) -> float:
    return 1.0


def agent(task: Task) -> Generator[Any, Any, Any]:
    first = yield Turn(messages=[{"role": "user", "content": "q"}])
    second = yield Turn(messages=[{"role": "tool", "content": "found"}], reward=0.5)
    third = yield "<information>text</information>"
    assert (first.number, second.number, third.number) == (0, 1, 2)
    return Graded(1.0, [SpanReward(4, 0.25, 0)])


async def async_agent(task: Task) -> AsyncGenerator[Any, Any]:
    reply = yield Turn(text=task["prompt"])
    yield float(len(reply))


def game(task: Task) -> Generator[Any, Any, Any]:
    yield Turn(text="a", side="black")
    return Sides({"black": 1.0})


def by_tokens(task: Task) -> Generator[Any, Any, Any]:
    yield Turn(tokens=[1, 2])
    return 1.0


def unlearned(task: Task) -> Generator[Any, Any, Any]:
    yield Turn(text="a", learn=False)
    yield " b"
    return 1.0


def group(tasks: list[Task], replies: list[str]) -> list[float]:
    return [0.0] * len(replies)


def scored(content: dict[str, Any]) -> list[float]:
    return [SCORES[step.split()[0]] for step in content["steps"]]


def play(
    env: Any, replies: list[str], task: Task | None = None, stop: StopReason = StopReason.EOS
) -> tuple[Any, list[Any]]:
    """Play an episode; returns the verdict, and what the reward model was asked."""
    said, asked = None, []
    playing = env(task or {"prompt": "p", "answer": "9"})
    left = [Reply(text, stop, number=n) for n, text in enumerate(replies)]
    try:
        while True:
            event = playing.send(said)
            if isinstance(event, Ask):
                assert event.service == "reward-model"
                asked.append(event.content)
                said = scored(event.content)
            else:
                said = left.pop(0)
    except StopIteration as end:
        return end.value, asked


@pytest.mark.parametrize(
    ("delimiter", "reply", "expected"),
    [
        ("line", "a\n\nb\n", [Step(2, "a"), Step(5, "b")]),
        ("\n\n", "a\nb\n\nc", [Step(5, "a\nb"), Step(6, "c")]),
        ("/(?=Step [0-9])/", "Step 1 x Step 2 y", [Step(9, "Step 1 x "), Step(17, "Step 2 y")]),
        ("/[.;] */", "a. b; c", [Step(3, "a"), Step(6, "b"), Step(7, "c")]),
        (".", "a.b", [Step(2, "a"), Step(3, "b")]),  # a text is no expression
        ("reply", "a\nb", [Step(3, "a\nb")]),
        ("line", " \n", []),
    ],
)
def test_replies_are_split_at_their_delimiters_and_blank_steps_are_none(
    delimiter: str, reply: str, expected: list[Step]
) -> None:
    assert split_steps(reply, delimiter) == expected


def test_the_last_step_of_a_reply_that_was_cut_off_is_none() -> None:
    assert split_steps("a\nb", "line", cut=True) == [Step(2, "a")]
    assert split_steps("a\nb", "reply", cut=True) == [Step(3, "a\nb")]
    assert split_at("abcd", [4, 2, 2, 9, 0]) == [Step(2, "ab"), Step(4, "cd")]
    assert split_at("abcd", [2, 9, -1]) == [Step(2, "ab")]


def test_each_step_earns_its_score_at_its_end_and_all_are_asked_at_once() -> None:
    found, asked = play(with_step_rewards(exact, StepScoring(**HOW)), ["good a\nbad 9"])
    assert asked == [{"prompt": "p", "steps": ["good a", "bad 9"]}]
    assert found == Graded({"outcome": 1.0, "reward": 1.0}, [SpanReward(7, 2.0, 0), SpanReward(12, -1.0, 0)])


def test_a_probability_is_the_sigmoid_of_the_score_and_is_weighed() -> None:
    how = StepScoring(**{**HOW, "probability": True}, weight=0.5)
    found, _ = play(with_step_rewards(exact, how), ["good\nbad"])
    earned = [span.reward for span in found.spans]
    assert earned == pytest.approx([0.5 / (1 + math.exp(-2)), 0.5 / (1 + math.exp(1))], abs=1e-15)


@pytest.mark.parametrize(("aggregate", "whole"), [("sum", 3.0), ("mean", 1.0), ("min", -1.0), ("last", 2.0)])
def test_steps_together_are_a_part_of_the_reward(aggregate: Any, whole: float) -> None:
    found, _ = play(with_step_rewards(exact, StepScoring(**HOW, aggregate=aggregate)), ["good\nbad\ngood 9"])
    assert found == Graded({"outcome": 1.0, "process": whole, "reward": 1.0 + whole}, [])
    own, _ = play(with_step_rewards(parts, StepScoring(**HOW, aggregate=aggregate)), ["good\nbad\ngood 9"])
    assert own.reward == {"outcome": 1.25, "correct": 1.0, "style": 0.25, "process": whole, "reward": 1.25 + whole}


@pytest.mark.parametrize(("aggregate", "whole"), [("product", -4.0), ("min", -1.0), ("mean", 1.0)])
@pytest.mark.parametrize("weight", [0.5, -2.0])
def test_the_weight_multiplies_the_aggregate_and_not_each_step_of_it(
    aggregate: Any, whole: float, weight: float
) -> None:
    how = StepScoring(**HOW, aggregate=aggregate, weight=weight)
    found, _ = play(with_step_rewards(exact, how), ["good\nbad\ngood 9"])
    assert found.reward["process"] == weight * whole


def test_steps_of_a_wrong_reply_earn_nothing_where_they_are_gated() -> None:
    env = with_step_rewards(exact, StepScoring(**HOW, success=1.0))
    assert [span.reward for span in play(env, ["good\nbad"])[0].spans] == [0.0, 0.0]
    assert [span.reward for span in play(env, ["good\nbad 9"])[0].spans] == [2.0, -1.0]


def test_every_reply_of_an_episode_is_scored_in_its_context_and_the_outcome_holds_what_the_environment_gave() -> None:
    found, asked = play(with_step_rewards(agent, StepScoring(**HOW)), ["good 1", "bad 2\ngood", "good 3"])
    user = {"role": "user", "content": "q"}
    said = [{"role": "assistant", "content": "good 1"}, {"role": "tool", "content": "found"}]
    assert asked == [
        {"messages": [user], "begun": "", "steps": ["good 1"]},
        {"messages": [user, *said], "begun": "", "steps": ["bad 2", "good"]},
        {"messages": [user, *said], "begun": "bad 2\ngood<information>text</information>", "steps": ["good 3"]},
    ]
    assert found.reward == {"outcome": 1.75, "reward": 1.0}  # 1.0, 0.5 of a turn and 0.25 of a span
    assert [(s.reply, s.reward) for s in found.spans] == [(0, 0.25), (0, 2.0), (1, -1.0), (1, 2.0), (2, 2.0)]


def test_ends_that_the_environment_names_are_the_steps() -> None:
    how = StepScoring(**{**HOW, "delimiter": "spans"})
    _, asked = play(with_step_rewards(agent, how), ["good rest", "x", "y"])
    assert [content["steps"] for content in asked] == [["good"]]


def test_replies_that_are_not_learned_from_are_not_scored() -> None:
    _, asked = play(with_step_rewards(unlearned, StepScoring(**HOW)), ["bad", "good"])
    assert asked == [{"prompt": "abad b", "steps": ["good"]}]


def test_what_cannot_be_scored_is_invalid_with_a_reason() -> None:
    for env, reason in ((game, "sides"), (by_tokens, "token ids")):
        found, asked = play(with_step_rewards(env, StepScoring(**HOW)), ["good"])
        assert isinstance(found, Invalid) and reason in found.reason and not asked
    with pytest.raises(UserError, match="scores whole groups"):
        with_step_rewards(group, StepScoring(**HOW))


def test_an_answer_that_failed_makes_the_reward_invalid() -> None:
    playing = with_step_rewards(exact, StepScoring(**HOW))({"prompt": "p", "answer": "9"})
    next(playing)
    playing.send(Reply("good"))
    with pytest.raises(StopIteration) as end:
        playing.send(Invalid("too long"))
    assert end.value.value == Invalid("too long")


def test_it_travels_to_workers_and_waits_where_the_environment_does() -> None:
    for env, is_waiting in ((exact, False), (waiting, True), (agent, False), (async_agent, True)):
        sent = pickle.loads(pickle.dumps(with_step_rewards(env, StepScoring(**HOW))))
        assert is_generator_env(sent) and is_async(sent) is is_waiting and sent.stands_for is env


@pytest.mark.parametrize("aggregate", [None, "min"])
def test_an_episode_notes_what_each_step_was_worth_for_its_readers(aggregate: Any) -> None:
    how = StepScoring(**{**HOW, "probability": True}, weight=0.5, aggregate=aggregate)
    with EnvPool(with_step_rewards(exact, how), workers=0) as pool:
        pool.start(0, {"id": "a", "prompt": "p", "answer": "9"})
        pool.poll(None)
        pool.send(0, Reply("good a\n\nbad 9"))
        [(_, asked)] = pool.poll(None)
        pool.send(0, scored(asked.content))
        [(_, done)] = pool.poll(None)
    chances = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))]
    expected: list[dict[str, Any]] = [
        {"text": text, "probability": pytest.approx(chance)}
        for text, chance in zip(["good a", "bad 9"], chances, strict=True)
    ]
    if aggregate is None:
        expected = [
            {**step, "reward": pytest.approx(0.5 * chance)} for step, chance in zip(expected, chances, strict=True)
        ]
    assert done.notes == {SCORED_STEPS: expected}
    told = ["probability 0.8808, reward 0.4404 │ good a", "probability 0.2689, reward 0.1345 │ bad 9"]
    assert scored_steps(done.notes) == (
        told if aggregate is None else [re.sub(", reward [0-9.]+", "", line) for line in told]
    )
    assert scored_steps({SCORED_STEPS: "left out: more than fits"}) == []


def test_an_async_environment_earns_the_same() -> None:
    import asyncio

    async def whole() -> Any:
        playing = with_step_rewards(async_agent, StepScoring(**HOW))({"prompt": "p"})
        assert await playing.asend(None) == Turn(text="p")
        ask = await playing.asend(Reply("good\nbad"))
        return await playing.asend(scored(ask.content))

    assert asyncio.run(whole()) == Graded(
        {"outcome": 8.0, "reward": 8.0}, [SpanReward(5, 2.0, 0), SpanReward(8, -1.0, 0)]
    )


def test_a_long_reply_has_a_reward_for_each_step_and_too_many_are_refused_with_the_fix() -> None:
    env = with_step_rewards(exact, StepScoring(**HOW))
    found, _ = play(env, ["good\n" * 4095 + "good 9"])
    assert len(read_verdict(found).spans) == 4096
    found, _ = play(env, ["good\n" * 4096 + "good 9"])
    assert isinstance(found, Invalid) and "4097 step rewards, and may have at most 4096" in found.reason
    whole, _ = play(with_step_rewards(exact, StepScoring(**HOW, aggregate="min")), ["good\n" * 4096 + "good 9"])
    assert read_verdict(whole).reward == 3.0


def test_an_expression_that_never_ends_meets_the_time_limit_of_the_environment() -> None:
    env = with_step_rewards(exact, StepScoring(**{**HOW, "delimiter": "/(a+)+b/"}))
    with EnvPool(env, 1, 0.5) as pool:
        pool.start(0, {"id": "0", "prompt": "p", "answer": "9"})
        assert isinstance(pool.poll(None)[0][1], Turn)
        pool.send(0, Reply("a" * 60))
        [(_, done)] = pool.poll(None)
    assert isinstance(done, Done) and isinstance(done.reward, Invalid) and done.reward.kind is InvalidKind.TIMEOUT


def test_a_backslash_and_an_n_are_no_new_line() -> None:
    with pytest.raises(UserError, match=r'write --step-delimiter "/\\n\\n/"'):
        Check(tasks="rows.jsonl", reward_model=["prm"], step_delimiter=r"\n\n")
    Check(tasks="rows.jsonl", reward_model=["prm"], step_delimiter=r"/\n\n/")
    assert split_steps("a\nb\n\nc", r"/\n\n/") == [Step(5, "a\nb"), Step(6, "c")]


def test_the_environment_s_own_outcome_decides_and_its_other_parts_are_kept() -> None:
    def graded(task: Task, reply: str) -> dict[str, float]:
        return {"outcome": float("9" in reply), "style": 2.0}

    how = StepScoring(**HOW, success=1.0, aggregate="sum")
    found, _ = play(with_step_rewards(graded, how), ["good 9"])
    assert found.reward == {"outcome": 1.0, "style": 2.0, "process": 2.0, "reward": 5.0}
    found, _ = play(with_step_rewards(graded, how), ["good 8"])
    assert found.reward == {"outcome": 0.0, "style": 2.0, "process": 0.0, "reward": 2.0}


def test_scores_beyond_the_range_of_the_exponential_have_a_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCORES, "bad", -1e4)
    monkeypatch.setitem(SCORES, "good", 1e4)
    found, _ = play(with_step_rewards(exact, StepScoring(**{**HOW, "probability": True})), ["good\nbad"])
    assert [span.reward for span in found.spans] == [1.0, 0.0]


@pytest.mark.parametrize("aggregate", ["sum", "mean", "min", "last"])
def test_a_reply_without_steps_earns_its_outcome_alone(aggregate: Any) -> None:
    found, asked = play(with_step_rewards(exact, StepScoring(**HOW, aggregate=aggregate)), [" \n"])
    assert found == Graded({"outcome": 0.0, "process": 0.0, "reward": 0.0}, []) and not asked


def test_a_part_of_the_environment_may_not_have_the_name_of_the_step_rewards() -> None:
    def graded(task: Task, reply: str) -> dict[str, float]:
        return {"process": 1.0}

    found, _ = play(with_step_rewards(graded, StepScoring(**HOW, aggregate="sum")), ["good"])
    assert isinstance(found, Invalid) and "'process'" in found.reason and "rename it" in found.reason
    assert not isinstance(play(with_step_rewards(graded, StepScoring(**HOW)), ["good"])[0], Invalid)


def test_a_fresh_context_forgets_what_was_shown_and_messages_behind_text_cannot_be_scored() -> None:
    def forgetting(task: Task) -> Generator[Any, Any, Any]:
        yield Turn(text="a")
        yield Turn(text="b", fresh=True)
        return 1.0

    def mixing(task: Task) -> Generator[Any, Any, Any]:
        yield Turn(text="a")
        yield Turn(messages=[{"role": "user", "content": "q"}])
        return 1.0

    _, asked = play(with_step_rewards(forgetting, StepScoring(**HOW)), ["good", "bad"])
    assert [content["prompt"] for content in asked] == ["a", "b"]
    found, _ = play(with_step_rewards(mixing, StepScoring(**HOW)), ["good", "bad"])
    assert isinstance(found, Invalid) and "messages after text" in found.reason


def test_ends_of_another_reply_are_no_steps_of_this_one() -> None:
    def two(task: Task) -> Generator[Any, Any, Any]:
        yield Turn(text="a")
        yield " b "
        return Graded(1.0, [SpanReward(4, 0.25, 0), SpanReward(3, 0.25, 1)])

    _, asked = play(with_step_rewards(two, StepScoring(**{**HOW, "delimiter": "spans"})), ["good rest", "bad rest"])
    assert [content["steps"] for content in asked] == [["good"], ["bad"]]
