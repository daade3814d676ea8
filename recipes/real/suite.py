"""Evaluates a run of a real model on a suite of three tasks, compared with the model that it started from:

python -m recipes.real.suite --trained runs/real/reading-120/grpo-0

reading    questions on a text, of held-out articles: what the recipe `reading` trains
sums       one-digit sums and products, worded as `posttrain demo --real` asks them
problems   word problems, with replies of at most 96 tokens
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from posttrain.cli.demo_command import questions as sums
from posttrain.cli.main import main as posttrain
from posttrain.cli.real_model import fetched
from recipes.real import reading
from recipes.real.problems import problems
from recipes.real.study import DATA, number, run

SUITE = """
[reading]
tasks = "{folder}/reading.jsonl"
env = "{reward}"
max_tokens = {longest}
temperature = 0
samples = 1
success = 1

[sums]
tasks = "{folder}/sums.jsonl"
env = "verify:numeric"
max_tokens = 24
samples = 4
out_of_distribution = true

[problems]
tasks = "{folder}/problems.jsonl"
env = "verify:numeric"
max_tokens = 96
samples = 4
out_of_distribution = true
"""


def write(folder: Path, data: Any, count: int) -> Path:
    """Write the tasks of the parts, at most `count` of each, and the suite. Return the suite's file."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[Any]] = {
        "reading": sorted(reading.questions(data)[1], key=_order)[: 2 * count],
        "sums": sums("+*", range(10), 0)[:count],
        "problems": sorted(problems(data.data)[1], key=_order)[:count],
    }
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "suite.toml"
    file.write_text(SUITE.format(folder=folder, reward=reading.REWARD, longest=reading.LONGEST))
    return file


def _order(row: Any) -> int:
    return number(row["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", required=True, help="run or checkpoint to evaluate")
    parser.add_argument("--model", help="the start, which it is compared with (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--out", type=Path, default=Path("runs/real/suite"))
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the datasets")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--small", action="store_true", help="shows that all of it runs, and nothing else")
    given = parser.parse_args()
    file = write(given.out, given, 4 if given.small else 100)
    words = ["eval", "--suite", str(file), "--model", given.trained, "--against", given.model or str(fetched())]
    words += ["--precision", given.precision, "--out", str(given.out / "suite.json"), "--overwrite"]
    raise SystemExit(posttrain(words))


if __name__ == "__main__":
    run(main)
