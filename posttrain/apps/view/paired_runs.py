"""Comparison of two runs, or of two checkpoints of one, paired by task: the differences, overall and task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.apps.view.comparison_warnings import warnings_of
from posttrain.apps.view.open_run import OpenRun
from posttrain.core.intervals import mean_interval, paired_interval, share_interval, stated
from posttrain.core.types import UserError
from posttrain.runs.metrics_table import METRICS
from posttrain.runs.run_options import differing

MOST = 200  # most tasks in a list
VISITS = 200  # most visits to choose from


def compared(runs: Sequence[OpenRun], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the comparison.

    `a`, `b` in the query: numbers of runs; `of_a`, `of_b`: parts of their rollouts, see `choices`.
    """
    a, b = sides(runs, query)
    number_a, number_b = runs.index(a), runs.index(b)
    offered = choices(a), choices(b)
    of_a = _chosen(query.get("of_a", ""), offered[0], first=True, alone=a is b)
    of_b = _chosen(query.get("of_b", ""), offered[1], first=False, alone=a is b)
    common = [c["name"] for c in offered[0] if c in offered[1]]
    if a is not b and not query.get("of_a") and not query.get("of_b") and common:
        of_a = of_b = max((n for n in common if n.startswith("eval")), key=_after, default=common[-1])
    found: dict[str, Any] = {
        "a": {"run": number_a, "name": a.name, "of": of_a, "choices": offered[0]},
        "b": {"run": number_b, "name": b.name, "of": of_b, "choices": offered[1]},
        "options": differing(a.about, b.about),
        "warnings": [] if a is b else warnings_of(a, b, of_a, of_b),
        "curves": _curves(a, b) if a is not b else [],
    }
    if of_a and of_b:
        found |= _paired(a, b, of_a, of_b)
    return found


def sides(runs: Sequence[OpenRun], query: Mapping[str, str]) -> tuple[OpenRun, OpenRun]:
    """Return the runs A and B; by default the first two."""
    return runs[_run(query.get("a", "0"), runs)], runs[_run(query.get("b", str(min(1, len(runs) - 1))), runs)]


def choices(run: OpenRun) -> list[dict[str, Any]]:
    """Return the parts of a run that can be compared: its evaluations, and its visits to the training tasks."""
    rows = run.store.rows
    held, step, epoch = rows.flag("held_out")[rows.first_rows], rows.of_groups("step"), rows.of_groups("epoch")
    found = [
        {"name": f"eval-{after:.0f}", "says": f"held-out, after step {after:.0f}"} for after in np.unique(step[held])
    ]
    for visit in np.unique(epoch[~held & ~np.isnan(epoch)])[:VISITS]:
        own = step[~held & (epoch == visit)]
        says = f"visit {visit + 1:.0f} to each task, steps {own.min():.0f}–{own.max():.0f}"
        found.append({"name": f"visit-{visit:.0f}", "says": says})
    return found


def _after(name: str) -> int:
    return int(name.partition("-")[2])


def _run(text: str, runs: Sequence[OpenRun]) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) >= len(runs):
        raise UserError(f"there are {len(runs)} runs here, 0 to {len(runs) - 1}: none is {text[:20]!r}")
    return int(text)


def _chosen(name: str, offered: list[dict[str, Any]], first: bool, alone: bool) -> str:
    """Return the name if it is offered. Without a name: the first choice for A within one run, else a late one."""
    names = [choice["name"] for choice in offered]
    if name in names:
        return name
    if name:
        raise UserError(f"there is no {name[:40]!r} to compare: one of {', '.join(names[:8]) or 'none'}")
    evals = [n for n in names if n.startswith("eval-")]
    visits = [n for n in names if n.startswith("visit-")]
    of = evals if len(evals) > alone else visits
    if not of:
        return ""
    return of[0] if first and alone else of[-1] if of is evals or len(of) < 3 else of[-2]


def _figures(run: OpenRun, of: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (task, side) -> the figures of its group."""
    kind, _, number = of.partition("-")
    rows = run.store.rows
    held = rows.flag("held_out")[rows.first_rows]
    named = held if kind == "eval" else ~held
    named &= rows.of_groups("step" if kind == "eval" else "epoch") == int(number)
    found = rows.groups_as(np.flatnonzero(named & (rows.groups["valid"] > 0)))
    return {(group["task"], group["side"]): group for group in found if group["task"] is not None}


def _paired(a: OpenRun, b: OpenRun, of_a: str, of_b: str) -> dict[str, Any]:
    own, other = _figures(a, of_a), _figures(b, of_b)
    both = [key for key in own if key in other]
    found: dict[str, Any] = {"n": len(both), "alone": {"a": len(own) - len(both), "b": len(other) - len(both)}}
    if not both:
        return found
    x, y = np.array([own[k]["mean"] for k in both]), np.array([other[k]["mean"] for k in both])
    share = all(_has_binary_rewards(groups[key]) for groups in (own, other) for key in both)
    of = share_interval if share else mean_interval
    order = np.argsort(y - x, kind="stable")

    def shown(i: int) -> dict[str, Any]:
        key = both[i]
        sides = {"a": _side(own[key]), "b": _side(other[key])}
        return {"task": key[0], "side": key[1], **sides, "difference": float(y[i] - x[i])}

    return {
        **found,
        "mean": {"a": stated(float(x.mean()), of(x)), "b": stated(float(y.mean()), of(y))},
        "difference": stated(float((y - x).mean()), paired_interval(y, x, share=share)),
        "better": int((y > x).sum()),
        "worse": int((y < x).sum()),
        "grid": _grid(x, y),
        "lost": [shown(int(i)) for i in order[:MOST] if y[i] < x[i]],
        "gained": [shown(int(i)) for i in order[::-1][:MOST] if y[i] > x[i]],
        "never": [shown(i) for i in range(len(both)) if y[i] == x[i] == min(x.min(), y.min()) and y.max() > y[i]][
            :MOST
        ],
    }


def _side(row: dict[str, Any]) -> dict[str, Any]:
    name = f"{row['step']}{'e' if row['held_out'] else ''}"
    return {"part": name, "index": row["first"], "mean": row["mean"], "right": row["right_n"], "n": row["n"]}


def _has_binary_rewards(group: dict[str, Any]) -> bool:
    """Return whether all rewards of a group are 0 or 1: then their mean determines their spread."""
    mean = group["mean"]
    return group["low"] in (0, 1) and group["high"] in (0, 1) and abs(group["sd"] ** 2 - mean * (1 - mean)) < 1e-4


def _grid(x: Any, y: Any) -> dict[str, Any]:
    """Count tasks by their mean rewards in both runs, on a grid of nine by nine between the least and the greatest."""
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
    width = (high - low) / 8 or 1.0
    places = [np.clip(np.rint((v - low) / width), 0, 8).astype(int) for v in (x, y)]
    counts = np.zeros((9, 9), dtype=int)
    np.add.at(counts, tuple(places), 1)
    return {"low": low, "high": high, "counts": counts.tolist()}


def _curves(a: OpenRun, b: OpenRun) -> list[dict[str, Any]]:
    """Return the metrics that both runs have, as panels with a line for each."""
    (steps_a, of_a), (steps_b, of_b) = a.series(), b.series()
    steps = sorted({*steps_a, *steps_b})
    found = []
    for metric in METRICS:
        name = metric.name
        if not metric.plotted or name not in of_a or name not in of_b:
            continue
        lines = []
        for label, own, values, colour in (("A", steps_a, of_a[name], "red"), ("B", steps_b, of_b[name], "blue")):
            by_step = dict(zip(own, values, strict=True))
            lines.append({"name": label, "values": [by_step.get(s) for s in steps], "colour": colour})
        kept = [i for i in range(len(steps)) if any(line["values"][i] is not None for line in lines)]
        lines = [{**line, "values": [line["values"][i] for i in kept]} for line in lines]
        found.append(
            {"title": metric.label, "about": metric.meaning, "steps": [steps[i] for i in kept], "lines": lines}
        )
    return found
