"""Tables and rollouts, printed for people."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from posttrain.messages import safe
from posttrain.runs.output import Output, columns, fancy
from posttrain.types import Fate, Outcome, Rollout, SpanKind

SLOW = 0.05  # seconds of a turn that are told
SPEAKERS = {
    SpanKind.PROMPT: "prompt",
    SpanKind.SAMPLED: "reply",
    SpanKind.IMITATED: "author",
    SpanKind.OBSERVATION: "env",
    SpanKind.TOOL: "tool",
}
"""Kind of a turn -> its label."""


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], stream: TextIO | None = None) -> None:
    """Print a table: numbers to the right with four digits, None as a dash."""
    out = Output(stream or sys.stdout)
    cells = [[_cell(value) for value in row] for row in rows]
    right = [any(_numeric(row[i]) for row in rows) for i in range(len(columns))]
    if fancy(out):
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
        for name, at_right in zip(columns, right, strict=True):
            drawn.add_column(Text(name), justify="right" if at_right else "left")
        for row in cells:
            drawn.add_row(*map(Text, row))
        Console(file=cast(TextIO, out)).print(drawn)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [title]
    for row in [list(columns), *cells]:
        places = zip(row, widths, right, strict=True)
        lines.append(
            "  ".join(f"{cell:{'>' if at_right else '<'}{width}}" for cell, width, at_right in places).rstrip()
        )
    out.write("\n".join(lines) + "\n")
    out.flush()


def sample(rollouts: Sequence[Rollout | Mapping[str, Any]], count: int, stream: TextIO | None = None) -> None:
    """Print the first `count` rollouts: what was said, turn by turn, and the reward.

    Takes them played or as `posttrain.record.reading` has them.
    """
    out = Output(stream or sys.stdout)
    width = columns(out)
    for rollout in rollouts[:count]:
        row = rollout if isinstance(rollout, Mapping) else shown(rollout)
        reward = _judged(row)
        credit = f" ── advantage {_cell(row['advantage'])}" if row.get("advantage") is not None else ""
        if row.get("fate") not in (None, Fate.TRAINED):
            credit += f" ── {row['fate']}{': ' + row['why'] if row.get('why') else ''}"
        side = f" ── {row['side']}" if row.get("side") else ""
        head = f"── {row['group']}{side} ── {reward}{credit} ── {row['stop']} "
        lines = [safe(head).replace("\n", " ").ljust(width or 80, "─")]
        lines += [*(_beside(name, text, width) for name, text in _said(row)), ""]
        out.write("\n".join(lines) + "\n")
    out.flush()


def _judged(row: Mapping[str, Any]) -> str:
    """What it earned; of a given row, what was said of it."""
    if row.get("invalid") is not None:
        return f"invalid: {row['invalid']}"
    label = row.get("label")
    if row["reward"] is not None or not isinstance(label, Mapping):
        return f"reward {_cell(row['reward'])}" if row["reward"] is not None else str(row.get("kind") or "no reward")
    said = [f"{better} over {worse}" for better, worse, *_ in label.get("comparisons", ())]
    said += [f"label {_cell(value)}" for value in label.get("labels", ())]
    return ", ".join([f"response {row['member']}", *said])


def shown(rollout: Rollout) -> Mapping[str, Any]:
    """A rollout that has just been played as it would be read."""
    from posttrain.record.making import rollouts_table
    from posttrain.record.reading import rows_of

    (row,) = rows_of(rollouts_table(0, [Outcome(rollout)], "eval"))
    return {**row, "advantage": None}


def _said(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(who, what) of a rollout, in the order in which it was said."""
    transcript = 0
    for turn in row["turns"]:
        if turn["transcript"] != transcript:
            transcript = turn["transcript"]
            yield "", "(a new context)"
        reward = f"  (reward {_cell(turn['reward'])})" if turn["reward"] else ""
        cut = f"  ({turn['cut']} tokens left out)" if turn.get("cut") else ""
        seconds = f"  ({turn['seconds']:.1f} s)" if turn.get("seconds", 0) >= SLOW else ""
        yield SPEAKERS.get(turn["role"], turn["role"]), turn["text"] + cut + reward + seconds
        for call in turn.get("calls", ()):
            given = ", ".join(f"{name}={value!r}" for name, value in call["arguments"].items())
            yield "call", f"{call['tool']}({given})" if call.get("problem") is None else f"malformed: {call['problem']}"
    if not row["turns"]:
        yield from (("prompt", row["prompt"]), ("reply", row["text"]))
    columns = row.get("columns") or {}
    answer = columns.get("answer", columns.get("answers"))
    if answer is not None:
        yield "answer", str(answer)


def _beside(name: str, text: str, width: int) -> str:
    """The text with its name to the left of the first line and a bar to the left of all, in so many columns (0: any)."""
    lines = [part for line in safe(text).split("\n") for part in _parts(line, max(width - 9, 20) if width else 0)]
    return "\n".join(f"{name if i == 0 else '':<7}│ {line}".rstrip() for i, line in enumerate(lines))


def _parts(line: str, width: int) -> list[str]:
    """A line in pieces of that width, broken between words where there are any. Nothing of it is lost."""
    if not width or len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False, expand_tabs=False)


def _numeric(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if _numeric(value) else safe(str(value))
