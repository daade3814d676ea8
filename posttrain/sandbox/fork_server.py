"""The warm interpreter: a process that has imported the usual modules, forks a jail for each program, and ends
programs.

It runs no code of a program, and no data of a program or of its tests passes through it: an order consists of limits
and descriptors, one of which connects the caller with the program. So requests to one program are not in the memory of
the next.

    host -> warm interpreter   an order, with the descriptors of `talk`, `watch` and perhaps `output`
    warm interpreter -> host   once, at the start: which protections are active, or why there are none;
                               on each `watch`, after the end of a program: how it ended

A program is over, and is killed, when it ends, when the host closes its end of `watch`, when its time is used up, or
when its folder on a disk is too large. With a namespace of process ids, the program is number 1 of one, and the kernel
kills all its other processes with it; without one, it cannot have started any. The warm interpreter is itself number 1
of a namespace that contains those of programs, so that no program outlives it; without one, each program asks the
kernel to be killed with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.sandbox import filesystem, syscalls
from posttrain.sandbox.capabilities import prepared, settled
from posttrain.sandbox.guest import serve
from posttrain.sandbox.jail import NOBODY, Ground, Order, become
from posttrain.sandbox.json_messages import send
from posttrain.sandbox.limits import ProgramLimits

WARM = """
abc bisect cmath collections collections.abc copy dataclasses datetime decimal enum fractions functools heapq itertools json
math numbers operator random re statistics string time typing
""".split()  # the modules that programs import most; with each further module, a fork copies more
LONGEST_ORDER = 1 << 16
LOOK_SECONDS = 0.05  # between checks of folders on a disk
AT_ONCE = 50  # files that are deleted without a separate process


def main(control: int, root: str, allowed: list[str]) -> None:
    """Serve the host at the other end of `control`. `root`: the folder from which this package was imported, hidden
    from programs. `allowed`: the kinds of namespaces that may be used if the system allows them.
    """
    sys.path[:] = [path for path in sys.path if path != root]
    for name in WARM:
        with suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        ground = prepared(allowed, tried)
        settled(ground)  # returns in another process if there is a namespace of process ids
    except OSError as error:
        send(control, {"failed": f"{type(error).__name__}: {error}"})
        return
    gc.collect()
    gc.freeze()  # a garbage collection in a child would touch, and so copy, all of this memory
    gc.disable()
    send(control, {"protections": asdict(ground.protections)})
    server = ForkServer(ground, control)
    try:
        while server.turn():
            pass
    finally:
        server.close()
        if ground.base is not None:
            filesystem.remove(ground.base)


@dataclass(eq=False)
class RunningProgram:
    """State of a running program."""

    pid: int
    ended: int  # descriptor that becomes readable when the program has ended
    watch: int
    confined: int | None  # descriptor for errors before the program begins; None afterwards
    end: float  # deadline
    limits: ProgramLimits
    folder: str
    over: str | None = None  # the limit that ended it
    broken: str = ""
    report: dict[str, Any] | None = None  # how it ended; from then on `pid` is the process that deletes its folder


class ForkServer:
    """Starts and ends programs, in one thread that never waits for a single program."""

    def __init__(self, ground: Ground, control: int) -> None:
        self._ground = ground
        self._host = socket.socket(fileno=control)
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._running: dict[int, RunningProgram] = {}  # each program under all of its descriptors
        self._started = 0
        self._looked = 0.0
        self._own = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=ground.proc)

    def turn(self) -> bool:
        """Wait for the next events and handle them. Return whether the host is still connected."""
        for descriptor, _ in self._poll.poll(self._timeout()):
            if descriptor == self._host.fileno():
                if not self._take_order():
                    return False
            else:
                self._attend(descriptor)
        self._look()
        return True

    def close(self) -> None:
        """End all programs."""
        self._poll.unregister(self._host)
        self._host.close()
        for running in set(self._running.values()):
            self._kill(running, None)
        while self._running:
            for descriptor, _ in self._poll.poll():
                self._attend(descriptor)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _take_order(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._host, LONGEST_ORDER, 3)
        if not message:
            return False
        talk, watch, *output = descriptors
        try:
            order = Order(ProgramLimits(**json.loads(message)), talk, output[0] if output else None, self._folder())
            self._start(order, watch)
        except OSError as error:  # no process available, or no room for a folder
            self._tell(watch, {"broken": f"{type(error).__name__}: {error}"})
            os.close(watch)
        for descriptor in (talk, *output):
            os.close(descriptor)
        return True

    def _folder(self) -> str:
        self._started += 1
        if self._ground.base is None:
            return filesystem.FOLDER
        folder = f"{self._ground.base}/{self._started}"
        os.mkdir(folder, 0o700)
        if self._ground.protections.other_user:
            os.chown(folder, NOBODY, NOBODY)
        return folder

    def _start(self, order: Order, watch: int) -> None:
        confined, confining = os.pipe()
        try:
            pid = self._fork(order, confining)
        except OSError:
            os.close(confined)
            raise
        finally:
            os.close(confining)
        end = time.monotonic() + order.limits.life
        running = RunningProgram(pid, os.pidfd_open(pid), watch, confined, end, order.limits, order.folder)
        for descriptor in (running.ended, watch, confined):
            self._running[descriptor] = running
            self._poll.register(descriptor, select.POLLIN)

    def _fork(self, order: Order, confining: int) -> int:
        contained = "pid" in self._ground.kinds
        if contained:
            syscalls.unshare(syscalls.NEW_PID)  # applies to the next child
        try:
            pid = os.fork()
            if pid == 0:
                become(self._ground, order, confining, serve)
            return pid
        finally:
            if contained:
                syscalls.enter(self._own, syscalls.NEW_PID)

    # -- ending --------------------------------------------------------------------------------------------------------

    def _attend(self, descriptor: int) -> None:
        if (running := self._running.get(descriptor)) is None:
            return  # its program has just been finished
        if descriptor == running.ended:
            self._finish(running)
        elif descriptor == running.confined:
            running.broken = os.read(descriptor, 4096).decode(errors="replace")
            self._drop(descriptor)
            running.confined = None
        else:  # the host has closed its end
            self._poll.unregister(descriptor)
            self._kill(running, None)

    def _kill(self, running: RunningProgram, over: str | None) -> None:
        if running.report is not None:  # the program has ended, and its folder is being deleted
            return
        running.over = running.over or over
        running.end = float("inf")
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGKILL)

    def _finish(self, running: RunningProgram) -> None:
        _, status, used = os.wait4(running.pid, 0)
        if running.confined is not None:  # the error may be the reason for its end
            self._attend(running.confined)
        if running.report is None:
            running.report = self._reported(running, status, used)
            if self._ground.base is not None and self._removing(running):
                return
        self._tell(running.watch, running.report)
        self._drop(running.ended)
        self._drop(running.watch)

    def _reported(self, running: RunningProgram, status: int, used: resource.struct_rusage) -> dict[str, Any]:
        if running.broken:
            return {"broken": running.broken}
        code, cpu = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        return {"over": running.over, "exit": code, "cpu": cpu, "peak": used.ru_maxrss << 10}

    def _removing(self, running: RunningProgram) -> bool:
        """Delete the program's folder; return whether another process does it from now on, so that the loop does not
        wait.
        """
        if not filesystem.usage(running.folder, running.limits.folder, AT_ONCE):
            with suppress(OSError):  # no process available
                pid = os.fork()
                if pid == 0:
                    try:
                        os.closerange(0, 1 << 30)  # descriptors of other programs
                        filesystem.remove(running.folder)
                    finally:
                        os._exit(0)
                self._drop(running.ended)
                running.pid, running.ended, running.end = pid, os.pidfd_open(pid), float("inf")
                self._running[running.ended] = running
                self._poll.register(running.ended, select.POLLIN)
                return True
        filesystem.remove(running.folder)
        return False

    def _tell(self, watch: int, report: dict[str, Any]) -> None:
        with suppress(OSError):  # the host has closed its end
            os.write(watch, json.dumps(report).encode())

    def _drop(self, descriptor: int) -> None:
        with suppress(KeyError):
            self._poll.unregister(descriptor)
        del self._running[descriptor]
        os.close(descriptor)

    # -- limits that the kernel does not enforce -----------------------------------------------------------------------

    def _timeout(self) -> float | None:
        """Return milliseconds until the next deadline."""
        if not self._running:
            return None
        now = time.monotonic()
        due = min(running.end for running in self._running.values())
        if self._ground.base is not None:
            due = min(due, now + LOOK_SECONDS)
        return None if due == float("inf") else max(0.0, 1000 * (due - now))

    def _look(self) -> None:
        now = time.monotonic()
        on_disk = self._ground.base is not None and now >= self._looked + LOOK_SECONDS
        self._looked = now if on_disk else self._looked
        for running in set(self._running.values()):
            if now >= running.end:
                self._kill(running, "life")
            elif on_disk and not filesystem.usage(running.folder, running.limits.folder, running.limits.files):
                self._kill(running, "folder")


def tried(ground: Ground) -> str | None:
    """Return why a program cannot run on this ground; None if a test program did. Everything happens in other
    processes.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            settled(ground)
            server = ForkServer(ground, theirs.fileno())
            while server.turn():
                pass
            server.close()
        finally:
            os._exit(0)
    theirs.close()
    try:
        return _trial(ours)
    finally:
        ours.close()
        os.waitpid(child, 0)


def _trial(control: socket.socket) -> str | None:
    """Run a program that reads the standard library and writes into its folder. Return why it failed, or None."""
    from posttrain.sandbox.program import Ended, Program, SandboxError

    try:
        with Program(control, ProgramLimits(), output=False) as program:
            raised = program.run(f"open({os.__file__!r}).close(); open('a', 'w').close()")
    except (SandboxError, Ended) as error:
        return str(error)
    return None if raised is None else raised[1]
