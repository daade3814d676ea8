"""Correlation of rewards with reply length over a run's last steps, within groups, and whether length itself is
rewarded.

Only replies to one prompt are compared, so long, hard tasks have no effect. Length may follow from success, or partial
credit from how far a reply came; a correlation alone is therefore no sign. It is a sign if longer wrong replies earn
more of a part than correct replies of their group: partial credit never gives that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.rollout_store import Store

STRONG = 0.7  # a correlation
LEAST = 40  # fewest degrees of freedom of a correlation
PAIRS, MORE = 30, 0.8  # fewest pairs (correct, longer wrong); share in which the wrong one earns more
GRADED = 5  # number of distinct values from which on a part is graded, not a check
SHARE, STEPS, MOST = 20, 5, 20_000  # steps read: the last 1/SHARE, at least STEPS, with at most MOST rollouts
REWARD = "reward"

Array = NDArray[Any]


class Length(NamedTuple):
    """Figures of a part of the reward, or of the whole reward."""

    name: str
    correlation: float  # with the reply's number of tokens, within groups
    paid: float | None = None  # share of pairs in which the longer, wrong reply earns more; None: too few pairs
    scored: bool = False  # whether a model gave the score, so that no success threshold exists


def lengths(store: Store, config: Mapping[str, Any]) -> list[Length]:
    """Return the parts of the reward, and the reward itself, whose correlation with length is strong."""
    rows = store.rows
    steps = np.unique(rows.key[rows.begins[~rows.flag("held_out")[rows.begins]]] >> 33)
    if not len(steps):
        return []
    last = slice(
        rows.of_part(RolloutPart(int(steps[-min(len(steps), max(STEPS, len(steps) // SHARE))]), False)).start, len(rows)
    )
    meant = (
        (rows.number("sampled")[last] > 0) & np.isfinite(rows.number("reward")[last]) & rows.equal("kind", "rl")[last]
    )
    for flag in ("held_out", "replayed", "truncated"):
        meant &= ~rows.flag(flag)[last]
    meant &= ~rows.baseline[last]
    places = last.start + np.flatnonzero(meant)[-MOST:]
    group, length = rows.gid[places], rows.number("sampled")[places]
    names = [REWARD, *(f"part.{part}" for part in rows.parts)]
    values = {name: rows.number(name)[places] for name in names}
    right = _right(values, rows.right[places] if store.success is not None else None)
    scored = bool(config.get("reward_model") or config.get("judge"))
    found = []
    for name, own in values.items():
        correlation = _correlation(group, length, own)
        if correlation is None or abs(correlation) < STRONG:
            continue
        graded = len(np.unique(np.round(own[np.isfinite(own)], 6))) >= GRADED
        paid = _paid(group, length, own, right) if graded and right is not None and correlation > 0 else None
        found.append(Length(name.removeprefix("part."), correlation, paid, scored and graded))
    return found


def _right(values: Mapping[str, Array], right: Array | None) -> Array | None:
    """Return the mask of correct replies: those that pass every check, else those with a successful reward.

    None: unknown.
    """
    checks = [
        own
        for name, own in values.items()
        if name != REWARD and 1 < len(np.unique(np.round(own[np.isfinite(own)], 6))) < GRADED
    ]
    if checks:
        found: Array = np.logical_and.reduce([own >= np.nanmax(own) - 1e-9 for own in checks])
        return found
    return right


def _centred(group: Array, values: Array) -> Array:
    """Return the values minus the mean of their group."""
    _, place = np.unique(group, return_inverse=True)
    found: Array = values - (np.bincount(place, values) / np.bincount(place))[place]
    return found


def _correlation(group: Array, length: Array, values: Array) -> float | None:
    """Return Pearson's correlation after subtracting group means. None: too little data."""
    kept = np.isfinite(values)
    group, length, values = group[kept], length[kept].astype(np.float64), values[kept]
    if not len(values):
        return None
    x, y = _centred(group, length), _centred(group, values)
    varied = np.isin(group, group[(np.abs(x) > 1e-9)])  # a group whose lengths are all equal has no information
    freedom = int(varied.sum()) - len(np.unique(group[varied]))
    spread = float(np.sqrt((x @ x) * (y[varied] @ y[varied])))
    if freedom < LEAST or spread <= 1e-12:
        return None
    return float(x @ y) / spread


def _paid(group: Array, length: Array, values: Array, right: Array) -> float | None:
    """Return the share of pairs, a correct reply and a longer wrong one of its group, in which the wrong one earns
    more.

    None if there are fewer than `PAIRS`.
    """
    more = pairs = 0
    order = np.argsort(group, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        good, bad = own[right[own]], own[~right[own]]
        if not len(good) or not len(bad):
            continue
        longer = length[bad][:, None] > length[good][None, :]
        pairs += int(longer.sum())
        more += int((longer & (values[bad][:, None] > values[good][None, :] + 1e-9)).sum())
    return more / pairs if pairs >= PAIRS else None
