"""Ways to damage a valid sample: a value inside a JSON document, the bytes of a file, a word of a command line."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

NESTED: Any = []
for _ in range(40):
    NESTED = [NESTED]

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53 + 1, 2**63, -(2**63), 10**9, 10**12, 10**15, 10**30),
    *(0.0, -0.0, 0.5, 1.5, -2.5, 1e-30, 1e308, math.nan, math.inf, -math.inf),
    *("", " ", "0", "12", "-1", "nan", "1e999", "text", "two\nlines", "a\x00b", "\ud800", "naïve 北京", "x" * 100_000),
    *([], [1], [[]], [None], ["a", 1], {}, {"a": 1}, {"content": 5}, {"content": "a"}, {"": None}, NESTED),
)
"""Values that stand in no valid place, or in few."""


def odd(random: Random) -> Any:
    return copy.deepcopy(random.choice(ODD))


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a JSON document holds values, the document itself left out. Of long lists the ends stand for all."""
    found = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    if len(items) > 12:
        items = items[:8] + items[-4:]
    for key, inner in items:
        found.append((*at, key))
        found.extend(paths(inner, (*at, key)))
    return found


def holder(document: Any, path: tuple[Any, ...]) -> Any:
    """The list or object that directly holds the value at a path."""
    for key in path[:-1]:
        document = document[key]
    return document


def mutated(document: Any, random: Random) -> tuple[Any, tuple[Any, ...], str]:
    """A copy of a JSON document with one value changed -> (copy, path of the value, what was done)."""
    document = copy.deepcopy(document)
    path = random.choice(paths(document))
    inside, key = holder(document, path), path[-1]
    old = inside[key]
    changes: dict[str, Callable[[], Any]] = {
        "odd": lambda: odd(random),
        "in a list": lambda: [old],
        "in an object": lambda: {"value": old},
        "as text": lambda: json.dumps(old, default=str),
    }
    if isinstance(old, bool | int | float):
        changes |= {"negative": lambda: -old, "huge": lambda: old * 10**9 + 1, "a fraction": lambda: old + 0.5}
        changes |= {"one more": lambda: old + 1, "one less": lambda: old - 1, "as a float": lambda: float(old)}
    if isinstance(old, str):
        changes |= {"cut": lambda: old[: len(old) // 2], "longer": lambda: old + "?", "upper": old.upper}
    if isinstance(old, list):
        changes |= {"shorter": lambda: old[:-1], "twice": lambda: old + old, "reversed": lambda: old[::-1]}
    how = random.choice([*changes, "odd", "odd", "odd", "absent", "renamed"])
    if how == "absent":
        del inside[key]
    elif how == "renamed" and isinstance(inside, dict):
        inside[f"{key}_"] = inside.pop(key)
    else:
        inside[key] = odd(random) if how == "renamed" else changes[how]()
    return document, path, f"{'.'.join(map(str, path))}: {how}"


def write_json(path: Path, document: Any) -> None:
    """As JSON that may hold NaN, infinities and half surrogate pairs (the last as escapes)."""
    path.write_text(json.dumps(document, default=str), encoding="utf-8")


DAMAGE: dict[str, Callable[[bytes, Random], bytes]] = {
    "empty": lambda data, random: b"",
    "cut": lambda data, random: data[: random.randrange(len(data) + 1)],
    "cut at the start": lambda data, random: data[random.randrange(min(len(data), 64) + 1) :],
    "byte changed": lambda data, random: _splice(data, random, 1, bytes([random.randrange(256)])),
    "byte put in": lambda data, random: _splice(data, random, 0, bytes([random.randrange(256)])),
    "not UTF-8": lambda data, random: _splice(data, random, 0, random.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80"])),
    "NUL": lambda data, random: _splice(data, random, 0, b"\x00"),
    "BOM": lambda data, random: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda data, random: data.decode("utf-8", "replace").encode("utf-16"),
    "twice": lambda data, random: data + data,
    "piece out": lambda data, random: _splice(data, random, random.randrange(1, 40), b""),
    "noise": lambda data, random: random.randbytes(random.randrange(1, 400)),
    "brackets": lambda data, random: random.choice([b"[", b"{", b'{"a":', b"("]) * 100_000,
    "digits": lambda data, random: b"9" * 5000,
    "CRLF": lambda data, random: data.replace(b"\n", b"\r\n"),
    "null": lambda data, random: random.choice([b"null", b"[]", b"{}", b'""', b"0", b"true", b"\n\n"]),
}


def _splice(data: bytes, random: Random, length: int, put: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + put + data[at + length :]


LARGEST = 1 << 28  # bytes that are read here


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "folder": Path.mkdir,
    "dangling": lambda path: path.symlink_to("nowhere"),
    "circle": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path.name}.pipe")),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: path.symlink_to("/dev/null"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "terabyte": _sparse,
}
"""What may stand in the place of a file, and is none that could be read."""


def put_special(path: Path, random: Random) -> str:
    """Put it into a file's place. Returns what was done."""
    how = random.choice(list(SPECIAL))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    SPECIAL[how](path)
    return f"{path.name}: {how}"


def content_of(path: Path) -> bytes:
    """What stands in a file that can be read. Raises OSError for any other."""
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise OSError(f"{path} cannot be read")
    return path.read_bytes()


def damage_file(path: Path, random: Random) -> str:
    """Change a file's bytes, or what stands at its name. Returns what was done."""
    how = random.choice([*DAMAGE, "missing", "special", "special", "special", "unreadable"])
    if how == "special" or not path.is_file() or path.stat().st_size > LARGEST:
        return put_special(path, random)
    data = path.read_bytes()
    if how == "unreadable" and os.geteuid() == 0:
        how = "missing"  # nothing is unreadable to root
    if how == "unreadable":
        path.chmod(0)
    elif how in DAMAGE:
        path.write_bytes(DAMAGE[how](data, random))
    else:
        path.unlink()
    return f"{path.name}: {how}"


def is_json_object(path: Path) -> bool:
    """Whether a file still holds a JSON object, by Python's own reader."""
    try:
        return isinstance(json.loads(content_of(path).decode("utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        return False


def is_same(path: Path, other: Path) -> bool:
    """Whether two files can be read and hold the same."""
    try:
        return content_of(path) == content_of(other)
    except OSError:
        return False
