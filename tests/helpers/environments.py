"""Environments that several tests play. Workers import this module: nothing heavy may be imported here."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import Any

from posttrain.core.types import Ask, Graded, Invalid, Reply, Task, Turn
from posttrain.envs.play.call_recording import recorded
from posttrain.envs.play.tools import Tools


def asking(task: Task) -> Generator[Turn | str, Reply, float]:
    """Two tool replies whose text repeats what the policy said, then the length of it all."""
    reply = yield Turn(task["prompt"], stop=("7",))
    total = len(reply)
    for _ in range(2):
        reply = yield f"<info>{reply}</info>"
        total += len(reply)
    return float(total)


def delayed(task: Task) -> Generator[Turn | str, Reply, float]:
    """The same, each answer after a time that nobody can foresee."""
    reply = yield Turn(task["prompt"], stop=("7",))
    total = len(reply)
    for _ in range(2):
        time.sleep(os.urandom(1)[0] / 255 * 0.02)
        reply = yield f"<info>{reply}</info>"
        total += len(reply)
    time.sleep(os.urandom(1)[0] / 255 * 0.02)
    return float(total)


def scored(task: Task) -> Generator[Turn | str | Ask, Any, Any]:
    """Two turns; a service scores each reply."""
    reply = yield task["prompt"]
    first = yield Ask("lengths", reply)
    reply = yield f"<{first}>"
    second = yield Ask("lengths", reply)
    return {"first": first, "second": second}


def careful(task: Task) -> Generator[Turn | str | Ask, Any, Any]:
    reply = yield task["prompt"]
    score = yield Ask("judge", reply)
    return 0.25 if isinstance(score, Invalid) else score


# -- that wait ---------------------------------------------------------------------------------------------------------


def meeting(size: int) -> Any:
    """An environment, and a reward, whose episodes all wait for each other."""
    here: dict[str, Any] = {}

    async def meet() -> None:
        barrier = here.setdefault("barrier", asyncio.Barrier(size))
        await barrier.wait()

    async def env(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
        reply = yield Turn(task["prompt"])
        await meet()
        yield float(reply)

    async def reward(task: dict[str, Any], reply: str) -> float:
        await meet()
        return float(reply)

    return env, reward


async def misbehaving(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    """Waits, and does what the reply says."""
    reply = yield Turn(task["prompt"])
    await asyncio.sleep(0.01)
    if reply == "hang":
        await asyncio.sleep(1000)
    if reply == "loop":
        while True:
            pass
    if reply == "exit":
        os._exit(3)
    if reply == "raise":
        raise ValueError("bad thing")
    if reply == "cancel":
        raise asyncio.CancelledError
    if reply == "odd":
        yield Turn()
    if reply == "deaf":
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
    if reply == "silent":
        return
    if reply == "none":
        yield None
    await asyncio.sleep(0.3)  # the others wait while it happens
    yield float(len(reply))


async def delegating(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    """Waits in tasks of its own, and in one of them does what the reply says."""

    async def inner(reply: str) -> float:
        await asyncio.sleep(0.01)
        while reply == "loop":
            pass
        await asyncio.sleep(0.3)
        return float(len(reply))

    reply = yield Turn(task["prompt"])
    both = await asyncio.gather(inner(reply), asyncio.wait_for(inner("ab"), 60))
    yield sum(both)


async def asking_too(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    """As `asking`."""
    reply = yield Turn(task["prompt"], stop=("7",))
    total = len(reply)
    for _ in range(2):
        await asyncio.sleep(os.urandom(1)[0] / 255 * 0.02)
        reply = yield f"<info>{reply}</info>"
        total += len(reply)
    yield float(total)


async def echo(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    """What was said so far, turn by turn."""
    reply = yield task["prompt"]
    said = [str(reply)]
    while reply != "end":
        if reply == "exit":
            os._exit(3)
        await asyncio.sleep(1000 if reply == "hang" else 0)
        reply = yield "+".join(said)
        said.append(str(reply))
    yield Graded({"turns": float(len(said))})


async def tidy(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    """Waits for ever, and leaves a file when it is told to end."""
    try:
        yield task["prompt"]
        await asyncio.sleep(1000)
    finally:
        with open(task["file"], "w"):
            pass


async def one_task(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    """What it opens before a reply it closes after it."""
    current = asyncio.current_task()
    async with asyncio.timeout(60):
        await asyncio.sleep(0)
        yield "a"
    yield float(current is asyncio.current_task())


async def closing(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    """Leaves a file with whether it ends in the task in which it began, as libraries with scopes of their own need it."""
    current = asyncio.current_task()
    try:
        yield "a"
        yield 1.0
    finally:
        await asyncio.sleep(0)
        with open(task["file"], "w") as file:
            file.write(str(current is asyncio.current_task()))


class Scorer:
    async def __call__(self, task: dict[str, Any], reply: str) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"length": float(len(reply)), "one": 1.0}


# -- that record -------------------------------------------------------------------------------------------------------


def _look(folder: str, name: str) -> int:
    """Leaves a file each time it is called."""
    count = sum(file.startswith(f"{name}-") for file in os.listdir(folder)) + 1
    open(os.path.join(folder, f"{name}-{count}"), "x").close()
    return count


async def _look_beside(folder: str, name: str) -> int:
    await asyncio.sleep(0.01 * (os.urandom(1)[0] % 3))
    return _look(folder, name)


def one_of_many(task: Task) -> Generator[str, Reply, Any]:
    """Two recorded calls a reply; "die" ends the process."""
    found: list[int] = []
    while (reply := (yield f"{found}")) != "end":
        if reply == "die":
            os._exit(7)
        found += [recorded(_look, task["folder"], task["id"]) for _ in range(2)]
    assert found == sorted(found)
    return {"reward": 1.0, "calls": len(found)}


async def one_of_many_waiting(task: Task) -> AsyncGenerator[Any, Any]:
    found: list[int] = []
    while (reply := (yield f"{found}")) != "end":
        if reply == "die":
            os._exit(7)
        found += await asyncio.gather(*(recorded(_look_beside, task["folder"], task["id"]) for _ in range(2)))
    yield {"reward": 1.0, "calls": len(found)}


def looking_up(task: Task) -> Generator[Turn | str, Reply, float]:
    """What ends with 7 is given back as a tool's answer, up to three times; the last reply is to be the answer."""
    reply = yield Turn(task["prompt"], stop=("7",))
    for _ in range(3):
        if reply == "raise":
            raise RuntimeError("as asked")
        if not reply.endswith("7"):
            break
        reply = yield Turn(str(reply), stop=("7",), tool=True)
    return float(reply == task["answer"])


def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def calculating(task: Task) -> Generator[Turn, Reply, float]:
    """A question whose answer a tool computes."""
    tools = Tools(add)
    reply = yield Turn(messages=[{"role": "user", "content": task["question"]}], tools=tools)
    while turn := tools.answer(reply):
        reply = yield turn
    return float(task["answer"] in reply)
