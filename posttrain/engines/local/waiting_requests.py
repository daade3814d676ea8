"""Queue of the requests that wait for a slot of the embedded engine, with what they continue."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

from posttrain.engines.local.kv_cache import Prompt, PromptPrefix
from posttrain.engines.local.prefix_cache import CachedPrefixes
from posttrain.engines.local.running_batch import BegunReply
from posttrain.engines.request import Request


class WaitingRequests:
    """First come, first served; a preempted request comes first. `resumed` and `begun` have a request until its tokens
    are computed again.
    """

    def __init__(self) -> None:
        self.prefixes: dict[Prompt, PromptPrefix] = {}  # computed prompts, kept while requests with them wait
        self.resumed: dict[int, CachedPrefixes] = {}  # id of a request that continues another one -> that one's prefix
        self.begun: dict[int, BegunReply] = {}  # id of a preempted request -> its reply so far
        self._queue: deque[Request] = deque()
        self._wanted: Counter[Prompt] = Counter()  # prompt -> number of waiting requests with it

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def append(self, request: Request) -> None:
        self._queue.append(request)
        self._wanted[request.prompt] += 1

    def put_back(self, request: Request, begun: BegunReply) -> None:
        """Put a request that was running at the front of the queue."""
        self.begun[request.id] = begun
        self._queue.appendleft(request)
        self._wanted[request.prompt] += 1

    def take(self) -> Request:
        """Remove and return the first request. Its prompt is kept until `release`."""
        return self._queue.popleft()

    def release(self, requests: Iterable[Request]) -> None:
        """Drop the prompts of requests that were taken, if no waiting request has them."""
        self._wanted -= Counter(request.prompt for request in requests)
        self._drop_unused()

    def _drop_unused(self) -> None:
        self.prefixes = {prompt: prefix for prompt, prefix in self.prefixes.items() if prompt in self._wanted}

    def cancel(self, id: int) -> None:
        """Remove a request, if it waits."""
        self._queue = deque(request for request in self._queue if request.id != id)
        self._wanted = Counter(request.prompt for request in self._queue)
        self.resumed.pop(id, None)
        self.begun.pop(id, None)
        self._drop_unused()

    def clear(self) -> None:
        for held in (self._queue, self._wanted, self.prefixes, self.resumed, self.begun):
            held.clear()

    def given(self, request: Request) -> int:
        """Return the number of tokens behind the prompt of a request that is admitted."""
        return len(request.own) + len(self.begun[request.id].tokens if request.id in self.begun else ())

    def replies(self, ids: Collection[int]) -> dict[int, tuple[list[int], list[float]]]:
        """Return the tokens and log-probabilities of preempted requests so far, by their ids."""
        return {id: (list(tokens), list(logp)) for id, (tokens, logp) in self.begun.items() if id in ids}
