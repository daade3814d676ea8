"""Environments that show pictures. Workers import this module: nothing heavy may be imported here."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from PIL import Image

from posttrain.core.pictures import png
from posttrain.core.types import Reply, Task, Turn


def drawn(seed: int, height: int = 16, width: int = 16) -> bytes:
    return png(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def message(*content: Any, role: str = "user") -> dict[str, Any]:
    parts = [{"type": "text", "text": c} if isinstance(c, str) else {"type": "image", "image": c[0]} for c in content]
    return {"role": role, "content": parts}


def looking(task: Task) -> Generator[Turn, Reply, float]:
    """Two turns, the second of a tool, with a picture each."""
    red = np.full((16, 16, 3), task["shade"], dtype=np.uint8)
    first = yield Turn(messages=[message("a", (Image.fromarray(red),), "b")])
    shown = [{"role": "tool", "content": [{"type": "image", "image": drawn(task["shade"])}]}]
    second = yield Turn(messages=shown)
    return sum(c.isdigit() for c in first + second) / max(1, len(first + second))


def hostile(task: Task) -> Generator[Turn, Reply, float]:
    yield Turn(messages=[message("a", (drawn(1),))])
    if task["how"] == "text":
        yield Turn(messages=[{"role": "tool", "content": "found <image><image>"}])
    elif task["how"] == "cut":
        yield Turn(messages=[message((drawn(5, 64, 64)[:2000],), role="tool")])
    elif task["how"] == "tokens":
        yield Turn(tokens=[5, 5, 5])
    return 1.0
