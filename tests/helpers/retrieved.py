"""Small indices and what they are made of: what tests of retrieval share."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.services.retrieval.passage_index import build
from posttrain.services.retrieval.search_server import SearchHandlers, serving

ROWS = [
    {"id": "rome", "title": "Rome", "text": "Rome is the capital of Italy. It lies on the Tiber."},
    {"id": "paris", "title": "Paris", "text": "Paris is the capital of France, on the Seine."},
    {"id": "hobbit", "title": "The Hobbit", "text": "The Hobbit is a novel by J. R. R. Tolkien, of 1937."},
    {"id": "tolkien", "title": "Tolkien", "text": "Tolkien was a professor at Oxford. He wrote a novel."},
    {"id": "seine", "title": "Seine", "text": "The Seine is a river of France that flows through Paris."},
]


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]] = ROWS) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def small_index(folder: Path, rows: Iterable[Mapping[str, Any]] = ROWS, **options: Any) -> Path:
    """An index of these rows, given in memory."""
    build(list(rows), folder, **options)
    return folder


@contextmanager
def served(index: Any, topk: int = 3, **limits: Any) -> Iterator[int]:
    """The port of a server of this index, in a thread."""
    loop, ready, bound = asyncio.new_event_loop(), threading.Event(), []
    ended = loop.create_future()

    async def run() -> None:
        async with serving(SearchHandlers(index, topk, **limits).application()) as port:
            bound.append(port)
            ready.set()
            await ended

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(20)
    try:
        yield bound[0]
    finally:
        loop.call_soon_threadsafe(ended.set_result, None)
        thread.join()
        loop.close()


def asked(port: int, body: Any, path: str = "/retrieve", method: str = "POST") -> tuple[int, Any]:
    """(status, JSON) of a request. `body`: bytes, or what is written as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body))
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, content
