"""What the processes that are measured have in common: how they are asked, and how they read their own memory.

    driver -> side   a JSON object a line on its standard input
    side -> driver   a JSON object a line on a pipe of its own (what it prints goes to a log)

A side that has answered waits: while one side works, the others stand still.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ANSWERS = "BENCH_ANSWERS"  # environment variable: the number of the pipe
MIB = 1 << 20


class Line:
    """The side's end of the line to the driver."""

    def __init__(self) -> None:
        self._answers = os.fdopen(int(os.environ[ANSWERS]), "w")

    def answer(self, **found: Any) -> None:
        self._answers.write(json.dumps(found) + "\n")
        self._answers.flush()

    def asked(self) -> dict[str, Any] | None:
        """The next request; None when there will be none."""
        line = sys.stdin.readline()
        request: dict[str, Any] | None = json.loads(line) if line else None
        return request

    def serve(self, actions: dict[str, Callable[..., dict[str, Any]]]) -> None:
        """Answer {"do": name, ...} with what the action of that name finds, until there are no more requests."""
        self.answer(ready=True)
        while (request := self.asked()) is not None:
            self.answer(**actions[request.pop("do")](**request))


class Laps:
    """Measures the steps of a trainer that calls back after each: a lap is as many steps as the driver asks for.

    The first step is reported too, in the answer that says the side is ready; the driver leaves it out.
    """

    def __init__(
        self, line: Line, watch: Memory, on_request: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        self.line, self.watch, self.on_request = line, watch, on_request
        self.left = 1
        self.about: dict[str, Any] = {}  # what else every answer says
        self.sums: dict[str, float] = {}
        self.begin = time.perf_counter()

    def step(self, **sums: float) -> bool:
        """A step has ended, these being its figures. Returns True when the driver wants no more."""
        ended = time.perf_counter()
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.left -= 1
        if self.left:
            return False
        self.line.answer(**self.about, seconds=ended - self.begin, **self.sums, **self.watch.peak())
        request = self.line.asked()
        if request is None:
            return True
        self.left, self.sums = request.pop("steps", 1), {}
        self.on_request(request)
        self.begin = time.perf_counter()
        return False


class Memory:
    """The most memory that this process and its children (workers that score) occupied since `begin`, in MiB."""

    def __init__(self) -> None:
        self.base = 0.0

    def begin(self) -> None:
        """Call it with all imports done and the model loaded: what comes on top of that is the trainer's.

        Forgets the peak so far, where the kernel lets us (Linux).
        """
        self.base = _status("self", "VmRSS")
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def peak(self) -> dict[str, float]:
        """peak: of all; added: over what the process had at `begin`."""
        own = _status("self", "VmHWM")
        children = sum(_status(child, "VmHWM") for child in _children())
        return {"peak": own + children, "added": own + children - self.base}


def _status(process: str, name: str) -> float:
    """A line of /proc/*/status, in MiB; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":")), 0.0)


def _children() -> list[str]:
    found = []
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += listed.read_text().split()
    return found


def use_threads(count: int) -> None:
    """Both kinds of PyTorch's threads that matter on processors."""
    import torch

    torch.set_num_threads(count)


def timed(action: Callable[[], Any]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
