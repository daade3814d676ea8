"""Calls that an episode makes once, and that its replay does not repeat: `recorded`.

When a worker is lost, its environments are replayed from their tasks and the replies they had. Their calls to the
outside world, such as a search, would be repeated and might return something else. The pool keeps a recorded result and
returns it instead.
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

MOST_RECORDS = 4096  # of an episode
MOST_NOTES = 1 << 16  # characters of an episode's notes
LEFT_OUT = f"left out: more than the {MOST_NOTES:,} characters of an episode's notes"
FURTHER = {"further notes": LEFT_OUT}
"""The note beyond that limit, where not even a name has room."""
MOST_FURTHER = 99  # its characters, as they are counted

Keep = Callable[[int, Any], None]
"""Sends a result to the pool: its number within the episode, and the result."""


class CallJournal:
    """The results of one episode, by the order of its calls.

    `known`: earlier results, in the order in which they came. Waiting calls get them in that order again: the order in
    which tasks go on decides the numbers of their next calls.
    """

    def __init__(self, keep: Keep | None = None, known: Mapping[int, Any] | None = None) -> None:
        self._keep = keep
        self._known = dict(known or {})
        self._left = deque(self._known)  # that were not taken yet
        self._turns: dict[int, asyncio.Future[None]] = {}  # calls that wait for those before
        self._asked = 0
        self._thread = threading.get_ident()
        self._notes: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}  # of each note, in characters
        self._noted = 0  # their sum
        self._further = False  # whether some of them have left no trace
        self._each: dict[str, list[Any]] = {}  # notes with a value for each member of a group

    @property
    def notes(self) -> dict[str, Any]:
        """The notes so far."""
        return {**self._notes, **(FURTHER if self._further else {})}

    def note_each(self, name: str, values: Sequence[Any]) -> None:
        """Store a note of each member of the group that is scored, in their order."""
        self._each[name] = list(values)

    def notes_of(self, member: int) -> dict[str, Any]:
        """Return the notes of a member of a group. A value that JSON cannot hold is noted as its text."""
        own = CallJournal()
        for name, values in self._each.items():
            if member < len(values):
                own.note_or_text(name, values[member])
        return own.notes

    def note_or_text(self, name: str, value: Any) -> None:
        """Store a note: as its text if JSON cannot hold it."""
        try:
            self.note({name: value})
        except TypeError:
            self.note({name: str(value)})

    def note(self, values: Mapping[str, Any]) -> None:
        """Store notes. Raises TypeError for values that JSON cannot hold. Long values are marked as such: no reward
        depends on them."""
        for name, value in values.items():
            name = str.__str__(name)
            self._notes.pop(name, None)
            self._noted -= self._sizes.pop(name, 0)
            self._further |= not any(self._keeps(name, kept) for kept in (value, LEFT_OUT))

    def _keeps(self, name: str, value: Any) -> bool:
        """Store it, if there is room: each costs its length, however many there are."""
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
                "recorded was called in another thread than its episode's: in an async environment, give it the thread's "
                "work, as in `await recorded(asyncio.to_thread, fetch, url)`"
            )
        number = self._asked
        if number == MOST_RECORDS:
            raise RuntimeError(f"an episode may record {MOST_RECORDS:,} results")
        self._asked += 1
        return number, number in self._known

    def known(self, number: int) -> Any:
        self._left.remove(number)
        after = self._turns.pop(self._left[0], None) if self._left else None
        if after is not None and not after.done():
            after.set_result(None)
        return self._known[number]

    async def turn(self, number: int) -> None:
        """Wait until those that came before are taken."""
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
    """Return the notes of an episode as a worker sends them. Raises ValueError if it has none such."""
    size = [0]
    found: dict[str, Any] = plain_data(dict(notes), size, 0)
    if size[0] > MOST_NOTES + MOST_FURTHER:
        raise TooMuch(f"that makes {size[0]:,} characters of notes: an episode may have {MOST_NOTES:,}")
    return found


CURRENT: ContextVar[CallJournal | None] = ContextVar("journal", default=None)
NOTING: ContextVar[CallJournal | None] = ContextVar("noting", default=None)
"""The episode's journal, also within a recorded call."""


def note(*unnamed: Never, **values: Any) -> None:
    """Store notes of an episode for readers of its rollout: `note(moves=7, opening="e4")`.

    Plain JSON data, under names of the environment's own; a later note replaces an earlier one of its name, and notes
    beyond `MOST_NOTES` characters are left out. No result depends on it, and outside of an environment it does nothing.
    Within a `recorded` call it is refused: a replayed episode does not repeat that call, so note its result instead.
    """
    if unnamed:
        raise TypeError("note takes names, as in note(moves=7); of a dict, note(**values)")
    journal = NOTING.get()
    if journal is None:
        return
    if CURRENT.get() is None:
        raise RuntimeError("note was called within what is recorded: note what `recorded` returned")
    journal.note(values)


def recorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function once in an episode, however often the episode is replayed: `page = recorded(fetch, url)`.

    Its result is plain JSON data. Of a coroutine function the result is awaited: `page = await recorded(fetch, url)`.
    An exception is not recorded. Outside of an environment it is a plain call, and also within a recorded call, which
    is not repeated as a whole, and in threads that the environment starts.
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
        finally:  # if it is given up, others still wait for theirs
            result = journal.known(number)
        return result
    token = CURRENT.set(None)
    try:
        value = await call()
    finally:
        CURRENT.reset(token)
    return journal.write(number, value)
