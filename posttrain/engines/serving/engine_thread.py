"""An engine shared by many clients. It runs in its own thread, so that decoding and HTTP do not wait for each other.

All current requests are decoded together, and none waits for a batch to fill. The thread sleeps while there are no
requests. A request whose client has disconnected is cancelled in the engine.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from posttrain.core.messages import one_line
from posttrain.core.protocols import Engine, Watchable
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.serving.requests import RequestRefused
from posttrain.models.gpu_placement import on_this_gpu

JOIN_SECONDS = 30.0  # timeout for a decoding step to end

SoFar = tuple[list[int], list[float]]
"""The tokens of a reply that is being sampled, and their log-probabilities."""
Watch = Callable[[list[int], list[float]], None]
"""A function that receives them."""
Outcome = Completion | UserError | SoFar
"""Events of a request: what was sampled, the error, or the tokens so far."""
WATCH_SECONDS = 0.02  # between two reports of the tokens so far


@dataclass(frozen=True)
class _Order:
    """An order to the thread."""

    id: int
    prompt: Sequence[int] = ()
    sampling: Sampling | None = None  # None: cancel the request
    watched: bool = False


class EngineThread:
    """Passes requests to an engine. It is created and used in one event loop; only the thread uses the engine until
    `close`.
    """

    def __init__(self, engine: Engine, failed: Callable[[BaseException], None] = lambda error: None) -> None:
        """Start the thread. `failed` is called in the event loop if the engine fails; no request is answered after
        that.
        """
        self.engine = engine
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}  # futures of clients, by request number
        self._watches: dict[int, Watch] = {}
        self._shown = threading.Event()  # whether the event loop has passed on the last report of tokens so far
        self._shown.set()
        self._problem: RequestRefused | None = None
        self._count = 0
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(on_this_gpu(),), name="engine", daemon=True)
        self._thread.start()

    async def complete(self, prompt: Sequence[int], sampling: Sampling, watch: Watch | None = None) -> Completion:
        """Sample a reply. Cancelling this coroutine cancels the request in the engine. `watch`: gets its tokens in
        between, where the engine shows them.

        Raises UserError for a request that the engine refuses, and Refused if the engine has failed.
        """
        if self._problem is not None:
            raise self._problem
        self._count += 1
        id, answer = self._count, self._loop.create_future()
        self._waiting[id] = answer
        watched = watch is not None and isinstance(self.engine, Watchable)
        if watch is not None and watched:
            self._watches[id] = watch
        self._orders.put(_Order(id, prompt, sampling, watched))
        try:
            return await answer
        except asyncio.CancelledError:
            self._orders.put(_Order(id))
            raise
        finally:
            del self._waiting[id]
            self._watches.pop(id, None)

    @property
    def under_way(self) -> int:
        """Number of requests with a waiting client."""
        return len(self._waiting)

    def close(self) -> None:
        """Stop the thread and drop its requests. The engine stays open. May be called twice."""
        self._orders.put(None)
        self._thread.join(JOIN_SECONDS)

    def _settle(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        for id, outcome in outcomes:
            answer = self._waiting.get(id)
            if answer is None or answer.done():  # the client is gone
                continue
            if isinstance(outcome, tuple):
                self._watches[id](*outcome)
            elif isinstance(outcome, Completion):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)

    def _report(self, sampled: dict[int, SoFar]) -> None:
        try:
            self._settle(list(sampled.items()))
        finally:
            self._shown.set()

    def _fail(self, problem: BaseException) -> None:
        self._problem = RequestRefused(f"the engine failed: {one_line(problem)}", 503)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._problem)
        self._failed(problem)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _work(self, begin: Callable[[], None]) -> None:
        begin()
        has: set[int] = set()  # numbers of the requests in the engine
        watched: set[int] = set()  # those whose tokens are reported
        reported = 0.0
        try:
            while self._carry_out(has, watched):
                done = self.engine.poll() if has else []
                has.difference_update(completion.id for completion in done)
                self._tell([(completion.id, completion) for completion in done])
                watched &= has
                due = time.monotonic() > reported + WATCH_SECONDS and self._shown.is_set()
                if watched and due and isinstance(self.engine, Watchable):
                    self._shown.clear()
                    self._loop.call_soon_threadsafe(self._report, self.engine.so_far(watched))
                    reported = time.monotonic()
        except BaseException as error:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._fail, error)

    def _carry_out(self, has: set[int], watched: set[int]) -> bool:
        """Carry out the orders, waiting for one if the engine is idle. Return False for the order to stop."""
        refused: list[tuple[int, Outcome]] = []
        with suppress(queue.Empty):
            while (order := self._orders.get(block=not (has or refused))) is not None:
                if order.sampling is None:
                    if order.id in has:
                        self.engine.cancel(order.id)
                        has.discard(order.id)
                    continue
                try:
                    self.engine.submit(order.id, order.prompt, order.sampling)
                except UserError as error:  # an error of the client
                    refused.append((order.id, error))
                else:
                    has.add(order.id)
                    watched.update([order.id] if order.watched else [])
            return False
        self._tell(refused)
        return True

    def _tell(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        if outcomes:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._settle, outcomes)
