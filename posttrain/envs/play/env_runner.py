"""Runs episodes in this process. It decides how exceptions of user code are reported, and how async code shares a
thread.

An environment written with `def` has the thread to itself while it runs. An episode of one written with `async def` is
a task of an event loop, from its first turn to its reward, and any number of episodes run side by side.
"""

from __future__ import annotations

import asyncio
import copy
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import replace
from typing import Any, NamedTuple

from posttrain.core.types import Ask, AsyncEnv, Env, Invalid, InvalidKind, Reply, Task, Turn, UserError
from posttrain.envs.play.call_recording import CURRENT, NOTING, CallJournal
from posttrain.envs.play.env_outputs import AwaitsGroup, Done, Event, cleaned, read_verdict, read_yielded, unreadable
from posttrain.envs.play.group_rewards import (
    GroupVerdicts,
    group_reward_of,
    is_group_reward,
    lift_async_group,
    lift_group,
    read_group,
)
from posttrain.envs.play.load_env import is_async, is_generator_env, lift, lift_async
from posttrain.system.user_code import describe_error, source_file

DIVERGED = (
    "did something else when it was replayed, after a crash or for a branch: an environment must depend only on its "
    "task, replies and answers; call everything else through `recorded`"
)

Records = Callable[[int, int, Any], None]
"""Stores a recorded result: the episode's number, the number of the result, and the result."""


class _Result(NamedTuple):
    """The value that an episode returned, to be scored with its group."""

    task: Task
    value: Any
    journal: CallJournal


class _Reports:
    """Converts results and exceptions of user code to events. No exception of user code leaves it.

    `alone`: whether the process belongs to the environment, so that even a KeyboardInterrupt is no user's at the
    keyboard. `memory`: limit of the process in GiB, for the reason when memory runs out (0: no limit). `records` stores
    results that episodes record.
    """

    def __init__(self, function: Callable[..., Any], alone: bool, memory: float, records: Records | None) -> None:
        self._records = records
        self.single_turn = not is_generator_env(function)
        self._group_reward = None if self.single_turn else group_reward_of(function)
        self.by_group = self._group_reward is not None or (self.single_turn and is_group_reward(function))
        self._results: dict[int, _Result] = {}  # of the episodes that await their group
        self._file = source_file(function)
        self._memory = memory
        self._alone = alone

    def raised(self, error: BaseException) -> Done:
        """Return the end of an episode whose code raised."""
        try:
            reason = describe_error(error, self._file)
        except BaseException as failed:  # raised by the user's __str__, or for lack of memory
            self._let_through(failed)
            reason = type(error).__name__
        if isinstance(error, MemoryError) and self._memory:
            reason += f"; a worker may use {self._memory:g} GiB: see --env-memory"
        return Done(Invalid(cleaned(reason), InvalidKind.RAISED))

    def _let_through(self, error: BaseException) -> None:
        """Raise a KeyboardInterrupt of the user; every other exception is reported as the environment's."""
        if isinstance(error, KeyboardInterrupt) and not self._alone:
            raise error

    def _verdict(self, value: Any) -> Done:
        try:
            return read_group(value) if isinstance(value, GroupVerdicts) else read_verdict(value)
        except BaseException as error:  # raised by types of the user's
            self._let_through(error)
            return self.raised(error)

    def _ended(self, id: int, value: Any, task: Task, journal: CallJournal) -> Event:
        """Return the end of an episode, or keep what it returned until its group is scored."""
        if self._group_reward is None or isinstance(value, GroupVerdicts | Invalid):
            return self._verdict(value)
        self._results[id] = _Result(task, value, journal)
        return AwaitsGroup()

    def _group_of(self, members: Sequence[int]) -> tuple[Task, list[CallJournal]]:
        """Return the task of the environment that scores these episodes, and their journals."""
        results = [self._results.pop(member) for member in members]
        tasks = [self._own(result.task) for result in results]
        return {"tasks": tasks, "replies": [r.value for r in results]}, [r.journal for r in results]

    def _with_notes(self, event: Event, journals: Sequence[CallJournal]) -> Event:
        """Return the verdicts of a group with the notes that its episodes made themselves."""
        assert isinstance(event, Done), "a reward of groups asks nothing"
        members = event.group or [Done(event.reward)] * len(journals)
        found = [replace(d, notes={**j.notes, **d.notes}) for d, j in zip(members, journals, strict=True)]
        return replace(event, group=tuple(found))

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
        """Return a copy of a task: the rows of a group are one object, and an episode may change its row."""
        return task if self._alone else copy.deepcopy(task)


class EnvRunner(_Reports):
    """The episodes in progress in this process, of which one at a time runs."""

    def __init__(
        self, function: Callable[..., Any], alone: bool = False, memory: float = 0.0, records: Records | None = None
    ) -> None:
        super().__init__(function, alone, memory, records)
        lifted = lift_group if self.by_group else lift
        self._env: Env = lifted(function) if self.single_turn else function
        self._episodes: dict[int, tuple[Generator[Any, Any, Any], CallJournal, Task]] = {}

    def start(self, id: int, task: Task, known: Mapping[int, Any] | None = None) -> Event:
        """Begin an episode and return its first event. `known`: results recorded before its replay."""
        self._episodes[id] = self._begin(task), self._journal(id, known or {}), task
        return self._resume(id, None)

    def score(self, id: int, members: Sequence[int], known: Mapping[int, Any] | None = None) -> Event:
        """Score the episodes `members`, which await their group, as the episode `id`."""
        assert self._group_reward is not None, "each episode has a reward of its own"
        group, journals = self._group_of(members)
        self._episodes[id] = lift_group(self._group_reward)(group), self._journal(id, known or {}), group
        return self._with_notes(self._resume(id, None), journals)

    def send(self, id: int, said: Any) -> Event:
        """Continue an episode. `said`: the reply to its turn, or the answer to its request."""
        return self._resume(id, said)

    def drop(self, id: int) -> None:
        self._results.pop(id, None)
        episode = self._episodes.pop(id, None)
        try:
            if episode is not None:
                episode[0].close()  # may run code of the user's
        except BaseException as error:
            self._let_through(error)

    def close(self) -> None:
        """Abandon all episodes in progress."""
        for id in [*self._episodes, *self._results]:
            self.drop(id)

    def _begin(self, task: Task) -> Generator[Any, Any, Any]:
        """Run the environment; it is called only at the first resumption, so that exceptions of a decorator are caught
        too.
        """
        return (yield from self._env(self._own(task)))

    def _resume(self, id: int, said: Any) -> Event:
        journal = self._episodes[id][1]
        return self._end(self._step(id, said), journal)

    def _step(self, id: int, said: Any) -> Event:
        playing, journal, task = episode = self._episodes.pop(id)
        token, noting = CURRENT.set(journal), NOTING.set(journal)
        try:
            event = read_yielded(playing.send(said))
        except StopIteration as end:
            return self._ended(id, end.value, task, journal)
        except BaseException as error:
            self._let_through(error)
            self._episodes[id] = episode  # if only reading its yielded value failed, it has not ended
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


_Begin = Callable[[], AsyncGenerator[Any, Any]]


class _Waiting:
    """An async episode, which is a task of the event loop."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None


class AsyncEnvRunner(_Reports):
    """The episodes in progress in this event loop.

    `seconds`: the limit of a step; an episode that takes longer is cancelled, and the reason begins with `name`.
    `enters` is called with the episode's number each time before its code runs, if `noting` makes the loop's tasks: if
    the code never returns, its episode is known.
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
        """Begin an episode and return its first event. `known`: results recorded before its replay."""
        return await self._run(id, lambda: self._env(self._own(task)), task, self._journal(id, known or {}))

    async def score(self, id: int, members: Sequence[int], known: Mapping[int, Any] | None = None) -> Event:
        """Score the episodes `members`, which await their group, as the episode `id`."""
        assert self._group_reward is not None, "each episode has a reward of its own"
        group, journals = self._group_of(members)
        scoring = lift_async_group(self._group_reward)
        event = await self._run(id, lambda: scoring(group), group, self._journal(id, known or {}))
        return self._with_notes(event, journals)

    async def _run(self, id: int, begin: _Begin, task: Task, journal: CallJournal) -> Event:
        """Begin an episode in a task of its own, and return its first event."""
        episode = self._episodes[id] = _Waiting()
        context = copy_context()
        context.run(_ENTERS.set, lambda: self._enters(id))
        run = self._play(id, begin, task, journal)
        episode.task = asyncio.get_running_loop().create_task(run, context=context)
        return await self._event(id, episode)

    async def send(self, id: int, said: Any) -> Event:
        """Continue an episode. `said`: the reply to its turn, or the answer to its request."""
        episode = self._episodes[id]
        episode.said.put_nowait(said)
        return await self._event(id, episode)

    def drop(self, id: int) -> None:
        self._results.pop(id, None)
        episode = self._episodes.pop(id, None)
        if episode is not None and episode.task is not None:
            episode.task.cancel()

    async def _event(self, id: int, episode: _Waiting) -> Event:
        try:
            event = await asyncio.wait_for(episode.events.get(), self._seconds)
        except TimeoutError:
            self.drop(id)
            return Done(Invalid(f"{self._name}did not return within {self._seconds:g} s", InvalidKind.TIMEOUT))
        if isinstance(event, Done | AwaitsGroup):
            self._episodes.pop(id, None)
        return event

    async def _play(self, id: int, begin: _Begin, task: Task, journal: CallJournal) -> None:
        """Run an episode from beginning to end in one task, so that it can close what it opened with `async with`."""
        CURRENT.set(journal)  # of this task
        NOTING.set(journal)
        episode = self._episodes[id]
        playing: AsyncGenerator[Any, Any] | None = None
        try:
            playing = begin()
            said = None
            while isinstance(event := self._read(id, await playing.asend(said), task, journal), Turn | Ask):
                episode.events.put_nowait(event)
                said = await episode.said.get()
        except StopAsyncIteration:
            event = Done(unreadable("ended without a reward: an async environment must yield it last"))
        except BaseException as error:
            self._let_through(error)
            event = self.raised(error)
        episode.events.put_nowait(self._end(event, journal))  # of an abandoned episode it is not read
        if playing is not None:
            with suppress(Exception, asyncio.CancelledError):  # clean-up code of the user
                async with asyncio.timeout(self._seconds):  # not wait_for, which would close it in another task
                    await playing.aclose()

    def _read(self, id: int, value: Any, task: Task, journal: CallJournal) -> Event:
        """Read a yielded value: a turn, a request to a service, or else the reward."""
        if not isinstance(value, Turn | str | Ask):
            return self._ended(id, value, task, journal)
        event = read_yielded(value)
        return Done(event) if isinstance(event, Invalid) else event


class OneByOne:
    """Runs async episodes in this thread, one step at a time, with the interface of `EnvRunner`."""

    def __init__(self, function: Callable[..., Any], records: Records | None = None) -> None:
        self._stage = AsyncEnvRunner(function, records=records)
        self._loop = asyncio.new_event_loop()
        self.single_turn, self.by_group = self._stage.single_turn, self._stage.by_group

    def start(self, id: int, task: Task, known: Mapping[int, Any] | None = None) -> Event:
        return self._finished(self._stage.start(id, task, known))

    def send(self, id: int, said: Any) -> Event:
        return self._finished(self._stage.send(id, said))

    def score(self, id: int, members: Sequence[int], known: Mapping[int, Any] | None = None) -> Event:
        return self._finished(self._stage.score(id, members, known))

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
    """Return the runner in this process for an environment."""
    return OneByOne(function, records) if is_async(function) else EnvRunner(function, records=records)


def parted(event: Event, said: Any) -> bool:
    """Return whether a value sent before the replay cannot answer this event."""
    return isinstance(event, Done | AwaitsGroup) or isinstance(event, Ask) == isinstance(said, Reply)


def diverged(stage: EnvRunner | AsyncEnvRunner | OneByOne, id: int, event: Event) -> Event:
    """Drop an episode whose replay took another course, and return its end."""
    if isinstance(event, Done) and isinstance(event.reward, Invalid):
        return event
    stage.drop(id)
    return Done(Invalid(DIVERGED, InvalidKind.DIVERGED))


_ENTERS: ContextVar[Callable[[], None] | None] = ContextVar("enters", default=None)
"""Called each time before code of this context continues."""


def noting(loop: asyncio.AbstractEventLoop, coroutine: Any, **how: Any) -> asyncio.Task[Any]:
    """Make a task of a loop. Tasks begun by an episode's code belong to the episode: they call its `enters` too."""
    context: Context | None = how.get("context")
    enters = _ENTERS.get() if context is None else context.get(_ENTERS)
    return asyncio.Task(coroutine if enters is None else _noted(coroutine, enters), loop=loop, **how)


async def _noted(coroutine: Coroutine[Any, Any, Any], enters: Callable[[], None]) -> Any:
    return await _stepped(coroutine, enters)


@types.coroutine
def _stepped(coroutine: Coroutine[Any, Any, Any], enters: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Run a coroutine, calling `enters` each time before it continues."""
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
        except GeneratorExit:  # the caller no longer waits
            coroutine.close()
            raise
        except BaseException as error:  # cancellation
            said, go_on = error, coroutine.throw
