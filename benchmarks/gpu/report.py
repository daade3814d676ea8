"""The findings of all parts in one Markdown file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import Table

RESULTS = "results.jsonl"
GOALS = (
    "an update of 1.5B at 45 % MFU or more; GRPO of 7B with LoRA and replies of 4,096 tokens within 80 GB; a step of "
    "GRPO 1.5 times as fast as TRL's with vLLM, or faster"
)
WORDS = {
    "done": "done",
    "failed": "done, with failures",
    "crashed": "CRASHED",
    "timed out": "STOPPED at its time limit",
    "not run": "NOT RUN: it did not fit into the time",
}
"""Outcome of a part, in words."""


def append(out: Path, result: Mapping[str, Any]) -> None:
    with open(out / RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def results(out: Path) -> dict[str, dict[str, Any]]:
    """The newest result of each part."""
    file = out / RESULTS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {row["part"]: row for row in map(json.loads, lines)}


def write(into: Path, out: Path, parts: Sequence[str], command: str) -> None:
    """Write the report of all parts that have a result, in this order."""
    found = results(out)
    shown = [found[name] for name in parts if name in found]
    lines = ["# posttrain on a CUDA card", "", f"Made by `{command}`, the newest result of each part.", ""]
    lines += [f"Goals: {GOALS}.", "", "| part | outcome | seconds |", "| --- | --- | --- |"]
    lines += [f"| {row['part']} | {WORDS[row['ended']]} | {row['seconds']:.0f} |" for row in shown]
    failures = [f"- {row['part']}: {_plain(line)}" for row in shown for line in row.get("failures", ())]
    lines += ["", "## What failed", "", *(failures or ["Nothing."]), ""]
    for row in shown:
        lines += _section(row)
    into.parent.mkdir(parents=True, exist_ok=True)
    draft = into.with_name(into.name + ".draft")
    draft.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    draft.replace(into)


def _section(row: Mapping[str, Any]) -> list[str]:
    lines = [f"## {row['part']}", "", f"{row['what']}. {row['date']}, commit {row['commit']}.", ""]
    lines += [Table(**table).markdown() for table in row.get("tables", ())]
    lines += [f"- {note}" for note in row.get("notes", ())]
    return lines


def _plain(line: str) -> str:
    return line.replace("|", "/").replace("<", "&lt;")
