"""Calls that an episode makes once, and that its replay does not repeat: `recorded`.

When a worker is lost, its environments are replayed from their tasks and replies. Their calls to the outside world,
such as a search, would be repeated and might return something else. The pool stores a recorded result and returns it
instead.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Never

from posttrain.envs.play.env_outputs import TooMuch, plain_data

MOST_RECORDS = 4096  # most recorded results of an episode
MOST_NOTES = 1 << 16  # most characters of an episode's notes
LEFT_OUT = f"left out: more than the {MOST_NOTES:,} characters of an episode's notes"
FURTHER = {"further notes": LEFT_OUT}
"""The note in place of notes beyond that limit, names included."""
MOST_FURTHER = 99  # size of that note, as `plain_data` counts it

Keep = Callable[[int, Any], None]
"""Sends a result to the pool: its number within the episode, and the result."""


class CallJournal:
    """The recorded results of one episode, by the order of its calls.

    `known`: earlier results, in order of arrival. In a replay waiting calls get them in that order, because the order
    in which tasks continue decides the numbers of their next calls.
    """

    def __init__(self, keep: Keep | None = None, known: Mapping[int, Any] | None = None) -> None:
        self._keep = keep
        self._known = dict(known or {})
        self._left = deque(self._known)  # known results that were not returned yet
        self._turns: dict[int, asyncio.Future[None]] = {}  # calls that wait for earlier results
        self._asked = 0
        self._thread = threading.get_ident()
        self._notes: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}  # of each note, in characters
        self._noted = 0  # their sum
        self._further = False  # whether some notes were dropped with their names
        self._each: dict[str, list[Any]] = {}  # notes with a value for each member of a group

    @property
    def notes(self) -> dict[str, Any]:
        """The notes so far."""
        return {**self._notes, **(FURTHER if self._further else {})}

    def note_each(self, name: str, values: Sequence[Any]) -> None:
        """Store a note for each member of the group that is scored, in their order."""
        self._each[name] = list(values)

    def notes_of(self, member: int) -> dict[str, Any]:
        """Return the notes of a group's member. Values that JSON cannot hold become text."""
        own = CallJournal()
        for name, values in self._each.items():
            if member < len(values):
                own.note_or_text(name, values[member])
        return own.notes

    def note_or_text(self, name: str, value: Any) -> None:
        """Store a note; a value that JSON cannot hold as its text."""
        try:
            self.note({name: value})
        except TypeError:
            self.note({name: str(value)})

    def note(self, values: Mapping[str, Any]) -> None:
        """Store notes. Raises TypeError for values that JSON cannot hold. Too long values are replaced by a remark, as
        no reward depends on them.
        """
        for name, value in values.items():
            name = str.__str__(name)
            self._notes.pop(name, None)
            self._noted -= self._sizes.pop(name, 0)
            self._further |= not any(self._keeps(name, kept) for kept in (value, LEFT_OUT))

    def _keeps(self, name: str, value: Any) -> bool:
        """Store a note if there is room for it; return whether it was stored."""
        size = [0]
        try:
            ((name, kept),) = plain_data({name: value}, size, 0).items()
        except TooMuch:
            return False
        except ValueError as problem:
            raise TypeError(f"noted something {problem}") from None
        if self._noted + size[0] > MOST_NOTES:
            return False
        self._notes[name], self._sizes[name] = kept, size[0]
        self._noted += size[0]
        return True

    def next(self) -> tuple[int, bool]:
        """Return the number of the current call, and whether its result is known."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "recorded was called in a thread that is not its episode's: in an async environment, pass the thread's "
                "function to it, as in `await recorded(asyncio.to_thread, fetch, url)`"
            )
        number = self._asked
        if number == MOST_RECORDS:
            raise RuntimeError(f"an episode may record at most {MOST_RECORDS:,} results")
        self._asked += 1
        return number, number in self._known

    def known(self, number: int) -> Any:
        self._left.remove(number)
        after = self._turns.pop(self._left[0], None) if self._left else None
        if after is not None and not after.done():
            after.set_result(None)
        return self._known[number]

    async def turn(self, number: int) -> None:
        """Wait until all results that came before are returned."""
        if self._left[0] == number:
            return await asyncio.sleep(0)
        self._turns[number] = asyncio.get_running_loop().create_future()
        await self._turns[number]

    def write(self, number: int, value: Any) -> Any:
        try:
            plain = plain_data(value, [0], 0)
        except ValueError as problem:
            raise TypeError(f"recorded a result {problem}") from None
        if self._keep is not None:
            self._keep(number, plain)
        return plain


def noted_data(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes of an episode as plain data, as a worker sends them. Raises ValueError for invalid notes."""
    size = [0]
    found: dict[str, Any] = plain_data(dict(notes), size, 0)
    if size[0] > MOST_NOTES + MOST_FURTHER:
        raise TooMuch(f"the episode has {size[0]:,} characters of notes: it may have at most {MOST_NOTES:,}")
    return found


CURRENT: ContextVar[CallJournal | None] = ContextVar("journal", default=None)
NOTING: ContextVar[CallJournal | None] = ContextVar("noting", default=None)
"""The journal for notes, also set within a recorded call."""


def note(*unnamed: Never, **values: Any) -> None:
    """Store notes of an episode for readers of its rollout: `note(moves=7, opening="e4")`.

    Plain JSON data, under names of the environment's own; a later note replaces an earlier one of its name, and notes
    beyond `MOST_NOTES` characters are left out. No result depends on it, and outside of an environment it does nothing.
    Within a `recorded` call it is refused: a replayed episode does not repeat that call, so note its result instead.
    """
    if unnamed:
        raise TypeError("note takes named values: write note(moves=7), or note(**values) for a dict")
    journal = NOTING.get()
    if journal is None:
        return
    if CURRENT.get() is None:
        raise RuntimeError("note was called within a recorded function: call it after `recorded` returned")
    journal.note(values)


def recorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function once in an episode, however often the episode is replayed: `page = recorded(fetch, url)`.

    Its result is plain JSON data. For a coroutine function, await the result: `page = await recorded(fetch, url)`. An
    exception is not recorded. It is a plain call outside of an environment, in threads that the environment starts, and
    within a recorded call, whose result is recorded as a whole.
    """
    journal = CURRENT.get() or CallJournal()
    number, known = journal.next()
    if inspect.iscoroutinefunction(function):
        return _awaited(journal, number, known, partial(function, *args, **kwargs))
    if known:
        return journal.known(number)
    token = CURRENT.set(None)
    try:
        value = function(*args, **kwargs)
    finally:
        CURRENT.reset(token)
    return journal.write(number, value)


async def _awaited(journal: CallJournal, number: int, known: bool, call: Callable[[], Any]) -> Any:
    if known:
        try:
            await journal.turn(number)
        finally:  # also if cancelled: others wait for their results
            result = journal.known(number)
        return result
    token = CURRENT.set(None)
    try:
        value = await call()
    finally:
        CURRENT.reset(token)
    return journal.write(number, value)
