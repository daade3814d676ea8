"""How long a large file of rows keeps a run from its first step, and how much memory that takes.

    .venv/bin/python benchmarks/data/first_step.py --out docs/results/data.md       # five minutes on two idle cores

Makes the files with generate.py, then starts `posttrain sft` and `posttrain rl` on them as a user would: from JSON lines
with nothing kept from before, the same once more, and from Parquet with nothing kept. Seconds go from the command to the
first line of metrics.jsonl of a step; memory is the largest resident set of the process at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from generate import INSTRUCTIONS, ROWS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = ("--hidden", "64", "--layers", "2", "--context", "512", "--tokenizer", "characters")
# What is said of it, ending of the file, whether something is kept from the start before, goals: seconds, GB.
CASES: tuple[tuple[str, str, bool, float | None, float | None], ...] = (
    ("2,000 of them, first start", "few.jsonl", False, None, None),  # what a start takes, whatever the rows
    ("JSON lines, first start", "jsonl", False, 10.0, 1.0),
    ("JSON lines, second start", "jsonl", True, 3.0, 0.6),
    ("Parquet, first start", "parquet", False, 3.0, 0.6),
)
REWARD = "def reward(task, reply):\n    return float(len(reply) > 3)\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument(
        "--place", type=Path, help="where the files are made and left; default: a folder that is removed"
    )
    parser.add_argument("--out", type=Path, help="a document to write the table into")
    options = parser.parse_args()
    if not INSTRUCTIONS.exists():
        print(f"{INSTRUCTIONS} is missing: the rows are made of it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        place = options.place or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        for ending in ("jsonl", "parquet"):
            if not (place / f"rows.{ending}").exists():
                made = [sys.executable, HERE / "generate.py", place / f"rows.{ending}", "--rows", str(options.rows)]
                subprocess.run(made, check=True)
        (place / "my.py").write_text(REWARD)
        lines = table(place, options.rounds)
    told = header(options.rows)
    print("\n".join([*told, *lines]))
    if options.out:
        options.out.write_text("\n".join([*told, *lines, ""]), encoding="utf-8")
    return 0


def table(place: Path, rounds: int) -> list[str]:
    lines = [
        "| verb | rows | seconds to the first step | goal | memory, GB | goal |",
        "|---|---|---|---|---|---|",
    ]
    small = place / "rows.few.jsonl"
    with (place / "rows.jsonl").open() as rows:
        small.write_text("".join(line for line, _ in zip(rows, range(2000), strict=False)))
    start(place, ["sft", "--tasks", str(small), *MODEL, "--steps", "1", "--rows", "4"], "model", keep=False)
    words = {
        "sft": ["--model", str(place / "model"), "--rows", "16"],
        "rl": f"--model {place / 'model'} --env my.py:reward --prompts 2 --group 2 --max-tokens 4".split(),
    }
    for verb, more in words.items():
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for name, ending, keep, _, _ in CASES:
                command = [verb, "--tasks", str(place / f"rows.{ending}"), "--steps", "2", *more]
                found.setdefault(name, []).append(start(place, command, "run", keep))
        for name, _, _, seconds, memory in CASES:
            times, sizes = zip(*found[name], strict=True)
            cells = [said(times, seconds), str(seconds or ""), said(sizes, memory), str(memory or "")]
            lines.append("| " + " | ".join([verb, name, *cells]) + " |")
    return lines


def said(values: tuple[float, ...], goal: float | None) -> str:
    middle = statistics.median(values)
    verdict = "" if goal is None else ", met" if middle <= goal else ", missed"
    return f"{middle:.2f} [{min(values):.2f}, {max(values):.2f}]{verdict}"


def start(place: Path, command: list[str], out: str, keep: bool) -> tuple[float, float]:
    """Seconds to the first step of this command, and GB of memory in all."""
    cache, run = place / "cache", place / out
    if not keep:
        # Compiled code stays: it is not what is measured.
        shutil.rmtree(cache / "posttrain" / "rows", ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)
    environment: dict[str, Any] = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrain", *command, "--out", str(run), "--quiet"], cwd=place, env=environment
    )
    first = None
    ended, status, used = 0, 0, None
    while not ended:
        time.sleep(0.02)
        if first is None and any(json.loads(line)["step"] for line in written(run / "metrics.jsonl")):
            first = time.perf_counter() - began
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or first is None or used is None:
        raise SystemExit(f"posttrain {' '.join(command)} ended with {process.returncode}")
    return first, used.ru_maxrss * 1024 / 1e9


def written(file: Path) -> list[str]:
    """The whole lines of a file that grows."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def header(rows: int) -> list[str]:
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    return [
        "# Large files of rows",
        "",
        "How long does a run take to start on a large file?",
        "",
        f"`python {' '.join(sys.argv)}`, {date.today()}, commit {commit}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}. {rows:,} rows of text; median, minimum and maximum of the rounds.",
        "",
        "First start: the row cache of the user is empty. Second start: the row cache holds what the first start wrote.",
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
