"""What is asked over HTTP is what the engine samples, to the last bit; and nobody's request harms another."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML, tiny
from openai import BadRequestError, OpenAI
from served import TOOLS, Scripted, Served, served

from posttrain.cli.main import main
from posttrain.cli.serve_command import serve_policy
from posttrain.config.inference import ServePolicy
from posttrain.core.seeds import seed_of
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.engines.serving.policy_server import ServerLimits
from posttrain.models.tokenizer.tokenizer import Tokenizer

CONTEXT = 128
SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """One that knows chats; its replies end with a token of its own, and <|im_end|> is another."""
    tokenizer = Tokenizer.train(["the quick brown fox 0123456789+-*/=.<>{}\n"], 300, "bpe", SPECIAL)
    tokenizer.chat_template = CHATML
    return tokenizer


def engine_of(tokenizer: Tokenizer, slots: int = 8, context: int = CONTEXT) -> LocalEngine:
    return LocalEngine(tiny(tokenizer, context=context), tokenizer, slots=slots)


@pytest.fixture(scope="module")
def server(words: Tokenizer) -> Iterator[Served]:
    engine = engine_of(words)
    engine.load(engine.model, 7)
    with served(engine, words, CONTEXT) as found:
        yield found


def alone(tokenizer: Tokenizer, prompt: list[int], sampling: Sampling) -> Completion:
    """What an engine samples that nobody else asks."""
    engine = engine_of(tokenizer)
    engine.submit(0, prompt, sampling)
    while not (done := engine.poll()):
        pass
    return done[0]


def same(ours: Sequence[float], theirs: Sequence[float], tokenizer: Tokenizer) -> bool:
    """Whether log-probabilities are the same: to the last bit, where these do not depend on what is sampled beside it."""
    exact = engine_of(tokenizer).batch_invariant
    return list(ours) == (list(theirs) if exact else pytest.approx(list(theirs), abs=1e-4))


ASKED: list[dict[str, Any]] = [
    {"max_tokens": 24, "seed": 1},
    {"max_tokens": 24, "seed": 2, "temperature": 0.7, "top_p": 0.9},
    {"max_tokens": 24, "seed": 3, "top_k": 20},
    {"max_tokens": 24, "seed": (1 << 63) - 1, "temperature": 0.0},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_tokens_and_log_probabilities_are_those_of_the_engine_bit_for_bit(
    server: Served, words: Tokenizer, asked: dict[str, Any]
) -> None:
    prompt = words.encode("the quick ")
    choice, own = server.sampled(prompt, **asked), alone(words, prompt, Sampling(**asked))
    assert choice["token_ids"] == list(own.tokens)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(own.logp)
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in own.tokens]
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": len(own.tokens)}]


def test_many_at_once_get_what_each_would_get_alone(server: Served, words: Tokenizer) -> None:
    if not engine_of(words).batch_invariant:
        pytest.skip("needs compiled decoding: without it the last bits depend on what is sampled together")
    asked = [(words.encode("the quick "[: 1 + n % 9]), {"seed": n, "max_tokens": 3 + n % 17}) for n in range(40)]
    with ThreadPoolExecutor(40) as threads:
        together = list(threads.map(lambda one: server.sampled(one[0], **one[1]), asked))
    for (prompt, how), choice in zip(asked, together, strict=True):
        own = alone(words, prompt, Sampling(**how))
        assert choice["token_ids"] == list(own.tokens)
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(own.logp)


def test_a_chat_is_its_rendered_prompt(server: Served, words: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "quick"}]}]
    asked = {"messages": messages, "max_tokens": 20, "seed": 5, "logprobs": True, "return_token_ids": True}
    status, answer = server.ask("/v1/chat/completions", asked)
    prompt = words.encode(words.render([messages[0], {"role": "user", "content": "quick"}]), start=True)
    own = alone(words, prompt, Sampling(max_tokens=20, seed=5))
    assert status == 200 and answer["prompt_token_ids"] == prompt
    [choice] = answer["choices"]
    assert choice["token_ids"] == list(own.tokens) and choice["message"]["content"] == own.text
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(own.logp)
    sizes = {"prompt_tokens": len(prompt), "completion_tokens": len(own.tokens)}
    assert answer["usage"] == {**sizes, "total_tokens": sum(sizes.values())}
    assert choice["finish_reason"] == ("length" if own.stop.truncated else "stop")


def test_completions_answer_each_prompt_as_often_as_asked_and_in_order(server: Served, words: Tokenizer) -> None:
    tokens = words.encode("brown")
    asked = {"prompt": ["the quick ", "fox"], "n": 2, "seed": 9, "max_tokens": 12, "logprobs": 0, "temperature": 0.5}
    status, answer = server.ask("/v1/completions", asked)
    assert status == 200 and [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for place, choice in enumerate(answer["choices"]):
        prompt, number = asked["prompt"][place // 2], place % 2  # type: ignore[index]
        seed = 9 if number == 0 else seed_of(9, number)
        own = alone(words, words.encode(prompt, start=True), Sampling(0.5, max_tokens=12, seed=seed))
        assert choice["text"] == own.text and same(choice["logprobs"]["token_logprobs"], own.logp, words)
    _, several = server.ask("/v1/completions", {"prompt": [tokens, tokens], "seed": 1, "max_tokens": 4})
    _, one = server.ask("/v1/completions", {"prompt": tokens, "seed": 1, "max_tokens": 4})
    assert [choice["text"] for choice in several["choices"]] == [one["choices"][0]["text"]] * 2
    assert several["usage"]["prompt_tokens"] == 2 * len(tokens)
    assert answer["usage"]["prompt_tokens"] == sum(len(words.encode(p, start=True)) for p in asked["prompt"])  # type: ignore[attr-defined]


def test_a_stop_string_ends_a_reply_and_is_not_shown_unless_asked_for(server: Served, words: Tokenizer) -> None:
    prompt = words.encode("the ")
    free = alone(words, prompt, Sampling(max_tokens=40, seed=3))
    stop = words.decode([free.tokens[6]])
    own = alone(words, prompt, Sampling(max_tokens=40, seed=3, stop=(stop,)))
    asked = {"prompt": prompt, "max_tokens": 40, "seed": 3, "stop": stop}
    _, answer = server.ask("/v1/completions", asked)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    assert choice["text"] + stop == own.text
    _, answer = server.ask("/v1/completions", {**asked, "include_stop_str_in_output": True})
    assert answer["choices"][0]["text"] == own.text


def test_a_special_token_may_end_a_reply_by_its_id(words: Tokenizer) -> None:
    ends = words.vocabulary["<|im_end|>"]
    engine = engine_of(words)
    with served(engine, words, CONTEXT) as server:
        found = (server.sampled(words.encode("a"), seed=seed, max_tokens=100) for seed in range(400))
        seed, free = next((n, c) for n, c in enumerate(found) if ends in c["token_ids"][2:-1])
        choice = server.sampled(words.encode("a"), seed=seed, max_tokens=100, stop_token_ids=[ends, words.eos_id])
        assert choice["token_ids"] == free["token_ids"][: free["token_ids"].index(ends) + 1]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ends


def test_the_openai_client_reads_answers_and_streams_alike(server: Served) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        [model] = client.models.list().data
        assert model.id == "tiny" and model.max_model_len == CONTEXT  # type: ignore[attr-defined]
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 16}
        whole = client.chat.completions.create(**asked, seed=4)
        pieces = list(
            client.chat.completions.create(**asked, seed=4, stream=True, stream_options={"include_usage": True})
        )
        said = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
        assert said == whole.choices[0].message.content
        assert pieces[-1].usage == whole.usage
        assert [c.finish_reason for p in pieces for c in p.choices][-1] == whole.choices[0].finish_reason
        text = client.completions.create(model="tiny", prompt="fox", seed=4, max_tokens=16)
        streamed = client.completions.create(model="tiny", prompt="fox", seed=4, max_tokens=16, stream=True)
        assert "".join(choice.text for piece in streamed for choice in piece.choices) == text.choices[0].text
        with pytest.raises(BadRequestError, match="maximum context length") as refused:
            client.completions.create(model="tiny", prompt="fox " * CONTEXT)
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"


HOSTILE: dict[str, tuple[str, Any, int, str | None]] = {
    "no JSON": ("chat", b"{", 400, None),
    "a list": ("chat", b"[]", 400, None),
    "no UTF-8": ("chat", b'{"messages": "\xff"}', 400, None),
    "nested a million deep": ("chat", b"[" * 1_000_000, 400, None),
    "NaN": ("chat", b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400, None),
    "no messages": ("chat", {}, 400, "messages"),
    "messages that are none": ("chat", {"messages": [1]}, 400, "messages[0]"),
    "no content": ("chat", {"messages": [{"role": "user", "content": 7}]}, 400, "messages[0]"),
    "a picture": ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]"),
    "half a surrogate": ("chat", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
    "calls that are none": ("chat", {"messages": [{"role": "assistant", "tool_calls": [1]}]}, 400, "messages[0]"),
    "tools that are none": ("chat", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools"),
    "another model": ("chat", {"messages": [{"role": "user", "content": "a"}], "model": "other"}, 404, "model"),
    "no token ids": ("generate", {"sampling_params": {}}, 400, "token_ids"),
    "an empty prompt": ("generate", {"token_ids": [], "sampling_params": {}}, 400, "token_ids"),
    "ids that are none": ("generate", {"token_ids": ["a"], "sampling_params": {}}, 400, "token_ids"),
    "ids that are true": ("generate", {"token_ids": [True], "sampling_params": {}}, 400, "token_ids"),
    "a negative id": ("generate", {"token_ids": [-1], "sampling_params": {}}, 400, "token_ids"),
    "an id beyond the vocabulary": ("generate", {"token_ids": [1 << 40], "sampling_params": {}}, 400, None),
    "no sampling": ("generate", {"token_ids": [5]}, 400, "sampling_params"),
    "a stop token that is text": (
        "generate", {"token_ids": [5], "sampling_params": {"stop_token_ids": [40]}}, 400, "stop_token_ids",
    ),
    "too many log-probabilities": (
        "generate", {"token_ids": [5], "sampling_params": {"logprobs": 20}}, 400, "sampling_params.logprobs",
    ),
    "a penalty": (
        "generate", {"token_ids": [5], "sampling_params": {"presence_penalty": 1}}, 400, "sampling_params.presence_penalty",
    ),
    "no prompt": ("completions", {}, 400, "prompt"),
    "a prompt that is none": ("completions", {"prompt": {"a": 1}}, 400, "prompt"),
    "prompts that are mixed": ("completions", {"prompt": ["a", 5]}, 400, "prompt"),
    "a misspelt field": ("completions", {"prompt": "a", "temprature": 0.5}, 400, "temprature"),
    "an unknown field": ("chat", {"messages": [{"role": "user", "content": "a"}], "unheard_of": 1}, 400, "unheard_of"),
    "a misspelt field of sampling": (
        "generate", {"token_ids": [5], "sampling_params": {"max_token": 1}}, 400, "sampling_params.max_token",
    ),
    "a negative temperature": ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    "a temperature beyond all": ("completions", {"prompt": "a", "temperature": 1e300}, 400, "temperature"),
    "a top_p of 0": ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
    "no tokens": ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "a seed beyond 63 bits": ("completions", {"prompt": "a", "seed": 1 << 63}, 400, "seed"),
    "a million replies": ("completions", {"prompt": "a", "n": 1_000_000}, 400, "n"),
    "many prompts": ("completions", {"prompt": ["a"] * 100, "n": 2}, 400, "n"),
    "an empty stop string": ("completions", {"prompt": "a", "stop": ""}, 400, "stop"),
    "a thousand stop strings": ("completions", {"prompt": "a", "stop": ["a"] * 1000}, 400, "stop"),
    "half a surrogate to stop at": ("completions", b'{"prompt": "a", "stop": "\\ud800"}', 400, None),
    "a top_k beyond 64 bits": ("completions", {"prompt": "a", "top_k": 10**30}, 400, "top_k"),
    "a flag that is none": ("completions", {"prompt": "a", "stream": "yes"}, 400, "stream"),
    "an echo": ("completions", {"prompt": "a", "echo": True}, 400, "echo"),
}  # fmt: skip
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/inference/v1/generate"}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_read_is_refused_in_openais_form(server: Served, name: str) -> None:
    form, body, status, parameter = HOSTILE[name]
    found, answer = server.ask(PATHS[form], body)
    assert found == status, answer
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["param"] == parameter, error
    assert 0 < len(error["message"]) < 400 and error["type"] == "invalid_request_error"


def test_what_is_no_request_of_ours_is_refused(server: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for path, status in (("/elsewhere", 404), ("/v1/chat/completions", 405)):
        found, answer = server.ask(path)
        assert found == status and "POST /v1/chat/completions" in answer["error"]["message"]
        assert "GET /v1/models" in answer["error"]["message"]
    assert server.ask("/v1/chat/completions", chat, headers={"Content-Type": "text/plain"})[0] == 415
    assert server.ask("/v1/chat/completions", chat, headers={"Host": "evil.example"})[0] == 421
    packed, headers = gzip.compress(json.dumps(chat).encode()), {"Content-Encoding": "gzip"}
    found, answer = server.ask("/v1/chat/completions", packed, headers={"Content-Type": "application/json", **headers})
    assert found == 415 and "compressed" in answer["error"]["message"], "nothing is unpacked"
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d says
    assert server.ask("/v1/chat/completions", chat, headers={**form, "Origin": "http://evil.example"})[0] == 403
    assert server.ask("/v1/chat/completions", chat, headers=form)[0] == 200
    assert server.ask("/v1/chat/completions", chat)[0] == 200
    assert server.ask("/health") == (200, {"status": "ok", "requests": 0})


def test_bytes_that_are_no_request_are_answered_or_dropped_in_silence(
    server: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for sent in (
        b"\x00\xff garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /%ff%00../../etc HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: [::1\r\n\r\n",
        head + b"Content-Length: 99999999999\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        head + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
        b"A" * 100_000,
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(1 << 16)
        assert not answer or answer.split()[1].startswith(b"4"), answer[:200]
    assert server.ask("/health")[0] == 200 and capfd.readouterr().err == ""


def test_a_text_that_cannot_fit_is_not_tokenised(
    server: Served, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *asked, **how: pytest.fail("it was tokenised"))
    status, answer = server.ask("/v1/completions", {"prompt": "a" * 1_000_000})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_null_is_as_good_as_nothing_and_what_changes_nothing_is_not_looked_at(server: Served) -> None:
    plain = {"prompt": "the", "max_tokens": 5, "seed": 0}
    more = {
        "temperature": None, "top_p": None, "stop": None, "n": None, "presence_penalty": 0, "logit_bias": {},
        "user": "me", "metadata": {"a": 1}, "stream_options": None, "best_of": 1,
    }  # fmt: skip
    first, second = (server.ask("/v1/completions", {**plain, **extra})[1] for extra in ({}, more))
    assert first["choices"] == second["choices"]


def test_no_more_is_served_at_once_than_the_limits_say(words: Tokenizer) -> None:
    model = tiny(words, context=CONTEXT)
    model.eos_ids = (1 << 20,)  # no reply ends by itself
    engine = LocalEngine(model, words, slots=8)
    with served(engine, words, CONTEXT, ServerLimits(requests=2, body=4096), max_tokens=9) as server:
        asked = {"prompt": "the", "max_tokens": 100, "n": 3}
        status, answer = server.ask("/v1/completions", asked)
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        status, answer = server.ask("/v1/completions", {**asked, "n": 2})
        assert status == 200 and [c["finish_reason"] for c in answer["choices"]] == ["length"] * 2
        assert answer["usage"]["completion_tokens"] == 2 * 9
        assert server.ask("/v1/completions", {"prompt": "the " * 2000})[0] == 413


@pytest.mark.parametrize("kind", [LocalEngine, UncachedEngine])
def test_a_client_that_goes_away_takes_its_request_with_it(words: Tokenizer, kind: Any) -> None:
    model = tiny(words, context=4096)
    model.eos_ids = (1 << 20,)  # no reply ends by itself
    engine = kind(model, words, slots=2)
    with served(engine, words, 4096) as server:
        gone = []
        for _ in range(3):  # more than run at once: one waits
            client = socket.create_connection(("127.0.0.1", server.port))
            body = json.dumps({"token_ids": [5], "sampling_params": {}}).encode()
            head = "POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            gone.append(client)
        while server.ask("/health")[1]["requests"] < 3:
            time.sleep(0.01)
        for client in gone:
            client.close()
        assert len(server.sampled([5], max_tokens=3)["token_ids"]) == 3  # it would wait for ever
        deadline = time.monotonic() + 30
        while server.ask("/health")[1]["requests"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.ask("/health")[1]["requests"] == 0
    assert not (engine.running or engine.waiting if kind is LocalEngine else engine._running or engine._waiting)


def test_where_one_of_several_prompts_is_refused_none_goes_on(words: Tokenizer) -> None:
    model = tiny(words, context=4096)
    model.eos_ids = (1 << 20,)  # no reply ends by itself
    engine = LocalEngine(model, words, slots=2)
    with served(engine, words, 4096) as server:
        prompts = [[5], [5] * 5000]
        assert server.ask("/v1/completions", {"prompt": prompts, "max_tokens": 4000})[0] == 400
        assert len(server.sampled([5], max_tokens=3)["token_ids"]) == 3
        assert not engine.running and not engine.waiting


def test_a_cancelled_request_leaves_the_others_as_they_are(words: Tokenizer) -> None:
    def replies(cancelled: bool) -> dict[int, Completion]:
        engine, done = engine_of(words, slots=3), {}
        for id in range(6):
            engine.submit(id, words.encode("the quick "[: id + 1]), Sampling(max_tokens=30, seed=id), keep=True)
        for polls in range(200):
            if polls == 1 and cancelled:
                engine.cancel(1)  # runs
                engine.cancel(4)  # waits
            done.update({completion.id: completion for completion in engine.poll()})
        assert not engine.running and not engine.waiting
        return done

    every, some = replies(False), replies(True)
    assert set(every) == set(range(6)) and set(some) <= {0, 2, 3, 5, 1}
    assert len(every[1].tokens) > 9 and 1 not in some and 4 not in some
    for id, one in some.items():
        assert one.tokens == every[id].tokens and same(one.logp, every[id].logp, words)


def test_an_engine_that_fails_ends_every_request_and_tells(words: Tokenizer) -> None:
    engine = engine_of(words)

    def poll() -> list[Completion]:
        raise UserError("the machine is on fire")

    engine.poll = poll  # type: ignore[method-assign]
    with served(engine, words, CONTEXT) as server:
        for _ in range(2):
            status, answer = server.ask("/v1/completions", {"prompt": "a"})
            assert status == 503 and "on fire" in answer["error"]["message"]
        assert [str(problem) for problem in server.failed] == ["the machine is on fire"]


@pytest.mark.parametrize("arguments", ["as an object", "as text"])
def test_calls_of_tools_are_told_as_openai_has_them_and_rendered_as_the_template_takes_them(
    words: Tokenizer, arguments: str
) -> None:
    template = TOOLS if arguments == "as an object" else TOOLS.replace("arguments | tojson", "arguments + ''")
    tokenizer = Tokenizer(words.backend, words.config, template)
    call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox", "n": 2}}\n</tool_call>'
    engine = Scripted(tokenizer, [f"I look.\n{call}\n{call}<|im_end|>"] * 9)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    messages: list[Any] = [{"role": "user", "content": "a"}]
    with served(engine, tokenizer, 4096) as server:
        asked = {"messages": messages, "tools": tools, "return_token_ids": True}
        _, answer = server.ask("/v1/chat/completions", asked)
        [choice] = answer["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls" and message["content"] == "I look."
        assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [{"word": "fox", "n": 2}] * 2
        ids = [c["id"] for c in message["tool_calls"]]
        assert len(set(ids)) == 2 and all(len(id) == 9 and id.isalnum() for id in ids)
        told = [{"role": "tool", "tool_call_id": id, "content": "found"} for id in ids]
        _, again = server.ask("/v1/chat/completions", {**asked, "messages": [*messages, message, *told]})
        shown = tokenizer.decode(again["prompt_token_ids"])
        assert shown.startswith(tokenizer.decode(answer["prompt_token_ids"]) + f"I look.\n{call}\n{call}<|im_end|>")
        assert shown.count("found") == 2
        _, plain = server.ask("/v1/chat/completions", {"messages": messages})
        assert plain["choices"][0]["message"]["content"] == f"I look.\n{call}\n{call}"
        status, refused = server.ask("/v1/chat/completions", {**asked, "tool_choice": "required"})
        assert status == 400 and refused["error"]["param"] == "tool_choice"
        with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            stream = client.chat.completions.create(model="tiny", messages=messages, tools=tools, stream=True)  # type: ignore[call-overload]
            calls = [c for piece in stream for choice in piece.choices for c in choice.delta.tool_calls or ()]
            assert [call.index for call in calls] == [0, 1] and calls[0].function.name == "look_up"


@pytest.fixture
def folder(words: Tokenizer, tmp_path: Path) -> Path:
    """A checkpoint of a run, after step 12."""
    found = tmp_path / "step-000012"
    tiny(words, context=CONTEXT).save(found)
    words.save(found)
    return found


def test_the_command_serves_until_it_is_interrupted(folder: Path, words: Tokenizer) -> None:
    said: list[str] = []
    answers: list[Any] = []

    def client() -> None:
        while not any("Ctrl-C" in line for line in said):
            time.sleep(0.01)
        server = Served()
        server.port = int(said[1].rpartition(":")[2].removesuffix("/v1"))
        answers.append(server.sampled(words.encode("the"), seed=1, max_tokens=8))
        answers.append(server.ask("/v1/models")[1]["data"][0]["id"])
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it, and the command then does too
    thread = threading.Thread(target=client)
    thread.start()
    serve_policy(ServePolicy(model=str(folder), port=0, name="mine"), said.append)
    thread.join()
    own = alone(words, words.encode("the"), Sampling(max_tokens=8, seed=1))
    assert answers[0]["weight_versions"][0]["version"] == "12"
    assert answers[0]["token_ids"] == list(own.tokens) and answers[1] == "mine" and said[-1] == "stopped"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_port_that_is_taken_is_told_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["serve-policy", "--model", str(folder), "--port", port]) == 2
    assert capsys.readouterr().err.startswith(
        f"posttrain: --port {port} cannot be used on 127.0.0.1: Address already in use"
    )
    assert main(["serve-policy"]) == 2 and "--model is missing" in capsys.readouterr().err
