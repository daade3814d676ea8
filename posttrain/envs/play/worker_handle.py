"""The pool's side of a worker process of environments: its socket, and its commands, sent and to be sent."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.types import Task
from posttrain.envs.play.worker_protocol import LONGEST_ANSWER, NOTE_BYTES, FrameSocket, WorkerSetup, framed, noted
from posttrain.system.child_processes import Child, pair


@dataclass(eq=False, slots=True)
class PoolEpisode:
    id: int  # the caller's id
    number: int  # its number among all episodes of this pool
    task: Task
    sent: list[Any] = field(default_factory=list)  # replies and answers of services sent to it, in order
    recorded: dict[int, Any] = field(default_factory=dict)  # results of its recorded calls
    worker: WorkerHandle | None = None  # the worker that runs or will run it; None for a plain reward
    placed: bool = False  # its worker has all of `sent` except the last, which may be on its way
    waiting: bool = True  # whether a command is unanswered
    killed: int = 0  # how often its process was killed from outside while running it
    group: Hashable = None  # a group reward scores episodes of one group together
    awaits: bool = False  # whether it has ended, and the caller knows that it awaits its group
    members: tuple[PoolEpisode, ...] = ()  # if it is a group that is scored as one episode: its episodes


@dataclass(eq=False, slots=True)
class QueuedCommand:
    """A command for a worker: run the next step of an episode, or forget it."""

    episode: PoolEpisode
    drop: bool = False
    since: float = 0.0  # time at which an async worker began it


class WorkerHandle:
    """The pool's end of a worker process. No method blocks."""

    def __init__(self, setup: WorkerSetup, folder: str) -> None:
        self.ready = False
        self.waits = False  # whether it runs async code: all orders side by side
        self.queue: deque[QueuedCommand] = deque()  # orders to send
        self.sent: dict[int, QueuedCommand] = {}  # episode number -> order in progress, in order
        self.since = time.monotonic()  # time at which it began the first of `sent`
        self.socket, theirs = pair()
        self.line = FrameSocket(self.socket, LONGEST_ANSWER)
        self.line.unsent += framed(pickle.dumps(setup))
        note = os.memfd_create("posttrain")
        try:
            os.ftruncate(note, NOTE_BYTES)
            self.note = mmap.mmap(note, NOTE_BYTES)
            with theirs:
                told = {"POSTTRAIN_ENV_TIMEOUT": f"{setup.seconds:g}"}  # so that an environment may stop earlier
                told["PYTHONHASHSEED"] = "0"  # the order of a set must not change a reward
                self.child = Child(
                    "posttrain.envs.play.env_worker:main", [theirs.fileno(), note], folder=folder, environment=told
                )
        finally:
            os.close(note)

    def write(self) -> bool:
        """Write as `FrameSocket` does. The limit of its work begins when it has taken something."""
        unsent = len(self.line.unsent)
        whole = self.line.write()
        if len(self.line.unsent) < unsent:
            self.since = time.monotonic()
        return whole

    @property
    def blamed(self) -> QueuedCommand:
        """The order that it works on, which is blamed if the worker is lost."""
        first = next(iter(self.sent.values()))
        if not self.waits:
            return first
        return next((order for number, order in self.sent.items() if noted(number) == self.note[:]), first)

    @property
    def stirs(self) -> bool:
        """Whether there is data to read, or the end of the stream."""
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
