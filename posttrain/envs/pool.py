"""Plays environments in worker processes, so that nothing the user's code does can hang, crash or quietly zero a run.

What is decided here:

* An episode lives in worker `id % workers`. Each step (the first turn, or the answer to one reply) has `seconds`,
  counted from when the worker began it. A worker beyond that is killed, with every process it started, and the episode
  it was stuck in is `Done(Invalid(...))`. So it is when the worker dies by itself.
* The other episodes of a lost worker are replayed in a fresh one from their task and replies, which gives what was
  there before if the environment is deterministic. It should be: seed what is random from the task.
* A worker gets its next batch only when it has answered the last one. It is then reading, and never writing, while we
  write: two full pipes cannot wait for each other.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from posttrain.envs.load import is_generator_env, load_env, opening, pack_env
from posttrain.envs.worker import Command, Done, Event, Stage
from posttrain.types import Invalid, Reply, Task, Turn, UserError

__all__ = ["Done", "EnvPool", "Event", "Turn"]

IMPORT_SECONDS = 60.0  # for a worker to start and import the environment, which may read an index or a model
FREEZE_SECONDS = 10  # for a worker that should be reading to take what we write
CLOSE_SECONDS = 1.0  # for idle workers to leave by themselves

BOOT = "import sys; sys.path[:] = sys.argv[3:]; from posttrain.envs.worker import main; main()"


@dataclass
class Episode:
    task: Task
    replies: list[Reply] = field(default_factory=list)
    placed: bool = False  # its worker holds it, and has seen all its replies except one that is not yet sent
    waiting: bool = True  # a command of it is unanswered


class Worker:
    """Our end of one worker process."""

    def __init__(self, packed: str | bytes, folder: str) -> None:
        self.ready = False
        self.queue: deque[int] = deque()  # ids with a command to send
        self.sent: deque[int] = deque()  # ids it is working on, in order
        self.since = time.monotonic()  # when it began the first of `sent`
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()  # closing our end, or dying, kills it: see `worker._die_with_parent`
        limit = struct.pack("ll", FREEZE_SECONDS, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        path = [entry or folder for entry in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(theirs.fileno()), str(life), *path],
            pass_fds=(theirs.fileno(), life),
            stdin=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,  # a group of its own, killed as one; and out of reach of Ctrl-C
        )
        theirs.close()
        os.close(life)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        with suppress(OSError):  # it did not even start: that shows when we read from it
            self.connection.send(packed)

    def send(self, dropped: list[int], commands: list[Command]) -> None:
        """Raises OSError if the worker is gone or does not read."""
        self.connection.send_bytes(pickle.dumps((dropped, commands), pickle.HIGHEST_PROTOCOL))
        self.since = time.monotonic()

    def exit_code(self) -> str:
        """How a process whose socket has closed ended, in words."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_SECONDS)
        code = self.process.poll()
        if code is None:
            return "it closed its socket"
        known = code < 0 and -code in signal.valid_signals()
        return f"exit code {code}" + (f", {signal.Signals(-code).name}" if known else "")

    def kill(self) -> None:
        if self.process.poll() is None:  # not yet reaped, so the number is still its own
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._life)
        self.connection.close()


class EnvPool:
    """Episodes of one environment: `start` and `send` ask, `poll` brings the answers, in the order they come.

    `env` is a name as in `load_env`, a reward or a generator function; `seconds` is the limit of one step. With
    `workers=0` everything runs in this process, at once and in the caller's thread, without limit: for a debugger.
    """

    def __init__(self, env: str | Callable[..., Any], workers: int = 1, seconds: float = 10.0) -> None:
        if workers < 0 or seconds <= 0:
            raise UserError(f"workers must be 0 or more and seconds above 0, not {workers} and {seconds:g}")
        self._name = env if isinstance(env, str) else getattr(env, "__qualname__", type(env).__name__)
        self._seconds = seconds
        self._folder = os.getcwd()  # workers started later are to find the same files
        self._episodes: dict[int, Episode] = {}
        self._events: list[tuple[int, Event]] = []
        self._dropped: dict[int, list[int]] = {}  # by worker, to be told with its next batch
        self._workers: list[Worker] = []
        self._stage = Stage(load_env(env)) if workers == 0 else None
        self._single_turn: bool | None = None  # not known before a worker has imported the environment
        if self._stage is not None:
            self._single_turn = self._stage.single_turn
            return
        if not isinstance(env, str):
            self._single_turn = not is_generator_env(load_env(env))
        self._packed = pack_env(env)
        self._workers = [Worker(self._packed, self._folder) for _ in range(workers)]

    def start(self, id: int, task: Task) -> None:
        """Begin an episode; its first event comes from `poll`. `id` is free again after its `Done`.

        Raises UserError if a plain reward's task has neither prompt nor messages; so may `poll`, during the import.
        """
        assert id not in self._episodes, f"episode {id} is in progress"
        self._episodes[id] = Episode(task)
        self._ask(id)

    def send(self, id: int, reply: Reply) -> None:
        """Answer the last turn of an episode."""
        episode = self._episodes[id]
        assert not episode.waiting, f"episode {id} has not shown its next turn"
        episode.replies.append(reply)
        episode.waiting = True
        self._ask(id)

    def drop(self, id: int) -> None:
        """Give up an episode that waits for a reply (its context is full, say). There is no further event."""
        assert not self._episodes[id].waiting, f"episode {id} has not shown its next turn"
        del self._episodes[id]
        if self._stage is not None:
            self._stage.drop(id)
        else:
            self._dropped.setdefault(id % len(self._workers), []).append(id)

    def poll(self, timeout: float | None = 0.0) -> list[tuple[int, Event]]:
        """The events since the last call. Waits up to `timeout` seconds (None: without end) for at least one of them.

        Returns [] at once if nothing is pending. Commands leave for the workers here, in batches: poll often.
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
        while not all(worker.ready for worker in self._workers):
            self._exchange(time.monotonic() + IMPORT_SECONDS)

    @property
    def pending(self) -> int:
        """Starts and sends whose event `poll` has not returned yet."""
        return len(self._events) + sum(len(worker.queue) + len(worker.sent) for worker in self._workers)

    @property
    def single_turn(self) -> bool:
        """True for a plain reward: its only turn is the task's, so `start` asks no worker. May wait for the import."""
        if self._single_turn is None:
            self.ready()
        assert self._single_turn is not None
        return self._single_turn

    def close(self) -> None:
        """End the workers; episodes in progress are lost. May be called twice."""
        workers, self._workers = self._workers, []
        leaving = [worker for worker in workers if worker.ready and not worker.sent]
        for worker in leaving:
            worker.connection.close()
        end = time.monotonic() + CLOSE_SECONDS
        for worker in leaving:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end - time.monotonic()))
        for worker in workers:
            worker.kill()

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, id: int) -> None:
        episode = self._episodes[id]
        turn = opening(episode.task) if self._single_turn and not episode.replies else None
        if self._stage is not None and episode.replies:
            self._answer(id, self._stage.send(id, episode.replies[-1]))
        elif self._stage is not None:
            self._answer(id, self._stage.start(id, episode.task))
        elif turn is not None:
            self._answer(id, turn)
        else:
            assert self._workers, "the host is closed"
            self._workers[id % len(self._workers)].queue.append(id)

    def _answer(self, id: int, event: Event) -> None:
        self._events.append((id, event))
        if isinstance(event, Done):
            del self._episodes[id]
        else:
            self._episodes[id].waiting = False

    def _exchange(self, end: float | None) -> None:
        """One round with the workers: send what is queued, wait until `end` for an answer or a limit, take it."""
        for number in range(len(self._workers)):
            self._dispatch(number)
        now = time.monotonic()
        limits = [limit for worker in self._workers if (limit := self._limit(worker)) is not None]
        until = min([*limits, *([] if end is None else [end])], default=now)
        readable = wait([worker.connection for worker in self._workers], max(0.0, until - now))
        for number, worker in enumerate(self._workers):
            limit = self._limit(worker)
            if worker.connection in readable:
                self._receive(number)
            elif limit is not None and limit <= now:  # overdue before we waited, and nothing came since
                self._overdue(number)
        for number in range(len(self._workers)):
            self._dispatch(number)  # the next batch now: the caller may be away for a while

    def _limit(self, worker: Worker) -> float | None:
        """When the worker is to be given up, unless it answers."""
        if not worker.ready:
            return worker.since + IMPORT_SECONDS
        return worker.since + self._seconds if worker.sent else None

    def _dispatch(self, number: int) -> None:
        worker = self._workers[number]
        if not worker.ready or worker.sent or not worker.queue:
            return
        if worker.process.poll() is not None:  # died while idle: nobody's fault
            self._replace(number, None)
            return
        commands: list[Command] = []
        for id in worker.queue:
            episode = self._episodes[id]
            replay = not episode.placed
            commands.append((id, episode.task if replay else None, episode.replies if replay else episode.replies[-1:]))
            episode.placed = True
        worker.sent, worker.queue = worker.queue, deque()
        try:
            worker.send(self._dropped.pop(number, []), commands)
        except OSError:
            self._replace(number, "its worker process stopped reading")

    def _receive(self, number: int) -> None:
        worker = self._workers[number]
        try:
            while worker.connection.poll():
                message = worker.connection.recv()
                worker.since = time.monotonic()
                if not worker.ready:
                    self._greet(worker, message)
                    continue
                id, event = message
                if event is not None:
                    expected = worker.sent.popleft()
                    assert id == expected, "answers come in the order of the commands"
                    self._answer(id, event)
        except (EOFError, OSError):
            code = worker.exit_code()
            if not worker.ready:
                self._fail(f"{self._name}: a worker process died while importing it ({code})")
            self._replace(number, f"its worker process died ({code})")

    def _greet(self, worker: Worker, message: bool | str) -> None:
        if isinstance(message, str):
            self._fail(message)
        worker.ready = True
        if self._single_turn is None and message:  # what was asked until now are starts: we answer them ourselves
            started = [id for worker in self._workers for id in worker.queue]
            for worker in self._workers:
                worker.queue.clear()
            for id in started:
                self._answer(id, opening(self._episodes[id].task))
        self._single_turn = bool(message)

    def _overdue(self, number: int) -> None:
        if not self._workers[number].ready:
            self._fail(f"{self._name} did not finish importing within {IMPORT_SECONDS:g} s")
        self._replace(number, f"did not return within {self._seconds:g} s")

    def _replace(self, number: int, reason: str | None) -> None:
        """A fresh worker for a lost one. `reason` blames the episode it was in; the others are to be replayed."""
        lost = self._workers[number]
        lost.kill()
        if reason is not None and lost.sent:
            self._answer(lost.sent.popleft(), Done(Invalid(f"{self._name}: {reason}")))
        fresh = Worker(self._packed, self._folder)
        fresh.queue.extend([*lost.sent, *lost.queue])
        self._workers[number] = fresh
        self._dropped.pop(number, None)
        for id, episode in self._episodes.items():
            if id % len(self._workers) == number:
                episode.placed = False

    def _fail(self, message: str) -> None:
        self.close()
        raise UserError(message)
