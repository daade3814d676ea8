"""Resources servers of NeMo Gym as environments: the requests of its agents, its rewards, and what fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from nemo_gym_server import resources_server
from scripted import scripted

from posttrain.core.types import Invalid, Reply, StopReason, UserError
from posttrain.envs.bridges.nemo_gym import play
from posttrain.envs.play.load_env import load_env
from posttrain.models.tokenizer.tool_parser import HERMES

TOOL = {"type": "function", "name": "add", "description": "Add.", "strict": True,
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}}}  # fmt: skip
ASKED = {
    "input": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "add 1, then 2"}],
    "tools": [TOOL],
}
ROW = {"id": "a", "responses_create_params": ASKED, "start": 3, "wanted": 6}
GAME = {"id": "b", "responses_create_params": {"input": "Play.", "tools": [TOOL]}, "wanted": "7"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def at(url: str, **options: Any) -> Callable[..., Any]:
    return partial(play, url=url, **options)


def test_an_episode_is_one_session_and_its_verifier_sees_the_whole_conversation() -> None:
    with resources_server() as server:
        calls = f"One. {call('add', count=1)}{call('add', count=2)}"
        named = [replace(made, id=f"own{place}") for place, made in enumerate(HERMES.read(calls))]
        replies = [Reply(calls, tool_calls=named, before_calls=5), "<think>hm</think>It is 6."]
        found = scripted(at(server.url), ROW, replies)
        other = scripted(at(server.url), {**ROW, "url": server.url}, ["no"])
    assert found.done is not None and found.done.reward == 1.0 and found.done.rewards == {"right": 1.0, "short": 0.5}
    assert other.reward == 0.0
    first, answers = found.shown
    assert first.messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "add 1, then 2"}]
    assert [tool["function"]["name"] for tool in first.tools or ()] == ["add"]
    assert [m["content"] for m in answers.messages or ()] == ['{"count": 4}', '{"count": 6}'] and answers.failed == 0
    assert [message["tool_call_id"] for message in answers.messages or ()] == ["own0", "own1"]
    sessions = [session for session, _, _ in server.asked]
    assert len(set(sessions[:4])) == 1 and sessions[4] == sessions[5] != sessions[0]
    assert [path for _, path, _ in server.asked] == [
        "/seed_session",
        "/add",
        "/add",
        "/verify",
        "/seed_session",
        "/verify",
    ]
    told = server.asked[3][2]
    assert {name: value for name, value in told.items() if name != "response"} == ROW
    ids = [item.get("call_id") for item in told["response"]["output"]]
    assert [item["type"] for item in told["response"]["output"]] == [
        "message", "function_call", "function_call", "function_call_output", "function_call_output", "reasoning", "message",
    ]  # fmt: skip
    assert ids[1:3] == ids[3:5] and ids[1] != ids[2]
    assert told["response"]["output"][0]["content"][0]["text"] == "One. "
    assert told["response"]["output"][-2]["summary"][0]["text"] == "hm"
    assert told["response"]["output"][-1]["content"][0]["text"] == "It is 6."
    assert told["response"]["incomplete_details"] is None


def test_calls_that_name_no_tool_of_the_row_never_reach_the_server() -> None:
    with resources_server() as server:
        calls = call("verify"), call("../verify"), "<tool_call>rubbish</tool_call>", call("add", count="x")
        found = scripted(at(server.url), ROW, ["".join(calls), "done"])
    assert found.reward == 0.0 and [path for _, path, _ in server.asked] == ["/seed_session", "/add", "/verify"]
    texts = [message["content"] for message in found.shown[1].messages or ()]
    assert "there is no tool 'verify'" in texts[0] and "the name of the tool is '../verify'" in texts[1]
    assert "not JSON" in texts[2] and "whole number" in texts[3] and found.shown[1].failed == 4


def test_an_episode_that_was_cut_off_is_verified_as_incomplete() -> None:
    def verified(replies: list[str], **options: Any) -> Any:
        with resources_server() as server:
            scripted(at(server.url, **options), ROW, replies)
            return server.asked[-1]

    cut = Reply(call("add", count=1), StopReason.LENGTH)
    for path, content in (verified([cut])[1:], verified([call("add", count=1), Reply("", StopReason.LENGTH)])[1:]):
        assert path == "/verify" and content["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    _, path, content = verified([call("add", count=1)] * 9, turns=2)
    assert path == "/verify" and [i["type"] for i in content["response"]["output"]].count("function_call") == 2


def test_the_rewards_of_steps_add_up_and_the_episode_is_closed() -> None:
    with resources_server(steps=True) as server:
        found = scripted(at(server.url), GAME, ["1", f"2 {call('add')}", "7"])
        short = scripted(at(server.url, turns=2), GAME, ["1", "2", "7"])
        lost = scripted(at(server.url), GAME, ["1", Reply("", StopReason.LENGTH)])
    assert found.reward == 0.5 and [turn.reward for turn in found.shown] == [0.0, -0.25, -0.25]
    assert short.reward == -0.5 and lost.reward == -0.25
    assert found.shown[0].messages == [{"role": "user", "content": "Play."}, {"role": "user", "content": "Guess."}]
    assert [message["role"] for message in found.shown[2].messages or ()] == ["tool", "user"]
    paths = [path for _, path, _ in server.asked]
    assert paths[:6] == ["/seed_session", "/reset", "/step", "/step", "/step", "/close"] and paths.count("/close") == 3
    said = [[item["type"] for item in content["response"]["output"]] for _, _, content in server.asked[2:5]]
    assert said == [["message"], ["message", "function_call"], ["message"]], "a step is told its own reply alone"


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ({"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "busy"}, "judge_failed: busy"),
        ({"reward": None, "reward_components": {"a": "high"}}, "the part 'a' is 'high', not a finite number"),
        ("fail", '/verify answered 500: "xxx'),
        ("flood", "answers more than 4,194,304 bytes"),
        ("hang", "/verify did not answer within 0.3 s"),
    ],
)
def test_a_reward_that_the_server_does_not_give_is_invalid(verdict: Any, reason: str) -> None:
    with resources_server(verdict=verdict) as server:
        found = scripted(at(server.url, timeout=0.3 if verdict == "hang" else 8.0), ROW, ["x"])
    assert isinstance(found.reward, Invalid) and reason in found.reason


@pytest.mark.parametrize("info", [["x"], "x", {"tool_outputs": "x"}, {"tool_outputs": ["x"]}, {"tool_outputs": 7}])
@pytest.mark.parametrize("path", ["reset", "step"])
def test_an_answer_of_another_form_is_invalid(path: str, info: Any) -> None:
    with resources_server(steps=True) as server:
        setattr(server, f"step_{path}", lambda session, row: (200, {"reward": 0.0, "info": info}))
        found = scripted(at(server.url), GAME, ["1", "7"])
    assert isinstance(found.reward, Invalid) and f"the answer of {server.url}/{path} is malformed" in found.reason


def test_a_server_that_is_not_there_and_rows_of_another_form_are_told() -> None:
    began = time.monotonic()
    found = scripted(at("http://127.0.0.1:9"), ROW, ["x"])
    assert "there is no resources server at http://127.0.0.1:9" in found.reason and time.monotonic() - began < 30
    assert "--env nemo-gym,url=" in scripted(play, ROW, ["x"]).reason
    refused = play.problem_of_row  # type: ignore[attr-defined]
    assert refused(ROW) is None and refused(GAME) is None
    assert 'needs "responses_create_params"' in refused({"prompt": "x"})
    hosted = {"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}
    assert "responses_create_params.tools[0] has the type 'web_search'" in refused(hosted)
    assert "responses_create_params.input is missing" in refused({"responses_create_params": {}})


def test_options_stand_behind_its_name() -> None:
    with resources_server() as server:
        assert scripted(load_env(f"nemo-gym,url={server.url},turns=3"), ROW, ["x"]).reward == 0.0
    with pytest.raises(UserError, match="turn"):
        load_env("nemo-gym,turn=3")
