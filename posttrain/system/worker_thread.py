"""A thread beside the main one: it runs tasks one after the other, each with a result or an error for the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerThread:
    """A thread that is not of `concurrent.futures`: the interpreter would wait for these at its end."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """Start the thread. `begin` is called first in it."""
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(begin,), name=name, daemon=True)
        self._thread.start()

    def left(self) -> bool:
        """Whether no caller waits any more."""
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
