"""The effect of a step: the tokens that changed most, one by one and by entry of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.apps.view import silent_defects
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.rollout_files import RolloutPart, positions, rows
from posttrain.core.json_text import parsed
from posttrain.core.types import UserError

MOST = 40  # most tokens listed on each side
LOOKED = 160  # tokens read on each side, among which equal ones are merged
AROUND = 24  # tokens shown before a token
BINS = 41
MEASURES = {
    "after": ("change by the step", "after", ("before", "engine")),
    "learner": ("until its last update", "learner", ("before", "engine")),
    "gap": ("learner less engine", "before", ("engine",)),
    "teacher": ("teacher less student", "teacher", ("before", "learner", "engine")),
    "reference": ("policy less reference", "learner", ("reference",)),
    "push": ("push on weights", "weight", ()),
}
"""Measure -> (label, column, columns of which the first recorded one is subtracted)."""
ABOUT = {
    "gap": "log-probability under the learner before the step, less the engine's",
    "push": "as recorded: minus the gradient of the loss at a token's log-probability, its advantage in it, over all passes",
}
MISSING = {
    "after": "not recorded: --record-after keeps it",
    "teacher": "no teacher took part in this step",
    "reference": "no reference was computed in this step",
}
_FULL = "not recorded: --record full keeps it, where the step computes it"
_READ = ("index", "tokens", "spans", "engine", "before", "learner", "reference", "weight", "after",
         "teacher", "advantage", "fate", "member", "label")  # fmt: skip


def changes(run: OpenRun, part: RolloutPart, by: str) -> dict[str, Any]:
    """Return a step's histogram, the tokens that changed most either way, and the changes by vocabulary entry."""
    if part not in run.store.files:
        raise UserError(f"there are no rollouts of step {part.name} in this run")
    table = rows(run.store.files[part], names=_READ).to_pydict()
    steps = sorted(p.step for p in run.store.files if p.held_out == part.held_out)
    found = {name: known for name in MEASURES if (known := _values(table, name)) is not None}
    measures = [
        {"name": name, "says": says, "about": ABOUT.get(name, ""),
         "missing": "" if name in found and len(found[name][0]) else MISSING.get(name, _FULL)}
        for name, (says, *_) in MEASURES.items()
    ]  # fmt: skip
    about = {"step": part.step, "held_out": part.held_out, "steps": steps, "measures": measures}
    usable = [name for name in found if len(found[name][0])]
    if not usable:
        return {**about, "by": None}
    name = by if by in usable else usable[0]
    values, row, place = found[name]
    order = np.argsort(values)
    return {
        **about,
        "by": name,
        "n": len(values),
        "mean": float(values.mean()),
        "size": float(np.abs(values).mean()),
        "histogram": _histogram(values),
        "preferences": any(label is not None for label in table["label"]),
        "sides": _sides(table, values, row),
        "pushed": silent_defects.pushed_in(run.store.files[part], run.objective),
        "up": _most(run, table, name, (values, row, place), [i for i in order[::-1][:LOOKED] if values[i] > 0]),
        "down": _most(run, table, name, (values, row, place), [i for i in order[:LOOKED] if values[i] < 0]),
        "vocabulary": _vocabulary(run, table, values, row, place),
    }


def _values(table: dict[str, list[Any]], name: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Return (values, rows, positions in the transcript) of every scored token with a value; None: not recorded."""
    _, first, less = MEASURES[name]
    if first not in table or all(values is None for values in table[first]):
        return None
    values, row, places = [], [], []
    for number, column in enumerate(table[first]):
        if column is None:
            continue
        at = positions(s for s in table["spans"][number] or () if s["learned"])
        own = np.asarray(column, dtype=np.float64)
        if not less:
            pass
        elif (base := _base(table, number, less)) is not None and len(base) == len(own):
            own = own - base
        else:
            continue
        kept = np.isfinite(own)
        values.append(own[kept])
        places.append(at[kept])
        row.append(np.full(int(kept.sum()), number))
    if not values:
        return None
    return np.concatenate(values), np.concatenate(row), np.concatenate(places).astype(np.int64)


def _base(table: dict[str, list[Any]], number: int, names: tuple[str, ...]) -> NDArray[Any] | None:
    for name in names:
        column = table[name][number] if name in table else None
        if column is None:
            continue
        if name == "engine":  # it has a value for each sampled token; keep the scored ones
            spans = [s for s in table["spans"][number] if s["kind"] == "sampled"]
            kept = np.concatenate([np.zeros(0, dtype=bool), *(np.full(s["length"], s["learned"], bool) for s in spans)])
            column = np.asarray(column, dtype=np.float64)
            return column[kept] if len(kept) == len(column) else None
        return np.asarray(column, dtype=np.float64)
    return None


def _histogram(values: NDArray[Any]) -> dict[str, Any]:
    most = float(np.abs(values).max()) or 1.0
    counts, edges = np.histogram(values, bins=BINS, range=(-most, most))
    return {"low": float(edges[0]), "width": float(edges[1] - edges[0]), "counts": counts.tolist()}


def _most(
    run: OpenRun, table: dict[str, list[Any]], name: str, found: tuple[Any, Any, Any], order: Sequence[int]
) -> list[dict[str, Any]]:
    """Return tokens in this order.

    Equal tokens after equal text are merged and counted, chosen and rejected separately.
    """
    merged: dict[tuple[str, str, str | None], dict[str, Any]] = {}
    for i in order:
        own = _one(run, table, name, *found, i)
        known = merged.setdefault((own["before"], own["piece"], _chosen_or_rejected(table, int(found[1][i]))), own)
        known["times"] = known.get("times", 0) + 1
    return list(merged.values())[:MOST]


def _one(
    run: OpenRun, table: dict[str, list[Any]], name: str, values: Any, row: Any, place: Any, i: int
) -> dict[str, Any]:
    number, at = int(row[i]), int(place[i])
    tokens = table["tokens"][number]
    pieces = run.pieces.of(tokens[max(0, at - AROUND) : at + 1])
    own: dict[str, Any] = {
        "index": table["index"][number],
        "at": at,
        "value": float(values[i]),
        "advantage": table["advantage"][number],
        "member": table["member"][number],
        "label": parsed(table["label"][number]),
        "before": "".join(pieces[:-1])[-60:],
        "piece": pieces[-1],
    }
    _, first, less = MEASURES[name]
    if less:
        scored = positions(s for s in table["spans"][number] if s["learned"]).tolist()
        own["logp"] = float(table[first][number][scored.index(at)])
    return own


def _chosen_or_rejected(table: dict[str, list[Any]], number: int) -> str | None:
    """Return "chosen" or "rejected" for a response with exactly one comparison; None for others."""
    label = parsed(table["label"][number])
    comparisons = label.get("comparisons") if isinstance(label, dict) else None
    own = [c for c in comparisons or () if table["member"][number] in c[:2]]
    return None if len(own) != 1 else "chosen" if own[0][0] == table["member"][number] else "rejected"


def _sides(table: dict[str, list[Any]], values: NDArray[Any], row: NDArray[Any]) -> list[dict[str, Any]]:
    """Return the number of tokens and their mean value, separately for chosen and rejected responses."""
    said = np.array([_chosen_or_rejected(table, number) or "" for number in range(len(table["label"]))])[row]
    sides = [(name, values[said == name]) for name in ("chosen", "rejected")]
    return [{"name": name, "n": len(own), "mean": float(own.mean())} for name, own in sides if len(own)]


def _vocabulary(run: OpenRun, table: dict[str, list[Any]], values: Any, row: Any, place: Any) -> dict[str, Any]:
    """Return the vocabulary entries whose summed changes rose most and fell most."""
    ids = np.array([table["tokens"][r][p] for r, p in zip(row.tolist(), place.tolist(), strict=True)], dtype=np.int64)
    unique, inverse, count = np.unique(ids, return_inverse=True, return_counts=True)
    total = np.bincount(inverse, weights=values)
    order = np.argsort(total)

    def shown(i: int) -> dict[str, Any]:
        [piece] = run.pieces.of([int(unique[i])])
        return {"id": int(unique[i]), "piece": piece, "n": int(count[i]), "sum": float(total[i])}

    return {
        "up": [shown(int(i)) for i in order[::-1][:MOST] if total[i] > 0],
        "down": [shown(int(i)) for i in order[:MOST] if total[i] < 0],
    }
