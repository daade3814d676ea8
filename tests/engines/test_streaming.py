"""A stream shows a reply while it is sampled: in every format the same events as for a whole reply, sooner."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import tokenizers
from conftest import tiny
from openai import APIError, OpenAI
from served import TOOLS, Scripted, served
from tokenizers import decoders, models, normalizers
from wire import tool_words

from posttrain.core.protocols import Watchable
from posttrain.core.types import Completion, Sampling
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.engines.serving import engine_thread
from posttrain.engines.serving.engine_policy import settled
from posttrain.engines.serving.growing_text import GrowingText
from posttrain.models.tokenizer.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fox"}}\n</tool_call>'
REPLIES = {
    "text": "One, two < three 😀 four.\n\nFive ",
    "thoughts": "<think>\nhm, so\n</think>\n\nYes: a quick fox.",
    "calls": f"<think>\nhm\n</think>\n\nI look twice.\n{CALL}\n{CALL}",
    "a call alone": CALL,
    "no call after all": "I look.\n<tool_call>\n{nothing}\n</tool_call> Or not",
    "thoughts alone": "<think>\nhm, and hm",
    "nothing": "",
}
MESSAGES = [{"role": "user", "content": "fox"}]
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
FUNCTION = {"name": "look_up", "description": "Looks.", "parameters": SCHEMA}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/completions": {"prompt": "fox", "max_tokens": 500},
    "/v1/responses": {"input": "fox", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 500, "model": "tiny",
                     "tools": [{"name": "look_up", "description": "Looks.", "input_schema": SCHEMA}]},
}  # fmt: skip


class Growing(Scripted):
    """Samples its scripts one after the other, token by token, and the second half of each only if it may."""

    def __init__(self, tokenizer: Tokenizer, replies: list[str], waits: bool = False, fails: bool = False) -> None:
        super().__init__(tokenizer, replies)
        self.may, self.waits, self.fails, self.count, self.told = threading.Event(), waits, fails, 0, -1
        self.cancelled: list[int] = []
        if not waits:
            self.may.set()

    def poll(self) -> list[Completion]:
        if not self.done:
            return []
        if self.told < self.count:  # each token is shown before the next is sampled
            return []
        half = self.count > len(self.done[0].tokens) // 2
        if half and not self.may.wait(0.01):
            return []
        if half and self.fails:
            raise RuntimeError("out of memory")
        self.count += 1
        if self.count < len(self.done[0].tokens):
            return []
        self.count, self.told = 0, -1
        if self.waits:
            self.may.clear()
        return [self.done.pop(0)]

    def so_far(self, ids: Collection[int]) -> dict[int, tuple[list[int], list[float]]]:
        self.told, count = self.count, self.count
        return {d.id: (list(d.tokens[:count]), list(d.logp[:count])) for d in self.done[:1] if d.id in ids}

    def cancel(self, id: int) -> None:
        self.cancelled.append(id)
        self.done = [done for done in self.done if done.id != id]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    found = tool_words()
    return Tokenizer(found.backend, found.config, TOOLS)


@pytest.fixture(autouse=True)
def _each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "WATCH_SECONDS", 0.0)


def events_of(content: bytes) -> Iterator[tuple[str, Any]]:
    for block in content.decode().strip().split("\n\n"):
        name, _, data = block.rpartition("data: ")
        yield name, data if data == "[DONE]" else json.loads(data)


def bare(content: Any) -> Any:
    """Without what differs from one request to the next."""
    if isinstance(content, dict):
        left = {"id", "item_id", "created", "created_at", "completed_at", "sequence_number"}
        return {key: bare(value) for key, value in content.items() if key not in left}
    return [bare(one) for one in content] if isinstance(content, list) else content


def places_of(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Texts of an event that a delta may hold."""
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from places_of(value, (*place, key))
    elif isinstance(content, str) and place[-1] in ("content", "text", "thinking", "delta"):
        yield place, content


def merged(content: bytes) -> list[Any]:
    """The events, with those that differ in one text alone joined to one."""
    found: list[Any] = []
    for name, data in events_of(content):
        event = (name, bare(data))
        before = found[-1] if found else None
        texts = list(places_of(event[1])) if "delta" in json.dumps(event[1]) or "choices" in event[1] else []
        if before and len(texts) == 1 and [p for p, _ in places_of(before[1])] == [texts[0][0]]:
            [(place, text)], [(_, earlier)] = texts, list(places_of(before[1]))
            alike = [json.dumps(one[1]).replace(json.dumps(t), "0") for one, t in ((event, text), (before, earlier))]
            if alike[0] == alike[1] and text and earlier and name == before[0]:
                inner: Any = before[1]
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = earlier + text
                continue
        found.append(event)
    return found


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_in_pieces_has_the_events_of_the_whole_reply(path: str, name: str, words: Tokenizer) -> None:
    body = {**ASKED[path], "stream": True}
    contents = []
    for kind in (Scripted, Growing):
        with served(kind(words, [f"{REPLIES[name]}<|im_end|>"] * 9), words, 900) as server:
            status, content = server.raw(path, body)
            assert status == 200
            contents.append(content)
    whole, pieces = contents
    assert merged(pieces) == merged(whole)
    if name in ("text", "thoughts"):
        assert len(list(events_of(pieces))) > len(list(events_of(whole))) + 5
    numbers = [data["sequence_number"] for _, data in events_of(pieces) if "sequence_number" in data]
    assert numbers == list(range(len(numbers)))


SHOWN = {
    "foo</think>\n\na quick fox": ["foo</think>\n\na quick fox"],
    "a quick <think>hm</think> fox": ["a quick <think>hm</think> fox"],
    "<think>\nhm\n</think>\n\nYes</think> a fox": ["hm", "Yes</think> a fox"],
    "<think>\n\n</think>\n\nYes": ["Yes"],
}
"""Replies -> the texts of their blocks, where thoughts are those before a mark at which text was already shown."""


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("reply", SHOWN)
def test_text_that_was_shown_does_not_become_thoughts(path: str, reply: str, words: Tokenizer) -> None:
    with served(Growing(words, [f"{reply}<|im_end|>"] * 9), words, 900) as server:
        _, content = server.raw(path, {**ASKED[path], "stream": True})
    blocks: dict[int, str] = {}
    for _, data in events_of(content):
        delta = data.get("delta")
        if isinstance(delta, dict):
            delta = delta.get("text", delta.get("thinking"))
        if delta:
            place = data.get("index", data.get("output_index"))
            blocks[place] = blocks.get(place, "") + delta
    assert [blocks[place] for place in sorted(blocks)] == SHOWN[reply]
    if path == "/v1/responses":
        items = json.loads(content.decode().strip().split("data: ")[-1])["response"]["output"]
        assert [item["content"][0]["text"] for item in items] == SHOWN[reply]


def joined(content: bytes) -> dict[int, dict[str, Any]]:
    """The choices of a stream, whose pieces are joined as clients of OpenAI's API do."""
    found: dict[int, dict[str, Any]] = {}
    for _, data in events_of(content):
        for piece in [] if data == "[DONE]" else data["choices"]:
            own = found.setdefault(piece["index"], {"text": "", "tokens": [], "logp": [], "pieces": 0})
            assert "finish_reason" not in own, "nothing follows the end of a choice"
            delta, logprobs = piece.get("delta", piece), piece["logprobs"] or {}
            text = delta.get("content", delta.get("text"))
            own["text"] += text or ""
            own["pieces"] += 1
            own["tokens"] += [one["token"] for one in logprobs.get("content", [])] + logprobs.get("tokens", [])
            own["logp"] += [one["logprob"] for one in logprobs.get("content", [])] + logprobs.get("token_logprobs", [])
            own |= {name: delta[name] for name in ("role", "tool_calls") if delta.get(name)}
            own |= {"offsets": own.get("offsets", []) + logprobs["text_offset"]} if "text_offset" in logprobs else {}
            own |= {"finish_reason": piece["finish_reason"]} if piece["finish_reason"] else {}
            own.setdefault("early", []).append(bool(text) and not own["text"].startswith("".join(own["tokens"])))
    return found


def answered(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same of an answer in one piece."""
    found = {}
    for choice in answer["choices"]:
        message, logprobs = choice.get("message", choice), choice["logprobs"] or {}
        content = logprobs.get("content", [])
        calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", []))]
        found[choice["index"]] = {
            "text": message.get("content", message.get("text")) or "", "finish_reason": choice["finish_reason"],
            "tokens": [one["token"] for one in content] + logprobs.get("tokens", []),
            "logp": [one["logprob"] for one in content] + logprobs.get("token_logprobs", []),
            **({"role": "assistant"} if "message" in choice else {}), **({"tool_calls": calls} if calls else {}),
            **({"offsets": logprobs["text_offset"]} if "text_offset" in logprobs else {}),
        }  # fmt: skip
    return found


MANY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"logprobs": True, "n": 3},
    "/v1/completions": {"logprobs": 1, "n": 2, "prompt": ["fox", "quick"]},
}


@pytest.mark.parametrize("path", MANY)
@pytest.mark.parametrize("name", [None, *REPLIES])
def test_choices_grow_side_by_side_with_their_log_probabilities(path: str, name: str | None, words: Tokenizer) -> None:
    asked = {**ASKED[path], **MANY[path], "max_tokens": 500 if name else 60, "seed": 3}
    replies = [f"{REPLIES[name]}<|im_end|>"] * 9 if name else []
    whole: Any = Scripted(words, replies) if name else LocalEngine(tiny(words, context=300), words, slots=3)
    growing: Any = Growing(words, replies) if name else LocalEngine(tiny(words, context=300), words, slots=3)
    with served(whole, words, 900 if name else 300) as server:
        _, answer = server.ask(path, asked)
    with served(growing, words, 900 if name else 300) as server:
        _, content = server.raw(path, {**asked, "stream": True, "stream_options": {"include_usage": True}})
    found = joined(content)
    early, pieces = ([own.pop(key) for own in found.values()] for key in ("early", "pieces"))
    assert found == answered(answer) and len(found) > 2
    assert [data["usage"] for _, data in events_of(content) if data != "[DONE]" and data["usage"]] == [answer["usage"]]
    if name not in (None, "text"):  # these have tokens that are parts of a character; the last text has the end's token
        assert not any(any(own[:-2]) for own in early), "a token comes with its text, not before"
    assert name not in ("text", "thoughts") or min(pieces) > 8


def test_a_choice_ends_before_the_others_are_sampled(words: Tokenizer) -> None:
    engine = Growing(words, [f"{REPLIES['text']}<|im_end|>"] * 9, waits=True)
    with (
        served(engine, words, 900) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20) as client,
    ):
        stream: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, n=2, logprobs=True)  # type: ignore[call-overload]
        ended: list[int] = []
        for chunk in stream:
            [choice] = chunk.choices
            ended += [choice.index] if choice.finish_reason else []
            if choice.delta.content:
                assert choice.logprobs.content and (choice.index == 0 or ended == [0])
                engine.may.set()
    assert ended == [0, 1]


def test_log_probabilities_of_a_response_come_with_its_text(words: Tokenizer) -> None:
    asked = {**ASKED["/v1/responses"], "stream": True, "include": ["message.output_text.logprobs"]}
    with served(Growing(words, [f"{REPLIES['thoughts']}<|im_end|>"] * 9), words, 900) as server:
        _, content = server.raw("/v1/responses", asked)
    steps = [data for _, data in events_of(content)]
    deltas = [data for data in steps if data["type"] == "response.output_text.delta"]
    [done] = [data for data in steps if data["type"] == "response.output_text.done"]
    assert [one for data in deltas for one in data["logprobs"]] == done["logprobs"]
    assert "".join(data["delta"] for data in deltas) == done["text"] and len(deltas) > 3


def test_an_event_loop_that_is_behind_gets_no_further_report(words: Tokenizer) -> None:
    engine = Growing(words, ["one two three four five<|im_end|>"] * 2)
    asked: list[set[int]] = []
    so_far = engine.so_far
    engine.so_far = lambda ids: asked.append({*ids}) or so_far(ids)  # type: ignore[method-assign, func-returns-value]
    seen: list[int] = []

    def watch(sampled: list[int], logp: list[float]) -> None:
        before = len(asked)
        time.sleep(0.003)
        seen.append(len(asked) - before)

    async def ask() -> None:
        thread = engine_thread.EngineThread(engine)
        for _ in range(2):
            await thread.complete(words.encode("fox"), Sampling(max_tokens=40), watch)
        thread.close()

    asyncio.run(ask())
    assert len(seen) > 5 and not any(seen)
    assert {1} in asked and {2} in asked and {1, 2} not in asked, "a reply that has ended is not asked for"


def first_words(client: Any, engine: Growing, api: str) -> str:
    """The text that a client reads of a stream whose engine goes on only after its first word."""
    if api == "chat":
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        pieces = (choice.delta.content for chunk in stream for choice in chunk.choices)
    elif api == "completions":
        stream = client.completions.create(model="tiny", prompt="fox", max_tokens=500, stream=True)
        pieces = (choice.text for chunk in stream for choice in chunk.choices)
    else:
        stream = client.responses.create(model="tiny", input="fox", stream=True)
        pieces = (event.delta for event in stream if event.type == "response.output_text.delta")
    read = ""
    for piece in pieces:
        read += piece or ""
        if read:
            engine.may.set()
    return read


@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
def test_openais_client_reads_the_first_words_before_the_last_are_sampled(api: str, words: Tokenizer) -> None:
    engine = Growing(words, [f"{REPLIES['text']}<|im_end|>"] * 9, waits=True)
    with (
        served(engine, words, 900) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20) as client,
    ):
        assert first_words(client, engine, api) == REPLIES["text"]


def test_anthropics_client_reads_the_first_words_before_the_last_are_sampled(words: Tokenizer) -> None:
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    engine = Growing(words, [f"{REPLIES['thoughts']}<|im_end|>"] * 9, waits=True)
    with (
        served(engine, words, 900) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=20) as client,
        client.messages.stream(model="tiny", max_tokens=500, messages=MESSAGES) as stream,
    ):
        for event in stream:
            if event.type == "content_block_delta":
                engine.may.set()
        blocks = stream.get_final_message().content
    assert [(block.type, getattr(block, block.type)) for block in blocks] == [
        ("thinking", "hm, so"), ("text", "Yes: a quick fox."),
    ]  # fmt: skip


def test_a_failure_after_the_first_words_ends_the_stream_with_an_error(words: Tokenizer) -> None:
    engine = Growing(words, [f"{REPLIES['text']}<|im_end|>"] * 9, waits=True, fails=True)
    with (
        served(engine, words, 900) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20) as client,
        pytest.raises(APIError, match="out of memory"),
    ):
        first_words(client, engine, "chat")


def test_a_client_that_leaves_in_the_middle_takes_its_request_along(words: Tokenizer) -> None:
    engine = Growing(words, [f"{REPLIES['text']}<|im_end|>"] * 9, waits=True)
    with (
        served(engine, words, 900) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20) as client,
    ):
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        stream.close()
        for _ in range(500):
            if engine.cancelled:
                break
            threading.Event().wait(0.01)
        assert engine.cancelled == [1] and not engine.may.is_set() and server.ask("/health")[1]["requests"] == 0


@pytest.mark.parametrize("kind", [LocalEngine, UncachedEngine])
def test_tokens_so_far_are_those_with_which_the_reply_begins(kind: Any, words: Tokenizer) -> None:
    engine = kind(tiny(words, context=128), words, slots=2)
    assert isinstance(engine, Watchable)
    for id in range(3):
        engine.submit(id, words.encode("fox"), Sampling(max_tokens=40, seed=id))
    seen: list[tuple[int, tuple[list[int], list[float]]]] = []
    done: dict[int, Completion] = {}
    while len(done) < 3:
        done |= {completion.id: completion for completion in engine.poll()}
        seen += engine.so_far({0, 2}).items()
    assert {id for id, _ in seen} == {0, 2} and len({len(tokens) for _, (tokens, _) in seen}) > 3
    assert all(tokens == list(done[id].tokens[: len(tokens)]) for id, (tokens, _) in seen)
    assert all(logp == list(done[id].logp[: len(tokens)]) for id, (tokens, logp) in seen)


def sentencepiece() -> Tokenizer:
    """A tokenizer as Llama 2 has it: spaces are letters, a leading one is stripped, and rare characters are bytes."""
    rare = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {text: id for id, text in enumerate(["<unk>", "<s>", "</s>", *rare, "▁", *"abcdefghijklmno.,"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_text_decoded_in_pieces_is_the_text_decoded_at_once_and_no_token_is_decoded_often(
    kind: str, words: Tokenizer
) -> None:
    tokenizer = words if kind == "bytes" else sentencepiece()
    for number, text in enumerate(
        [" 😀é a lone ä, näh", "  bean,  café</s> 日本\n語", "a" * 300, "😀" * 40, "<0x41>bc é"]
    ):
        tokens = tokenizer.encode(text)
        decoded: list[int] = []

        def decode(some: Sequence[int], tokenizer: Tokenizer = tokenizer, decoded: list[int] = decoded) -> str:
            decoded.append(len(some))
            return tokenizer.decode(some)

        growing, chance, end = GrowingText(decode), random.Random(number), 0
        while end < len(tokens):
            end = min(len(tokens), end + chance.randrange(4))
            known = growing.of(tokens[:end]).rstrip("\ufffd")  # decoded at once, a last half character may hide others
            assert text.startswith(known) and known.startswith(tokenizer.decode(tokens[:end]).rstrip("\ufffd"))
        assert growing.of(tokens) == tokenizer.decode(tokens) == text and sum(decoded) <= 12 * len(tokens)


@pytest.mark.parametrize("name", REPLIES)
def test_a_settled_text_only_grows(name: str) -> None:
    text, marks = REPLIES[name], ["<think>", "</think>", "<tool_call>", "four"]
    found = [settled(text[:end], marks) for end in range(len(text) + 1)]
    assert all(text.startswith(one) for one in found)
    assert not any(one.endswith(mark[:length]) for one in found for mark in marks for length in range(1, len(mark)))
