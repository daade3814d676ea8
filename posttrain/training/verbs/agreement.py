"""Agreement of two labellers on the same preference examples.

Every two different responses that both compared count once. A verdict is one of three: the first is better, the second
is better, a tie; first and second are the order of the responses in the first file. Kappa is Cohen's (1960), (p_o -
p_e) / (1 - p_e), once with ties as a verdict of their own and once over the comparisons that neither labeller called a
tie. Intervals are over prompts, as comparisons of a prompt are not independent. The interval of kappa is Cohen's own:
that of p_o, with p_e taken as known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.core.intervals import Interval, share_interval
from posttrain.core.types import UserError
from posttrain.data.labels import to_labelled
from posttrain.data.preference_examples import comparisons_of
from posttrain.data.rows import load_rows

Counts = NDArray[np.float64]  # [prompts, 3, 3], by verdict (better, worse, tie) of the first and the second labeller


@dataclass(frozen=True)
class AgreementEstimate:
    """A mean with its 95% interval; nan if undefined."""

    mean: float
    low: float
    high: float
    why: str = ""  # reason for a missing interval

    @staticmethod
    def of(mean: float, interval: Interval) -> AgreementEstimate:
        return AgreementEstimate(mean, interval.low, interval.high, interval.why)

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "undefined: all verdicts are the same"
        return f"{self.mean:.3f} {Interval(self.low, self.high, self.why).text()}"


@dataclass(frozen=True)
class Agreement:
    """Agreement of two labellers."""

    prompts: int
    comparisons: int
    ties: tuple[int, int]  # number of ties of each labeller
    raw: AgreementEstimate  # share of equal verdicts, with a tie as a verdict
    kappa: AgreementEstimate
    decided: int  # comparisons that neither labeller called a tie
    raw_decided: AgreementEstimate
    kappa_decided: AgreementEstimate

    def lines(self) -> list[str]:
        return [
            f"{self.comparisons} comparisons of {self.prompts} prompts that both labelled; ties: "
            f"{self.ties[0]} and {self.ties[1]}",
            f"a tie is a verdict       agreement {self.raw}   Cohen's kappa {self.kappa}",
            f"without ties ({self.decided:>5})     agreement {self.raw_decided}   Cohen's kappa {self.kappa_decided}",
            "95% intervals over prompts",
        ]


def read_labels(file: str) -> list[Mapping[str, Any]]:
    """Read the rows of a file of labels. Raises UserError, with the row's place, for a row without labels."""
    rows = load_rows(file)
    found: list[Mapping[str, Any]] = []
    for place in range(len(rows)):
        try:
            found.append(to_labelled(rows[place]) or {})
        except UserError as error:
            raise UserError(f"{rows.where(place)}: {error}") from error
    return found


def agreement(first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]]) -> Agreement:
    """Return the agreement of two files of ranks, scores or comparisons.

    Raises UserError if they share no comparison.
    """
    others = {_known_by(row): row for row in second if not row.get("skipped")}
    tables = []
    for row in first:
        other = others.get(_known_by(row))
        if other is None or row.get("skipped"):
            continue
        table = np.zeros((3, 3))
        theirs = verdicts(other)
        for pair, verdict in verdicts(row).items():
            if pair in theirs:
                table[verdict, theirs[pair]] += 1
            elif pair[::-1] in theirs:
                table[verdict, (1, 0, 2)[theirs[pair[::-1]]]] += 1
        if table.any():
            tables.append(table)
    if not tables:
        raise UserError("the two files share no comparison: give labels of the same preference examples")
    return measured(np.stack(tables))


def measured(counts: Counts) -> Agreement:
    """Return the figures of these counts."""
    whole, decided = counts.sum(0), counts[:, :2, :2]
    raw, raw_decided = _agreed(counts), _agreed(decided)
    return Agreement(
        prompts=len(counts),
        comparisons=int(whole.sum()),
        ties=(int(whole[2].sum()), int(whole[:, 2].sum())),
        raw=raw,
        kappa=_kappa(raw, whole),
        decided=int(decided.sum()),
        raw_decided=raw_decided,
        kappa_decided=_kappa(raw_decided, decided.sum(0)),
    )


def _agreed(tables: Counts) -> AgreementEstimate:
    equal, all_of = np.trace(tables, axis1=1, axis2=2), tables.sum((1, 2))
    return AgreementEstimate.of(observed(tables.sum(0)), share_interval(equal, all_of, of="prompts"))


def _kappa(agreed: AgreementEstimate, table: NDArray[np.float64]) -> AgreementEstimate:
    chance, found = _chance(table), kappa(table)
    if math.isnan(found):
        return AgreementEstimate(found, math.nan, math.nan)
    return AgreementEstimate(
        found, (agreed.low - chance) / (1 - chance), (agreed.high - chance) / (1 - chance), agreed.why
    )


def observed(table: NDArray[np.float64]) -> float:
    """Return the share of equal verdicts."""
    total = table.sum()
    return float(np.trace(table) / total) if total else math.nan


def kappa(table: NDArray[np.float64]) -> float:
    """Return Cohen's kappa of a table of counts."""
    chance = _chance(table)
    return (observed(table) - chance) / (1 - chance) if chance < 1 else math.nan


def _chance(table: NDArray[np.float64]) -> float:
    """Return the chance agreement of two labellers with these shares; 1 without verdicts."""
    total = table.sum()
    return float((table.sum(0) * table.sum(1)).sum() / total**2) if total else 1.0


def verdicts(row: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Return (text, other text) -> 0: the first is better, 1: the second is, 2: a tie; for all comparisons of a row."""
    texts = row["responses"]
    pairs, preferred = row.get("pairs"), row.get("preferred")
    judged = pairs is not None and preferred is not None and row.get("scores") is None
    found = _compared(row) if judged or row.get("comparisons") is not None else _valued(row)
    for i, j in row.get("ties") or ():
        found[min(i, j), max(i, j)] = 2
    for (i, j), which in zip(pairs or (), preferred or (), strict=True) if judged else ():
        if which == 0:
            found[min(i, j), max(i, j)] = 2
    return {(texts[i], texts[j]): verdict for (i, j), verdict in found.items() if texts[i] != texts[j]}


def _compared(row: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    """Return the verdict with the larger sum of shares, as two responses may be compared several times."""
    lean: dict[tuple[int, int], float] = {}
    for better, worse, share, _ in comparisons_of(dict(row), len(row["responses"])):
        pair = int(min(better, worse)), int(max(better, worse))
        lean[pair] = lean.get(pair, 0.0) + (share if better > worse else -share)
    return {pair: 2 if by == 0 else int(by > 0) for pair, by in lean.items()}


def _valued(row: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    ranked = row.get("ranks") is not None
    values = row["ranks"] if ranked else row.get("scores") or ()
    found = {}
    for i, j in combinations(range(len(values)), 2):
        if values[i] is not None and values[j] is not None:
            found[i, j] = 2 if values[i] == values[j] else int((values[i] > values[j]) == ranked)
    return found


def _known_by(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key of a preference example, equal for the same prompt and responses in any order."""
    return (repr(row.get("prompt") or row.get("messages")), *sorted(row["responses"]))
