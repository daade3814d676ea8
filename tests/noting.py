"""Environments that note something, for workers to import."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator
from typing import Any

from posttrain import Reply, Sides, Task, Turn, note, recorded


def scored(task: Task, reply: str) -> float:
    note(letters=len(reply), first=reply[:1] or None)
    return 1.0


def told(task: Task) -> Generator[Turn | str, Reply, Any]:
    """Notes every reply. A worker that hears "die" ends, the first time."""
    said: list[str] = []
    while (reply := (yield "go on")) != "end":
        if reply == "die" and not recorded(os.path.exists, task["mark"]):
            open(task["mark"], "x").close()
            os._exit(7)
        said.append(str(reply))
        note(said=said, **{str(reply): len(said)})
        if reply == "raise":
            raise RuntimeError("as asked")
    return Sides({"": 1.0}) if task.get("sides") else 1.0


async def told_waiting(task: Task) -> AsyncGenerator[Any, Any]:
    said: list[str] = []
    while (reply := (yield "go on")) != "end":
        said.append(str(reply))
        note(said=said, **{str(reply): len(said)})
        if reply == "raise":
            raise RuntimeError("as asked")
    yield 1.0


def strange(task: Task, reply: str) -> float:
    note(what=object())
    return 1.0


def long(task: Task, reply: str) -> float:
    note(before=1, first="a" * 60_000)
    note(second="b" * 60_000, third=["c" * (1 << 21)], after=2)
    note(before=3)
    return 1.0


def unnamed(task: Task, reply: str) -> float:
    note(reply)  # type: ignore[arg-type]
    return 1.0


def within(task: Task, reply: str) -> float:
    recorded(note, seen=1)
    return 1.0
