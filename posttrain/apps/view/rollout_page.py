"""JSON data of the pages of one rollout, with the numbers of its tokens, and of one group.

Numbers are sent as bytes of float32 (nan: not recorded), the cheapest form for the network and the browser.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from posttrain.apps.view import silent_defects
from posttrain.apps.view.rollout_files import RolloutPart, positions, rows
from posttrain.apps.view.rollout_store import Store
from posttrain.apps.view.token_texts import TokenPieces
from posttrain.apps.view.training_reasons import equation, why
from posttrain.core import user_files
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_rows import said_by
from posttrain.runs.record.schema import NUMBERS
from posttrain.runs.run_files import SECONDS, kept_file

WINDOW = 40_000  # most tokens of one response
TEXT = 20_000  # most characters of a text in one response
GROUP = 64  # most rollouts of a group shown side by side
VISITS = 500  # most visits to a task shown
_SIBLING = ("index", "member", "reward", "used", "advantage", "fate")

_LONG = ("tokens", "spans", "engine", "kept", "pictures", "forks", *NUMBERS)
_JSON = ("columns", "notes", "answers", "label")


def one(
    store: Store, pieces: TokenPieces, objective: Sequence[str], part: RolloutPart, index: int, begin: int = 0
) -> dict[str, Any]:
    """Return a rollout with the figures of its group."""
    [row] = _read(store, part, [index])
    shown = _shown(row, pieces, begin, WINDOW)
    held = store.rows
    place = held.place(part, index)
    siblings = held.rows(held.members(int(held.gid[place])), _SIBLING) if place is not None else []
    rewards = [s["used"] if s["used"] is not None else s["reward"] for s in siblings]
    seconds = _seconds(store.folder, part, index)
    scored = positions(s for s in row["spans"] or () if s["learned"])
    leaks = silent_defects.contains_answer(
        row["prompt"], shown["columns"] if isinstance(shown["columns"], dict) else None
    )
    return {
        **shown,
        "siblings": siblings,
        "sides": _sides(store, part, index),
        "pushed": scored[silent_defects.pushed(row, objective)].tolist(),
        "leaks": leaks and silent_defects.leaks(store) is not None,
        "why": why(row),
        "equation": equation(row, rewards, objective),
        "seconds": seconds,
        "first": _first(store, part, index) if row["replayed"] else None,
    }


def _sides(store: Store, part: RolloutPart, index: int) -> list[dict[str, Any]]:
    """Return the rollouts of the same episode's other sides; [] unless every side has equally many rollouts in the
    group.

    The n-th rollouts of the sides belong together.
    """
    held = store.rows
    own = held.place(part, index)
    if own is None or held.codes("side")[own] < 0:
        return []
    among = held.of_part(part)
    places = among.start + np.flatnonzero(held.codes("group")[among] == held.codes("group")[own])
    places = places[held.flag("replayed")[places] == held.flag("replayed")[own]]
    side, member = held.codes("side")[places], held.number("member")[places]
    if len(set(np.unique(side, return_counts=True)[1].tolist())) != 1:
        return []
    return held.rows(
        places[(member == held.number("member")[own]) & (side != held.codes("side")[own])], ("index", "side")
    )


def _first(store: Store, part: RolloutPart, index: int) -> dict[str, Any] | None:
    """Return the step and index of the original of a replayed rollout."""
    held = store.rows
    own = held.place(part, index)
    if own is None:
        return None
    same = ~held.flag("replayed") & ~held.flag("held_out") & (held.number("step") < part.step)
    for name in ("group", "side"):
        same &= held.codes(name) == held.codes(name)[own]
    same &= held.number("member") == held.number("member")[own]
    places = np.flatnonzero(same)[-1:]
    return next(iter(held.rows(places, ("step", "index"))), None)


def group(store: Store, pieces: TokenPieces, part: RolloutPart, index: int) -> dict[str, Any]:
    """Return all rollouts of a rollout's group, and the other visits to the same task."""
    held = store.rows
    place = held.place(part, index)
    if place is None:
        raise _missing(part, index)
    gid = int(held.gid[place])
    [about] = held.groups_as(np.array([gid]))
    own = held.number("index")[held.members(gid)].astype(int).tolist()
    read = _read(store, part, own[:GROUP])
    window = max(500, WINDOW // max(1, len(read)))
    visits = held.groups_as(held.visits(gid)[:VISITS])
    shown = [{**_shown(row, pieces, 0, window), "why": why(row)} for row in read]
    return {
        "group": about,
        "rollouts": shown,
        "visits": [{**v, "index": v["first"]} for v in visits],
        "hidden": len(own) - len(read),
    }


def text_of(store: Store, part: RolloutPart, index: int) -> str:
    """Return the whole reply of a rollout, however long."""
    if part not in store.files:
        raise _missing(part, index)
    found = rows(store.files[part], [index], ["index", "text"]).to_pylist()
    if not found:
        raise _missing(part, index)
    return str(found[0]["text"])


def _read(store: Store, part: RolloutPart, indices: Iterable[int]) -> list[dict[str, Any]]:
    indices = list(indices)
    if part not in store.files:
        raise _missing(part, indices[0] if indices else 0)
    try:
        table = rows(store.files[part], indices)
    except IndexError:
        raise _missing(part, indices[0]) from None
    if table.num_rows != len(set(indices)):
        raise _missing(part, indices[0])
    long = {name: table[name] for name in _LONG if name in table.column_names}
    found = table.drop_columns(list(long)).to_pylist()
    for place, row in enumerate(found):
        for name, column in long.items():
            value = column[place]
            plain = name in ("spans", "pictures", "forks")
            row[name] = value.as_py() if plain else _array(value)
    return found


def _array(value: Any) -> NDArray[Any] | None:
    if not value.is_valid:
        return None
    found: NDArray[Any] = value.values.to_numpy(zero_copy_only=False)
    return found


def _shown(row: dict[str, Any], pieces: TokenPieces, begin: int, window: int) -> dict[str, Any]:
    """Return a row as JSON data, with `window` of its tokens from `begin` on."""
    tokens = row["tokens"] if row["tokens"] is not None else np.zeros(0, dtype=np.int32)
    begin = min(begin, len(tokens))
    end = min(len(tokens), begin + window)
    spans = row["spans"] or []
    scored = positions(s for s in spans if s["learned"])
    sampled = positions(s for s in spans if s["kind"] == SpanKind.SAMPLED)
    numbers = {name: _cut(row[name], scored, begin, end) for name in NUMBERS if row.get(name) is not None}
    if row["engine"] is not None and len(row["engine"]):
        numbers["engine"] = _cut(row["engine"], sampled, begin, end)
    if row.get("kept") is not None:
        numbers["kept"] = _cut(row["kept"].astype(np.float32), scored, begin, end)
    own = {name: value for name, value in row.items() if name not in _LONG and name not in _JSON}
    own |= {name: _json(row.get(name)) for name in _JSON}
    own["turns"] = [_turn(turn, row) for turn in row["turns"] or []]
    own["text"], own["prompt"] = _clipped(own["text"]), _clipped(own["prompt"])
    return {
        **own,
        "held_out": row["kind"] == "eval",
        "spans": [[s["kind"], s["start"], s["length"], s["version"], bool(s["learned"])] for s in spans],
        "begin": begin,
        "end": end,
        "ids": _bytes(tokens[begin:end].astype(np.int32)),
        "pieces": pieces.of(tokens[begin:end].tolist()),
        "known": pieces.known,
        "numbers": {name: values for name, values in numbers.items() if values is not None},
        "pictures": row["pictures"] or [],
        "characters": len(row["text"] or ""),
    }


def _cut(values: NDArray[Any], places: NDArray[np.int64], begin: int, end: int) -> str | None:
    """Return a float32 for each token from `begin` to `end`, encoded; nan where a token has no number."""
    found = np.full(end - begin, np.nan, dtype=np.float32)
    count = min(len(values), len(places))
    inside = (places[:count] >= begin) & (places[:count] < end)
    found[places[:count][inside] - begin] = values[:count][inside]
    return _bytes(found)


def _bytes(values: NDArray[Any]) -> str:
    return b64encode(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _turn(turn: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return a turn whose first token is counted over all transcripts."""
    before = sum((row["transcripts"] or [])[: turn["transcript"]])
    text = said_by(turn, row["prompt"] or "", row["text"] or "")
    calls = [{**call, "arguments": _clipped(call["arguments"])} for call in turn["calls"] or ()]
    return {**turn, "text": _clipped(text), "calls": calls, "first": before + turn["first"]}


def _clipped(text: str | None) -> str | None:
    if text is None or len(text) <= TEXT:
        return text
    return f"{text[:TEXT]} … {len(text) - TEXT:,} more characters"


def _json(text: str | None) -> Any:
    """Return the data of JSON text; other or very long text unchanged."""
    if text is None:
        return None
    if len(text) > 4 * TEXT:
        return _clipped(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _seconds(folder: Path, part: RolloutPart, index: int) -> dict[str, Any] | None:
    """Return the seconds of a rollout's turns and of its reward, where recorded."""
    if part.held_out:
        return None
    file = kept_file(folder, SECONDS, part.step)
    if file is None:
        return None
    try:
        seen = file.stat()
        table = _seconds_of(file, (seen.st_mtime_ns, seen.st_size))
        own = np.flatnonzero(table["index"].to_numpy() == index)[:1]
        return next(iter(table.take(pa.array(own)).to_pylist()), None)
    except (OSError, ValueError, LookupError, UserError):
        return None


@lru_cache(maxsize=8)
def _seconds_of(file: Path, stamp: tuple[int, int]) -> pa.Table:
    """Read and cache a file of seconds. `stamp`: changes with the file, which a resumed run writes anew."""
    return parquet.ParquetFile(user_files.readable(file)).read(use_threads=False)


def _missing(part: RolloutPart, index: int) -> UserError:
    return UserError(f"there is no rollout {index} in step {part.name} of this run")
