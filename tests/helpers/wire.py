"""Wire formats of a served policy: what their tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from conftest import CHATML, tiny
from served import Served, served

from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.tokenizer.tokenizer import Tokenizer

CONTEXT = 256
SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    7,
    1.5,
    1e400,
    "",
    "x",
    [],
    {},
    [1],
    [None],
    [[]],
    {"a": 1},
    [{}],
    [{"type": "x"}],
)
"""Values that few fields accept."""


def tool_words() -> Tokenizer:
    """Return a tokenizer with the markup of chat and tool calls."""
    tokenizer = Tokenizer.train(["the quick brown fox 0123456789+-*/=.<>{}\n"], 300, "bpe", SPECIAL)
    tokenizer.chat_template = CHATML
    return tokenizer


@contextmanager
def wire_server(words: Tokenizer) -> Iterator[Served]:
    """A server of a tiny policy that is sampled."""
    with served(LocalEngine(tiny(words, context=CONTEXT), words, slots=8), words, CONTEXT) as found:
        yield found


def streamed(server: Served, path: str, body: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The server-sent events of a response: names and content."""
    status, content = server.raw(path, {**body, "stream": True})
    assert status == 200, content
    found = []
    for block in content.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        found.append((name[7:], json.loads(data[6:])))
        assert found[-1][1]["type"] == found[-1][0], "the event's name is its type"
    return found


def changed(value: Any) -> Iterator[Any]:
    """The same JSON with each of its parts replaced by each wrong value, or left out."""
    yield from WRONG
    if isinstance(value, dict):
        for key in value:
            yield {name: one for name, one in value.items() if name != key}
            for other in changed(value[key]):
                yield {**value, key: other}
    if isinstance(value, list):
        for place, one in enumerate(value):
            for other in changed(one):
                yield [*value[:place], other, *value[place + 1 :]]
