"""The document about what was tried: a table of modules, and every mistake that no test notices."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from mutating.operators import Mutant

Drawn = dict[str, tuple[int, list[Mutant]]]
Rows = dict[str, dict[str, Any]]


def table(rows: Rows, drawn: Drawn) -> tuple[list[str], float]:
    """Lines of Markdown, and the share of the mistakes that are not equivalent that were noticed."""
    lines = ["| module | sites | drawn | tried | killed | of these by time-out | equivalent | survived |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    sums = [0] * 7
    for module, (sites, own) in drawn.items():
        tried = [rows[m.id] for m in own if m.id in rows]
        killed = [r for r in tried if r["status"] != "survived"]
        alive = [r for r in tried if r["status"] == "survived"]
        equal = sum(bool(r["reason"]) for r in alive)
        hung = sum(r["status"] == "time-out" for r in killed)
        counts = [sites, len(own), len(tried), len(killed), hung, equal, len(alive) - equal]
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
        lines.append(f"| `{module}` | {' | '.join(map(str, counts))} |")
    lines.append(f"| all | {' | '.join(map(str, sums))} |")
    share = sums[3] / max(1, sums[2] - sums[5])
    lines.append(
        f"\nThe tests notice {sums[3]} of the {sums[2] - sums[5]} mistakes that are not equivalent: {share:.1%}."
    )
    return lines, share


def write(file: Path, rows: Rows, drawn: Drawn, command: str) -> None:
    alive = [rows[m.id] for _, own in drawn.values() for m in own if rows.get(m.id, {}).get("status") == "survived"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines, _ = table(rows, drawn)
    text = [
        "# Mutation tests: which mistakes do the tests notice?",
        "",
        f"`{command}`, {date.today()}, commit {commit}, {_machine()}, Python {platform.python_version()}.",
        "",
        "Each mistake is one small change of one place, tried alone against the tests that run its line: see",
        "`tools/mutants.py`. Places are drawn by seed, every kind of mistake in turn.",
        "",
        *lines,
        "",
        "## Survivors that are not equivalent",
        "",
        *(_list([r for r in alive if not r["reason"]]) or ["Nothing."]),
        "",
        "## Equivalents",
        "",
        *(_list([r for r in alive if r["reason"]]) or ["None."]),
        "",
    ]
    file.write_text("\n".join(text))


def _machine() -> str:
    """The processor's name, where the system says it."""
    told = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in told if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def _list(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"- `{r['module']}:{r['line']}` {r['kind']}: `{_short(r['before'])}` becomes `{_short(r['after'])}`"
        + (f". {r['reason']}" if r["reason"] else "")
        for r in rows
    ]


def _short(text: str) -> str:
    return " ".join(text.split())
