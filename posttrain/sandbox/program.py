"""The caller's end of one program in the sandbox.

There are two kinds of failure. `Ended`: caused by the program, which took too long or too much, ended itself, or sent a
message that cannot be parsed. `SandboxError`: caused by the sandbox, which implies nothing about the program.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from posttrain.sandbox.json_messages import HEAD, framed, length
from posttrain.sandbox.limits import ProgramLimits

MOST_ANSWER = 1 << 20  # most bytes of a program's answer
END_SECONDS = 10.0  # for the warm interpreter to report a program's end


class Ended(Exception):
    """The program has ended, or was given up, by its own fault."""


class SandboxError(Exception):
    """The sandbox could not run a program."""


class Program:
    """The caller's end of one program. `ask` and the methods that use it raise Ended and SandboxError, and again at
    each call after the program's end.
    """

    def __init__(self, control: socket.socket, limits: ProgramLimits, output: bool) -> None:
        self.limits = limits
        self.printed = bytearray()
        self.report: dict[str, Any] | None = None  # how it ended: exit, cpu (seconds), peak (bytes), over
        self._over: Exception | None = None
        self._until = time.monotonic() + limits.life
        self._talk, talk = socket.socketpair()
        self._watch, watch = socket.socketpair()
        theirs = [talk, watch]
        self._output: int | None = None
        if output:
            self._output, written = os.pipe()
            os.set_blocking(self._output, False)
        self._talk.setblocking(False)
        try:
            descriptors = [end.fileno() for end in theirs] + ([written] if output else [])
            socket.send_fds(control, [json.dumps(asdict(limits)).encode()], descriptors)
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox is gone: {error}") from None
        finally:
            for end in theirs:
                end.close()
            if output:
                os.close(written)

    @property
    def left(self) -> float:
        """Seconds until the program's time limit."""
        return max(0.0, self._until - time.monotonic())

    def run(self, code: str, name: str = "__program__", seconds: float | None = None) -> list[str] | None:
        """Run code as a module with this name. Return its exception as [type, text, traceback], or None."""
        return self.asked({"do": "run", "code": code, "name": name}, seconds).get("raised")

    def asked(self, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send a request and return {"value": any form} or {"raised": [type, text, traceback]}. Any other answer ends
        the program.
        """
        answer = self.ask(request, seconds)
        if _is_raised(answer):
            return {"raised": answer["raised"]}
        if "raised" in answer or "value" not in answer:
            raise self._ends("sent a message that cannot be read")
        return {"value": answer["value"]}

    def ask(self, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send a request and return the answer, which may be any JSON object. `seconds`: limit in wall time; None: the
        rest of the program's time.
        """
        if self._over is not None:
            raise self._over
        end = self._until if seconds is None else min(self._until, time.monotonic() + seconds)
        try:
            self._write(framed(request), end)
            size = length(self._read(HEAD, end))
            if size > MOST_ANSWER:
                raise self._ends(f"answered with {size:,} bytes")
            answer = json.loads(self._read(size, end))
        except (ValueError, RecursionError):
            raise self._ends("sent a message that cannot be read") from None
        except OSError:
            raise self._lost() from None
        if not isinstance(answer, dict):
            raise self._ends("sent a message that cannot be read")
        return answer

    def close(self) -> None:
        """Kill the program and all processes that it started. May be called twice."""
        self._over = self._over or Ended("was ended")
        for end in (self._talk, self._watch):
            end.close()
        if self._output is not None:
            os.close(self._output)
            self._output = None

    def finish(self) -> dict[str, Any]:
        """Kill the program, wait until it is completely gone, and return how it ended. Raises SandboxError."""
        if self.report is None:
            self._over = self._over or Ended("was ended")
            with suppress(OSError):
                self._watch.shutdown(socket.SHUT_WR)
            self.report = self._reported()
        return self.report

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- exchange ------------------------------------------------------------------------------------------------------

    def _write(self, content: bytes, end: float) -> None:
        while content:
            try:
                content = content[self._talk.send(content) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, end)

    def _read(self, size: int, end: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                more = self._talk.recv(min(size - len(parts), 1 << 18))
            except BlockingIOError:
                self._wait(select.POLLIN, end)
                continue
            if not more:
                raise ConnectionResetError
            parts += more
        self._drain()
        return bytes(parts)

    def _wait(self, event: int, end: float) -> None:
        """Wait until the channel can be read or written, and collect output meanwhile. Raises Ended at the deadline."""
        poll = select.poll()
        poll.register(self._talk, event)
        if self._output is not None:
            poll.register(self._output, select.POLLIN)
        while True:
            ready = dict(poll.poll(max(0.0, 1000 * (end - time.monotonic()))))
            if self._output in ready and not self._drain():
                poll.unregister(self._output)
            if self._talk.fileno() in ready:
                return
            if time.monotonic() >= end:
                raise self._ends("took too long")

    def _drain(self) -> bool:
        """Collect output; return whether more may follow. Raises Ended if it is too much."""
        if self._output is None:
            return False
        with suppress(BlockingIOError):
            while more := os.read(self._output, 1 << 16):
                self.printed += more[: self.limits.output - len(self.printed)]
                if len(self.printed) >= self.limits.output:
                    raise self._ends("printed too much")
            return False
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def _ends(self, reason: str) -> Exception:
        """Kill the program; return the error with the reason."""
        self._over = self._over or Ended(reason)
        self.finish()
        return self._over

    def _lost(self) -> Exception:
        """Return the error for a program that closed its end, by itself or because it was killed, as its report
        shows.
        """
        if self._over is None:
            self._over = Ended("ended by itself")
            try:
                report = self.finish()
            except SandboxError as error:
                self._over = error
                return error
            with suppress(Ended):
                self._drain()
            self._over = Ended(_ending(report, self.limits))
        return self._over

    def _reported(self) -> dict[str, Any]:
        self._watch.settimeout(END_SECONDS)
        found = b""
        try:
            while more := self._watch.recv(1 << 16):
                found += more
            report: dict[str, Any] = json.loads(found)
        except (OSError, ValueError):
            raise SandboxError("the sandbox lost a program") from None
        if "broken" in report:
            raise SandboxError(f"the sandbox could not start a program: {report['broken']}")
        return report


def _is_raised(answer: dict[str, Any]) -> bool:
    raised = answer.get("raised")
    return isinstance(raised, list) and len(raised) == 3 and all(isinstance(part, str) for part in raised)


def _ending(report: dict[str, Any], limits: ProgramLimits) -> str:
    """Return how the program ended, in words."""
    if report["over"]:
        return "took too long" if report["over"] == "life" else "wrote too much into its folder"
    if report["exit"] == -9 and report["cpu"] >= limits.cpu / 2:  # reported in ticks, limited exactly
        return f"took more than {limits.cpu} s of processor time"
    return f"ended by signal {-report['exit']}" if report["exit"] < 0 else f"ended with exit code {report['exit']}"
