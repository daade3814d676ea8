"""The reward and the tasks of recipes/stories.toml, in the form of a user's own file.

python recipes/stories.py --out runs/stories/tasks.jsonl    # the tasks
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

ANIMALS = ("dog", "cat", "bird", "rabbit", "bear", "frog", "duck", "fish", "mouse", "bunny", "squirrel", "fox")
OPENINGS = (
    "Once upon a time, there was a {} named",
    "One day, a little {} went to the park.",
    "Lily and her {} were playing in the garden.",
    "There was a big {} who lived in the forest.",
    "Tim saw a {} in the garden.",
    "The {} was very sad because it was raining.",
    "A little girl found a small {} under a tree.",
    'Mom said, "Look, there is a {}!"',
)
END = "<s>"  # between stories, this model begins a new one
SUCCESS = 1.0  # all three


def reward(task: dict[str, Any], reply: str) -> dict[str, float]:
    """Rewards a story that ends in time, with a full stop, and mentions its animal again."""
    story, ended, _ = reply.partition(END)
    return {
        "animal": 0.5 * bool(re.search(rf"\b{task['animal']}", story.lower())),
        "full stop": 0.25 * story.rstrip().endswith((".", "!", '."', '!"')),
        "ended": 0.25 * bool(ended),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/stories/tasks.jsonl")
    parser.add_argument("--seed", help="the tasks are the same for every seed")
    options = parser.parse_args()
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": f"{animal}-{i}", "prompt": opening.format(animal), "animal": animal}
        for animal, (i, opening) in product(ANIMALS, enumerate(OPENINGS))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} tasks in {path}")


if __name__ == "__main__":
    main()
