"""A policy behind HTTP, in a thread of its own, and clients of it: what tests of serving share."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

from posttrain.core.protocols import Engine
from posttrain.core.types import Completion, Sampling, StopReason
from posttrain.engines.serving.engine_policy import EnginePolicy
from posttrain.engines.serving.engine_thread import EngineThread
from posttrain.engines.serving.policy_server import PolicyHandlers, ServerLimits, serving
from posttrain.models.tokenizer.tokenizer import Tokenizer

TOOLS = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ '\\n' }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template that shows tools, and calls as Qwen's do."""


class Scripted:
    """Stands for an engine: gives replies that a policy of random weights would not."""

    batch_invariant = True
    backend = "a script"

    def __init__(self, tokenizer: Tokenizer, replies: list[str]) -> None:
        self.tokenizer, self.replies, self.asked = tokenizer, replies, [0] * 99
        self.done: list[Completion] = []

    def submit(self, id: int, prompt: Any, sampling: Sampling, keep: bool = False) -> None:
        text = self.replies[self.asked[id]]
        self.asked[id] += 1
        tokens = self.tokenizer.encode(text)
        self.done.append(
            Completion(id, tokens, [-1.0] * len(tokens), text.removesuffix("<|im_end|>"), StopReason.EOS, 0)
        )

    def poll(self) -> list[Completion]:
        done, self.done = self.done, []
        return done

    def forget(self, id: int) -> None: ...
    def copy(self, id: int, to: int, tokens: int) -> None: ...
    def cancel(self, id: int) -> None: ...
    def load(self, weights: Any, version: int) -> None: ...
    def close(self) -> None: ...


class Served:
    """A server that is running."""

    def __init__(self) -> None:
        self.port = 0
        self.failed: list[BaseException] = []  # what ended its engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, **how: Any) -> tuple[int, Any]:
        """The status, and the answer as JSON. Without a body it is a GET; bytes are sent as they are."""
        status, content = self.raw(path, body, **how)
        return status, json.loads(content)

    def raw(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request("GET" if body is None else "POST", path, content, sent)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def sampled(self, prompt: list[int], **params: Any) -> dict[str, Any]:
        """The only choice of the token endpoint."""
        asked = {"token_ids": prompt, "sampling_params": {"logprobs": 1, **params}}
        status, answer = self.ask("/inference/v1/generate", asked)
        assert status == 200, answer
        [choice] = answer["choices"]
        return choice  # type: ignore[no-any-return]


@contextmanager
def served(
    engine: Engine,
    tokenizer: Tokenizer,
    context: int,
    limits: ServerLimits | None = None,
    max_tokens: int | None = None,
    name: str = "tiny",
    token: str | None = None,
) -> Iterator[Served]:
    """Serve what the engine samples, on a free port."""
    found, ready = Served(), threading.Event()
    over: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    ends = (tokenizer.eos_id,) if tokenizer.eos_id is not None else ()

    async def run() -> None:
        end = asyncio.Event()
        over.append((asyncio.get_running_loop(), end))
        policy = EnginePolicy(EngineThread(engine, found.failed.append), tokenizer, name, context, ends, max_tokens)
        try:
            async with serving(
                PolicyHandlers(lambda request: policy, limits or ServerLimits(), token).application()
            ) as found.port:
                ready.set()
                await end.wait()
        finally:
            policy.close()
            ready.set()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(30) and found.port
    try:
        yield found
    finally:
        loop, end = over[0]
        loop.call_soon_threadsafe(end.set)
        thread.join(30)
        assert not thread.is_alive()
