"""The process that plays environments, and what it answers. Decides how user code that raises is reported.

The parent (`posttrain.envs.pool`) sends batches of commands over a socket; each command is answered as soon as it is
done, before the next one begins, so that whatever happens to this process the parent knows which episode it was in.

    parent -> worker   first the environment (see `pack_env`), then batches (ids to drop, [(id, task or None, replies)])
    worker -> parent   first True or False (a plain reward or not) or the message of a failed import, then (id, event);
                       the event is None for a replayed step, whose answer the parent has had before

A command with a task begins an episode and feeds it the replies; one without continues the episode with its one reply.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from posttrain.envs.load import is_generator_env, lift, read_turn, read_verdict, unpack_env
from posttrain.types import Env, Invalid, Reply, Task, Turn, UserError
from posttrain.user_code import describe_error, source_file

Command = tuple[int, Task | None, list[Reply]]


@dataclass(frozen=True)
class Done:
    """The episode is over: what it earned, and the named parts of that."""

    reward: float | Invalid
    rewards: dict[str, float] = field(default_factory=dict)


Event = Turn | Done
"""What an environment answers: show this to the model and send its reply, or the end."""

DIVERGED = "ended earlier when it was replayed after a crash: an environment must depend on its task and replies alone"


class Stage:
    """The episodes in progress in this process. Nothing that an environment raises leaves it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.single_turn = not is_generator_env(function)
        self._env: Env = lift(function) if self.single_turn else function
        self._file = source_file(function)
        self._episodes: dict[int, Generator[Any, Any, Any]] = {}

    def start(self, id: int, task: Task) -> Event:
        self._episodes[id] = _begin(
            self._env, copy.deepcopy(task)
        )  # the rows of a group are one object: theirs to change
        return self._resume(id, None)

    def send(self, id: int, reply: Reply) -> Event:
        return self._resume(id, reply)

    def drop(self, id: int) -> None:
        self._episodes.pop(id, None)

    def _resume(self, id: int, reply: Reply | None) -> Event:
        try:
            turn = read_turn(self._episodes[id].send(reply))
        except StopIteration as end:
            event: Event = Done(*read_verdict(end.value))
        except (Exception, SystemExit) as error:
            event = Done(Invalid(describe_error(error, self._file)))
        else:
            event = Done(turn) if isinstance(turn, Invalid) else turn
        if isinstance(event, Done):
            self.drop(id)
        return event


def _begin(env: Env, task: Task) -> Generator[Any, Any, Any]:
    """Calls `env` only when it is first resumed: what a decorator of the user's raises is then caught like the rest."""
    return (yield from env(task))


def main() -> None:
    """Arguments: the file descriptors of the socket and of the life line, then the parent's module search path."""
    socket_fd, life_fd = int(sys.argv[1]), int(sys.argv[2])
    sys.argv[1:] = []
    os.set_inheritable(socket_fd, False)
    os.set_inheritable(life_fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.dup2(2, 1)  # what the user prints is for the eyes: standard output may be a pipe of the parent's
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _die_with_parent(life_fd)
    connection: Connection[Any, Any] = Connection(socket_fd)
    try:
        stage = Stage(unpack_env(connection.recv()))
    except UserError as error:
        connection.send(str(error))
        return
    except (Exception, SystemExit) as error:
        connection.send(f"the environment does not load in a worker: {describe_error(error, None)}")
        return
    try:
        connection.send(stage.single_turn)
        while True:
            dropped, commands = connection.recv()
            for id in dropped:
                stage.drop(id)
            for command in commands:
                _answer(connection, stage, command)
    except (EOFError, ConnectionError):
        return  # the parent is gone, or has closed us


def _answer(connection: Connection[Any, Any], stage: Stage, command: Command) -> None:
    id, task, replies = command
    if task is None:
        connection.send((id, stage.send(id, replies[0])))
        return
    event = stage.start(id, task)
    for reply in replies:
        if isinstance(event, Done):
            event = Done(Invalid(DIVERGED)) if not isinstance(event.reward, Invalid) else event
            break
        if not stage.single_turn:  # the start of a plain reward takes no time: not worth a message
            connection.send((id, None))
        event = stage.send(id, reply)
    connection.send((id, event))


def _die_with_parent(life_fd: int) -> None:
    """Have the kernel kill this process and its children when the parent's end of the life line closes.

    Needed for a worker that is stuck inside C code when its parent is killed: nothing in Python could notice. Where the
    kernel has no such signal, the worker ends when it next reads its socket.
    """
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
