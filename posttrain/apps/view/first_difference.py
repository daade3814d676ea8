"""The first difference of two runs: the step, rollout and token that differ, with a sentence about it.

Runs with the same tasks and seed are equal until something makes them differ; the place shows the cause: a prompt, a
sampled token, an environment's text. The search begins at the first step, and takes some seconds.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.rollout_files import RolloutPart, rows
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import UserError

SECONDS = 8.0  # limit of the search
AROUND = 24  # tokens shown before the difference
_NAMES = ("index", "group", "side", "member", "task", "replayed", "tokens")
_NUMBERS = ("engine", "learner")  # log-probabilities: of sampled tokens, else of given ones

Row = dict[str, Any]
_kept: dict[tuple[Any, ...], dict[str, Any]] = {}


class TokenPlace(NamedTuple):
    """A token of a rollout that both runs have, with the rollout's index in each."""

    part: RolloutPart
    a: int  # index of the rollout
    b: int
    at: int


def parted(a: OpenRun, b: OpenRun) -> dict[str, Any]:
    """Return whether and where the runs differ: `says` in words, `why` the likely cause, and the place itself."""
    key = (str(a.folder), a.store.version, str(b.folder), b.store.version)
    if key not in _kept:
        _kept.clear()
        _kept[key] = _parted(a, b)
    return _kept[key]


def _parted(a: OpenRun, b: OpenRun) -> dict[str, Any]:
    both = sorted(part for part in list(a.store.files) if part in b.store.files)
    if not both:
        return {
            "says": "No step of theirs has rollouts in both, so the place where they differ is unknown.",
            "first": None,
        }
    begin, count, numbers = time.monotonic(), 0, None
    for done, part in enumerate(both):
        if time.monotonic() - begin > SECONDS:
            told = f"Up to {_step(both[done - 1])} their tokens never differ; no time was left to look further."
            return {"says": told, "why": _agreeing(numbers), "first": None, "numbers": numbers}
        one, other = _read(a, part), _read(b, part)
        if one is None or other is None:
            continue
        found = _differing(one, other, part)
        if isinstance(found, TokenPlace | str):
            return _difference_text(a, b, part, found, count, numbers or _numbers(a, b, part))
        count += len(one)
        numbers = numbers or _numbers(a, b, part)
    steps = f"{_step(both[0])} to {_step(both[-1])}" if len(both) > 1 else _step(both[0])
    told = f"Their tokens never differ: all {count:,} rollouts of {steps}, which both have, are the same."
    return {"says": told, "why": _agreeing(numbers), "first": None, "numbers": numbers}


def _read(run: OpenRun, part: RolloutPart) -> pa.Table | None:
    try:
        table = rows(run.store.files[part], names=_NAMES)
    except (UserError, KeyError):
        return None
    return table if table["tokens"].null_count == 0 else None


def _keys(table: pa.Table) -> list[tuple[Any, ...]]:
    columns = (table[name].to_pylist() for name in ("group", "side", "member", "replayed"))
    return list(zip(*columns, strict=True))


def _differing(one: pa.Table, other: pa.Table, part: RolloutPart) -> TokenPlace | str | None:
    """Return the first token that differs, in the first rollout that does; or, in words, a rollout that only one run
    has.
    """
    names = ["group", "side", "member", "tokens"]
    if one.select(names).equals(other.select(names)):
        return None
    places = {key: place for place, key in enumerate(_keys(other))}
    own = _keys(one)
    for place, key in enumerate(own):
        theirs = places.get(key)
        if theirs is None:
            return f"the task {_named(one, place)} is in A alone"
        x, y = _array(one["tokens"][place]), _array(other["tokens"][theirs])
        if (at := _first(x, y)) is not None:
            return TokenPlace(part, one["index"][place].as_py(), other["index"][theirs].as_py(), at)
    alone = sorted(set(places.values()) - {places[key] for key in own})
    return f"the task {_named(other, alone[0])} is in B alone" if alone else None


def _named(table: pa.Table, place: int) -> str:
    return f"{table['task'][place].as_py() or table['group'][place].as_py()}"[:60]


def _array(value: Any) -> Any:
    return value.values.to_numpy(zero_copy_only=False)


def _first(x: Any, y: Any) -> int | None:
    """Return the first index at which two arrays differ; if one continues the other, the shorter length; None if
    equal.
    """
    short = min(len(x), len(y))
    unlike = np.flatnonzero(x[:short] != y[:short])
    return int(unlike[0]) if len(unlike) else None if len(x) == len(y) else short


def _numbers(a: OpenRun, b: OpenRun, part: RolloutPart) -> dict[str, Any] | None:
    """Return the first log-probability of a step that differs although the rollout's tokens are equal."""
    tables = [rows(run.store.files[part], names=("index", "tokens", *_NUMBERS)) for run in (a, b)]
    for name in _NUMBERS:
        one, other = (table[name] for table in tables)
        if one.null_count == len(one) or other.null_count == len(other):
            continue
        for place, (x, y) in enumerate(zip(one, other, strict=False)):
            if not (x.is_valid and y.is_valid and tables[0]["tokens"][place].equals(tables[1]["tokens"][place])):
                continue
            left, right = _array(x), _array(y)
            unlike = np.flatnonzero(left != right).tolist() if len(left) == len(right) else []
            if len(unlike):
                index, at = tables[0]["index"][place].as_py(), unlike[0]
                return {
                    "part": part.name,
                    "step": part.step,
                    "index": index,
                    "a": float(left[at]),
                    "b": float(right[at]),
                }
        return None
    return None


def _agreeing(numbers: dict[str, Any] | None) -> str:
    if numbers is None:
        return "Nor do the log-probabilities of these tokens."
    return f"But their log-probabilities do, {_since(numbers)}."


def _since(numbers: dict[str, Any]) -> str:
    return f"from step {numbers['step']} on ({_f(numbers['a'])} and {_f(numbers['b'])} in rollout {numbers['index']})"


def _difference_text(
    a: OpenRun, b: OpenRun, part: RolloutPart, found: TokenPlace | str, count: int, numbers: dict[str, Any] | None
) -> dict[str, Any]:
    before = f" The {count:,} rollouts before it are the same." if count else ""
    if isinstance(found, str):
        why = "They were not given the same tasks in the same order." if not count else "The groups are different."
        return {"says": f"They differ first in {_step(part)}: {found}.{before}", "why": why, "first": None}
    own = [_token(run, part, index, found.at) for run, index in ((a, found.a), (b, found.b))]
    numbers = numbers or _before(own, part, found.a)
    kind = next((o["kind"] for o in own if o["kind"]), "")
    ends = [o["piece"] is None for o in own]
    if any(ends):
        short, other = ("A", own[1]) if ends[0] else ("B", own[0])
        how = f"{short} ends before token {found.at}, and {'B' if ends[0] else 'A'} goes on with “{other['piece']}”"
    else:
        how = f"token {found.at}, {_from(kind)}, is “{own[0]['piece']}” in A and “{own[1]['piece']}” in B"
    task = f", task {own[0]['task']}" if own[0]["task"] else ""
    return {
        "says": f"They differ first in {_step(part)}, rollout {found.a}{task}: {how}.{before}",
        "why": _reason(kind, own, numbers),
        "first": {"part": part.name, "a": found.a, "b": found.b, "at": found.at, "before": own[0]["before"],
                  "pieces": [o["piece"] for o in own], "kind": kind},
    }  # fmt: skip


def _token(run: OpenRun, part: RolloutPart, index: int, at: int) -> Row:
    """Return a token of a rollout with the text before it; `piece` is None if the rollout has ended."""
    names = ("task", "tokens", "spans", "engine")
    [row] = rows(run.store.files[part], [index], names).to_pylist()
    tokens, spans = row["tokens"], row["spans"] or []
    inside = at < len(tokens)
    pieces = run.pieces.of(tokens[max(0, at - AROUND) : at + inside])
    span = next((s for s in spans if s["start"] <= at < s["start"] + s["length"]), None)
    logp, place = None, len(_sampled_before(row, at))
    if span is not None and span["kind"] == SpanKind.SAMPLED and place < len(row["engine"] or []):
        logp = row["engine"][place]
    before = "".join(pieces[:-1] if inside else pieces)
    kind = span["kind"] if span is not None else ""
    return {"task": f"{row['task'] or ''}"[:60], "piece": (pieces[-1] or f"⟨{tokens[at]}⟩") if inside else None,
            "before": before[-60:], "kind": kind, "logp": logp, "earlier": _sampled_before(row, at)}  # fmt: skip


def _sampled_before(row: Row, at: int) -> list[float]:
    """Return the engine's log-probabilities of the sampled tokens before a place."""
    spans = [s for s in row["spans"] or [] if s["kind"] == SpanKind.SAMPLED]
    return list((row["engine"] or [])[: sum(min(s["length"], max(0, at - s["start"])) for s in spans)])


def _before(own: list[Row], part: RolloutPart, index: int) -> dict[str, Any] | None:
    """Return the first log-probability before a place that differs, in rollouts equal up to that place."""
    pairs = zip(own[0]["earlier"], own[1]["earlier"], strict=False)
    x, y = next(((x, y) for x, y in pairs if x != y), (0.0, 0.0))
    return {"part": part.name, "step": part.step, "index": index, "a": x, "b": y} if x != y else None


def _reason(kind: str, own: list[Row], numbers: dict[str, Any] | None) -> str:
    """Return the likely cause of the first difference."""
    if kind == SpanKind.PROMPT:
        return "The prompts differ: the tasks, their order, or the template."
    if kind not in (SpanKind.SAMPLED, ""):
        return (
            "The replies before it are the same: the environment answered otherwise, or its answer was cut otherwise."
        )
    said = [o["logp"] for o in own]
    chances = ""
    if all(value is not None and math.isfinite(value) for value in said):
        own_a, own_b = (_f(math.exp(value)) for value in said)
        chances = f" A drew its token with probability {own_a}, B its own with {own_b}."
    if numbers is not None:
        told = f"Weights or rounding differed before: log-probabilities of the same tokens differ {_since(numbers)}"
    else:
        told = "All before it is the same, log-probabilities too: the draw was another one, by its seed or its settings"
    return f"{told}.{chances}"


def _from(kind: str) -> str:
    return {SpanKind.PROMPT: "of the prompt", SpanKind.SAMPLED: "sampled", "": "the last"}.get(kind, f"of the {kind}")


def _step(part: RolloutPart) -> str:
    return f"the evaluation after step {part.step}" if part.held_out else f"step {part.step}"


def _f(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")
