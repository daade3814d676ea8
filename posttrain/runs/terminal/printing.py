"""Tables and rollouts, printed for people."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from posttrain.core.messages import clip, readable, safe, several
from posttrain.core.reply_steps import SCORED_STEPS, scored_steps
from posttrain.core.rollouts import Outcome, Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.runs.terminal.live_region import cells as cells_of
from posttrain.runs.terminal.output import Output, fancy, wrapped
from posttrain.runs.terminal.output import columns as columns_of

SLOW = 0.05  # seconds: durations of slower turns are printed
FIRST_LINES, LAST_LINES = 8, 24  # of what a policy was shown at length, such as documents, on a terminal
TURNS = 6  # of an example, after its prompt
LINES_OF_PROMPT, LINES_OF_REPLY = 2, 3  # lines of an example: three examples and some figures should fit the screen
SPEAKERS = {
    SpanKind.PROMPT: "prompt",
    SpanKind.SAMPLED: "reply",
    SpanKind.IMITATED: "author",
    SpanKind.OBSERVATION: "env",
    SpanKind.TOOL: "tool",
}
"""Kind of a turn -> its label."""
SHOWN = tuple(SPEAKERS[kind] for kind in (SpanKind.PROMPT, SpanKind.OBSERVATION, SpanKind.TOOL))


def say(*lines: str) -> None:
    """Print lines, wrapped between words on a terminal; text after the first part is aligned with the end of its
    label.
    """
    width = columns_of(Output(sys.stdout))
    for line in "\n".join(lines).split("\n") if lines else ():
        print(wrapped(safe(line), width, 12))


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    stream: TextIO | None = None,
    upright: bool = False,
) -> None:
    """Print a table: numbers right-aligned with four digits, None as a dash.

    `upright`: long values are cut. If a terminal is too narrow for the table, rows are printed one by one, each under its
    first cell, with a line per further column.
    """
    out = Output(stream or sys.stdout)
    cells, columns = [[_cell(value) for value in row] for row in rows], [safe(name) for name in columns]
    right = [any(_numeric(row[i]) for row in rows) for i in range(len(columns))]
    title = "\n".join(wrapped(line, columns_of(out)) for line in title.split("\n"))
    if upright and rows and _too_wide(columns, cells, columns_of(out)):
        out.write("\n".join([title, *_upright(columns, cells, columns_of(out))]) + "\n")
        out.flush()
        return
    if upright:
        cells = [list(map(clip, row)) for row in cells]
    if fancy(out):
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(box=box.SIMPLE_HEAD, show_edge=False)
        for name, at_right in zip(columns, right, strict=True):
            drawn.add_column(Text(name), justify="right" if at_right else "left")
        for row in cells:
            drawn.add_row(*map(Text, row))
        Console(file=cast(TextIO, out), highlight=False).print(Text(title, style="bold"), drawn, "")
        return
    widths = [max(map(cells_of, column)) for column in zip(columns, *cells, strict=True)]
    lines = [title]
    for row in [list(columns), *cells]:
        places = zip(row, widths, right, strict=True)
        lines.append("  ".join(_padded(*place) for place in places).rstrip())
    out.write("\n".join(lines) + "\n")
    out.flush()


def _too_wide(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> bool:
    """Return whether columns would have to be narrower than their names, or than a few words."""
    if not width:
        return False
    least = [max(cells_of(name), min(20, max(cells_of(row[i]) for row in cells))) for i, name in enumerate(columns)]
    return sum(least) + 3 * len(least) > width


def _upright(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield the rows, one by one: each under the content of its first column, or its number where that is too long."""
    side = min(max(map(len, columns)), 30)
    for number, row in enumerate(cells, 1):
        name = f"{columns[0]} {row[0]}".strip()
        named = cells_of(name) + 5 <= width and "\n" not in name
        yield _padded(f"── {name if named else f'row {number}'} ", width, mark="─")
        for name, cell in list(zip(columns, row, strict=True))[named:]:
            lines = _parts(cell, max(width - side - 3, 20))
            yield "\n".join(f"{name if i == 0 else '':<{side}} │ {line}".rstrip() for i, line in enumerate(lines))


def sample(rollouts: Sequence[Rollout | Mapping[str, Any]], count: int, stream: TextIO | None = None) -> None:
    """Print the first `count` rollouts: their turns, one by one, and the reward.

    They are objects, or rows of `posttrain.runs.record.rollout_reading`.
    """
    out = Output(stream or sys.stdout)
    width = columns_of(out)
    for rollout in rollouts[:count]:
        row = rollout if isinstance(rollout, Mapping) else shown(rollout)
        lines = [*_head(row, width or 80), *(_beside(name, text, width) for name, text in _lines_by_speaker(row)), ""]
        out.write("\n".join(lines) + "\n")
    out.flush()


def examples(title: str, rollouts: Mapping[str, Rollout], stream: TextIO | None = None) -> None:
    """Print rollouts by their label, such as best, in a few lines: the end of the prompt and the beginning of the
    reply.
    """
    out = Output(stream or sys.stdout)
    width = columns_of(out) or 80
    lines = [title]
    for name, rollout in rollouts.items():
        head = f"── {name} ── task {rollout.task['id']} "
        head += f"as {rollout.side} " if rollout.side else ""
        lines.append(_padded(_parts(safe(f"{head}── ended by {rollout.stop} "), width)[0], width, mark="─"))
        prompt = _parts_of(_prompt_subject(rollout), width - 9)
        if len(prompt) > LINES_OF_PROMPT:
            prompt = [f"... ({len(prompt) - LINES_OF_PROMPT + 1} more lines before)", *prompt[1 - LINES_OF_PROMPT :]]
        told = _after_the_prompt(rollout)
        for speaker, said in (
            ("prompt", prompt),
            *((who, _first_lines(text, width - 9)) for who, text in told[:TURNS]),
        ):
            lines += [f"{speaker if i == 0 else '':<7}│ {line}".rstrip() for i, line in enumerate(said)]
        if len(told) > TURNS:
            lines.append(f"       │ ... ({several(len(told) - TURNS, 'more turn')})")
        answer = rollout.task.get("answer", rollout.task.get("answers"))
        if answer is not None:
            lines.append(f"answer │ {_shortened(safe(' '.join(str(answer).split())), width - 9)}")
    out.write("\n".join([*lines, ""]) + "\n")
    out.flush()


def _after_the_prompt(rollout: Rollout) -> list[tuple[str, str]]:
    """Return (speaker, text) of the turns after the prompt: of several replies also what came between them."""
    replies = [turn for turn in rollout.turns if turn.kind is SpanKind.SAMPLED]
    if len(replies) < 2:
        return [("reply", rollout.text)]
    return [(SPEAKERS[turn.kind], turn.text) for turn in rollout.turns[rollout.turns[0].kind is SpanKind.PROMPT :]]


def _first_lines(text: str, width: int) -> list[str]:
    found = _parts_of(text, width)
    if len(found) <= LINES_OF_REPLY:
        return found
    return [*found[: LINES_OF_REPLY - 1], f"... ({len(found) - LINES_OF_REPLY + 1} more lines)"]


def _prompt_subject(rollout: Rollout) -> str:
    """Return the subject of the prompt: of messages, the user's last one, since a template ends with its own marks."""
    said = [m["content"] for m in rollout.task.get("messages") or () if m["role"] == "user"]
    return said[-1] if said and isinstance(said[-1], str) else rollout.prompt


def _parts_of(text: str, width: int) -> list[str]:
    """Return the nonempty lines of a text in pieces of this width, at least one."""
    lines = [line for line in readable(text).split("\n") if line.strip()] or [""]
    return [part for line in lines for part in _parts(line, width)]


def _shortened(text: str, width: int) -> str:
    return text if cells_of(text) <= width else _parts(text, max(width - 3, 1))[0] + "..."


def _padded(text: str, width: int, at_right: bool = False, mark: str = " ") -> str:
    """Return the text with marks that fill this number of columns."""
    fill = mark * (width - cells_of(text))
    return fill + text if at_right else text + fill


def _head(row: Mapping[str, Any], width: int) -> list[str]:
    """Return the name, reward and fate of a rollout, in as many lines as necessary."""
    earned = _judged(row)
    numbered = row.get("member") is not None and not earned.startswith("response ")
    which = f"{row['group']} [{row['member']}]" if numbered else row["group"]
    said = [which, *filter(None, [row.get("side")]), earned]
    if row.get("advantage") is not None:
        said.append(f"advantage {_cell(row['advantage'])}")
    if row.get("fate") is not None:
        why = ", ".join(filter(None, [row.get("why"), *(row.get("flags") or ())]))
        said.append(f"{row['fate']}{f': {why}' if why else ''}")
    said.append(f"ended by {row['stop']}")
    lines = [""]
    for part in (safe(part).replace("\n", " ") for part in said):
        if cells_of(lines[-1]) + cells_of(part) + 5 > width and lines[-1]:
            lines.append("")
        lines[-1] += f"── {part} "
    return [_padded(lines[0], width, mark="─"), *map(str.rstrip, lines[1:])]


def _judged(row: Mapping[str, Any]) -> str:
    """Return the reward; for a given row, its labels."""
    if row.get("invalid") is not None:
        return f"invalid: {row['invalid']}"
    label = row.get("label")
    if row["reward"] is not None and not isinstance(label, Mapping):
        parts = [f"{name} {_cell(value)}" for name, value in (row.get("parts") or {}).items()]
        if steps := row.get("step_rewards"):
            parts.append(f"steps {_cell(sum(step['reward'] for step in steps))}")
        return f"reward {_cell(row['reward'])}" + (f": {', '.join(parts)}" if parts else "")
    if not isinstance(label, Mapping):
        return str(row.get("kind") or "no reward")
    said = [f"{better} over {worse}" for better, worse, *_ in label.get("comparisons", ())]
    said += [f"label {_cell(value)}" for value in label.get("labels", ())]
    said += [] if row["reward"] is None else [f"score {_cell(row['reward'])}"]
    said += [f"{name} {_cell(value)}" for name, value in (row.get("parts") or {}).items()]
    return ", ".join([f"response {row['member']}", *said])


def shown(rollout: Rollout) -> Mapping[str, Any]:
    """Return a newly sampled rollout in the form of a row that was read."""
    from posttrain.runs.record.rollout_reading import rows_of
    from posttrain.runs.record.rollout_tables import rollouts_table

    (row,) = rows_of(rollouts_table(0, [Outcome(rollout)], "eval"))
    return {**row, "advantage": None}


def _lines_by_speaker(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (speaker, text) of a rollout, in order."""
    transcript = 0
    for turn in row["turns"]:
        if turn["transcript"] != transcript:
            transcript = turn["transcript"]
            yield "", "(a new context)"
        reward = f"  (reward {_cell(turn['reward'])})" if turn["reward"] else ""
        cut = f"  ({turn['cut']} tokens left out)" if turn.get("cut") else ""
        seconds = f"  (took {turn['seconds']:.1f} s)" if turn.get("seconds", 0) >= SLOW else ""
        own = "" if turn.get("temperature") is None else f"  (temperature {turn['temperature']:g})"
        yield SPEAKERS.get(turn["role"], turn["role"]), turn["text"] + cut + own + reward + seconds
        for call in turn.get("calls", ()):
            given = ", ".join(f"{name}={value!r}" for name, value in call["arguments"].items())
            yield "call", f"{call['tool']}({given})" if call.get("problem") is None else f"malformed: {call['problem']}"
    if not row["turns"]:
        yield from (("prompt", row["prompt"]), ("reply", row["text"]))
    for one in row.get("answers") or ():
        yield from (("said", f"{one['service']}: {text}") for text in one.get("said", ()))
    columns = row.get("columns") or {}
    answer = columns.get("answer", columns.get("answers"))
    if answer is not None:
        yield "answer", str(answer)
    notes = row.get("notes") or {}
    yield from (("step", line) for line in scored_steps(notes))
    if others := {name: value for name, value in notes.items() if name != SCORED_STEPS}:
        yield "noted", ", ".join(f"{name} {_note(value)}" for name, value in others.items())


def _note(value: Any) -> str:
    return _cell(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _beside(name: str, text: str, width: int) -> str:
    """Return the text with its name left of the first line and a bar left of all, in this number of columns (0: any).

    On a terminal, a long text that the policy was shown loses its middle; its own replies never do.
    """
    lines = [part for line in readable(text).split("\n") for part in _parts(line, max(width - 9, 20) if width else 0)]
    left_out = len(lines) - FIRST_LINES - LAST_LINES
    if width and name in SHOWN and left_out > 1:
        more = f"... ({left_out} more lines: --json shows all)"
        lines = [*lines[:FIRST_LINES], more, *lines[-LAST_LINES:]]
    return "\n".join(f"{name if i == 0 else '':<7}│ {line}".rstrip() for i, line in enumerate(lines))


def _parts(line: str, width: int) -> list[str]:
    """Return a line in pieces of this many columns, broken between words if possible. No text is lost."""
    if not width or cells_of(line) <= width:
        return [line]
    if line.isascii():
        return textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False, expand_tabs=False)
    from rich.cells import chop_cells

    found = [""]
    for word in re.findall(r"\s+|\S+", line):
        if cells_of(found[-1] + word) <= width:
            found[-1] += word
        elif cells_of(word) <= width:
            found.append(word)
        else:  # a text without spaces, such as Chinese
            found += chop_cells(found.pop() + word, width)
    return found


def _numeric(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if _numeric(value) else safe(str(value))
