"""A thread that runs tasks one after the other and returns each result or error to the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerThread:
    """A daemon thread: unlike those of `concurrent.futures`, the interpreter does not wait for it at its end."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """Start the thread, which first calls `begin`."""
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(begin,), name=name, daemon=True)
        self._thread.start()

    def left(self) -> bool:
        """Return whether callers have stopped waiting."""
        return self._closed.is_set()

    def call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future

    def close(self, seconds: float) -> None:
        """Cancel tasks that have not begun, and wait for the running one, up to `seconds`."""
        self._closed.set()
        self._calls.put(None)
        self._thread.join(seconds)

    def _work(self, begin: Callable[[], None]) -> None:
        begin()
        while (asked := self._calls.get()) is not None:
            function, future = asked
            if self.left():
                future.cancel()
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # it is raised where the result is requested
                future.set_exception(error)
