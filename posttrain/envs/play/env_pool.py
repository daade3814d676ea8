"""A pool of worker processes for environments: nothing the user's code does can hang, crash or quietly zero a run.

Decided here:

* Each step of an episode (the first turn, or the answer to one reply) has `seconds`, counted from when its worker began
  it. A worker beyond that is killed, with every process it started, and the episode it was stuck in is
  `Done(Invalid(...))`. So it is when the worker dies by itself, takes too much memory, or sends an unreadable message.
* Scoring goes to whichever worker is free. An episode of several turns stays with the worker that began it, the one
  with the fewest of them. When that is lost, its other episodes are replayed in a fresh one from their task, the replies
  and the answers of services that they had, which gives the same state if the environment is deterministic. It
  should be: seed its random numbers from the task.
* An environment that is written with `async def` waits beside others: a worker has as many of its steps under way as are
  asked. It enforces the limit itself, and reports nothing but the result; the pool does so a little later, for code that
  never gives the thread back. Then, and when such a worker dies, the episode whose code ran last is the one that is blamed.
* A reward of whole groups (`group_rewards.py`) is asked once all episodes of a group that were begun have their replies,
  or were given up. To the workers such a group is one episode, of which a lost worker loses no more than of any other.
* The first worker starts at once and the others when it has imported the environment, while models are loaded: an import
  that fails does so once.
* Nothing waits for a worker to read or to write: sockets are written as far as they take it, and read as far as there is.
"""

from __future__ import annotations

import mmap
import os
import pickle
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from posttrain.core.types import Invalid, InvalidKind, Reply, Task, Turn, UserError
from posttrain.envs.play.env_outputs import Done, Event
from posttrain.envs.play.env_runner import EnvRunner, OneByOne, diverged, parted, stage_of
from posttrain.envs.play.group_rewards import is_group_reward
from posttrain.envs.play.load_env import is_generator_env, load_env, opening, pack_env
from posttrain.envs.play.worker_protocol import (
    LONGEST_ANSWER,
    NOTE_BYTES,
    CallRecord,
    Frames,
    Garbled,
    Greeting,
    WorkerCommand,
    WorkerReply,
    WorkerSetup,
    framed,
    noted,
    read_answer,
    read_greeting,
    write_commands,
)
from posttrain.system.child_processes import Child, pair

__all__ = ["Done", "EnvPool", "Event", "Turn"]

IMPORT_SECONDS = 60.0  # for a worker to start and import the environment, which may read an index or a model
LONGEST_STEP = 86_400.0  # seconds of a limit: the system cannot wait much longer at once
IMPORT_TRIES = 3  # of a worker that takes the place of a lost one
CLOSE_SECONDS = 1.0  # for idle workers to leave by themselves
READ_BYTES = 1 << 18  # at once
GRACE_SECONDS = 1.0  # for a worker whose code waits to see to a limit itself
KILLED = (
    signal.SIGKILL,
    signal.SIGTERM,
)  # signals that end a process from outside: a person, a scheduler, the system out of memory
KILLED_MOST = 2  # replays of an episode for that: one that ends its own process so does it each time
MOST_BESIDE = 1024  # scores that wait side by side in a worker


def default_workers() -> int:
    """Return the number of processors for them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _own(said: Any) -> Any:
    """Return a copy for code in this process, which may change it."""
    return said if isinstance(said, Reply) else deepcopy(said)


def _fits_group(episode: _Episode, event: Event | None) -> bool:
    """Whether a worker has answered a group as one, and all else not so."""
    if event is None or not episode.members:
        return not (isinstance(event, Done) and event.group)
    if not isinstance(event, Done) or event.sides:
        return False
    return len(event.group) == len(episode.members) or (not event.group and isinstance(event.reward, Invalid))


def _named(task: Task) -> Any:
    """Return the id of a task, or of the first one of a group."""
    return task["tasks"][0].get("id") if task.keys() == {"tasks", "replies"} else task.get("id")


@dataclass(eq=False, slots=True)
class _Episode:
    id: int  # the caller's
    number: int  # of all that this pool began
    task: Task
    sent: list[Any] = field(default_factory=list)  # to it, in order: replies, and answers of services
    recorded: dict[int, Any] = field(default_factory=dict)  # results of calls that it makes once
    worker: _Worker | None = None  # the worker that has it, or will: None for a plain reward without questions
    placed: bool = False  # its worker holds it, and has seen all that was sent except the last, which may be on its way
    waiting: bool = True  # a command of it is unanswered
    killed: int = 0  # times that its process was ended from outside while it was in it
    group: Hashable = None  # those of one are scored together, if the reward does so
    members: tuple[_Episode, ...] = ()  # of a group that is scored as one episode


@dataclass(eq=False, slots=True)
class _Order:
    """A command for a worker: the next step of an episode, or to forget it."""

    episode: _Episode
    drop: bool = False
    since: float = 0.0  # when it was begun, in a worker whose code waits


class _Worker:
    """Our end of one worker process. Nothing here waits."""

    def __init__(self, setup: WorkerSetup, folder: str) -> None:
        self.ready = False
        self.waits = False  # whether it works on all orders side by side
        self.queue: deque[_Order] = deque()  # to be sent
        self.sent: dict[int, _Order] = {}  # the orders in work, by the number of the episode, in order
        self.since = time.monotonic()  # when it began the first of `sent`
        self.socket, theirs = pair()
        self.socket.setblocking(False)
        note = os.memfd_create("posttrain")
        try:
            os.ftruncate(note, NOTE_BYTES)
            self.note = mmap.mmap(note, NOTE_BYTES)
            with theirs:
                told = {"POSTTRAIN_ENV_TIMEOUT": f"{setup.seconds:g}"}  # an environment may stop earlier
                told["PYTHONHASHSEED"] = "0"  # the order of a set must not change a reward
                self.child = Child(
                    "posttrain.envs.play.env_worker:main", [theirs.fileno(), note], folder=folder, environment=told
                )
        finally:
            os.close(note)
        self.frames = Frames(LONGEST_ANSWER)
        self.unsent = bytearray(framed(pickle.dumps(setup)))

    def write(self) -> bool:
        """Write as much as the socket takes. Returns whether that was all. Raises OSError if the worker is gone."""
        while self.unsent:
            try:
                del self.unsent[: self.socket.send(self.unsent)]
            except BlockingIOError:
                return False
            self.since = time.monotonic()
        return True

    def read(self) -> Iterable[bytes]:
        """Return the messages that are there. Raises EOFError or OSError if it is gone, Garbled if it sends nonsense."""
        try:
            more = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return ()
        if not more:
            raise EOFError
        return self.frames.add(more)

    @property
    def blamed(self) -> _Order:
        """The order that it works on: blamed if it is lost."""
        first = next(iter(self.sent.values()))
        if not self.waits:
            return first
        return next((order for number, order in self.sent.items() if noted(number) == self.note[:]), first)

    @property
    def stirs(self) -> bool:
        """Whether there is something to read, or the end."""
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def kill(self) -> None:
        self.child.kill()
        self.socket.close()
        self.note.close()


class EnvPool:
    """Episodes of one environment: `start` and `send` ask, `poll` brings the answers, in the order they come.

    `env` is a name as in `load_env`, a reward or a generator function, either of them perhaps async; `workers`: how many
    processes, None: as many as there are processors; `seconds`: the limit of one step; `memory`: GiB that a worker may
    take (0: no limit). With `workers=0` everything runs in this process, at once and in the caller's thread, without
    limits: for a debugger.
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
        if seconds > LONGEST_STEP:
            raise UserError(f"a step may take {LONGEST_STEP:g} seconds, one day, at most, not {seconds:g}")
        self.size = workers
        self.waited = 0.0  # seconds in which the player only waited for an answer
        self._name = env if isinstance(env, str) else getattr(env, "__qualname__", type(env).__name__)
        self._seconds = seconds
        self._folder = os.getcwd()  # workers started later are to find the same files
        self._episodes: dict[int, _Episode] = {}  # by the caller's id
        self._begun = 0
        self._waiting = 0  # episodes of which a command is unanswered
        self._events: list[tuple[int, Event]] = []
        self._queue: deque[_Order] = deque()  # for any worker, or until it is known whether it is a plain reward
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._imported = False  # whether any worker ever did
        self._tries = 0  # imports in a row that failed since
        self._closed = False
        self._groups: dict[Hashable, list[_Episode]] = {}  # of a reward of groups: the episodes that are not scored yet
        self._by_group = False  # whether it is one, once that is known
        self._stage: EnvRunner | OneByOne | None = stage_of(load_env(env), self._keep) if workers == 0 else None
        self._single_turn: bool | None = None  # not known before a worker has imported the environment
        if self._stage is not None:
            self._single_turn, self._by_group = self._stage.single_turn, self._stage.by_group
            return
        if not isinstance(env, str):
            self._single_turn = not is_generator_env(load_env(env))
            self._by_group = self._single_turn and is_group_reward(env)
        self._setup = WorkerSetup(pack_env(env), self._name, memory, seconds)
        self._add_worker()

    # -- asking --------------------------------------------------------------------------------------------------------

    def start(self, id: int, task: Task, group: Hashable = None) -> None:
        """Begin an episode; its first event comes from `poll`. `id` is free again after its `Done`.

        `group`: a reward of whole groups scores the episodes of one together, in the order of their ids; None: it is alone.
        All episodes of a group are begun before the last of them gets its reply.

        Raises UserError if a plain reward's task has neither prompt nor messages; so may `poll`, during the import.
        """
        assert id not in self._episodes, f"episode {id} is in progress"
        self._begun += 1
        self._episodes[id] = episode = _Episode(id, self._begun, task, group=("alone", id) if group is None else group)
        self._groups.setdefault(episode.group, []).append(episode)
        self._ask(episode)

    def branch(self, id: int, to: int) -> None:
        """Begin an episode that is where the episode `id` is, which waits for a reply. Its first event is that turn again.

        It is replayed with the replies and answers so far; recorded calls are not repeated. `Done` comes instead
        where it goes another way.
        """
        known = self._episodes[id]
        assert not known.waiting and to not in self._episodes
        self._begun += 1
        # a message may hold both episodes: changes that one of them makes to its answers must not reach the other
        sent, recorded = deepcopy((known.sent, known.recorded))
        self._episodes[to] = _Episode(to, self._begun, known.task, sent, recorded)
        self._ask(self._episodes[to])

    def send(self, id: int, said: Any) -> None:
        """Answer the last turn of an episode with a `Reply`, or its question with plain JSON data or Invalid."""
        episode = self._episodes[id]
        assert not episode.waiting, f"episode {id} has not shown its next turn"
        episode.sent.append(said)
        episode.waiting = True
        self._ask(episode)

    def drop(self, id: int) -> None:
        """Give up an episode that waits for a reply or an answer. There is no further event."""
        episode = self._episodes.pop(id)
        assert not episode.waiting, f"episode {id} has not shown its next turn"
        self._leave_group(episode)
        if self._by_group:
            self._score_group(episode.group)
        elif self._stage is not None:
            self._stage.drop(id)
        elif episode.placed and episode.worker is not None:
            episode.worker.queue.append(_Order(episode, drop=True))

    def clear(self) -> None:
        """Give up all episodes, those under way once they have come so far."""
        for episode in [e for own in self._groups.values() for e in own if self._by_group and e.sent]:
            episode.waiting = False  # it waits for others of its group, which get no reply any more
            self._waiting -= 1
            self._leave_group(episode)
            del self._episodes[episode.id]
        while self.pending and not self._closed:
            self.poll(None)
        for id in [] if self._closed else list(self._episodes):
            self.drop(id)

    def poll(self, timeout: float | None = 0.0) -> list[tuple[int, Event]]:
        """Return the events since the last call. Waits up to `timeout` seconds (None: without end) for at least one of them.

        Returns [] at once if nothing is pending. Commands leave for the workers here: poll often.
        Raises UserError if the environment cannot be imported.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._exchange(time.monotonic() if self._events else end)
            if self._events or not self.pending or (end is not None and time.monotonic() >= end):
                break
        events, self._events = self._events, []
        return events

    def ready(self) -> None:
        """Wait until every worker has imported the environment: before a measurement. Raises UserError if it cannot."""
        while len(self._workers) < self.size or not all(worker.ready for worker in self._workers):
            self._exchange(time.monotonic() + IMPORT_SECONDS)

    @property
    def pending(self) -> int:
        """Starts and sends whose event `poll` has not returned yet."""
        return len(self._events) + self._waiting

    @property
    def single_turn(self) -> bool:
        """True for a plain reward: its only turn is the task's, so `start` asks no worker. May wait for the import."""
        while self._single_turn is None:
            self._exchange(time.monotonic() + IMPORT_SECONDS)
        return self._single_turn

    @property
    def by_group(self) -> bool:
        """True for a reward that scores whole groups. May wait for the import."""
        return self.single_turn and self._by_group

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, episode: _Episode) -> None:
        self._waiting += 1
        first = opening(episode.task) if self._single_turn and not episode.sent else None
        if self._by_group and first is not None:
            self._answer(episode, first)
        elif self._by_group:
            self._score_group(episode.group)
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
            self._place(_Order(episode))

    def _score_group(self, group: Hashable) -> None:
        """Have a group scored, if the last of its replies is there."""
        members = self._groups.get(group, [])
        if not members or not all(episode.sent for episode in members):
            return
        members = sorted(self._groups.pop(group), key=lambda episode: episode.id)
        self._begun += 1
        asked = {"tasks": [e.task for e in members], "replies": [e.sent[0] for e in members]}
        whole = _Episode(-self._begun, self._begun, asked, members=tuple(members))
        if self._stage is None:
            return self._place(_Order(whole))
        began = time.perf_counter()
        event = self._stage.start(whole.id, whole.task)
        self.waited += time.perf_counter() - began
        self._answer(whole, event)

    def _leave_group(self, episode: _Episode) -> None:
        """Forget that an episode is of a group."""
        own = self._groups.get(episode.group, [])
        if episode in own:
            own.remove(episode)
        if not own:
            self._groups.pop(episode.group, None)

    def _replayed(self, episode: _Episode) -> Event:
        """Return the event behind all that was sent to an episode in this process."""
        assert self._stage is not None
        event = self._stage.start(episode.id, episode.task, deepcopy(episode.recorded))
        for said in episode.sent:
            if parted(event, said):
                return diverged(self._stage, episode.id, event)
            event = self._stage.send(episode.id, _own(said))
        return event

    def _keep(self, id: int, which: int, result: Any) -> None:
        """Store a result that an episode in this process recorded, as a copy: the environment may change its own."""
        if id in self._episodes:
            self._episodes[id].recorded[which] = deepcopy(result)

    def _place(self, order: _Order) -> None:
        """Queue it: for the worker that has the episode, or for any."""
        assert not self._closed, "the pool is closed"
        episode = order.episode
        if self._single_turn is False and episode.worker is None:
            held = {worker: 0 for worker in self._workers}
            for other in self._episodes.values():
                if other.worker is not None:
                    held[other.worker] += 1
            episode.worker = min(held, key=lambda worker: held[worker])
        (self._queue if episode.worker is None else episode.worker.queue).append(order)

    def _answer(self, episode: _Episode, event: Event) -> None:
        if episode.members:
            assert isinstance(event, Done), "a reward of groups asks for nothing"
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
        """One round with the workers: send queued orders, wait until `end` for an answer or a limit, take it."""
        self._dispatch()
        now = time.monotonic()
        limits = [limit for worker in self._workers if (limit := self._limit(worker)) is not None]
        until = min([*limits, *([] if end is None else [end])], default=now)
        arrived: list[_Worker] = [key.data for key, _ in self._selector.select(max(0.0, until - now))]
        for worker in arrived:
            self._receive(worker)
        for worker in list(self._workers):
            limit = self._limit(worker)
            if (
                worker not in arrived and limit is not None and limit <= now
            ):  # overdue before we waited, and silent since
                self._overdue(worker)
        self._dispatch()  # the next commands now: the caller may be away for a while

    def _limit(self, worker: _Worker) -> float | None:
        """When the worker is to be given up, unless it answers."""
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
                    self._receive(worker)  # nothing was asked of it: it is gone, or sends unasked
                    continue
                self._hand(worker)
            if worker.unsent:
                self._write(worker)

    def _hand(self, worker: _Worker) -> None:
        """Give a free worker the orders queued for it, or its share of those queued for any: less when less is left."""
        worker.queue.extend(self._queue.popleft() for _ in range(self._share(worker)))
        if not worker.queue:
            return
        commands = []
        pickled: dict[int, bytes] = {}  # by the identity of a task: a group shares its own
        now = time.monotonic()
        for order in worker.queue:
            episode = order.episode
            sent, recorded = episode.sent[-1:], dict[int, Any]()
            task: bytes | None = None
            if not (episode.placed or order.drop):
                key = id(episode.task)
                task = pickled[key] = pickled.get(key) or self._pickled(episode.task)
                sent, recorded = episode.sent, episode.recorded
            commands.append(
                WorkerCommand(episode.number, task, () if order.drop else tuple(sent), order.drop, recorded)
            )
            episode.placed = not order.drop
            order.since = now
            worker.sent[episode.number] = order
        worker.queue.clear()
        worker.unsent += write_commands(commands)
        worker.since = time.monotonic()

    def _share(self, worker: _Worker) -> int:
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
                f"task {_named(task)!r} cannot be sent to a worker: {type(error).__name__}: {error}; leave in it what can "
                "be pickled, or use --env-workers 0"
            ) from error

    def _write(self, worker: _Worker) -> None:
        try:
            whole = worker.write()
        except OSError:
            return  # it is gone, which shows when we read
        events = selectors.EVENT_READ if whole else selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.modify(worker.socket, events, worker)

    def _receive(self, worker: _Worker) -> None:
        try:
            for content in worker.read():
                if worker.ready:
                    self._take(worker, read_answer(content))
                else:
                    self._greet(worker, read_greeting(content))
        except Garbled as error:
            self._lost(worker, f"its worker process sent what cannot be read ({error})", InvalidKind.UNREADABLE)
        except (EOFError, OSError):
            ended = worker.child.wait(CLOSE_SECONDS)
            reason = f"died ({worker.child.exit()})" if ended else "closed its socket"
            killed = ended and -worker.child.code in KILLED
            self._lost(worker, f"its worker process {reason}", InvalidKind.DIED, killed)

    def _take(self, worker: _Worker, answer: WorkerReply | CallRecord) -> None:
        order = worker.sent.get(answer.number)
        if isinstance(answer, CallRecord):  # which extends no limit, and may be of an episode that was given up
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
        if not _fits_group(order.episode, answer.event):
            raise Garbled("an answer of another group")
        del worker.sent[answer.number]
        if answer.event is not None:
            self._answer(order.episode, answer.event)

    def _greet(self, worker: _Worker, message: Greeting | str) -> None:
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

    def _overdue(self, worker: _Worker) -> None:
        if worker.ready:
            self._lost(worker, f"did not return within {self._seconds:g} s", InvalidKind.TIMEOUT)
        else:
            self._import_failed(worker, f"{self._name} did not finish importing within {IMPORT_SECONDS:g} s")

    def _lost(self, worker: _Worker, reason: str, kind: InvalidKind, killed: bool = False) -> None:
        """A worker that has to be replaced; the reason blames the episode it was in, if any.

        `killed`: from outside, as far as known. The episode has then lost no more than those beside it, and is
        replayed.
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

    def _import_failed(self, worker: _Worker, message: str) -> None:
        """The user's mistake if no worker could ever import the environment, or if a fresh one fails again and again."""
        self._tries += 1
        if not self._imported or self._tries >= IMPORT_TRIES:
            self.close()
            raise UserError(message)
        self._replace(worker)

    def _replace(self, lost: _Worker) -> None:
        """A fresh worker for a lost one, in which its episodes are replayed when they go on."""
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

    def _add_worker(self) -> _Worker:
        worker = _Worker(self._setup, self._folder)
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        self._write(worker)
        return worker
