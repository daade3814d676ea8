"""Writes a large file of demonstrations, to measure how rows are read: JSON lines, or Parquet if the name says so.

.venv/bin/python benchmarks/data/generate.py /tmp/rows.jsonl               # 523,110 rows, 294 MB
.venv/bin/python benchmarks/data/generate.py /tmp/rows.parquet             # the same rows

Each row joins a few instructions of a small file, drawn by seed and numbered, so that no two rows are equal.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

INSTRUCTIONS = Path(__file__).resolve().parents[3] / "shared/data/sft/instructions.jsonl"
ROWS = 523_110
PER_GROUP = 10_000  # rows of a group of the Parquet file


def rows(count: int, instructions: Path, seed: int = 0) -> Iterator[dict[str, str]]:
    known = [json.loads(line) for line in instructions.open(encoding="utf-8")]
    rng = random.Random(seed)
    for number in range(1, count + 1):
        chosen = rng.choices(known, k=rng.choice((4, 5)))
        tasks = "\n".join(f"{i}. {row['prompt']}" for i, row in enumerate(chosen, 1))
        replies = "\n".join(f"{i}. {row['response']}" for i, row in enumerate(chosen, 1))
        yield {"prompt": f"Sheet number {number}\n{tasks}\n", "response": replies}


def write_parquet(file: Path, made: Iterator[dict[str, str]]) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = pa.schema({"prompt": pa.string(), "response": pa.string()})
    with ParquetWriter(file, schema) as writer:
        while group := list(islice(made, PER_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--instructions", type=Path, default=INSTRUCTIONS)
    options = parser.parse_args()
    made = rows(options.rows, options.instructions)
    if options.file.suffix == ".parquet":
        write_parquet(options.file, made)
    else:
        with options.file.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in made)
    print(f"{options.file}: {options.rows:,} rows, {options.file.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
