"""Rewards and environments that do what user code may do to its worker. Workers import this: nothing heavy here."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.core.types import Graded, Invalid, SpanReward, Turn


def _pool() -> socket.socket:
    """The worker's end of the socket to the pool: nothing hides it from code in the same process."""
    return next(x for x in gc.get_objects() if isinstance(x, socket.socket) and x.fileno() > 2)


def _say(content: bytes) -> None:
    _pool().sendall(struct.pack(">Q", len(content)) + content)


def _answer(**fields: Any) -> None:
    _say(json.dumps(fields).encode())


class _Loud:
    def __repr__(self) -> str:
        raise ValueError("no")

    def __float__(self) -> float:
        raise KeyboardInterrupt


DONE = {"rewards": {}, "spans": [], "reward": 1.0}
MESSAGES: dict[str, Callable[[], None]] = {
    "no JSON": lambda: _say(b"\xff\xfe"),
    "nested deep": lambda: _say(b"[" * 100_000),
    "a pickle": lambda: _say(b"\x80\x04cposix\nsystem\n(S'touch owned'\ntR."),
    "longer than all": lambda: _pool().sendall(struct.pack(">Q", 1 << 60)),
    "another episode": lambda: _answer(number=99, done=DONE),
    "a number that is none": lambda: _answer(number=True, done=DONE),
    "nothing where a reward is due": lambda: _answer(number=1),
    "a reward that is text": lambda: _answer(number=1, done={**DONE, "reward": "1"}),
    "a reward without end": lambda: _say(b'{"number":1,"done":{"rewards":{},"spans":[],"reward":1e999}}'),
    "NaN": lambda: _say(b'{"number":1,"done":{"rewards":{},"spans":[],"reward":NaN}}'),
    "an unknown kind": lambda: _answer(number=1, done={"rewards": {}, "spans": [], "invalid": "x", "kind": "odd"}),
    "an unknown field": lambda: _answer(number=1, done=DONE, more=1),
    "a turn that lacks fields": lambda: _answer(number=1, turn={"text": "x"}),
    "spans that are none": lambda: _answer(number=1, done={**DONE, "spans": [{"end": 1}]}),
}

RESULTS: dict[str, Callable[[], Any]] = {
    "complex": lambda: 1j,
    "bytes": lambda: b"1",
    "too large": lambda: 1e7,
    "an object that fights": _Loud,
    "surrogates as a name": lambda: {"\ud800": 1.0, "a": _Loud()},
    "a span of nonsense": lambda: Graded(1.0, [SpanReward("x", 1.0)]),  # type: ignore[arg-type]
    "a reason that is no text": lambda: Invalid(_Loud()),  # type: ignore[arg-type]
    "memory": lambda: float(len(bytearray(3 << 30))),
    "a KeyboardInterrupt": lambda: float(_Loud()),  # type: ignore[arg-type]
}


def reward(task: Any, reply: str) -> Any:
    if reply in MESSAGES:
        MESSAGES[reply]()
        time.sleep(30)
    if reply in RESULTS:
        return RESULTS[reply]()
    if reply == "close":
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # descriptors have the numbers that they have in the pool
    if reply == "fork and return":
        os.fork()  # both go on: the child must not answer
    if reply == "fork and stay" and os.fork() == 0:
        time.sleep(1000)
    if reply in DAEMONS:
        DAEMONS[reply]()
        time.sleep(1000 if task.get("stuck") else 0)
    return float(len(reply))


def _twice() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)


def _no_environment() -> None:
    subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)


DAEMONS: dict[str, Callable[[], Any]] = {
    "a shell": lambda: subprocess.Popen(["sleep", "1000"]),
    "a session of its own": lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True),
    "an orphan in a session of its own": _twice,
    "one without our environment": _no_environment,
}


def never(task: Any) -> Iterator[Any]:
    """A generator that never yields."""
    while True:
        pass
    yield ""


def floods(task: Any) -> Iterator[Any]:
    yield "x" * 100_000_000


def halves(task: Any) -> Iterator[Any]:
    reply = yield "fine"
    yield Turn(b"\xed\xa0\x80".decode("utf-8", "surrogatepass") + str(reply))


def raises_when_closed(task: Any) -> Iterator[Any]:
    try:
        yield "a"
    finally:
        raise RuntimeError("not now")
