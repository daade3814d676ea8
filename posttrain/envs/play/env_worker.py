"""The process that runs environments.

The pool (`posttrain.envs.play.env_pool`) sends lists of commands over a socket; each is answered as soon as it is done.
Commands of synchronous code are run one after the other, so that the pool knows which episode was running if this
process ends. Commands of async code run side by side, and a few bytes of shared memory hold the episode whose code ran
last.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.core.types import Invalid, InvalidKind, UserError
from posttrain.envs.play.env_outputs import AwaitsGroup, Done, Event
from posttrain.envs.play.env_runner import DIVERGED, AsyncEnvRunner, EnvRunner, diverged, noting, parted
from posttrain.envs.play.load_env import is_async, unpack_env
from posttrain.envs.play.worker_protocol import (
    NOTE_BYTES,
    Frames,
    WorkerCommand,
    WorkerSetup,
    noted,
    read_commands,
    write_answer,
    write_failure,
    write_greeting,
    write_record,
)
from posttrain.system.user_code import describe_error


class _Connection:
    """The worker's end of the socket, which no other process may use."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._frames = Frames(most=1 << 62)  # the pool is trusted
        self._arrived: list[bytes] = []
        self._owner = os.getpid()
        os.register_at_fork(after_in_child=self._socket.close)  # user code may fork: its child must not answer

    def receive(self) -> bytes:
        """Return the content of the next frame. Raises EOFError if the socket is closed."""
        while not self._arrived:
            more = self._socket.recv(1 << 20)
            if not more:
                raise EOFError
            self._arrived += self._frames.add(more)
        return self._arrived.pop(0)

    def send(self, frame: bytes) -> None:
        self._check_owner()
        self._socket.sendall(frame)

    async def receive_beside(self) -> bytes:
        """Return the content of the next frame, while other tasks run."""
        while not self._arrived:
            more = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 20)
            if not more:
                raise EOFError
            self._arrived += self._frames.add(more)
        return self._arrived.pop(0)

    async def send_beside(self, frame: bytes) -> None:
        self._unsent += frame
        await self._flush()

    def put_beside(self, frame: bytes) -> None:
        """Queue a frame without waiting; it is sent before all later ones."""
        self._unsent += frame
        task = asyncio.get_running_loop().create_task(self._flush())
        self._flushing.add(task)
        task.add_done_callback(self._flushing.discard)

    def open_beside(self) -> None:
        """Switch to the asynchronous methods."""
        self._socket.setblocking(False)
        self._sending = asyncio.Lock()
        self._unsent = bytearray()
        self._flushing: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly

    async def _flush(self) -> None:
        self._check_owner()
        async with self._sending:  # a frame must not begin in the middle of another
            while self._unsent:
                frames, self._unsent = self._unsent, bytearray()
                await asyncio.get_running_loop().sock_sendall(self._socket, frames)

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:  # a forked child of user code returned into this code
            os._exit(0)


def main(descriptor: int, note: int) -> None:
    """Run the commands that arrive on this socket until it is closed. `note`: memory shared with the pool."""
    if sys.stdout is not None:  # printed lines of user code should appear at once
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    connection = _Connection(descriptor)
    try:
        setup: WorkerSetup = pickle.loads(connection.receive())
        _limit_memory(setup.memory)
        stage = _load(setup, connection, note)
        if isinstance(stage, AsyncEnvRunner):
            asyncio.run(_beside(connection, stage))
        while isinstance(stage, EnvRunner):
            for command in read_commands(connection.receive()):
                _answer(connection, stage, command)
    except (EOFError, OSError):
        return  # the pool is gone, or has closed us; or user code has closed the socket


def _load(setup: WorkerSetup, connection: _Connection, note: int) -> EnvRunner | AsyncEnvRunner | None:
    try:
        stage = _stage(setup, unpack_env(setup.env), connection, note)
    except UserError as error:
        connection.send(write_failure(str(error)))
        return None
    except BaseException as error:
        hint = f"; a worker may use {setup.memory:g} GiB: see --env-memory" if isinstance(error, MemoryError) else ""
        said = f"the environment does not load in a worker: {describe_error(error, None)}{hint}"
        connection.send(write_failure(said))
        return None
    connection.send(write_greeting(stage.single_turn, isinstance(stage, AsyncEnvRunner), stage.by_group))
    return stage


def _stage(
    setup: WorkerSetup, function: Callable[..., Any], connection: _Connection, note: int
) -> EnvRunner | AsyncEnvRunner:
    if not is_async(function):

        def sends(number: int, which: int, result: Any) -> None:
            connection.send(write_record(number, which, result))

        return EnvRunner(function, True, setup.memory, sends)
    shared = mmap.mmap(note, NOTE_BYTES)

    def enters(number: int) -> None:
        shared[:] = noted(number)

    def puts(number: int, which: int, result: Any) -> None:
        connection.put_beside(write_record(number, which, result))

    return AsyncEnvRunner(function, True, setup.memory, setup.seconds, f"{setup.name}: ", enters, puts)


# -- code that has the thread to itself --------------------------------------------------------------------------------


def _answer(connection: _Connection, stage: EnvRunner, command: WorkerCommand) -> None:
    number = command.number
    if command.drop:
        stage.drop(number)
        connection.send(write_answer(number, None))
        return
    if command.members:
        again = [_begun(connection, stage, member, number) for member in command.members if member.task is not None]
        event = _apart(stage, command, again) or stage.score(number, _numbers(command), command.recorded)
    elif command.task is None:
        event = stage.send(number, command.sent[0])
    else:
        event = _begun(connection, stage, command, number)
    connection.send(write_answer(number, event))


def _begun(connection: _Connection, stage: EnvRunner, command: WorkerCommand, told: int) -> Event:
    """Begin an episode with all that was sent to it, and return its last event; the others only set back the limit of
    the command `told`.
    """
    assert command.task is not None
    try:
        event = stage.start(command.number, pickle.loads(command.task), command.recorded)
    except BaseException as error:  # the task may hold the user's classes
        event = stage.raised(error)
    for said in command.sent:
        if parted(event, said):
            return diverged(stage, command.number, event)
        if not stage.single_turn:  # the start of a plain reward takes no time and needs no message
            connection.send(write_answer(told, None))
        event = stage.send(command.number, said)
    return event


def _numbers(command: WorkerCommand) -> list[int]:
    return [member.number for member in command.members]


def _apart(stage: EnvRunner | AsyncEnvRunner, command: WorkerCommand, again: Sequence[Event]) -> Done | None:
    """Return the end of a group of which a replayed episode does not end as it did; None: they all do."""
    if all(isinstance(event, AwaitsGroup) for event in again):
        return None
    for number in _numbers(command):
        stage.drop(number)
    return Done(Invalid(DIVERGED, InvalidKind.DIVERGED))


# -- code that waits ---------------------------------------------------------------------------------------------------


async def _beside(connection: _Connection, stage: AsyncEnvRunner) -> None:
    """Answer commands side by side."""
    asyncio.get_running_loop().set_task_factory(noting)
    connection.open_beside()
    working: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly
    while True:
        for command in read_commands(await connection.receive_beside()):
            task = asyncio.get_running_loop().create_task(_answer_beside(connection, stage, command))
            working.add(task)
            task.add_done_callback(working.discard)


async def _answer_beside(connection: _Connection, stage: AsyncEnvRunner, command: WorkerCommand) -> None:
    """Answer as `_answer` does."""
    number = command.number
    event: Event | None = None
    if command.drop:
        stage.drop(number)
    elif command.members:
        again = [await _begun_beside(connection, stage, m, number) for m in command.members if m.task is not None]
        apart = _apart(stage, command, again)
        event = apart or await stage.score(number, _numbers(command), command.recorded)
    elif command.task is None:
        event = await stage.send(number, command.sent[0])
    else:
        event = await _begun_beside(connection, stage, command, number)
    await connection.send_beside(write_answer(number, event))


async def _begun_beside(connection: _Connection, stage: AsyncEnvRunner, command: WorkerCommand, told: int) -> Event:
    """Begin an episode as `_begun` does."""
    assert command.task is not None
    try:
        event = await stage.start(command.number, pickle.loads(command.task), command.recorded)
    except Exception as error:
        event = stage.raised(error)
    for said in command.sent:
        if parted(event, said):
            return diverged(stage, command.number, event)
        if not stage.single_turn:
            await connection.send_beside(write_answer(told, None))
        event = await stage.send(command.number, said)
    return event


def _limit_memory(gib: float) -> None:
    """Limit the memory that this process and each of its children may allocate.

    Code, files and stacks of threads do not count.
    """
    if gib and sys.platform == "linux":
        import resource

        most, (_, hard) = int(gib * 2**30), resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
