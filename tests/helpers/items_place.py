"""A folder with rows, two checkpoints and a reward model, for tests of items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conftest import tiny
from reward_models import write_reward_model

from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

ROWS = [{"id": str(i), "prompt": f"say {i}=", "answer": str(i), "topic": "ab"[i % 2]} for i in range(7)]
REWARD = """
from posttrain import Invalid


def reward(task, reply):
    return {"long": float(len(reply)), "e": 10.0 * ("e" in reply)}


def digits(task, reply):
    return float(any(c.isdigit() for c in reply[:2]))


def strict(task, reply):
    return Invalid("too short") if len(reply) < 4 else float(len(reply))


def never(task, reply):
    return Invalid("the service is down")


def ranked(tasks, replies):
    return [float(len(reply)) for reply in replies]


def twice(task):
    yield task["prompt"]
    yield "again"
    return 1.0
"""


def furnish(folder: Path, tokenizer: Tokenizer) -> None:
    write(folder / "rows.jsonl", ROWS)
    (folder / "my.py").write_text(REWARD)
    save_model(tiny(tokenizer), folder / "start", tokenizer)
    save_model(tiny(tokenizer, seed=3), folder / "other", tokenizer)
    write_reward_model(folder / "reward", tiny(tokenizer, seed=5), tokenizer, offset=0.5)


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]
