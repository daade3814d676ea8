"""Series over the steps computed from a run's rollouts: rewards of groups, fates, similarity of replies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from posttrain.apps.view.column_table import Floats, Places, RolloutColumns, sorted_within
from posttrain.core.intervals import mean_interval
from posttrain.runs.record.schema import START

Values = list[float | None]
LIKE = 400  # leading characters of replies to compare, where whole texts are held


def series(rows: RolloutColumns, steps: Sequence[int]) -> dict[str, Any]:
    """Return figures of the training rollouts at each of these steps.

    `reward`, with the ends `least` and `most` of its interval over groups; shares of groups that are all `right`, all
    `wrong` or `equal`; distinct `replies` in a group, whose greatest size is `n`; `alike`, see `_alike`; `fates` by
    name; `parts` of the reward by name.
    """
    own = np.flatnonzero(~rows.flag("held_out") & ~rows.baseline)
    if not len(own):
        return {"alike": [None] * len(steps), "compared": START, "fates": {}}
    step = rows.key[own] >> 33  # in order
    begins = np.flatnonzero(np.diff(step, prepend=-1))
    there, at = step[begins], np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(own))))
    place = {int(step): i for i, step in enumerate(there.tolist())}

    def said(values: Floats) -> Values:
        return [finite(float(values[place[step]])) if step in place else None for step in steps]

    found: dict[str, Any] = {name: said(values) for name, values in _of_groups(rows, there).items()}
    found["n"] = int(rows.groups["n"][~rows.flag("held_out")[rows.first_rows]].max())
    found["compared"] = LIKE if rows.long else START
    found["alike"] = said(_alike(rows, own, at, begins))
    found["fates"] = _fates(rows, own, at, place, steps)
    if rows.parts:
        found["parts"] = {name: said(_mean(rows.number(f"part.{name}")[own], at, len(there))) for name in rows.parts}
    return found


def finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _of_groups(rows: RolloutColumns, there: Places) -> dict[str, Floats]:
    gids = np.flatnonzero(~rows.flag("held_out")[rows.first_rows])
    at, count = np.searchsorted(there, rows.of_groups("step")[gids]), len(there)
    valid, right, mean, low, high, replies = (
        rows.groups[name][gids] for name in ("valid", "right_n", "mean", "low", "high", "replies")
    )
    several = valid > 1
    center = _mean(mean, at, count)
    known = ~np.isnan(mean)
    in_order = mean[known][np.argsort(at[known], kind="stable")]
    of_steps = np.split(in_order, np.cumsum(np.bincount(at[known], minlength=count))[:-1])
    bounds = np.array([tuple(mean_interval(own, of="groups")) for own in of_steps]).reshape(count, 2)
    return {
        "reward": center,
        "least": bounds[:, 0],
        "most": bounds[:, 1],
        "right": _mean(several & (right == valid), at, count),
        "wrong": _mean(several & (right == 0), at, count),
        "equal": _mean(several & (low == high), at, count),
        "replies": _mean(replies, at, count),
    }


def _mean(values: NDArray[Any], at: NDArray[Any], count: int) -> Floats:
    """Return the mean of the known values at each place."""
    known = ~np.isnan(values) if values.dtype == np.float64 else np.ones(len(values), dtype=bool)
    total = np.bincount(at[known], weights=values[known], minlength=count)
    with np.errstate(invalid="ignore"):
        return total / np.bincount(at[known], minlength=count)


def _alike(rows: RolloutColumns, own: NDArray[Any], at: NDArray[Any], begins: Places) -> Floats:
    """Return the chance that two rollouts of a step with different prompts begin with the same characters.

    `at`: the place of each row's step, ascending; `begins`: the first row of each step.
    """
    codes = rows.codes("text_start")
    if rows.long:
        codes, values = rows.fullest("text")
        begun = pc.dictionary_encode(pc.utf8_slice_codeunits(values, 0, LIKE))
        codes = np.append(begun.indices.to_numpy(zero_copy_only=False), -1)[codes]
    text, prompt = (each[own].astype(np.int64) + 1 for each in (codes, rows.codes("prompt_start")))
    prompts = len(rows.values("prompt_start")) + 1
    same, both, alone = (_pairs(key, at, begins) for key in (text.copy(), text * prompts + prompt, prompt))
    others = np.bincount(at).astype(np.float64) ** 2 - alone
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(others > 0, (same - both) / others, np.nan)


def _pairs(key: Places, at: NDArray[Any], begins: Places) -> Floats:
    """Count the ordered pairs of equal keys in each step."""
    key = sorted_within(key, begins)
    new = np.diff(key, prepend=-1) != 0
    new[begins] = True
    first = np.flatnonzero(new)
    many = np.diff(np.append(first, len(key))).astype(np.float64)
    return np.bincount(at[first], weights=many * many, minlength=len(begins)).astype(np.float64)


def _fates(
    rows: RolloutColumns, own: NDArray[Any], at: NDArray[Any], place: dict[int, int], steps: Sequence[int]
) -> dict[str, list[int]]:
    values, codes = rows.values("fate").to_pylist(), rows.codes("fate")[own]
    known = codes >= 0
    table = np.bincount(at[known] * len(values) + codes[known], minlength=len(place) * len(values))
    by_fate = table.reshape(-1, len(values)).T if values else np.zeros((0, 0), dtype=np.int64)
    return {
        name: [int(counts[place[step]]) if step in place else 0 for step in steps]
        for name, counts in zip(values, by_fate, strict=True)
        if counts.any()
    }
