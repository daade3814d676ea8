"""Environments with tools whose rollouts branch. Workers import this module: nothing heavy may be imported here."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

from posttrain.core.types import Ask, Invalid, Reply, Task, Turn
from posttrain.envs.play.call_recording import recorded

STOP = ("7", "a")
PLAYED = itertools.count()
"""Episodes of `ending_tools` in this process."""


def answer(reply: str) -> Turn:
    return Turn(f"<{reply[-4:]}>", tool=True, stop=STOP, reward=len(reply) / 8)


def worth(said: list[str]) -> float:
    return float(sum(map(len, said)) % 5)


def tools(task: Task) -> Generator[Turn, Reply, float]:
    """Three answers of a tool that repeats the end of what was said."""
    said = [(yield Turn(task["prompt"], stop=STOP))]
    for _ in range(3):
        said.append((yield answer(said[-1])))
    return worth(said)


def _moment() -> float:
    return os.urandom(1)[0] / 255 * 0.02


def slow_tools(task: Task) -> Generator[Turn, Reply, float]:
    """The same, after a time that nobody can foresee."""
    said = [(yield Turn(task["prompt"], stop=STOP))]
    for _ in range(3):
        time.sleep(_moment())
        said.append((yield answer(said[-1])))
    return worth(said)


async def waiting_tools(task: Task) -> AsyncGenerator[Any, Any]:
    said = [(yield Turn(task["prompt"], stop=STOP))]
    for _ in range(3):
        await asyncio.sleep(_moment())
        said.append((yield answer(said[-1])))
    yield worth(said)


def dying_tools(task: Task) -> Generator[Turn, Reply, float]:
    """The same; some rollouts end their process, some take too long, some raise, some are Invalid, some end soon."""
    said = [(yield Turn(task["prompt"], stop=STOP))]
    for _ in range(3):
        what = sum(map(ord, "".join(said))) % 13
        if what == 0:
            os._exit(3)
        if what == 1:
            raise RuntimeError("as it happens")
        if what == 2:
            return Invalid("as it happens")  # type: ignore[return-value]
        if what == 3:
            break
        said.append((yield answer(said[-1])))
    return worth(said)


def _note(folder: str, said: str) -> dict[str, Any]:
    """Leaves a file for each call."""
    place = Path(folder) / f"{time.time_ns()}-{os.getpid()}"
    place.write_text(said)
    return {"said": said}


def noting_tools(task: Task) -> Generator[Turn, Reply, float]:
    """Each answer is recorded; what comes back is changed by who asked."""
    said = [(yield Turn(task["prompt"], stop=STOP))]
    for _ in range(3):
        found = recorded(_note, task["folder"], str(said[-1]))
        turn = answer(found["said"])
        found["said"] = "changed"
        said.append((yield turn))
    return worth(said)


def _echo(said: str) -> dict[str, Any]:
    return {"said": said}


def remembering_tools(task: Task) -> Generator[Turn, Reply, float]:
    """Each answer is recorded, changed by who asked, and told again with each that follows."""
    said, heard = [(yield Turn(task["prompt"], stop=STOP))], ""
    for _ in range(3):
        found = recorded(_echo, str(said[-1]))
        heard += found["said"][-2:]
        found["said"] = "changed"
        said.append((yield answer(Reply(heard))))
    return worth(said)


async def _note_beside(folder: str, said: str) -> dict[str, Any]:
    await asyncio.sleep(_moment())
    return _note(folder, said)


async def noting_tools_beside(task: Task) -> AsyncGenerator[Any, Any]:
    said = [(yield Turn(task["prompt"], stop=STOP))]
    for _ in range(3):
        found = await recorded(_note_beside, task["folder"], str(said[-1]))
        turn = answer(found["said"])
        found["said"] = "changed"
        said.append((yield turn))
    yield worth(said)


def fickle_tools(task: Task) -> Generator[Turn, Reply, float]:
    """Answers otherwise each time."""
    said = [(yield Turn(task["prompt"], stop=STOP))]
    for _ in range(3):
        said.append((yield answer(os.urandom(4).hex())))
    return worth(said)


def ending_tools(task: Task) -> Generator[Turn, Reply, float]:
    """Ends where it went on before, every second time that it is played."""
    ends = next(PLAYED) % 2
    said = [(yield Turn(task["prompt"], stop=STOP))]
    for _ in range(3):
        if ends:
            break
        said.append((yield answer(said[-1])))
    return worth(said)


def asking_tools(task: Task) -> Generator[Turn | Ask, Any, float]:
    """What a service says stands in the tool's answer."""
    said = [(yield Turn(task["prompt"], stop=STOP))]
    for _ in range(3):
        found = yield Ask("lengths", str(said[-1]))
        turn = answer(str(found["length"]))
        found["length"] = "changed"
        said.append((yield turn))
    return worth(said)


def two_contexts(task: Task) -> Generator[Turn, Reply, float]:
    """Goes on in its first context after another one, and is not learned from everywhere."""
    said = [(yield Turn(task["prompt"], stop=STOP))]
    first = f"{task['prompt']}{said[0]}"
    said.append((yield Turn("other=", fresh=True, stop=STOP, learn=False)))
    said.append((yield answer(said[-1])))
    said.append((yield Turn(f"{first}<{said[-1]}>", whole=True, stop=STOP)))
    said.append((yield answer(said[-1])))
    said.append((yield answer(said[-1])))
    return worth(said)
