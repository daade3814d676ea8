"""A pool of worker processes for environments: user code cannot hang, crash or quietly zero a run.

- Each step of an episode (the first turn, or the answer to one reply) has a limit of `seconds` from when its worker began
  it. A worker beyond that is killed, with every process it started, and the episode it was stuck in is
  `Done(Invalid(...))`. The same happens when the worker dies by itself, takes too much memory, or sends an unreadable
  message.
- Scoring goes to any free worker. An episode of several turns stays with the worker that began it, the one with the fewest
  episodes. When that worker is lost, its other episodes are replayed in a fresh one from their task, their replies and the
  answers of services, which gives the same state if the environment is deterministic. It should be: seed its random
  numbers from the task.
- Environments written with `async def` run side by side: a worker has as many of their steps in progress as were
  requested. The worker enforces the limit itself and reports only the result; the pool does so a little later, for code
  that blocks the thread. Then, and when such a worker dies, the episode whose code ran last is blamed.
- A reward of whole groups (`group_rewards.py`) is called once all episodes of a group that were begun have their replies, or
  were given up. To the workers such a group is one episode, so a lost worker affects it like any other.
- Episodes of several turns that are scored so share a worker, which keeps their results. Each ends with `AwaitsGroup`. When
  the caller polls again, and so begins no further one of the group, the worker scores them; a fresh one replays them first.
- The first worker starts at once, the others when it has imported the environment, while models are loaded: an import that
  fails does so once.
- Nothing blocks on a worker's socket: writes send as much as it takes, and reads take what is there.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from posttrain.core.types import Invalid, InvalidKind, Reply, Task, UserError
from posttrain.envs.play.env_outputs import AwaitsGroup, Done, Event
from posttrain.envs.play.env_runner import EnvRunner, OneByOne, diverged, parted, stage_of
from posttrain.envs.play.group_rewards import scores_groups
from posttrain.envs.play.load_env import is_generator_env, load_env, opening, pack_env, step_limit
from posttrain.envs.play.worker_handle import PoolEpisode, QueuedCommand, WorkerHandle
from posttrain.envs.play.worker_protocol import (
    CallRecord,
    Garbled,
    Greeting,
    WorkerCommand,
    WorkerReply,
    WorkerSetup,
    read_answer,
    read_greeting,
    write_commands,
)

IMPORT_SECONDS = 60.0  # for a worker to start and import the environment, which may load an index or a model
LONGEST_STEP = 86_400.0  # greatest limit in seconds: the system cannot wait much longer at once
IMPORT_TRIES = 3  # for a worker that replaces a lost one
CLOSE_SECONDS = 1.0  # for idle workers to exit by themselves
GRACE_SECONDS = 1.0  # for an async worker to enforce a limit itself
KILLED = (signal.SIGKILL, signal.SIGTERM)
"""Signals that end a process from outside: from a user, a scheduler, the system out of memory."""
KILLED_MOST = 2  # most replays after such a signal: an episode that kills its own process does so each time
MOST_BESIDE = 1024  # most scores in progress in an async worker


def default_workers() -> int:
    """Return the number of available processors."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _own(said: Any) -> Any:
    """Return a copy that code in this process may change."""
    return said if isinstance(said, Reply) else deepcopy(said)


def _fits_group(episode: PoolEpisode, event: Event | None) -> bool:
    """Return whether a group's event has a result for each member, and any other event has none."""
    if event is None or not episode.members:
        return not (isinstance(event, Done) and event.group)
    if not isinstance(event, Done) or event.sides:
        return False
    return len(event.group) == len(episode.members) or (not event.group and isinstance(event.reward, Invalid))


def _named(task: Task) -> Any:
    """Return the id of a task; for a group, of its first task."""
    return task["tasks"][0].get("id") if task.keys() == {"tasks", "replies"} else task.get("id")


class EnvPool:
    """Episodes of one environment: `start` and `send` issue commands, `poll` returns the events in order of arrival.

    env       a name as in `load_env`, a reward or a generator function, either of them perhaps async
    workers   number of processes; None: the number of processors; 0: everything runs in this process, at once and in the
              caller's thread, without limits, as a debugger needs it
    seconds   limit of one step, which a task set may raise
    memory    GiB that a worker may take; 0: no limit

    Raises UserError for numbers out of range, and for an environment that does not exist.
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        workers: int | None = None,
        seconds: float = 10.0,
        memory: float = 4.0,
    ) -> None:
        workers = default_workers() if workers is None else workers
        if workers < 0 or seconds <= 0 or memory < 0:
            raise UserError(
                f"workers and memory must be 0 or more and seconds above 0, not {workers}, {memory:g} and {seconds:g}"
            )
        seconds = step_limit(env, seconds)
        if seconds > LONGEST_STEP:
            raise UserError(f"a step may take at most {LONGEST_STEP:g} seconds (one day), not {seconds:g}")
        self.size = workers
        self.waited = 0.0  # seconds in which the caller only waited for an event
        self._name = env if isinstance(env, str) else getattr(env, "__qualname__", type(env).__name__)
        self._seconds = seconds
        self._folder = os.getcwd()  # so that workers started later find the same files
        self._episodes: dict[int, PoolEpisode] = {}  # by the caller's id
        self._begun = 0
        self._waiting = 0  # number of episodes with an unanswered command
        self._events: list[tuple[int, Event]] = []
        self._queue: deque[QueuedCommand] = deque()  # orders for any worker, or until the kind of environment is known
        self._workers: list[WorkerHandle] = []
        self._selector = selectors.DefaultSelector()
        self._imported = False  # whether any worker has ever imported the environment
        self._tries = 0  # consecutive failed imports since then
        self._closed = False
        self._groups: dict[Hashable, list[PoolEpisode]] = {}  # group -> its episodes not scored yet
        self._changed: dict[Hashable, None] = {}  # groups that may have become complete since the last poll
        self._by_group = False  # whether the reward scores whole groups, once known
        self._stage: EnvRunner | OneByOne | None = stage_of(load_env(env), self._keep) if workers == 0 else None
        self._single_turn: bool | None = None  # not known before a worker has imported the environment
        if self._stage is not None:
            self._single_turn, self._by_group = self._stage.single_turn, self._stage.by_group
            return
        if not isinstance(env, str):
            self._single_turn = not is_generator_env(load_env(env))
            self._by_group = scores_groups(env)
        self._setup = WorkerSetup(pack_env(env), self._name, memory, seconds)
        self._add_worker()

    # -- asking --------------------------------------------------------------------------------------------------------

    def start(self, id: int, task: Task, group: Hashable = None) -> None:
        """Begin an episode; its first event comes from `poll`. `id` is free again after its `Done`.

        `group`: a reward of whole groups scores the episodes of a group together, in the order of their ids; None: a
        group of one. All episodes of a group must begin before the last of them gets its reply, or before the `poll`
        after the one by which the last of them awaits its group. Raises UserError if a plain reward's task has neither
        prompt nor messages; so may `poll`, during the import.
        """
        assert id not in self._episodes, f"episode {id} is in progress"
        self._begun += 1
        self._episodes[id] = episode = PoolEpisode(
            id, self._begun, task, group=("alone", id) if group is None else group
        )
        self._groups.setdefault(episode.group, []).append(episode)
        self._ask(episode)

    def branch(self, id: int, to: int) -> None:
        """Begin a copy `to` of the episode `id`, which waits for a reply. Its first event is that turn again.

        The copy is replayed with the replies and answers so far; recorded calls are not repeated. If it takes another
        course, its event is `Done`.
        """
        known = self._episodes[id]
        assert not known.waiting and to not in self._episodes
        self._begun += 1
        # a message may hold both episodes: changes that one of them makes to its answers must not reach the other
        sent, recorded = deepcopy((known.sent, known.recorded))
        self._episodes[to] = PoolEpisode(to, self._begun, known.task, sent, recorded, group=known.group)
        self._groups.setdefault(known.group, []).append(self._episodes[to])
        self._ask(self._episodes[to])

    def send(self, id: int, said: Any) -> None:
        """Answer the last turn of an episode with a `Reply`, or its request to a service with plain JSON data or
        Invalid.
        """
        episode = self._episodes[id]
        assert not episode.waiting, f"episode {id} has not shown its next turn"
        episode.sent.append(said)
        episode.waiting = True
        self._ask(episode)

    def drop(self, id: int) -> None:
        """Abandon an episode that waits for a reply, an answer or its group. It has no further event."""
        episode = self._episodes.pop(id)
        assert not episode.waiting, f"episode {id} has not shown its next turn"
        self._leave_group(episode)
        if self._by_group and self._single_turn:
            self._score_replies(episode.group)
        elif self._stage is not None:
            self._stage.drop(id)
        elif episode.placed and episode.worker is not None:
            episode.worker.queue.append(QueuedCommand(episode, drop=True))

    def clear(self) -> None:
        """Abandon all episodes; those with a step in progress, after that step."""
        replied = [e for own in self._groups.values() for e in own if self._by_group and self._single_turn and e.sent]
        for episode in replied:
            episode.waiting = False  # it waits for others of its group, which get no more replies
            self._waiting -= 1
            self._leave_group(episode)
            del self._episodes[episode.id]
        while self._waiting and not self._closed:
            self._exchange(None)
        self._events.clear()
        for id in [] if self._closed else list(self._episodes):
            self.drop(id)

    def poll(self, timeout: float | None = 0.0) -> list[tuple[int, Event]]:
        """Return the events since the last call. Waits up to `timeout` seconds (None: without limit) for at least one
        event.

        Returns [] at once if nothing is pending. Commands are sent to the workers here, so poll often.
        Raises UserError if the environment cannot be imported.
        """
        for group in [group for group in self._changed if self._complete(group)]:
            self._score_results(group)
        self._changed.clear()
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._exchange(time.monotonic() if self._events else end)
            if self._events or not self.pending or (end is not None and time.monotonic() >= end):
                break
        events, self._events = self._events, []
        for episode in [self._episodes[id] for id, event in events if isinstance(event, AwaitsGroup)]:
            episode.awaits = True
            self._changed[episode.group] = None
        return events

    def ready(self) -> None:
        """Wait until every worker has imported the environment, as before a measurement.

        Raises UserError if the import fails.
        """
        while len(self._workers) < self.size or not all(worker.ready for worker in self._workers):
            self._exchange(time.monotonic() + IMPORT_SECONDS)

    @property
    def pending(self) -> int:
        """Number of starts and sends whose event `poll` has not returned yet, and of groups that it will score."""
        return len(self._events) + self._waiting + sum(map(self._complete, self._changed))

    @property
    def single_turn(self) -> bool:
        """Whether it is a plain reward: its only turn is the task's, so `start` needs no worker.

        May wait for the import.
        """
        return self._kind()[0]

    @property
    def by_group(self) -> bool:
        """Whether the reward scores whole groups. May wait for the import."""
        return self._kind()[1]

    def _kind(self) -> tuple[bool, bool]:
        """Return whether it is a plain reward, and whether it scores whole groups."""
        while self._single_turn is None:
            self._exchange(time.monotonic() + IMPORT_SECONDS)
        return self._single_turn, self._by_group

    def close(self) -> None:
        """End the workers; episodes in progress are lost. May be called twice."""
        if self._stage is not None and not self._closed:
            self._stage.close()
        self._closed = True
        workers, self._workers = self._workers, []
        for worker in workers:
            self._selector.unregister(worker.socket)
            if worker.ready and not worker.sent:
                worker.socket.close()
        end = time.monotonic() + CLOSE_SECONDS
        for worker in workers:
            if worker.ready and not worker.sent:
                worker.child.wait(end - time.monotonic())
        for worker in workers:
            worker.kill()
        self._selector.close()

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _ask(self, episode: PoolEpisode) -> None:
        self._waiting += 1
        first = opening(episode.task) if self._single_turn and not episode.sent else None
        if self._by_group and first is not None:
            self._answer(episode, first)
        elif self._by_group and self._single_turn:
            self._score_replies(episode.group)
        elif self._stage is not None:
            began = time.perf_counter()
            sent, id = episode.sent, episode.id
            event = self._stage.send(id, _own(sent[-1])) if episode.placed else self._replayed(episode)
            episode.placed = True
            self.waited += time.perf_counter() - began
            self._answer(episode, event)
        elif first is not None:
            self._answer(episode, first)
        else:
            self._place(QueuedCommand(episode))

    def _score_replies(self, group: Hashable) -> None:
        """Score a group of single replies if all of them have arrived."""
        members = self._groups.get(group, [])
        if members and all(episode.sent for episode in members):
            members = sorted(self._groups.pop(group), key=lambda episode: episode.id)
            self._score(members, {"tasks": [e.task for e in members], "replies": [e.sent[0] for e in members]})

    def _complete(self, group: Hashable) -> bool:
        """Return whether all episodes of a group await it."""
        members = self._groups.get(group)
        return bool(members) and all(episode.awaits for episode in members or ())

    def _score_results(self, group: Hashable) -> None:
        """Score a group whose results its worker has."""
        members = sorted(self._groups.pop(group), key=lambda episode: episode.id)
        for episode in members:
            episode.waiting = True
        self._waiting += len(members)
        self._score(members, {})

    def _score(self, members: Sequence[PoolEpisode], asked: Task) -> None:
        self._begun += 1
        whole = PoolEpisode(-self._begun, self._begun, asked, worker=members[0].worker, members=tuple(members))
        if self._stage is None:
            return self._place(QueuedCommand(whole))
        began = time.perf_counter()
        event = self._stage.start(whole.id, asked) if asked else self._stage.score(whole.id, [e.id for e in members])
        self.waited += time.perf_counter() - began
        self._answer(whole, event)

    def _leave_group(self, episode: PoolEpisode) -> None:
        """Remove an episode from its group."""
        own = self._groups.get(episode.group, [])
        if episode in own:
            own.remove(episode)
            if self._by_group:
                self._changed[episode.group] = None
        if not own:
            self._groups.pop(episode.group, None)

    def _replayed(self, episode: PoolEpisode) -> Event:
        """Replay an episode in this process with everything sent to it, and return the last event."""
        assert self._stage is not None
        event = self._stage.start(episode.id, episode.task, deepcopy(episode.recorded))
        for said in episode.sent:
            if parted(event, said):
                return diverged(self._stage, episode.id, event)
            event = self._stage.send(episode.id, _own(said))
        return event

    def _keep(self, id: int, which: int, result: Any) -> None:
        """Store a result recorded by an episode in this process, as a copy: the environment may change its own."""
        if id in self._episodes:
            self._episodes[id].recorded[which] = deepcopy(result)

    def _place(self, order: QueuedCommand) -> None:
        """Queue an order for the worker of its episode, or for any worker."""
        assert not self._closed, "the pool is closed"
        episode = order.episode
        if self._single_turn is False and episode.worker is None:
            held = {worker: 0 for worker in self._workers}
            for other in self._episodes.values():
                if other.worker is not None:
                    held[other.worker] += 1
            beside = [e.worker for e in self._groups[episode.group] if e.worker is not None] if self._by_group else []
            episode.worker = beside[0] if beside else min(held, key=lambda worker: held[worker])
        (self._queue if episode.worker is None else episode.worker.queue).append(order)

    def _answer(self, episode: PoolEpisode, event: Event) -> None:
        if episode.members:
            assert isinstance(event, Done), "a reward of groups has no requests"
            for member, done in zip(episode.members, event.group or [event] * len(episode.members), strict=True):
                self._answer(member, replace(done, notes={**event.notes, **done.notes}))
            return
        self._events.append((episode.id, event))
        episode.waiting = False
        self._waiting -= 1
        if isinstance(event, Done):
            del self._episodes[episode.id]
            self._leave_group(episode)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _exchange(self, end: float | None) -> None:
        """Exchange messages with the workers once: send queued orders, wait until `end` for an answer or a limit,
        receive.
        """
        self._dispatch()
        now = time.monotonic()
        limits = [limit for worker in self._workers if (limit := self._limit(worker)) is not None]
        until = min([*limits, *([] if end is None else [end])], default=now)
        arrived: list[WorkerHandle] = [key.data for key, _ in self._selector.select(max(0.0, until - now))]
        for worker in arrived:
            self._receive(worker)
        for worker in list(self._workers):
            limit = self._limit(worker)
            # overdue before the wait, and silent since
            if worker not in arrived and limit is not None and limit <= now:
                self._overdue(worker)
        self._dispatch()  # send the next commands now: the caller may not poll for a while

    def _limit(self, worker: WorkerHandle) -> float | None:
        """Return the time at which the worker is replaced unless it answers; None without orders."""
        if not worker.ready:
            return worker.since + IMPORT_SECONDS
        if not worker.sent:
            return None
        if worker.waits:
            return min(order.since for order in worker.sent.values()) + self._seconds + GRACE_SECONDS
        return worker.since + self._seconds

    def _dispatch(self) -> None:
        for worker in list(self._workers):
            if worker.ready and (worker.waits or not worker.sent) and (worker.queue or self._queue):
                if not worker.sent and worker.stirs:
                    self._receive(worker)  # it has no orders: it is gone, or sends unrequested data
                    continue
                self._hand(worker)
            if worker.line.unsent:
                self._write(worker)

    def _hand(self, worker: WorkerHandle) -> None:
        """Give a free worker its own orders, or its share of those for any worker, which shrinks with the queue."""
        worker.queue.extend(self._queue.popleft() for _ in range(self._share(worker)))
        if not worker.queue:
            return
        commands = []
        pickled: dict[int, bytes] = {}  # by the identity of a task, which a group shares
        now = time.monotonic()
        for order in worker.queue:
            commands.append(self._command(order.episode, order.drop, pickled))
            order.since = now
            worker.sent[order.episode.number] = order
        worker.queue.clear()
        worker.line.unsent += write_commands(commands)
        worker.since = time.monotonic()

    def _command(self, episode: PoolEpisode, drop: bool, pickled: dict[int, bytes]) -> WorkerCommand:
        """Return the command for the next step of an episode, from its beginning if its worker does not know it."""
        sent, recorded = episode.sent[-1:], dict[int, Any]()
        task: bytes | None = None
        if not (episode.placed or drop):
            key = id(episode.task)
            task = pickled[key] = pickled.get(key) or self._pickled(episode.task)
            sent, recorded = episode.sent, episode.recorded
        results = () if self._single_turn else episode.members
        members = tuple(self._command(member, False, pickled) for member in results)
        episode.placed = not drop
        return WorkerCommand(episode.number, task, () if drop else tuple(sent), drop, recorded, members)

    def _share(self, worker: WorkerHandle) -> int:
        """Return the number of orders from the common queue that this worker takes."""
        if not self._single_turn:
            return 0
        if worker.waits:
            under_way = sum(len(other.sent) for other in self._workers)
            fair = -(-(len(self._queue) + under_way) // self.size)
            return min(len(self._queue), max(0, min(fair, MOST_BESIDE) - len(worker.sent)))
        return -(-len(self._queue) // (2 * self.size))

    def _pickled(self, task: Task) -> bytes:
        try:
            return pickle.dumps(task)
        except Exception as error:  # the objects in it may raise anything
            raise UserError(
                f"task {_named(task)!r} cannot be sent to a worker: {type(error).__name__}: {error}; keep only values that "
                "can be pickled, or use --env-workers 0"
            ) from error

    def _write(self, worker: WorkerHandle) -> None:
        try:
            whole = worker.write()
        except OSError:
            return  # it is gone, which the next read reports
        events = selectors.EVENT_READ if whole else selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.modify(worker.socket, events, worker)

    def _receive(self, worker: WorkerHandle) -> None:
        try:
            for content in worker.line.read():
                if worker.ready:
                    self._take(worker, read_answer(content))
                else:
                    self._greet(worker, read_greeting(content))
        except Garbled as error:
            self._lost(
                worker, f"its worker process sent a message that cannot be read ({error})", InvalidKind.UNREADABLE
            )
        except (EOFError, OSError):
            ended = worker.child.wait(CLOSE_SECONDS)
            reason = f"died ({worker.child.exit()})" if ended else "closed its socket"
            killed = ended and -worker.child.code in KILLED
            self._lost(worker, f"its worker process {reason}", InvalidKind.DIED, killed)

    def _take(self, worker: WorkerHandle, answer: WorkerReply | CallRecord) -> None:
        order = worker.sent.get(answer.number)
        if isinstance(answer, CallRecord):  # it extends no limit, and its episode may have been abandoned
            if order is not None and not order.drop:
                order.episode.recorded[answer.which] = answer.result
            return
        worker.since = time.monotonic()
        if order is None or not (worker.waits or order is worker.blamed):
            raise Garbled("an answer out of turn")
        if answer.event is None and not order.drop:
            order.since = worker.since
            return  # a step that was replayed
        if order.drop != (answer.event is None):
            raise Garbled("an answer out of turn")
        if not _fits_group(order.episode, answer.event) or (
            isinstance(answer.event, AwaitsGroup) and (self._single_turn or not self._by_group)
        ):
            raise Garbled("an answer of another group")
        del worker.sent[answer.number]
        if answer.event is not None:
            self._answer(order.episode, answer.event)

    def _greet(self, worker: WorkerHandle, message: Greeting | str) -> None:
        if isinstance(message, str):
            self._import_failed(worker, message)
            return
        worker.ready, self._imported, self._tries = True, True, 0
        worker.since = time.monotonic()
        worker.waits, self._by_group = message.waits, message.by_group
        while len(self._workers) < self.size:
            self._add_worker()
        if self._single_turn is None:
            self._single_turn = message.single_turn
            orders, self._queue = self._queue, deque()
            self._waiting -= len(orders)
            for order in orders:  # all of them starts
                self._ask(order.episode)

    def _overdue(self, worker: WorkerHandle) -> None:
        if worker.ready:
            self._lost(worker, f"did not return within {self._seconds:g} s", InvalidKind.TIMEOUT)
        else:
            self._import_failed(worker, f"{self._name} did not finish importing within {IMPORT_SECONDS:g} s")

    def _lost(self, worker: WorkerHandle, reason: str, kind: InvalidKind, killed: bool = False) -> None:
        """Replace a lost worker; the reason blames the episode that it ran, if any.

        `killed`: from outside, as far as known. In that case the episode is not to blame, and is replayed like the
        others.
        """
        if not worker.ready:
            self._import_failed(worker, f"{self._name}: {reason.replace('its', 'a')} while it was imported")
            return
        if worker.sent:
            order = worker.blamed
            if killed and order.episode.killed < KILLED_MOST:
                order.episode.killed += 1
                return self._replace(worker)
            del worker.sent[order.episode.number]
            if not order.drop:
                self._answer(order.episode, Done(Invalid(f"{self._name}: {reason}", kind)))
        self._replace(worker)

    def _import_failed(self, worker: WorkerHandle, message: str) -> None:
        """Raise UserError if no worker ever imported the environment, or if a fresh worker fails repeatedly; else try
        again.
        """
        self._tries += 1
        if not self._imported or self._tries >= IMPORT_TRIES:
            self.close()
            raise UserError(message)
        self._replace(worker)

    def _replace(self, lost: WorkerHandle) -> None:
        """Start a fresh worker for a lost one; its episodes are replayed there when they continue."""
        self._selector.unregister(lost.socket)
        self._workers.remove(lost)
        lost.kill()
        fresh = self._add_worker()
        orders = [order for order in (*lost.sent.values(), *lost.queue) if not order.drop]
        if self._single_turn:
            self._queue.extendleft(reversed(orders))
        else:
            fresh.queue.extend(orders)
        for episode in self._episodes.values():
            if episode.worker is lost:
                episode.worker = fresh
                episode.placed = False
        for order in orders:
            order.episode.placed = False

    def _add_worker(self) -> WorkerHandle:
        worker = WorkerHandle(self._setup, self._folder)
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        self._write(worker)
        return worker
