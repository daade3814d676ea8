"""Damaged rows in every format and for every use, and damaged text files of replies."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.case import Case
from fuzzing.mutate import content_of, damage_file, mutated, odd, write_json
from fuzzing.samples import REWARD, chats, copy, questions, rows
from fuzzing.usual import CHECK, EVAL, RL, SCRATCH, SFT, without

FORMATS = ("jsonl",) * 4 + ("json", "json", "csv", "tsv", "jsonl.gz", "csv.gz", "parquet", "folder", "saved")
USUAL = {
    "sft": f"sft {SCRATCH} --context 200",
    "sft-model": f"sft {SFT} --model MODEL",
    "rl": f"rl {RL} --model MODEL",
    "eval": f"eval {EVAL} --model MODEL",
    "check": f"check {CHECK}",
    "sample": "sample --tasks rows.jsonl --model MODEL --samples 1 --max-tokens 2 --limit 2 --threads 1 --out out.jsonl",
}
TYPED: tuple[Any, ...] = (
    *(datetime(2024, 2, 29, 12, 30, tzinfo=UTC), datetime(1, 1, 1), date(9999, 12, 31), time(23, 59)),
    *(timedelta(days=-1, microseconds=1), Decimal("1.10"), Decimal("1e-30"), b"", b"\xff\x00", b"text", float("nan")),
    *([b"\xff", None], {"when": datetime(2024, 2, 29), "raw": b"\x00"}, [[Decimal("0.5")]], float("-inf")),
)
"""What a table may hold and JSON has no form for."""


def write(path: Path, content: list[Any], form: str, random: Random) -> Path:
    """Rows in a file of some format, as far as the format can say them. Returns the file (or the folder)."""
    if form in ("csv", "tsv", "csv.gz"):
        columns = list(dict.fromkeys(key for row in content if isinstance(row, dict) for key in row))
        lines = [[row.get(c, "") if isinstance(row, dict) else row for c in columns] for row in content]
        text = io.StringIO()
        table = csv.writer(text, delimiter="\t" if form == "tsv" else ",")
        table.writerows([columns, *([_cell(value) for value in line] for line in lines)])
        data = text.getvalue().encode("utf-8", "surrogatepass")
    elif form == "json":
        nested = random.choice([content, content, {"data": content}, {"data": content, "version": 1}])
        data = json.dumps(nested, default=str).encode()
    else:
        data = "".join(json.dumps(row, default=str) + "\n" for row in content).encode()
    if form in ("parquet", "saved"):
        return _columns(path, content, form)
    if form == "folder":
        (path / "rows").mkdir()
        (path / "rows" / random.choice(["train.jsonl", "train-00000-of-00001.jsonl"])).write_bytes(data)
        if random.random() < 0.5:
            (path / "rows" / random.choice(["test.jsonl", "README.md", "train.csv", "x.parquet"])).write_bytes(data)
        return path / "rows"
    file = path / f"rows.{form}"
    file.write_bytes(gzip.compress(data, mtime=0) if form.endswith("gz") else data)
    return file


def _cell(value: Any) -> Any:
    return json.dumps(value, default=str) if isinstance(value, dict | list) else value


def _columns(path: Path, content: list[Any], form: str) -> Path:
    """As parquet or as a saved dataset; rows that no table can hold become rows of text."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = pyarrow.Table.from_pylist(content)
    except Exception:
        table = pyarrow.Table.from_pylist([{"prompt": ascii(row), "answer": "1", "response": "1"} for row in content])
    if form == "parquet":
        parquet.write_table(table, path / "rows.parquet")
        return path / "rows.parquet"
    import datasets

    datasets.disable_progress_bars()
    try:
        datasets.Dataset(table).save_to_disk(path / "rows")
    except Exception:
        parquet.write_table(table, path / "rows.parquet")
        return path / "rows.parquet"
    return path / "rows"


def _sample(verb: str, random: Random) -> list[dict[str, Any]]:
    if random.random() < 0.4:
        return chats() if verb.startswith("sft") else questions()
    return rows()


def dataset(random: Random, place: Path, samples: Path) -> Case:
    use = random.choice(["sft", "sft", "sft-model", "rl", "eval", "eval", "eval", "eval", "check", "sample", "sample"])
    model = {"sft-model": "chat", "rl": "plain", "eval": "plain", "sample": "plain"}.get(use)
    (place / "env.py").write_text(REWARD)
    content: list[Any] = _sample(use, random)
    form = random.choice(FORMATS)
    what = "as it is"
    broken: bool | None = None
    if random.random() < 0.75:
        for _ in range(random.choice([1, 1, 2])):
            content, _, what = mutated(content, random)
        if not isinstance(content, list):
            content = [content]
    elif random.random() < 0.3:
        content = [odd(random) for _ in range(random.randrange(4))]
        what = "odd rows"
    if random.random() < (0.6 if form in ("parquet", "saved") else 0.05):
        name, value = random.choice(["when", "answer", "id", "prompt", "label"]), random.choice(TYPED)
        content = [{**row, name: value} if isinstance(row, dict) else row for row in content]
        what += f", {name}: {value!r:.60}"
    file = write(place, content, form, random)
    if random.random() < 0.35:
        inside = random.choice(sorted(p for p in file.rglob("*") if p.is_file())) if file.is_dir() else file
        what += f", {damage_file(inside, random)}"
    if file.suffix == ".jsonl" and file.is_file():
        broken = True if _unreadable_lines(file, {"check": 1, "eval": 2, "sample": 2}.get(use)) else None
    elif not file.exists():
        broken = True
    if use in ("rl", "eval", "sample") and any(isinstance(row, dict) and row.get("messages") for row in content):
        model = "chat"
    if model:
        copy(samples, model, place)
    words = USUAL[use].replace("MODEL", model or "").replace("rows.jsonl", file.name).split()
    said = (file.name,) if broken else ()
    options = _data_options(use, random)
    if options:
        words = without(words, options[0].removeprefix("--"))
    return Case([*words, *options], f"{use} {form}: {what}", broken, said)


def _unreadable_lines(file: Path, limit: int | None) -> bool:
    """Whether some line of those that are read is not UTF-8, or not a JSON object: by Python's reader, on whole lines."""
    try:
        whole = content_of(file).removeprefix(codecs.BOM_UTF8)
    except OSError:
        return True
    for line in [line for line in whole.split(b"\n") if line.strip()][:limit]:
        try:
            if not isinstance(json.loads(line.decode("utf-8")), dict):
                return True
        except (ValueError, RecursionError):
            return True
    return False


def _data_options(use: str, random: Random) -> list[str]:
    """Sometimes: columns renamed, templates, splits, limits, held-out shares, right and wrong."""
    if random.random() < 0.7:
        return []
    choices: list[list[str]] = [
        ["--limit", random.choice(["1", "2", "0", "-1", "1000000000000"])],
        ["--fields.prompt", random.choice(["prompt", "response", "level", "nothing", "", "id"])],
        ["--fields.answer", random.choice(["answer", "level", "promt"])],
        [
            "--prompt-template",
            random.choice(["{prompt}", "{level}: {prompt}\\n", "{", "}", "{}", "{0}", "{prompt!r}", "{a.b}", ""]),
        ],
        ["--split", random.choice(["train", "test", "", "x"])],
        ["--held-out", random.choice(["0.5", "0.01", "0.99", "0", "1", "-1", "nan", "2"])],
    ]
    if use == "check":
        choices = choices[:1]
    if use.startswith("sft"):
        choices.append(["--response-template", random.choice(["{answer}", "{nothing}", "{", "", "x" * 3000])])
    return random.choice(choices)


def replies(random: Random, place: Path, samples: Path) -> Case:
    """The text file of sample replies that `check` takes."""
    (place / "env.py").write_text(REWARD)
    write_json(place / "rows.json", rows())
    file = place / "replies.txt"
    texts = ["4", "", " ", "\x00", "x" * 1_000_000, "\ufeff", "\u2028", "naïve", "a\x0bb", "\x1b[31m", "{}" * 1000]
    file.write_text("\n".join(random.choice(texts) for _ in range(random.randrange(4))), encoding="utf-8")
    what = damage_file(file, random) if random.random() < 0.5 else "odd replies"
    broken: bool | None = None
    try:
        content_of(file).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        broken = True
    words = ["check", "--env", "env.py:reward", "--tasks", "rows.json", "--replies", "replies.txt", "--limit", "1"]
    return Case(words, what, broken, ("replies.txt",) if broken else ())
