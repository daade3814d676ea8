"""A real HTTP server that behaves as it is told: what judges are tested against."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Said:
    """What is sent back to a request."""

    content: Any = None  # of the message, as JSON; None: `raw` is sent
    raw: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after: float = 0.0  # seconds
    close: bool = False  # the connection, instead of an answer
    finish: str | None = "stop"  # why it says no more


Behaviour = Callable[[dict[str, Any], int], Said]


def replied(request: dict[str, Any]) -> list[str]:
    """The texts that a request gives to be judged."""
    material = request["messages"][1]["content"]
    mark = material[1 : material.index(" ")]
    return [part.split("]\n", 1)[1].split(f"\n[{mark} end]")[0] for part in material.split(f"[{mark} reply")[1:]]


def by_length(request: dict[str, Any], number: int = 0) -> Said:
    """A judge that likes long replies: a score, or the longer of two."""
    replies = replied(request)
    if len(replies) == 2:
        better = "tie" if len(replies[0]) == len(replies[1]) else "A" if len(replies[0]) > len(replies[1]) else "B"
        return Said({"reason": "by length", "score": better})
    wanted = request["response_format"]["json_schema"]["schema"]["properties"]
    return Said({name: "by length" if name == "reason" else 1 + min(9, len(replies[0])) for name in wanted})


class Server:
    """Answers of `behave`, which sees each request and how many came before; keeps what was asked."""

    def __init__(self, behave: Behaviour) -> None:
        self.behave, self.asked, self.headers = behave, [], []  # type: ignore[var-annotated]
        self.most, self._now, self._lock = 0, 0, threading.Lock()  # requests at once
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    number = len(server.asked)
                    server.asked.append(body)
                    server.headers.append(dict(self.headers))
                    server._now += 1
                    server.most = max(server.most, server._now)
                try:
                    server.answer(self, server.behave(body, number))
                finally:
                    with server._lock:
                        server._now -= 1

            def log_message(self, *parts: Any) -> None:
                pass

        class Many(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that has gone away

        self.http = Many(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def answer(self, handler: BaseHTTPRequestHandler, said: Said) -> None:
        time.sleep(said.after)
        if said.close:
            handler.close_connection = True
            return
        content = said.raw
        if said.content is not None:
            text = said.content if isinstance(said.content, str) else json.dumps(said.content)
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": said.finish}
            usage = {"prompt_tokens": 100, "completion_tokens": 10}
            content = json.dumps({"choices": [choice], "usage": usage}).encode()
        handler.send_response(said.status)
        for name, value in {"Content-Length": str(len(content)), **said.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)


@contextmanager
def serving(behave: Behaviour = by_length) -> Iterator[Server]:
    server = Server(behave)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()


def write_recipe(file: Path, address: str, **settings: Any) -> str:
    """A judge.toml for this endpoint."""
    lines = {"endpoint": address, "model": "tested", "cache": False, "timeout": 5.0, "retries": 2, **settings}
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items()), encoding="utf-8")
    return str(file)
