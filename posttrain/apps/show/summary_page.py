"""The page of a run for a terminal of 80 columns and 24 lines, the table of a folder's runs, and two runs side by side."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.apps.show.run_summary import RunSummary, compared, names_of_figures, written
from posttrain.apps.view.comparison_warnings import warnings_of
from posttrain.config.service_options import implying
from posttrain.core.intervals import Interval
from posttrain.core.messages import dashed, readable, several
from posttrain.runs.metrics_table import MEASURED, on_terminal
from posttrain.runs.run_options import changed, differing, typed
from posttrain.runs.terminal.live_region import fitted
from posttrain.runs.terminal.output import wrapped

WIDTH, LABEL = 80, 12
PART = ("mixture/", "suite/")  # beginnings of the figures of parts
HELD, FOUND, OPTIONS = 4, 3, 3  # most lines of held-out figures, of findings, of options
ELSEWHERE = {"algorithm", "model", "tasks", "env", "steps", "out"}
"""Options that the page shows in lines of their own."""
Table = tuple[list[str], list[list[Any]]]


def page(run: RunSummary) -> list[str]:
    """Return the lines of a run's page."""
    lines = _flowed(f"{run.kind}  ", [f"{_state(run)}: {run.name}"], 2)
    lines += [_line("damaged", problem.replace(f"{run.folder}/", "")) for problem in run.problems[:2]]
    config, sizes = run.config, [str(line) for line in run.about.get("sizes", [])]
    size = next(
        (line.partition(", context")[0].removeprefix("model ") for line in sizes if line.startswith("model ")), ""
    )
    model = Path(run.model).name if run.model.startswith("/") else run.model
    lines.append(_line("model", f"{model} ({size})" if size else model))
    rows = next((line for line in sizes if line.endswith(" held out") or " held out" in line), "")
    rows = re.sub(r" \(.*?\)", "", rows)  # without the columns
    parts = {name: own for name, own in (config.get("mixture") or {}).items() if isinstance(own, dict)}
    files = str(config.get("tasks") or ("" if parts else "rows in memory"))
    lines += _flowed("data", [": ".join(filter(None, [files, rows]))], 2)
    scoring = implying(config)
    if config.get("env"):
        lines.append(_line("reward", " ".join(typed(run.about, scoring)) or str(config["env"])))
    elif scored := [f"{name} {own['env']}" for name, own in parts.items() if own.get("env")]:
        lines += _flowed("reward", [", ".join(scored)], 2)
    options = {name: value for name, value in changed(run.about).items() if name not in {*ELSEWHERE, *scoring}}
    if options:
        lines += _flowed("options", typed(run.about, options), OPTIONS)
    lines += _held_out(run.held_out())
    trained = [f"{on_terminal(one['name'])} {one['first']:.3f} -> {one['last']:.3f}" for one in run.trained()]
    if trained:
        lines += _flowed("training", [f"{', '.join(trained)} (first -> last tenth)"], 2)
    if run.no_signal is not None:
        lines.append(_line("signal", f"{run.no_signal:.0%} of the rollouts in groups with equal rewards: no signal"))
    lines += _findings(run)
    lines += [_line(name, _reply(one)) for name, one in (("best", run.best), ("worst", run.worst)) if one is not None]
    every = config.get("save_every")
    none = f"none: one is saved every {every} steps (--save-every)" if every else "none"
    lines.append(_line("checkpoint", str(run.checkpoint or none)))
    lines += [f"{label:<{LABEL}}{command}" for label, command in run.commands().items()]
    return lines


def _state(run: RunSummary) -> str:
    planned = "" if run.planned is None else f" of {run.planned:,}"
    took = "" if run.seconds is None else f", {run.seconds:.3g} s a step"
    return f"{run.state}, {run.done:,}{planned} steps{took}, {age(written(run.folder))} ago"


def age(when: float) -> str:
    """Return how long ago a time was, as "5 min"."""
    seconds = max(0.0, time.time() - when)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _line(label: str, text: str) -> str:
    return fitted(f"{label:<{LABEL}}{' '.join(readable(text).split())}", WIDTH)


def _flowed(label: str, words: Sequence[str], most: int) -> list[str]:
    """Return the words in at most so many lines; the last one ends with a note if some are left out."""
    lines = wrapped(f"{label:<{LABEL}}{'  '.join(readable(word) for word in words)}", WIDTH, LABEL).split("\n")
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: WIDTH - 20].rpartition("  --")[0] + "  ... (all: --json)"]
    return [fitted(line, WIDTH) for line in lines]


def _figure(figure: dict[str, Any]) -> str:
    """Return "accuracy 0.154 -> 0.385, change 0.231 [0.010, 0.452] (13 tasks)"."""
    name, before, change = on_terminal(figure["name"]), figure["before"], figure["change"]
    text = f"{name} {_number(before)} -> {_number(figure['after'])}" if before is not None else ""
    text = text or f"{name} {_number(figure['after'])}, after step {figure['steps'][1]}"
    return text if change is None else f"{text}, change {_change(change)} ({several(change['tasks'], 'task')})"


def _held_out(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the held-out figures; those of the parts of a mixture or suite together."""
    parts = [one for one in figures if one["name"].startswith(PART)]
    whole = [one for one in figures if one not in parts][:HELD]
    lines = [_line("held out" if i == 0 else "", _figure(one)) for i, one in enumerate(whole)]
    lines += _flowed("by part", [", ".join(map(_figure, parts))], HELD) if parts else []
    return lines or [_line("held out", "nothing")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _change(change: dict[str, Any]) -> str:
    if change.get("why"):
        return f"{change['mean']:+.3f}"
    return f"{change['mean']:+.3f} {Interval(change['low'], change['high']).text('.3f')}"


def _findings(run: RunSummary) -> list[str]:
    if not run.findings:
        fell = [
            on_terminal(one["name"]) for one in run.held_out() if one["change"] and (one["change"]["high"] or 0) < 0
        ]
        said = f"held-out {' and '.join(fell)} fell by more than chance" if fell else "nothing found"
        return [_line("health", said)]
    shown = run.findings[-FOUND:]
    lines = [f"step {one['step']}: {one['message'].partition(chr(10))[0]}" for one in shown]
    if left := len(run.findings) - len(shown):
        lines[0] += f" (and {left} before)"
    return [_line("health" if i == 0 else "", line) for i, line in enumerate(lines)]


def _reply(row: dict[str, Any]) -> str:
    return f"{row['reward']:.3g} (step {row['step']}, task {row['task']}): {row['text'] or '(empty)'}"


def listing(runs: Sequence[tuple[Path, RunSummary | str]], above: Path) -> Table:
    """Return the table of a folder's runs. A text in place of a run: why it cannot be read."""
    columns = ["run", "verb", "model", "steps", "held out", "findings", "age"]
    rows: list[list[Any]] = []
    for folder, run in runs:
        name = fitted(str(folder.relative_to(above)), 18)
        if isinstance(run, str):
            rows.append([name, "damaged", "", "", "", "", age(written(folder))])
            continue
        found = next(iter(run.held_out()), None)
        of = (
            ""
            if found is None
            else f"{on_terminal(found['name'])} {_number(found['before'])} -> {_number(found['after'])}"
        )
        steps = f"{run.done}/{run.planned or '?'}" + ("" if run.state == "ended" else f" {run.state.partition(' ')[0]}")
        model = fitted(Path(run.model).name, 12)
        steps = steps.replace("killed:", "killed")
        rows.append([name, run.kind, model, steps, of, len(run.findings), age(written(folder))])
    return columns, rows


def side_by_side(a: RunSummary, b: RunSummary) -> tuple[Table, Table, list[str]]:
    """Return the options that differ, the figures of both, and lines about the difference."""
    chosen = {*changed(a.about), *changed(b.about)}  # other verbs have other options, whose defaults say nothing
    differ = [one for one in differing(a.about, b.about) if one["name"].partition(".")[0] in chosen]
    options = [[_option(one["name"]), _value(one["a"]), _value(one["b"])] for one in differ]
    figures: list[list[Any]] = [["state", a.state, b.state], ["steps", a.done, b.done]]
    if a.verb != b.verb:
        figures.insert(0, ["verb", a.verb, b.verb])
    figures.append(["seconds a step", *(None if run.seconds is None else f"{run.seconds:.3g}" for run in (a, b))])
    own = [{figure["name"]: figure for figure in run.held_out()} for run in (a, b)]
    for name in islice(names_of_figures((a, b)), 8):
        cells = [None if name not in side else _ends(side[name]["before"], side[name]["after"]) for side in own]
        figures.append([f"{'' if name.startswith(MEASURED) else 'held-out '}{on_terminal(name)}", *cells])
    for name in dict.fromkeys(one["name"] for run in (a, b) for one in run.trained()):
        both = [run.tenths(name) for run in (a, b)]
        cells = [None if of is None else _ends(of["first"], of["last"]) for of in both]
        figures.append([f"training {on_terminal(name)}", *cells])
    figures.append(["groups without signal", *(None if x is None else f"{x:.0%}" for x in (a.no_signal, b.no_signal))])
    figures.append(["findings", len(a.findings), len(b.findings)])
    lines = [
        f"B - A       held-out {name} {_change(one)}, paired by {several(one['tasks'], 'task')}"
        for name, one in compared(a, b).items()
    ]
    lines += [f"note        {text}" for text in warnings_of(a, b)]
    kept = [row for row in figures if any(cell is not None for cell in row[1:])]
    lines = [wrapped(line, WIDTH, LABEL) for line in lines]
    return (["option", "A", "B"], options), (["figure", "A", "B"], kept), lines


def _ends(before: float | None, after: float) -> str:
    return f"{_number(before)} -> {_number(after)}"


def _option(name: str) -> str:
    """Return the name of an option as it is typed."""
    path = name.removeprefix("settings.")
    return f"--set {path}" if path != name and "." in path else dashed(path)


def _value(value: Any) -> str:
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return "none" if value in (None, "", [], {}) else fitted(" ".join(str(value).split()), 28)
