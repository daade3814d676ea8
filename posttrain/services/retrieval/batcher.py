"""Batches the queries of concurrent requests, one search at a time, and limits the queue.

While a search runs in its thread, requests gather; the next one takes some queries of each, so that a request of
thousands does not block the others. Encoders of dense indices take little more time for a batch than for a query.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from posttrain.services.retrieval.passage_index import Hit

TOGETHER = 64  # queries of a search
SHARE = 16  # of them that one request may have, where others wait
MOST_WAITING = 16_384  # queries

Search = Callable[[Sequence[str], int], list[list[Hit]]]


class Busy(Exception):
    """The queue of queries is full."""


@dataclass(eq=False)
class _Job:
    queries: Sequence[str]
    k: int
    answered: asyncio.Future[list[list[Hit]]]
    found: list[list[Hit]] = field(default_factory=list)
    begun: int = 0  # queries of it whose search has begun


class Batcher:
    """`search` may be called concurrently, while `run` is running."""

    def __init__(self, search: Search, most_waiting: int = MOST_WAITING) -> None:
        self._search, self._most = search, most_waiting
        self._jobs: deque[_Job] = deque()
        self._there = asyncio.Event()
        self.waiting = 0  # queries

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Search. Raises Busy, and the errors of the search."""
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
        finally:  # the client may be gone
            self.waiting -= len(queries)

    async def run(self) -> None:
        """Search for queued queries, without end."""
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
        """Return (job, first query, behind the last) of the next search: of requests for as many passages as the first
        one.
        """
        taken: list[tuple[_Job, int, int]] = []
        room, later = TOGETHER, deque[_Job]()
        jobs, self._jobs = self._jobs, deque()
        share = TOGETHER if len(jobs) == 1 else SHARE
        while jobs:
            job = jobs.popleft()
            if job.answered.done():  # cancelled, or failed
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
