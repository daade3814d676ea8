"""Anthropic's Messages: the same prompt and tokens as in OpenAI's chat, in blocks and events as its clients read them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from served import TOOLS, Scripted, Served, served
from wire import CONTEXT, changed, streamed, tool_words, wire_server

from posttrain.core.types import UserError
from posttrain.engines.serving.anthropic_messages import read_count, read_messages
from posttrain.engines.serving.policy_server import ServerLimits
from posttrain.engines.serving.requests import RequestRefused, read_body
from posttrain.models.tokenizer.tokenizer import Tokenizer

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MARK = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
TOOL = {"name": "look_up", "description": "Looks a word up.", "input_schema": SCHEMA, **MARK}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox"}}\n</tool_call>'


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tool_words()


@pytest.fixture(scope="module")
def server(words: Tokenizer) -> Iterator[Served]:
    with wire_server(words) as found:
        yield found


@pytest.fixture(scope="module")
def showing(words: Tokenizer) -> Tokenizer:
    """A tokenizer whose template shows tools."""
    return Tokenizer(words.backend, words.config, TOOLS)


def asked(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 12, "messages": list(messages), **more}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


@pytest.mark.parametrize(
    ("given", "system", "chat"),
    [
        ([user("fox")], None, [user("fox")]),
        ([user([text("fox", **MARK)])], [text("be", **MARK)], [{"role": "system", "content": "be"}, user("fox")]),
        ([user([text("a"), text("b")]), user("c")], "be", [{"role": "system", "content": "be"}, user("a\nb\nc")]),
        (
            [user("a"), {"role": "assistant", "content": [text("b"), text("c")]}, user("d")],
            None,
            [user("a"), {"role": "assistant", "content": "bc"}, user("d")],
        ),
    ],
)
def test_a_message_is_the_chat_with_the_same_words(server: Served, given: Any, system: Any, chat: Any) -> None:
    same = {"seed": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "return_token_ids": True}
    more = {} if system is None else {"system": system}
    status, answer = server.ask(PATH, asked(*given, **more, **same, metadata={"user_id": "a"}))
    _, other = server.ask("/v1/chat/completions", {"messages": chat, "max_tokens": 12, **same})
    assert status == 200, answer
    [choice] = other["choices"]
    assert answer["prompt_token_ids"] == other["prompt_token_ids"]
    assert answer["token_ids"] == choice["token_ids"] and answer["weight_versions"] == choice["weight_versions"]
    assert answer["usage"]["input_tokens"] == other["usage"]["prompt_tokens"] == len(other["prompt_token_ids"])
    assert answer["usage"]["output_tokens"] == len(choice["token_ids"])
    assert "".join(block["text"] for block in answer["content"]) == choice["message"]["content"]
    assert answer["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[choice["finish_reason"]]
    counted = {"model": "tiny", "messages": given, **more}
    assert server.ask(COUNT, counted) == (200, {"input_tokens": len(other["prompt_token_ids"])})


def test_a_stop_sequence_is_named_and_left_out(server: Served, words: Tokenizer) -> None:
    how = {"seed": 3, "return_token_ids": True, "max_tokens": 40}
    _, free = server.ask(PATH, {**asked(user("the")), **how})
    stop = words.decode([free["token_ids"][6]])
    _, answer = server.ask(PATH, {**asked(user("the")), **how, "stop_sequences": [stop]})
    assert answer["stop_reason"] == "stop_sequence" and answer["stop_sequence"] == stop
    assert answer["content"][0]["text"] + stop == words.decode(answer["token_ids"])
    assert answer["token_ids"] == free["token_ids"][: len(answer["token_ids"])]


REPLY = f"<think>\nI look.\n</think>\n\nWait.\n{CALL}\n{CALL}"


def test_thoughts_words_and_calls_are_blocks_that_come_back_as_the_tokens_that_were_sampled(showing: Tokenizer) -> None:
    with served(Scripted(showing, [f"{REPLY}<|im_end|>"]), showing, 4096) as server:
        first = asked(user("a"), tools=[TOOL], return_token_ids=True, tool_choice={"type": "auto"})
        _, answer = server.ask(PATH, first)
        assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        thinking, said, *calls = answer["content"]
        assert thinking["thinking"] == "I look." and thinking["signature"] and said["text"].strip() == "Wait."
        assert [call["input"] for call in calls] == [{"word": "fox"}] * 2 and answer["stop_reason"] == "tool_use"
        assert len({call["id"] for call in calls}) == 2
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": [text("found")]} for call in calls]
        again = asked(user("a"), {"role": "assistant", "content": answer["content"]}, user([*results, text("go on")]),
                      tools=[TOOL], return_token_ids=True)  # fmt: skip
        _, then = server.ask(PATH, again)
        shown = showing.decode(then["prompt_token_ids"])
        assert shown.startswith(showing.decode(answer["prompt_token_ids"]) + f"{REPLY}<|im_end|>")
        assert shown.count("<|im_start|>tool\nfound<|im_end|>") == 2 and "<|im_start|>user\ngo on<|im_end|>" in shown
        _, plain = server.ask(PATH, {**first, "tool_choice": {"type": "none"}})
        assert [block["type"] for block in plain["content"]] == ["thinking", "text"]
        assert "look_up" not in showing.decode(plain["prompt_token_ids"])


def test_a_stream_has_the_events_of_the_api_in_their_order_and_adds_up_to_the_response(showing: Tokenizer) -> None:
    with served(Scripted(showing, [f"{REPLY}<|im_end|>"]), showing, 4096) as server:
        body = asked(user("a"), tools=[TOOL])
        _, whole = server.ask(PATH, body)
        events = streamed(server, PATH, body)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [block[0], block[1], *block[1:]]  # the signature comes last
    assert [name for name, _ in events] == [
        "message_start", "ping", *thinking, *block, *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    message = events[0][1]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    blocks: list[dict[str, Any]] = []
    for name, event in events:
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        if name == "content_block_delta":
            one, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                assert one["input"] == {}
                one["input"] = json.loads(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                assert one[name] == ""
                one[name] = delta[name]
    assert blocks == whole["content"]
    ending = events[-2][1]
    assert ending["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and ending["usage"] == whole["usage"]


def test_anthropics_own_client_reads_answers_streams_counts_and_errors(showing: Tokenizer) -> None:
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    with (
        served(Scripted(showing, [f"{REPLY}<|im_end|>"]), showing, 600) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
    ):
        tools = [{key: TOOL[key] for key in ("name", "description", "input_schema")}]
        body: Any = {"model": "tiny", "max_tokens": 100, "messages": [user("a")], "tools": tools}
        whole = client.messages.create(**body)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
        with client.messages.stream(**body) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "input_json" in kinds
        parts = [[block.model_dump(exclude={"parsed_output"}) for block in one.content] for one in (final, whole)]
        assert parts[0] == parts[1] and final.stop_reason == whole.stop_reason == "tool_use"
        assert final.usage.output_tokens == whole.usage.output_tokens
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "found"} for block in whole.content[2:]]
        longer = [user("a"), {"role": "assistant", "content": whole.content}, user(results)]
        count = client.messages.count_tokens(model="tiny", messages=longer, tools=tools).input_tokens
        assert client.messages.create(**{**body, "messages": longer}).usage.input_tokens == count
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(**{**body, "messages": [user("fox " * 900)]})
        with pytest.raises(anthropic.NotFoundError, match="no model"):
            client.messages.create(**{**body, "model": "other"})


def test_the_tokens_of_a_prompt_longer_than_the_context_are_counted(showing: Tokenizer) -> None:
    with served(Scripted(showing, []), showing, 20) as server:
        for words in (100, 20_000):  # the second is longer than any text that could fit
            messages = [user("fox " * words)]
            expected = len(showing.encode(showing.render(messages, True), start=True))
            assert server.ask(COUNT, {"model": "tiny", "messages": messages}) == (200, {"input_tokens": expected})


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
HOSTILE: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"{", 400, "not JSON"),
    "nested a million deep": (b"[" * 1_000_000, 400, "not JSON"),
    "half a surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "surrogate"),
    "no messages": (asked(), 400, "messages"),
    "no budget": ({"model": "tiny", "messages": [user("a")]}, 400, "max_tokens is missing"),
    "no model of that name": (asked(user("a"), model="claude"), 404, "claude"),
    "a picture": (asked(user([PICTURE])), 400, "messages[0].content[0] has the type 'image'"),
    "a document": (asked(user([{"type": "document", "source": {}}])), 400, "'document'"),
    "a picture as a result": (
        asked(user([{"type": "tool_result", "tool_use_id": "a", "content": [PICTURE]}])), 400, "content[0].content[0]",
    ),
    "a tool of the server's": (asked(user("a"), tools=[{"type": "web_search_20250305", "name": "w"}]), 400, "web_search"),
    "a tool without a schema": (asked(user("a"), tools=[{"name": "w"}]), 400, "input_schema"),
    "a forced call": (asked(user("a"), tools=[TOOL], tool_choice={"type": "any"}), 400, "cannot be forced"),
    "a reply to go on with": (asked(user("a"), {"role": "assistant", "content": "b"}), 400, "begun"),
    "a form": (asked(user("a"), output_config={"format": {"type": "json_schema"}}), 400, "output_config.format"),
    "a misspelt field": (asked(user("a"), stop_sequence=["a"]), 400, "stop_sequences"),
    "another role": (asked({"role": "tool", "content": "a"}), 400, "role"),
    "no thinking of ours": (asked(user("a"), thinking={"type": "on"}), 400, "thinking.type"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_read_is_refused_in_one_line_in_anthropics_form(server: Served, name: str) -> None:
    body, status, named = HOSTILE[name]
    found, answer = server.ask(PATH, body)
    assert found == status, answer
    assert answer.keys() == {"type", "error"} and answer["type"] == "error"
    assert answer["error"].keys() == {"type", "message"}
    assert answer["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert named in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 400


def test_hints_and_what_programs_send_along_change_nothing(server: Served) -> None:
    plain = asked(user("fox"), seed=1)
    more = {
        "thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "high"}, "service_tier": "auto",
        "cache_control": {"type": "ephemeral"}, "temperature": None, "context_management": {"edits": []},
    }  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "any"}
    connection = [server.ask(f"{PATH}?beta=true", {**plain, **extra}, headers=headers)[1] for extra in ({}, more)]
    assert connection[0]["content"] == connection[1]["content"]


WHOLE = asked(
    user([text("a"), text("b")]),
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            text("c"),
            {"type": "tool_use", "id": "i", "name": "look_up", "input": {"word": "fox"}},
        ],
    },
    user([{"type": "tool_result", "tool_use_id": "i", "content": [text("d")], "is_error": False}]),
    system=[text("s")],
    tools=[TOOL],
    tool_choice={"type": "auto"},
    stop_sequences=["x"],
    thinking={"type": "enabled", "budget_tokens": 1024},
    output_config={"effort": "low"},
    temperature=1,
    top_p=0.5,
    top_k=3,
    seed=1,
    stream=False,
)


def test_every_field_with_every_wrong_type_is_read_or_refused(showing: Tokenizer) -> None:
    read = refused = 0
    for body in changed(WHOLE):
        try:
            found = read_messages(read_body(json.dumps(body).encode()))
        except RequestRefused as problem:
            refused += 1
            assert problem.status == 400 and "\n" not in str(problem)
            continue
        read += 1
        try:
            showing.encode(showing.render(found.prompts[0], True, found.tools))  # type: ignore[arg-type]
        except UserError as problem:
            assert "\n" not in str(problem)
    assert read > 50 and refused > 500
    with pytest.raises(RequestRefused, match="max_tokens"):
        read_count(WHOLE)


def test_the_token_is_taken_as_anthropics_clients_send_it(words: Tokenizer) -> None:
    token = "0123456789abcdef"
    with served(Scripted(words, ["a<|im_end|>"]), words, CONTEXT, token=token) as server:
        body = asked(user("a"))
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": token}, 200),
            ({"Authorization": f"Bearer {token}"}, 200),
            ({"x-api-key": "wrong", "Authorization": f"Bearer {token}"}, 200),
        ):
            found, answer = server.ask(PATH, body, headers=headers)
            assert found == status, headers
            assert status == 200 or answer["error"]["type"] == "authentication_error"


def test_limits_are_told_in_anthropics_form(words: Tokenizer) -> None:
    with served(Scripted(words, ["a<|im_end|>"]), words, CONTEXT, ServerLimits(requests=0, body=4096)) as server:
        for content, status, kind in (("a", 429, "rate_limit_error"), ("a " * 4000, 413, "request_too_large")):
            found, answer = server.ask(PATH, asked(user(content)))
            assert found == status and answer["error"]["type"] == kind


def test_many_streams_at_once_and_clients_that_leave_in_the_middle_harm_nobody(
    words: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    reply = "the quick brown fox " * 40_000
    with served(Scripted(words, [f"{reply}<|im_end|>"]), words, 1 << 20) as server:
        body = json.dumps(asked(user("a"), stream=True, max_tokens=1 << 19)).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                assert client.recv(100).startswith(b"HTTP/1.1 200")
        short = asked(user("a"), max_tokens=1 << 19)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: streamed(server, PATH, short), range(4)))
        for events in found:
            assert "".join(e["delta"].get("text", "") for n, e in events if n == "content_block_delta") == reply
        deadline = time.monotonic() + 30
        while server.ask("/health")[1]["requests"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.ask("/health")[1]["requests"] == 0
    assert capfd.readouterr().err == ""
