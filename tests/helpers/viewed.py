"""The pages of `posttrain view` behind HTTP, in a thread of their own, and a client of them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from posttrain.apps.view.evaluation_file import EvaluationFile
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.web_server import application
from posttrain.system.http_front import HOST, bound
from posttrain.system.http_server import serving

__all__ = ["Answer", "Pages", "viewing"]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass(frozen=True)
class Pages:
    """A server that is running."""

    port: int
    token: str

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"

    def get(self, path: str, host: str = HOST, method: str = "GET") -> Answer:
        connection = HTTPConnection(HOST, self.port, timeout=60)
        try:
            connection.request(method, path, headers={"host": host})
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()


@contextmanager
def viewing(
    runs: Sequence[OpenRun], token: str = "token", evaluations: Sequence[EvaluationFile] = ()
) -> Iterator[Pages]:
    loop, ready, ports = asyncio.new_event_loop(), threading.Event(), []
    ended = loop.create_future()

    async def run() -> None:
        async with serving(application(runs, token, evaluations), bound(HOST, 0), shutdown_timeout=1.0) as port:
            ports.append(port)
            ready.set()
            await ended

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield Pages(ports[0], token)
    finally:
        loop.call_soon_threadsafe(ended.set_result, None)
        thread.join(20)
        loop.close()
