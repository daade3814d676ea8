"""OpenAI's Responses: the same prompt and tokens as in its chat, in items and events as its clients read them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from served import TOOLS, Scripted, Served, served
from wire import changed, streamed, tool_words, wire_server

from posttrain.core.types import UserError
from posttrain.engines.serving.openai_responses import read_response
from posttrain.engines.serving.requests import RequestRefused, read_body
from posttrain.engines.serving.stored_conversations import StoredConversations
from posttrain.models.tokenizer.tokenizer import Tokenizer

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
TOOL = {"type": "function", "name": "look_up", "description": "Looks a word up.", "parameters": SCHEMA, "strict": False}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox"}}\n</tool_call>'
REPLY = f"<think>\nI look.\n</think>\n\nWait.\n{CALL}\n{CALL}"


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


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


@pytest.mark.parametrize(
    ("given", "instructions", "chat"),
    [
        ("fox", None, [user("fox")]),
        ([user([part("a"), part("b")])], "be", [{"role": "system", "content": "be"}, user("ab")]),
        (
            [{"role": "developer", "content": "x"}, {"type": "message", "role": "user", "content": "a"}],
            "be",
            [{"role": "system", "content": "be\n\nx"}, user("a")],
        ),
        (
            [
                user("a"),
                {"type": "reasoning", "id": "r", "summary": [], "content": [part("t", "reasoning_text")]},
                {"type": "message", "id": "m", "role": "assistant", "content": [part("b", "output_text")]},
                user("c"),
            ],
            None,
            [user("a"), {"role": "assistant", "content": "<think>\nt\n</think>\n\nb"}, user("c")],
        ),
    ],
)
def test_a_response_is_the_chat_with_the_same_words(server: Served, given: Any, instructions: Any, chat: Any) -> None:
    same = {"seed": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "return_token_ids": True}
    body = {"model": "tiny", "input": given, "instructions": instructions, "max_output_tokens": 12, **same}
    status, answer = server.ask(PATH, {**body, "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}})
    asked = {"messages": chat, "max_tokens": 12, "logprobs": True, **same}
    _, other = server.ask("/v1/chat/completions", asked)
    assert status == 200, answer
    [choice] = other["choices"]
    assert answer["prompt_token_ids"] == other["prompt_token_ids"]
    assert answer["token_ids"] == choice["token_ids"] and answer["weight_versions"] == choice["weight_versions"]
    usage = answer["usage"]
    assert [usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")] == list(other["usage"].values())
    [message] = answer["output"]
    [content] = message["content"]
    assert content["text"] == choice["message"]["content"] and content["logprobs"] == choice["logprobs"]["content"]
    cut = choice["finish_reason"] == "length"
    assert answer["status"] == message["status"] == ("incomplete" if cut else "completed")
    assert answer["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    assert answer["instructions"] == instructions and answer["metadata"] == {"a": "b"}


@pytest.mark.parametrize("way", ["items", "encrypted", "previous"])
def test_reasoning_words_and_calls_are_items_that_come_back_as_the_tokens_that_were_sampled(
    showing: Tokenizer, way: str
) -> None:
    with served(Scripted(showing, [f"{REPLY}<|im_end|>"]), showing, 4096) as server:
        more = {"include": ["reasoning.encrypted_content"]} if way == "encrypted" else {}
        first = {"input": "a", "tools": [TOOL], "return_token_ids": True, **more}
        _, answer = server.ask(PATH, first)
        items = answer["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
        assert items[0]["content"] == [part("I look.", "reasoning_text")]
        assert (items[0]["encrypted_content"] is None) == (way != "encrypted")
        assert [json.loads(item["arguments"]) for item in items[2:]] == [{"word": "fox"}] * 2
        assert answer["status"] == "completed" and len({item["call_id"] for item in items[2:]}) == 2
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "found"} for item in items[2:]
        ]
        if way == "encrypted":
            items = [{key: value for key, value in items[0].items() if key != "content"}, *items[1:]]
        given = results if way == "previous" else [user("a"), *items, *results]
        before = {"previous_response_id": answer["id"]} if way == "previous" else {}
        _, then = server.ask(PATH, {**first, "input": [*given, user("go on")], **before})
        shown = showing.decode(then["prompt_token_ids"])
        assert shown.startswith(showing.decode(answer["prompt_token_ids"]) + f"{REPLY}<|im_end|>")
        assert shown.count("<|im_start|>tool\nfound<|im_end|>") == 2 and "<|im_start|>user\ngo on<|im_end|>" in shown


def test_a_response_is_continued_by_its_id_without_its_instructions_and_only_if_it_was_stored(
    server: Served, words: Tokenizer
) -> None:
    first = {"input": "a", "instructions": "be", "max_output_tokens": 3, "return_token_ids": True, "seed": 2}
    _, answer = server.ask(PATH, first)
    _, then = server.ask(PATH, {**first, "instructions": None, "input": "b", "previous_response_id": answer["id"]})
    said = answer["output"][0]["content"][0]["text"]
    whole = [user("a"), {"role": "assistant", "content": said}, user("b")]
    assert then["prompt_token_ids"] == words.encode(words.render(whole), start=True)
    assert then["previous_response_id"] == answer["id"]
    _, unstored = server.ask(PATH, {**first, "store": False})
    for id in (unstored["id"], "resp_0"):
        status, refused = server.ask(PATH, {**first, "previous_response_id": id})
        assert status == 400 and refused["error"]["code"] == "previous_response_not_found"


def test_what_is_stored_is_bounded_by_number_and_by_size_and_the_oldest_goes_first() -> None:
    store = StoredConversations(most=3, characters=390)
    for name in "abc":
        store.add(name, [user(name)])
    assert store.find("a") == (user("a"),)
    store.add("d", [user("d")])
    assert len(store) == 3
    for name, there in (("a", True), ("b", False), ("c", True), ("d", True)):
        try:
            found = store.find(name) == (user(name),)
        except RequestRefused:
            found = False
        assert found == there
    store.add("e", [user("e" * 300)])
    assert len(store) == 2 and store.find("d")
    store.add("f", [user("f" * 500)])
    assert len(store) == 0


def test_a_stream_has_the_events_of_the_api_in_their_order_and_adds_up_to_the_response(showing: Tokenizer) -> None:
    with served(Scripted(showing, [f"{REPLY}<|im_end|>"]), showing, 4096) as server:
        events = streamed(server, PATH, {"input": "a", "tools": [TOOL]})
    names = [name.removeprefix("response.") for name, _ in events]
    added, done = "output_item.added", "output_item.done"
    call = [added, "function_call_arguments.delta", "function_call_arguments.done", done]
    assert names == [
        "created", "in_progress",
        added, "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", done,
        added, "content_part.added", "output_text.delta", "output_text.done", "content_part.done", done,
        *call, *call, "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    begun, whole = events[0][1]["response"], events[-1][1]["response"]
    assert begun["status"] == "in_progress" and begun["output"] == [] and begun["usage"] is None
    assert begun["id"] == whole["id"] and whole["usage"]["output_tokens"] > 0 and whole["status"] == "completed"
    items = [event["item"] for name, event in events if name == f"response.{done}"]
    assert items == whole["output"]
    for name, event in events:
        if name == f"response.{added}":
            assert (
                event["item"]["status"] == "in_progress" and event["item"]["id"] == items[event["output_index"]]["id"]
            )
            assert event["item"].get("content", event["item"].get("arguments")) in ([], "")
        if name.endswith(".delta"):
            item = items[event["output_index"]]
            assert event["item_id"] == item["id"]
            assert event["delta"] == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


def test_openais_own_client_reads_responses_streams_and_errors(showing: Tokenizer) -> None:
    with (
        served(Scripted(showing, [f"{REPLY}<|im_end|>"]), showing, 600) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        body: Any = {"model": "tiny", "input": "a", "tools": [TOOL]}
        whole = client.responses.create(**body)
        assert whole.output_text == "Wait." and [item.type for item in whole.output][2:] == ["function_call"] * 2
        with client.responses.stream(**body) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert final.output_text == whole.output_text and final.usage == whole.usage
        assert [getattr(item, "call_id", None) for item in final.output] == [
            getattr(item, "call_id", None) for item in whole.output
        ]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "found"}
            for item in whole.output
            if item.type == "function_call"
        ]
        by_items = client.responses.create(**{**body, "input": [user("a"), *whole.output, *results]})
        by_id = client.responses.create(**{**body, "input": results}, previous_response_id=whole.id)
        assert by_items.usage == by_id.usage and by_id.usage.input_tokens > whole.usage.input_tokens
        with pytest.raises(BadRequestError, match="maximum context length") as refused:
            client.responses.create(model="tiny", input="fox " * 900)
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "input"


HOSTILE: dict[str, tuple[Any, str | None, str]] = {
    "no JSON": (b"[", None, "not JSON"),
    "no input": ({}, "input", "input is missing"),
    "an empty input": ({"input": []}, "input", "input"),
    "a picture": ({"input": [user([{"type": "input_image"}])]}, "input[0].content[0]", "'input_image'"),
    "an item of a hosted tool": ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0]", "hosted"),
    "a reference": ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "item_reference"),
    "a hosted tool": ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]", "only functions"),
    "a forced call": ({"input": "a", "tool_choice": "required"}, "tool_choice", "cannot be forced"),
    "a form": ({"input": "a", "text": {"format": {"type": "json_object"}}}, "text.format.type", "schema"),
    "in the background": ({"input": "a", "background": True}, "background", "not supported"),
    "a conversation of the server's": ({"input": "a", "conversation": "c"}, "conversation", "not supported"),
    "a cut input": ({"input": "a", "truncation": "auto"}, "truncation", "not supported"),
    "reasoning of another server": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "?"}, user("a")]},
        "input[0].encrypted_content", "this server",
    ),
    "arguments that are no object": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}, user("a")]},
        "input[0].arguments", "JSON object",
    ),
    "half a surrogate in arguments": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a": "\\ud800"}'}, user("a")]},
        "input[0].arguments", "JSON object",
    ),
    "a reply to go on with": ({"input": [user("a"), {"role": "assistant", "content": "b"}]}, "input", "ends with"),
    "a misspelt field": ({"input": "a", "max_output_token": 3}, "max_output_token", "max_output_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_read_is_refused_in_one_line_in_openais_form(server: Served, name: str) -> None:
    body, parameter, named = HOSTILE[name]
    status, answer = server.ask(PATH, body)
    assert status == 400, answer
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == parameter and named in error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 600


WHOLE: dict[str, Any] = {
    "model": "tiny",
    "input": [
        user([part("a")]),
        {
            "type": "reasoning",
            "id": "r",
            "summary": [part("s", "summary_text")],
            "content": [part("t", "reasoning_text")],
        },
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [part("b", "output_text")],
        },
        {"type": "function_call", "id": "f", "call_id": "c", "name": "look_up", "arguments": '{"word": "fox"}'},
        {"type": "function_call_output", "call_id": "c", "output": [part("d")]},
    ],
    "instructions": "be",
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_output_tokens": 3,
    "store": True,
    "stream": False,
    "stream_options": {"include_obfuscation": False},
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "temperature": 1,
    "top_p": 0.5,
    "top_logprobs": 0,
}


def test_every_field_with_every_wrong_type_is_read_or_refused(showing: Tokenizer) -> None:
    read = refused = 0
    for body in changed(WHOLE):
        try:
            found = read_response(read_body(json.dumps(body).encode()), StoredConversations())
        except RequestRefused as problem:
            refused += 1
            assert problem.status == 400 and "\n" not in str(problem)
            continue
        read += 1
        try:
            showing.encode(showing.render(found.prompts[0], True, found.tools))  # type: ignore[arg-type]
        except UserError as problem:
            assert "\n" not in str(problem)
    assert read > 50 and refused > 400


def test_clients_that_leave_in_the_middle_of_a_stream_harm_nobody(
    words: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    reply = "the quick brown fox " * 40_000
    with served(Scripted(words, [f"{reply}<|im_end|>"]), words, 1 << 20) as server:
        body = json.dumps({"input": "a", "stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                assert client.recv(100).startswith(b"HTTP/1.1 200")
        events = streamed(server, PATH, {"input": "a"})
        assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == reply
        deadline = time.monotonic() + 30
        while server.ask("/health")[1]["requests"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.ask("/health")[1]["requests"] == 0
    assert capfd.readouterr().err == ""
