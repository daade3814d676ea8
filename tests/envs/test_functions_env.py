"""Errands in a shop by calling functions: what is solved, what is not, and that a lost worker changes nothing."""

from __future__ import annotations

import doctest
import json
import os
import signal
from typing import Any

import pytest
from processes import descendants, gone

from posttrain.core.types import Invalid, Reply, SpanReward, Task, Turn, UserError
from posttrain.envs.builtin import functions
from posttrain.envs.check import check
from posttrain.envs.play.env_outputs import Done, read_verdict
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.load_env import load_env
from posttrain.models.tokenizer.tool_parser import HERMES

SHOP: Task = {
    "id": "a", "question": "Order 2 apples and say what that costs.", "shelves": {"apple": [3, 5], "kite": [1, 7]},
    "answer": "10", "orders": {"apple": 2},
}  # fmt: skip


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def replied(text: str, turn: Turn, number: int) -> Reply:
    return Reply(text, tool_calls=HERMES.read(text, turn.tools or ()), number=number)


def played(replies: list[str], task: Task = SHOP, **options: Any) -> tuple[Done, list[str]]:
    """What it earns, and what the tools answered."""
    playing, heard = functions.functions(task, **options), list[str]()
    turn = next(playing)
    tools = turn.tools
    try:
        for number, text in enumerate(replies):
            turn = playing.send(Reply(text, tool_calls=HERMES.read(text, list(tools or ())), number=number))
            heard += [str(message["content"]) for message in turn.messages or ()]
    except StopIteration as end:
        return read_verdict(end.value), heard
    raise AssertionError("it asks on")


LOOK, ORDER, SAY = call("look_up", item="apple"), call("order", item="apple", count=2), "It costs <answer> 10 </answer>"


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        ([LOOK, ORDER, SAY], 1.0),
        ([f"{LOOK}\n{ORDER}", SAY], 1.0),
        ([ORDER, SAY], 1.0),
        ([call("order", item="apple", count=1), call("order", item="apple", count=1), SAY], 1.0),
        ([LOOK, SAY], 0.0),  # nothing was ordered
        ([ORDER, ORDER, SAY], 1.0),  # the second one fails: there is one apple left
        ([ORDER, call("order", item="apple", count=1), SAY], 0.0),  # too many
        ([ORDER, call("order", item="kite", count=1), SAY], 0.0),  # and something else
        ([ORDER, "<answer>11</answer>"], 0.0),
        ([ORDER, "<answer>9, 10 or 11</answer>"], 0.0),  # all that it could be
        ([ORDER, "10"], 0.0),  # no tags
        ([ORDER, "<answer>10"], 0.0),
        ([f"{SAY}\n{ORDER}", "done"], 0.0),  # the answer stands in the last reply
        ([""], 0.0),
    ],
)
def test_a_task_is_solved_by_the_right_answer_and_the_right_orders(replies: list[str], reward: float) -> None:
    assert played(replies)[0].reward == reward


def test_what_cannot_be_done_is_answered_and_changes_nothing() -> None:
    wrong = [
        call("order", item="apple", count=4), call("order", item="apple", count=0), call("order", item="apple", count=-1),
        call("order", item="pear", count=1), call("look_up", item="pear"), call("order", item="apple"),
        call("order", item="apple", count="2"), call("sell", item="apple"), "<tool_call>{</tool_call>",
    ]  # fmt: skip
    done, heard = played([*wrong, LOOK, ORDER, SAY])
    assert done.reward == 1.0 and not done.spans
    assert all(answer.startswith("Error: ") for answer in heard[:9]) and len(heard) == 11
    assert "the shop has 3" in heard[0] and "there are apple, kite" in heard[3] and json.loads(heard[9])["count"] == 3
    done, _ = played([*wrong, LOOK, ORDER, SAY], mistake=-0.25)
    ends = [len(text) for text in wrong]
    assert done.reward == 1.0 and done.spans == tuple(SpanReward(end, -0.25, n) for n, end in enumerate(ends))


def test_a_mistake_is_never_paid_for() -> None:
    for worth in (0.5, -2.0):
        with pytest.raises(UserError, match="give a mistake from -1 to 0"):
            played([SAY], mistake=worth)


def test_tasks_are_solved_by_their_own_calls_and_by_no_other_tasks_answer() -> None:
    tasks = functions.tasks(120, 3)
    assert len({task["id"] for task in tasks}) == 120 and tasks == json.loads(json.dumps(functions.tasks(120, 3)))
    for task in tasks:
        assert played(task["replies"], task)[0].reward == 1.0
        assert played(["<answer>7</answer>"], task)[0].reward == float(task["answer"] == "7" and not task["orders"])
    assert {len(task["replies"]) for task in tasks} == {2, 3} and any(task["answer"] == "no" for task in tasks)
    held_out = {task["id"] for task in functions.tasks(60, 3, held_out=True)}
    assert not held_out & {task["id"] for task in tasks}
    assert check("functions", tasks[:3]).ok
    tried = doctest.testmod(functions)
    assert tried.attempted and not tried.failed


def test_a_lost_worker_loses_no_order() -> None:
    """What the tools changed is changed again where the episode is played again."""
    with EnvPool(load_env("functions"), workers=1, seconds=20) as pool:
        pool.start(0, SHOP)
        [(_, turn)] = pool.poll(None)
        for number, text in enumerate([LOOK, ORDER, SAY]):
            assert isinstance(turn, Turn)
            pool.send(0, replied(text, Turn(messages=(), tools=functions_tools()), number))
            [(_, turn)] = pool.poll(None)
            if number < 2:
                for worker in descendants(pool._workers[0].child.process.pid):
                    os.kill(worker, signal.SIGKILL)
                    gone(worker)
    assert isinstance(turn, Done) and turn.reward == 1.0 and not isinstance(turn.reward, Invalid)


def functions_tools() -> list[Any]:
    turn = next(functions.functions(SHOP))
    return list(turn.tools or ())
