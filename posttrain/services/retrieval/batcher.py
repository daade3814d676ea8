"""Batches the queries of concurrent requests, one search at a time, and limits the queue.

While a search runs in its thread, requests queue up. The next search takes some queries of each request, so that a
request of thousands does not block the others. Encoders of dense indices take little more time for a batch than for a
query.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from posttrain.services.retrieval.passage_index import Hit

TOGETHER = 64  # most queries of one search
SHARE = 16  # most queries of one request in a search, if others wait
MOST_WAITING = 16_384  # most queued queries

Search = Callable[[Sequence[str], int], list[list[Hit]]]


class Busy(Exception):
    """The queue is full."""


@dataclass(eq=False)
class _Job:
    queries: Sequence[str]
    k: int
    answered: asyncio.Future[list[list[Hit]]]
    found: list[list[Hit]] = field(default_factory=list)
    begun: int = 0  # number of its queries whose search has begun


class Batcher:
    """Combines the queries of concurrent calls of `search`, while `run` is running."""

    def __init__(self, search: Search, most_waiting: int = MOST_WAITING) -> None:
        self._search, self._most = search, most_waiting
        self._jobs: deque[_Job] = deque()
        self._there = asyncio.Event()
        self.waiting = 0  # number of queued queries

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Search for passages. Raises Busy, and the errors of the search."""
        if not queries:
            return []
        if self.waiting + len(queries) > self._most:
            raise Busy
        job = _Job(queries, k, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self.waiting += len(queries)
        self._there.set()
        try:
            return await job.answered
        finally:  # also if the client has disconnected
            self.waiting -= len(queries)

    async def run(self) -> None:
        """Search for queued queries, in an endless loop."""
        while True:
            await self._there.wait()
            self._there.clear()
            while taken := self._next_batch():
                queries = [query for job, start, end in taken for query in job.queries[start:end]]
                try:
                    found = await asyncio.to_thread(self._search, queries, taken[0][0].k)
                    assert len(found) == len(queries), "an answer to each query"
                except Exception as error:  # reported to each client of the batch
                    for job, _, _ in taken:
                        if not job.answered.done():
                            job.answered.set_exception(error)
                    continue
                answers = iter(found)
                for job, start, end in taken:
                    job.found += islice(answers, end - start)
                    if len(job.found) == len(job.queries) and not job.answered.done():
                        job.answered.set_result(job.found)

    def _next_batch(self) -> list[tuple[_Job, int, int]]:
        """Return (job, first query, end of queries) for the next search: of jobs with the same number of passages as
        the first.
        """
        taken: list[tuple[_Job, int, int]] = []
        room, later = TOGETHER, deque[_Job]()
        jobs, self._jobs = self._jobs, deque()
        share = TOGETHER if len(jobs) == 1 else SHARE
        while jobs:
            job = jobs.popleft()
            if job.answered.done():  # cancelled or failed
                continue
            if not room or (taken and job.k != taken[0][0].k):
                self._jobs.append(job)
                continue
            end = min(len(job.queries), job.begun + min(share, room))
            taken.append((job, job.begun, end))
            room -= end - job.begun
            job.begun = end
            if end < len(job.queries):
                later.append(job)
        self._jobs += later
        return taken
