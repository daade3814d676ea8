"""Waits for a database so long and no longer: it can be interrupted between two calls of a function, and not within one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from posttrain.core.types import UserError

SECONDS = 12.0  # two beyond those after which a question is interrupted

T = TypeVar("T")


class QueryTimeout:
    """Hands out answers as they come. One that does not come in time is given up, and until it has ended there is no other:
    what nobody can end shall not pile up.
    """

    def __init__(self) -> None:
        self._given_up: list[Thread] = []

    def answer(self, ask: Callable[[], T]) -> T:
        """What `ask` returns or raises. UserError if it takes too long."""
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        if self._given_up:
            raise UserError(
                "an earlier condition is still busy within one call of a function: wait, or start view again"
            )
        found: Future[T] = Future()

        def work() -> None:
            try:
                found.set_result(ask())
            except BaseException as error:
                found.set_exception(error)

        thread = Thread(target=work, daemon=True)
        thread.start()
        try:
            return found.result(SECONDS)
        except TimeoutError:
            if found.done():  # it was its own
                raise
            self._given_up.append(thread)
            raise UserError(
                f"that took longer than {SECONDS:g} s, within one call of a function: ask for less"
            ) from None
