"""A retriever as a service: environments request passages, `found = yield Ask("retriever", {"query": ..., "k": 3})`.

The answer is a list of {"id", "contents", "score"}, the best first; it may be empty. It comes from a server with the
protocol of `posttrain.services.retrieval.search_protocol`, or from an index of this machine, opened by one process for
all workers. A failure of the server is Invalid, never an empty list, which would mean that no passage matches.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import select
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core import user_files
from posttrain.core.messages import clip, short
from posttrain.core.protocols import Service
from posttrain.core.types import Invalid, InvalidKind, UserError
from posttrain.envs.play.service_client import made_up_passages
from posttrain.envs.play.worker_protocol import FrameSocket, framed
from posttrain.services.retrieval.index_folder import Manifest
from posttrain.services.retrieval.search_protocol import (
    LONGEST_QUERY,
    MOST_TOPK,
    PATH,
    is_score,
    read_answer,
    written_request,
)
from posttrain.system.child_processes import Child, pair
from posttrain.system.endpoint import Endpoint, EndpointFailure

CALLS, SECONDS, RETRIES = 64, 30.0, 5
"""Limits of a server: concurrent calls, timeout of each, retries."""
OPEN_SECONDS = 300.0  # for opening an index, which may load an encoder
MOST_ANSWER = 1 << 30  # most bytes of an answer
FORM = '{"query": text, "k": passages}, or the text alone'
TOKEN = "POSTTRAIN_RETRIEVER_TOKEN"  # environment variable with the token for a server
TRIED = "water"  # query with which a server is tested


def retriever(place: str, name: str = "retriever", retries: int = RETRIES) -> Service:
    """Open the retriever at an address (http://host:8000, or host:8000), or for the index in a folder. Raises
    UserError.
    """
    if re.match(r"https?://", place):
        return RemoteRetriever(place, name, retries)
    if re.fullmatch(r"[\w.-]+:\d+(/\w*)?|localhost", place) and not os.path.exists(place):
        return RemoteRetriever(f"http://{place}", name, retries)
    return LocalRetriever(place, name)


def _read_question(content: Any) -> tuple[str, int] | str:
    """Parse a request. Return the query and the number of passages, or an error message.

    A query that is too long is truncated, as the policy could otherwise make its reward invalid.
    """
    asked = {"query": content} if isinstance(content, str) else content
    if not isinstance(asked, dict) or not isinstance(asked.get("query"), str) or asked.keys() - {"query", "k"}:
        return f"a retriever is asked with {FORM}"
    k = asked.get("k", 3)
    if type(k) is not int or not 0 < k <= MOST_TOPK:
        return f"k is {short(k)}; it must be from 1 to {MOST_TOPK}"
    return asked["query"][:LONGEST_QUERY], k


class RemoteRetriever:
    """A retriever behind a server; implements `posttrain.core.protocols.Service`."""

    def __init__(self, address: str, name: str, retries: int = RETRIES) -> None:
        """Create the client. `address`: with or without a path. Raises UserError for an invalid one."""
        base = address.rstrip("/").removesuffix(f"/{PATH}")
        self.name = name
        self.endpoint = Endpoint(base, os.environ.get(TOKEN) or None, CALLS, None, SECONDS, retries)
        self._answers: list[tuple[int, Any]] = []
        self._counts = dict.fromkeys(("asked", "invalid", "rubbish"), 0.0)

    @property
    def identity(self) -> str:
        """A constant: servers do not identify their index, so a run assumes that answers do not change."""
        return "retriever"

    @property
    def description(self) -> str:
        return f"{self.endpoint.address}/{PATH}, {CALLS} calls at once"

    def problem(self) -> str | None:
        """Return the reason why the server cannot be used, in one line, after a short query; None if it answers."""
        found = self.endpoint.try_once(self._ask(TRIED, 1, retries=0))
        if isinstance(found, EndpointFailure):
            way = found.way(f"its token is read from {TOKEN}", "--retriever")
            return f"--retriever {self.endpoint.address} does not answer: {found.reason}; {way}"
        return None

    def submit(self, id: int, content: Any) -> None:
        self._counts["asked"] += 1
        question = _read_question(content)
        if isinstance(question, str):
            self._answers.append((id, Invalid(question, InvalidKind.UNANSWERED)))
        else:
            self.endpoint.start(id, self._find(*question))

    def poll(self) -> list[tuple[int, Any]]:
        answers, self._answers = [*self._answers, *self.endpoint.finished()], []
        for _, answer in answers:
            if isinstance(answer, Exception):
                raise answer
            self._counts["invalid"] += isinstance(answer, Invalid)
        return answers

    def example(self, content: Any) -> Any:
        return made_up_passages()

    def counts(self) -> dict[str, float]:
        return {**self._counts, **self.endpoint.counts}

    def close(self) -> None:
        self.endpoint.close()

    async def _find(self, query: str, k: int) -> Any:
        """Query the server, with one repetition after an invalid answer: it may be a proxy's page about a server that
        is down.
        """
        found = await self._ask(query, k)
        if isinstance(found, EndpointFailure) and found.rubbish:
            self._counts["rubbish"] += 1
            found = await self._ask(query, k)
        if isinstance(found, EndpointFailure):
            return Invalid(f"{self.name}: {self.endpoint.address}: {found.reason}", InvalidKind.UNANSWERED)
        return found[0]

    async def _ask(
        self, query: str, k: int, retries: int | None = None
    ) -> list[list[dict[str, Any]]] | EndpointFailure:
        body = written_request([query], k)
        return await self.endpoint.call(PATH, body, lambda message: read_answer(message, 1, k), retries)


class LocalRetriever:
    """A retriever in a process of its own, which opens the index; implements `posttrain.core.protocols.Service`."""

    def __init__(self, folder: str, name: str) -> None:
        """Start the process. Raises UserError if there is no index, or if it cannot be opened."""
        self.name, self.folder = name, str(user_files.real(Path(folder).expanduser()))
        self._manifest = Manifest.read(Path(self.folder))
        self._socket, theirs = pair()
        with theirs:
            self._child = Child("posttrain.services.retrieval.search_worker:main", [theirs.fileno()])
        self._line = FrameSocket(self._socket, MOST_ANSWER)
        self._line.unsent += framed(pickle.dumps(self.folder))
        self._asked: deque[tuple[int, str, int]] = deque()
        self._pending: set[int] = set()
        self._answers: list[tuple[int, Any]] = []
        self._counts = dict.fromkeys(("asked", "invalid"), 0.0)
        try:
            self._wait_until_open()
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> str:
        return self._manifest.fingerprint

    @property
    def description(self) -> str:
        return f"{self.folder}, {self._manifest.count:,} passages, {self._manifest.kind}"

    def submit(self, id: int, content: Any) -> None:
        self._counts["asked"] += 1
        question = _read_question(content)
        if isinstance(question, str):
            self._invalid(id, question)
        else:
            self._asked.append((id, *question))
            self._pending.add(id)

    def poll(self) -> list[tuple[int, Any]]:
        """Return answers. Raises UserError if the process has ended: a new one would fail at the same request."""
        if self._asked:
            self._line.unsent += framed(pickle.dumps(list(self._asked)))
            self._asked.clear()
        if self._pending:
            for message in self._exchanged():
                self._take(message)
        answers, self._answers = self._answers, []
        return answers

    def example(self, content: Any) -> Any:
        return made_up_passages()

    def counts(self) -> dict[str, float]:
        return dict(self._counts)

    def close(self) -> None:
        self._socket.close()
        self._child.wait(1.0)
        self._child.kill()

    def _invalid(self, id: int, reason: str) -> None:
        self._counts["invalid"] += 1
        self._answers.append((id, Invalid(f"{self.name}: {reason}", InvalidKind.UNANSWERED)))

    def _wait_until_open(self) -> None:
        end = time.monotonic() + OPEN_SECONDS
        while True:
            for message in self._exchanged():
                if isinstance(failed := message.get("failed"), str):
                    raise UserError(failed)
                if message.get("ready") != self.identity:
                    raise UserError(f"the index in {self.folder} has changed while it was opened: start again")
                return
            if time.monotonic() > end:
                raise UserError(f"the index in {self.folder} did not open within {OPEN_SECONDS:g} s")
            select.select([self._socket], [self._socket] if self._line.unsent else [], [], 0.1)

    def _exchanged(self) -> list[dict[str, Any]]:
        """Send as much as the process accepts now, and return messages that have arrived."""
        try:
            self._line.write()
            messages = list(map(json.loads, self._line.read()))
        except (EOFError, OSError):
            raise self._gone() from None
        except (ValueError, RecursionError):
            raise self._garbled() from None
        if not all(isinstance(message, dict) for message in messages):
            raise self._garbled()
        return messages

    def _take(self, message: dict[str, Any]) -> None:
        number, found, failed = message.get("number"), message.get("found"), message.get("failed")
        if type(number) is not int or number not in self._pending:
            raise UserError(f"the process of {self.name} answered an unknown request: {clip(str(number))}")
        self._pending.discard(number)
        if isinstance(failed, str):
            self._invalid(number, failed)
        elif isinstance(found, list) and all(_is_passage(one) for one in found):
            names = ("id", "contents", "score")
            self._answers.append((number, [dict(zip(names, one, strict=True)) for one in found]))
        else:
            self._invalid(number, "its process sent a message that cannot be read")

    def _garbled(self) -> UserError:
        return UserError(f"the process of {self.name} sent a message that cannot be read")

    def _gone(self) -> UserError:
        ended = f"died ({self._child.exit()})" if self._child.wait(1.0) else "closed its socket"
        return UserError(f"the process of {self.name}, which searches {self.folder}, {ended}")


def _is_passage(one: Any) -> bool:
    return (
        isinstance(one, list)
        and len(one) == 3
        and isinstance(one[0], str)
        and isinstance(one[1], str)
        and is_score(one[2])
    )


if TYPE_CHECKING:
    _remote: Callable[..., Service] = RemoteRetriever
    _local: Callable[..., Service] = LocalRetriever
