"""A resources server as those of NeMo Gym: a counter with tools and a verifier, or a guessing game of /step.

Sessions are cookies. What it was asked is in `asked`, as (session, path, content).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ResourcesServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, steps: bool = False, verdict: Any = None) -> None:
        """`steps`: a GymnasiumServer; `verdict`: the answer of /verify or "hang", "fail", "flood"; None: its own."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.steps, self.verdict = steps, verdict
        self.asked: list[tuple[str, str, Any]] = []
        self.counts: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, session: str, path: str, content: Any) -> tuple[int, Any]:
        self.asked.append((session, path, content))
        made = getattr(self, ("step_" if self.steps else "tool_") + path[1:], None)
        return (404, {"detail": "Not Found"}) if made is None else made(session, content)

    # -- tools

    def tool_seed_session(self, session: str, row: Any) -> tuple[int, Any]:
        self.counts[session] = row["start"]
        return 200, {}

    def tool_add(self, session: str, arguments: Any) -> tuple[int, Any]:
        if not isinstance(arguments.get("count"), int):
            return 422, {"detail": "count is a whole number"}
        self.counts[session] += arguments["count"]
        return 200, {"count": self.counts[session]}

    def tool_verify(self, session: str, row: Any) -> tuple[int, Any]:
        if self.verdict == "hang":
            time.sleep(20)
        if self.verdict in ("fail", "flood"):
            return 500 if self.verdict == "fail" else 200, "x" * (100 if self.verdict == "fail" else 5_000_000)
        found = float(self.counts[session] == row["wanted"])
        return 200, self.verdict or {**row, "reward": found, "reward_components": {"right": found, "short": 0.5}}

    # -- steps

    def step_reset(self, session: str, row: Any) -> tuple[int, Any]:
        self.counts[session] = 0
        return 200, {"observation": "Guess.", "info": {"supports_explicit_close": True}}

    def step_step(self, session: str, row: Any) -> tuple[int, Any]:
        output = row["response"]["output"]
        self.counts[session] += 1
        text = "".join(item["content"][0]["text"] for item in output if item["type"] == "message")
        outputs = [{"call_id": i["call_id"], "output": "seen"} for i in output if i["type"] == "function_call"]
        ended = text == row["wanted"]
        return 200, {"observation": None if ended else "No.", "reward": 1.0 if ended else -0.25, "terminated": ended,
                     "truncated": False, "info": {"tool_outputs": outputs}}  # fmt: skip

    def step_close(self, session: str, row: Any) -> tuple[int, Any]:
        return 200, {}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, ResourcesServer)
        session = (self.headers["Cookie"] or "").partition("session=")[2] or f"s{len(self.server.asked)}"
        status, found = self.server.answer(session, self.path, content)
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Set-Cookie", f"session={session}; path=/; httponly")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def resources_server(**settings: Any) -> Iterator[ResourcesServer]:
    server = ResourcesServer(**settings)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
