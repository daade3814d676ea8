"""Environments that note something, for workers to import."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Generator
from importlib import import_module
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


class Lying(str):
    """Says that it is short."""

    def __len__(self) -> int:
        return 0


class Wild(int):
    """Says that it is another number."""

    def __abs__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 5


class Ending:
    def __repr__(self) -> str:
        raise SystemExit(3)


def cycle() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


def nested(levels: int, wide: int = 1) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found] * wide
    return found


def of_library(name: str, make: Callable[[Any], Any]) -> Any:
    """Libraries that not every worker of these tests has to load."""
    return make(import_module(name))


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "huge": lambda: {"x": "a" * (1 << 24)},
    "huge name": lambda: {"a" * (1 << 17): 1},
    "many": lambda: {f"n{i}": i for i in range(5_000)},
    "lying": lambda: {"x": Lying("a" * 200_000)},
    "wild": lambda: {"x": Wild(7), "y": Wild(1 << 70)},
    "wide": lambda: {"x": nested(30, 2)},
    "cycle": lambda: {"x": cycle()},
    "deep": lambda: {"x": nested(2000)},
    "columns": lambda: {
        "reward": "5",
        "step": None,
        "notes": {"a": 2},
        "values": [1],
        "self": 1,
        "unnamed": 3,
    },
    "control": lambda: {"a\x00\x1b[2J\u202e\n": "\x00\r\n\x7f</script>\u2028"},
    "half": lambda: {"x": "a\ud800"},
    "half name": lambda: {"\udfff": 1},
    "not finite": lambda: {"x": [0.5, float("nan")]},
    "infinite": lambda: {"x": float("-inf")},
    "repr raises": lambda: {"x": Ending()},
    "bytes": lambda: {"x": b"ab"},
    "numpy": lambda: {"x": of_library("numpy", lambda np: [np.float64(0.5), np.arange(3)])},
    "float64": lambda: {"x": of_library("numpy", lambda np: np.float64(0.1))},
    "tensor": lambda: {"x": of_library("torch", lambda torch: torch.zeros(2))},
    "keys": lambda: {"x": {1: 2}},
    "largest": lambda: {"x": (1 << 63) - 1, "y": -1.7976931348623157e308, "z": 5e-324, "w": -0.0},
}


def hostile(task: Task, reply: str) -> float:
    note(kept=1, **HOSTILE[str(task["id"])]())
    return 1.0


def changed(task: Task, reply: str) -> float:
    values: dict[str, Any] = {"list": [1]}
    note(x=values)
    values["list"].append(values)
    values["more"] = object()
    return 1.0


def unnamed(task: Task, reply: str) -> float:
    note(reply)  # type: ignore[arg-type]
    return 1.0


def within(task: Task, reply: str) -> float:
    recorded(note, seen=1)
    return 1.0
