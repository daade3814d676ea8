"""Runs episodes in this process. Decides how exceptions of user code are reported, and how code that waits shares a thread.

An environment written with `def` has the thread to itself while it runs. One that is written with `async def` is a task
of an event loop, from its first turn to its reward: as many as there are wait side by side.
"""

from __future__ import annotations

import asyncio
import copy
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import replace
from typing import Any

from posttrain.core.types import Ask, AsyncEnv, Env, Invalid, InvalidKind, Reply, Task, Turn, UserError
from posttrain.envs.play.call_recording import CURRENT, NOTING, CallJournal
from posttrain.envs.play.env_outputs import Done, Event, cleaned, read_verdict, read_yielded, unreadable
from posttrain.envs.play.group_rewards import GroupVerdicts, is_group_reward, lift_async_group, lift_group, read_group
from posttrain.envs.play.load_env import is_async, is_generator_env, lift, lift_async
from posttrain.system.user_code import describe_error, source_file

DIVERGED = (
    "went another way when it was played again, after a crash or for a branch: an environment must depend on its task, and "
    "on the replies and answers that it gets, alone; what may come out otherwise is called by `recorded`"
)

Records = Callable[[int, int, Any], None]
"""Keeps a recorded result: the episode's number, the number of the result, and the result."""


class _Reports:
    """The report of user code, in words. No exception of it leaves this.

    `alone`: the process is the environment's own, so that not even a KeyboardInterrupt is the user's. `memory`: GiB that
    it may take, for the reason when there are no more (0: no limit). `records` stores results that episodes record.
    """

    def __init__(self, function: Callable[..., Any], alone: bool, memory: float, records: Records | None) -> None:
        self._records = records
        self.single_turn = not is_generator_env(function)
        self.by_group = self.single_turn and is_group_reward(function)
        self._file = source_file(function)
        self._memory = memory
        self._alone = alone

    def raised(self, error: BaseException) -> Done:
        """Return the end of an episode whose code raised."""
        try:
            reason = describe_error(error, self._file)
        except BaseException as failed:  # the user's __str__, or no memory is left for the message
            self._let_through(failed)
            reason = type(error).__name__
        if isinstance(error, MemoryError) and self._memory:
            reason += f"; a worker may take {self._memory:g} GiB: see --env-memory"
        return Done(Invalid(cleaned(reason), InvalidKind.RAISED))

    def _let_through(self, error: BaseException) -> None:
        """Raise an exception of the user's at the keyboard; everything else that an environment raises is its own."""
        if isinstance(error, KeyboardInterrupt) and not self._alone:
            raise error

    def _verdict(self, value: Any) -> Done:
        try:
            return read_group(value) if isinstance(value, GroupVerdicts) else read_verdict(value)
        except BaseException as error:  # types of the user's
            self._let_through(error)
            return self.raised(error)

    def _journal(self, id: int, known: Mapping[int, Any]) -> CallJournal:
        records = self._records
        return CallJournal(None if records is None else lambda number, value: records(id, number, value), known)

    def _end(self, event: Event, journal: CallJournal) -> Event:
        """Return the event, with the episode's notes if it is the end."""
        if not isinstance(event, Done):
            return event
        if event.group:
            members = [replace(done, notes=journal.notes_of(place)) for place, done in enumerate(event.group)]
            event = replace(event, group=tuple(members))
        return replace(event, notes=journal.notes) if journal.notes else event

    def _own(self, task: Task) -> Task:
        """Return an own copy of a task: the rows of a group are one object, and an episode may change its row."""
        return task if self._alone else copy.deepcopy(task)


class EnvRunner(_Reports):
    """The episodes in progress in this process, of which one runs at a time."""

    def __init__(
        self, function: Callable[..., Any], alone: bool = False, memory: float = 0.0, records: Records | None = None
    ) -> None:
        super().__init__(function, alone, memory, records)
        lifted = lift_group if self.by_group else lift
        self._env: Env = lifted(function) if self.single_turn else function
        self._episodes: dict[int, tuple[Generator[Any, Any, Any], CallJournal]] = {}

    def start(self, id: int, task: Task, known: Mapping[int, Any] | None = None) -> Event:
        """Begin an episode. `known`: results recorded before its replay."""
        self._episodes[id] = self._begin(task), self._journal(id, known or {})
        return self._resume(id, None)

    def send(self, id: int, said: Any) -> Event:
        """`said`: the reply to its turn, or the answer to its question."""
        return self._resume(id, said)

    def drop(self, id: int) -> None:
        episode = self._episodes.pop(id, None)
        try:
            if episode is not None:
                episode[0].close()  # may run code of the user's
        except BaseException as error:
            self._let_through(error)

    def close(self) -> None:
        """Give up all episodes in progress."""
        for id in list(self._episodes):
            self.drop(id)

    def _begin(self, task: Task) -> Generator[Any, Any, Any]:
        """Calls the environment only when it is first resumed: an exception of a decorator is then caught like the rest."""
        return (yield from self._env(self._own(task)))

    def _resume(self, id: int, said: Any) -> Event:
        journal = self._episodes[id][1]
        return self._end(self._step(id, said), journal)

    def _step(self, id: int, said: Any) -> Event:
        playing, journal = episode = self._episodes.pop(id)
        token, noting = CURRENT.set(journal), NOTING.set(journal)
        try:
            event = read_yielded(playing.send(said))
        except StopIteration as end:
            return self._verdict(end.value)
        except BaseException as error:
            self._let_through(error)
            self._episodes[id] = episode  # not ended, if its yielded value has failed
            self.drop(id)
            return self.raised(error)
        finally:
            CURRENT.reset(token)
            NOTING.reset(noting)
        self._episodes[id] = episode
        if isinstance(event, Invalid):
            self.drop(id)
            return Done(event)
        return event


# -- code that waits ---------------------------------------------------------------------------------------------------


class _Waiting:
    """An episode that is a task."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None


class AsyncEnvRunner(_Reports):
    """The episodes in progress in this event loop.

    `seconds`: the limit of a step; an episode that takes longer is cancelled, and the reason begins with `name`.
    `enters` is called with its number each time before an episode's code runs, if the loop's tasks are made by `noting`:
    should it never come back, it is known which one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        alone: bool = False,
        memory: float = 0.0,
        seconds: float | None = None,
        name: str = "",
        enters: Callable[[int], None] = lambda number: None,
        records: Records | None = None,
    ) -> None:
        super().__init__(function, alone, memory, records)
        lifted = lift_async_group if self.by_group else lift_async
        self._env: AsyncEnv = lifted(function) if self.single_turn else function
        self._seconds, self._name, self._enters = seconds, name, enters
        self._episodes: dict[int, _Waiting] = {}

    async def start(self, id: int, task: Task, known: Mapping[int, Any] | None = None) -> Event:
        """Begin an episode. `known`: results recorded before its replay."""
        episode = self._episodes[id] = _Waiting()
        context = copy_context()
        context.run(_ENTERS.set, lambda: self._enters(id))
        run = self._play(episode, task, self._journal(id, known or {}))
        episode.task = asyncio.get_running_loop().create_task(run, context=context)
        return await self._event(id, episode)

    async def send(self, id: int, said: Any) -> Event:
        """`said`: the reply to its turn, or the answer to its question."""
        episode = self._episodes[id]
        episode.said.put_nowait(said)
        return await self._event(id, episode)

    def drop(self, id: int) -> None:
        episode = self._episodes.pop(id, None)
        if episode is not None and episode.task is not None:
            episode.task.cancel()

    async def _event(self, id: int, episode: _Waiting) -> Event:
        try:
            event = await asyncio.wait_for(episode.events.get(), self._seconds)
        except TimeoutError:
            self.drop(id)
            return Done(Invalid(f"{self._name}did not return within {self._seconds:g} s", InvalidKind.TIMEOUT))
        if isinstance(event, Done):
            self._episodes.pop(id, None)
        return event

    async def _play(self, episode: _Waiting, task: Task, journal: CallJournal) -> None:
        """Run an episode from its beginning to its end, in one task: what it opens with `async with` it may close."""
        CURRENT.set(journal)  # of this task
        NOTING.set(journal)
        playing: AsyncGenerator[Any, Any] | None = None
        try:
            playing = self._env(self._own(task))
            said = None
            while not isinstance(event := self._read(await playing.asend(said)), Done):
                episode.events.put_nowait(event)
                said = await episode.said.get()
        except StopAsyncIteration:
            event = Done(unreadable("ended without a reward: an async environment yields it, last of all"))
        except BaseException as error:
            self._let_through(error)
            event = self.raised(error)
        episode.events.put_nowait(self._end(event, journal))  # after it was given up nobody reads it
        if playing is not None:
            with suppress(Exception, asyncio.CancelledError):  # code of the user's that cleans up
                async with asyncio.timeout(self._seconds):  # not wait_for, which would close it in another task
                    await playing.aclose()

    def _read(self, value: Any) -> Event:
        """Read a yielded value: a turn, a question, or else the reward."""
        if not isinstance(value, Turn | str | Ask):
            return self._verdict(value)
        event = read_yielded(value)
        return Done(event) if isinstance(event, Invalid) else event


class OneByOne:
    """Episodes that wait, in this thread and one step at a time: as `EnvRunner` has them."""

    def __init__(self, function: Callable[..., Any], records: Records | None = None) -> None:
        self._stage = AsyncEnvRunner(function, records=records)
        self._loop = asyncio.new_event_loop()
        self.single_turn, self.by_group = self._stage.single_turn, self._stage.by_group

    def start(self, id: int, task: Task, known: Mapping[int, Any] | None = None) -> Event:
        return self._finished(self._stage.start(id, task, known))

    def send(self, id: int, said: Any) -> Event:
        return self._finished(self._stage.send(id, said))

    def drop(self, id: int) -> None:
        self._stage.drop(id)

    def close(self) -> None:
        """Cancel all episodes in progress."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

    def _finished(self, step: Coroutine[Any, Any, Event]) -> Event:
        try:
            return self._loop.run_until_complete(step)
        except RuntimeError as error:  # a notebook has a loop of its own in this thread
            step.close()
            raise UserError("an async environment cannot run inside another event loop: use --env-workers 1") from error


def stage_of(function: Callable[..., Any], records: Records | None = None) -> EnvRunner | OneByOne:
    """Return the runner of a function in this process."""
    return OneByOne(function, records) if is_async(function) else EnvRunner(function, records=records)


def parted(event: Event, said: Any) -> bool:
    """Whether what was sent before the replay cannot be the answer to this event."""
    return isinstance(event, Done) or isinstance(event, Ask) == isinstance(said, Reply)


def diverged(stage: EnvRunner | AsyncEnvRunner | OneByOne, id: int, event: Event) -> Event:
    """Return the end of an episode whose replay took another course."""
    if isinstance(event, Done) and isinstance(event.reward, Invalid):
        return event
    stage.drop(id)
    return Done(Invalid(DIVERGED, InvalidKind.DIVERGED))


_ENTERS: ContextVar[Callable[[], None] | None] = ContextVar("enters", default=None)
"""Called before code of this context goes on."""


def noting(loop: asyncio.AbstractEventLoop, coroutine: Any, **how: Any) -> asyncio.Task[Any]:
    """Makes the tasks of a loop: those that the code of an episode begins are the episode's, as it is itself."""
    context: Context | None = how.get("context")
    enters = _ENTERS.get() if context is None else context.get(_ENTERS)
    return asyncio.Task(coroutine if enters is None else _noted(coroutine, enters), loop=loop, **how)


async def _noted(coroutine: Coroutine[Any, Any, Any], enters: Callable[[], None]) -> Any:
    return await _stepped(coroutine, enters)


@types.coroutine
def _stepped(coroutine: Coroutine[Any, Any, Any], enters: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Return a coroutine that calls `enters` each time before it goes on."""
    said: Any = None
    go_on: Callable[[Any], Any] = coroutine.send
    while True:
        enters()
        try:
            waits_for = go_on(said)
        except StopIteration as end:
            return end.value
        try:
            said, go_on = (yield waits_for), coroutine.send
        except GeneratorExit:  # its caller does not wait any more
            coroutine.close()
            raise
        except BaseException as error:  # it was cancelled
            said, go_on = error, coroutine.throw
