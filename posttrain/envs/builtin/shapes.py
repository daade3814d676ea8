"""Questions about a picture of 32 x 32 pixels: how many shapes of a kind it shows, or which of two kinds it shows more
of.

The picture is drawn from the task alone, each time that it is shown. Answers are drawn first and uniformly, so that a
policy that ignores the picture gets no more than 1 in 4 of the numbers, 1 in 3 of the comparisons, 0.29 in all.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from typing import Any

from posttrain.core.pictures import png
from posttrain.core.types import Reply, Task, Turn
from posttrain.envs.builtin.generated import distinct, write

SUCCESS = 1.0  # the reward of a correct answer
KINDS = ("circle", "square", "cross")
COLOURS = ((230, 60, 60), (70, 200, 90), (80, 120, 240), (240, 210, 70))
CELL, CELLS = 8, 4  # side of a cell in pixels; side of the picture in cells, each with at most one shape
MOST = 3  # most shapes of a kind


def shapes(task: Task) -> Generator[Turn, Reply, float]:
    """Run an episode; the reward is 1.0 for the correct number or word. Without `drawing` no picture is shown."""
    content: list[dict[str, Any]] = [{"type": "text", "text": task["question"]}]
    if task.get("drawing") is not None:
        content.insert(0, {"type": "image", "image": draw(task["drawing"])})
    reply = yield Turn(messages=[{"role": "user", "content": content}])
    return float(reply.strip() == task["answer"])


def draw(drawing: list[list[int]]) -> bytes:
    """Return the PNG file of a drawing: each shape is its kind, its colour, and row and column of its first pixel."""
    import numpy as np

    pixels = np.full((CELL * CELLS, CELL * CELLS, 3), 16, dtype=np.uint8)
    y, x = np.mgrid[:6, :6] - 2.5
    masks = (x**2 + y**2 <= 8, np.ones((6, 6), dtype=bool), (abs(x) < 1) | (abs(y) < 1))
    for kind, colour, row, column in drawing:
        pixels[row : row + 6, column : column + 6][masks[kind]] = COLOURS[colour]
    return png(pixels)


def tasks(count: int, seed: int = 0, held_out: bool = False, blind: bool = False) -> list[Task]:
    """Distinct questions with their answers. `blind`: without what is to be drawn, for a control."""
    found = distinct(_draws(seed), count, held_out)
    return [{**task, "drawing": None} for task in found] if blind else found


def _draws(seed: int) -> Iterator[Task]:
    rng = random.Random(seed)
    while True:
        kinds = rng.sample(range(len(KINDS)), 3)
        counts = [rng.randint(0, MOST) for _ in kinds]
        if rng.random() < 0.5:
            question, answer = f"how many {KINDS[kinds[0]]}s?", str(counts[0])
        else:
            answer = rng.choice(("same", KINDS[kinds[0]], KINDS[kinds[1]]))
            less, more = sorted(rng.sample(range(MOST + 1), 2))
            counts[0], counts[1] = (more, less) if answer == KINDS[kinds[0]] else (less, more)
            counts[1] = counts[0] if answer == "same" else counts[1]
            first, second = (KINDS[kind] for kind in kinds[:2])
            question = f"{first} or {second}?"
        cells = rng.sample(range(CELLS * CELLS), sum(counts))
        listed = [kind for kind, many in zip(kinds, counts, strict=True) for _ in range(many)]
        drawing = [
            [kind, rng.randrange(len(COLOURS)), *(CELL * place + rng.randint(0, 2) for place in divmod(cell, CELLS))]
            for kind, cell in zip(listed, cells, strict=True)
        ]
        shown = " ".join(",".join(map(str, one)) for one in sorted(drawing))
        yield {"id": f"{question} {shown}", "question": question, "answer": answer, "drawing": drawing}


if __name__ == "__main__":
    write(tasks)
