"""An immutable snapshot of a run's rollouts, in columns in memory.

Rows are sorted by step, then evaluation after training, then index: of equal rows the earlier comes first in every
order. Texts are codes into a dictionary of distinct texts; numbers are float64 with nan for null.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.sql_text import OF_GROUPS
from posttrain.core.rollouts import Fate
from posttrain.core.types import OUTCOME

Floats = NDArray[np.float64]
Codes = NDArray[np.int32]
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]

KEPT = 8  # answers in the cache
FIGURES = ("n", "valid", "right_n", "mean", "sd", "low", "high", "replies", "first", "length")
"""Figures of a group: rollouts, rollouts with a reward, successful rollouts, statistics of the reward, distinct
replies, the least index, the mean length of the reply.
"""
_OF_TEXTS = "whole: "  # prefix of cached columns that depend on whole texts
_WHOLE = ("n", "valid", "right_n", "replies", "first")


def merged(tables: Sequence[pa.Table]) -> pa.Table:
    """Return all rows of some tables in order; each column's dictionary has a text once."""
    table = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
    key = keys(table)
    if not _in_order(key):  # the index has pieces of 50 steps, each with its evaluations last
        begins = np.flatnonzero(np.diff(key >> 32, prepend=-1))
        parts = np.argsort(key[begins], kind="stable")
        pairs = list(zip(begins[parts].tolist(), np.append(begins[1:], len(key))[parts].tolist(), strict=True))
        table = pa.concat_tables([table.slice(begin, end - begin) for begin, end in pairs])
        key = np.concatenate([key[begin:end] for begin, end in pairs])
    table = table.combine_chunks()
    return table if _in_order(key) else table.take(pa.array(np.argsort(key, kind="stable"))).combine_chunks()


def _in_order(key: NDArray[Any]) -> bool:
    return bool((key[1:] >= key[:-1]).all())


def sorted_within(values: Places, begins: Places) -> Places:
    """Sort each stretch of values between two of `begins`, in place: many short sorts are faster than one of all."""
    ends = [*begins[1:].tolist(), len(values)]
    for begin, end in zip(begins.tolist(), ends, strict=True):
        values[begin:end].sort()
    return values


def keys(table: pa.Table) -> Places:
    """Return the sort key of each row: step, held_out and index in one integer."""
    key = _plain(table["step"]).astype(np.int64)
    for name, bits in (("held_out", 1), ("index", 32)):
        key <<= bits
        key |= _plain(table[name])
    return key


def key_of(part: RolloutPart, index: int) -> int:
    return (part.step << 33) | (int(part.held_out) << 32) | index


def outside(table: pa.Table, parts: Iterable[RolloutPart]) -> pa.Table:
    """Return the rows of a table that belong to none of these parts."""
    gone = np.array([key_of(part, 0) >> 32 for part in parts], dtype=np.int64)
    return table.filter(pa.array(~np.isin(keys(table) >> 32, gone)))


class RolloutColumns:
    """The rollouts of a run.

    `limit`: the reward from which on a reply succeeds; `texts`: the whole texts read so far.
    """

    def __init__(self, table: pa.Table, limit: float | None = None, texts: pa.Table | None = None) -> None:
        self.table, self._texts = table, texts
        self.parts = [name.removeprefix("part.") for name in table.column_names if name.startswith("part.")]
        decides = f"part.{OUTCOME}" if OUTCOME in self.parts else "reward"
        best = limit if limit is not None else pc.max(table[decides]).as_py()
        self.limit = (0.0 if best is None else float(best)) - 1e-6  # tolerance for rounding
        self._columns: dict[str, Any] = {}
        self._answers: OrderedDict[Any, Any] = OrderedDict()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def with_texts(self, texts: pa.Table) -> RolloutColumns:
        """Return the same rows with other whole texts; cached figures that do not depend on texts are kept."""
        other = copy(self)
        other._texts, other._answers = texts, OrderedDict()
        other._columns = {name: column for name, column in self._columns.items() if not name.startswith(_OF_TEXTS)}
        if other.long:
            other.__dict__.pop("groups", None)  # the groups count distinct replies
        return other

    @property
    def long(self) -> bool:
        """Whether any whole reply is held; otherwise only the beginnings of replies are."""
        return self._texts is not None and self._texts["text"].null_count < len(self._texts)

    @cached_property
    def key(self) -> Places:
        return keys(self.table)

    @cached_property
    def begins(self) -> Places:
        """The first row of each part."""
        return np.flatnonzero(np.diff(self.key >> 32, prepend=-1))

    def place(self, part: RolloutPart, index: int) -> int | None:
        """Return the number of the row with this part and index; None if there is none."""
        wanted = key_of(part, index)
        found = int(np.searchsorted(self.key, wanted))
        return found if found < len(self) and self.key[found] == wanted else None

    def of_part(self, part: RolloutPart) -> slice:
        """Return the rows of a step, or of an evaluation."""
        begin, end = np.searchsorted(self.key, [key_of(part, 0), key_of(part, 0) + (1 << 32)])
        return slice(int(begin), int(end))

    def number(self, name: str) -> Floats:
        """Return a column of numbers, or a figure of the row's group, for each row; nan: null."""
        if name in FIGURES and name != "length":
            return self.of_groups(name)[self.gid]
        return self.kept(name, lambda: _numbers(self.table[name]))

    def flag(self, name: str) -> Mask:
        return self.kept(name, lambda: _plain(self.table[name]))

    @cached_property
    def outcome(self) -> Floats:
        """The number of each row that success is compared with: the part "outcome", or else the reward; nan: none."""
        reward = self.number("reward")
        if OUTCOME not in self.parts:
            return reward
        part = self.number(f"part.{OUTCOME}")
        return np.where(np.isnan(part) | np.isnan(reward), reward, part)

    @cached_property
    def right(self) -> Mask:
        """Mask of the rows that succeed."""
        return self.outcome >= self.limit

    @cached_property
    def baseline(self) -> Mask:
        """Mask of the greedy replies whose rewards are baselines: no figure of a group counts them."""
        return self.equal("fate", Fate.BASELINE)

    def codes(self, name: str) -> Codes:
        """Return the index into `values(name)` of each row's text; -1: null."""
        return self.kept(name, lambda: _codes(self.table[name]))

    def values(self, name: str) -> pa.Array:
        return _one(self.table[name]).dictionary

    def whole(self, name: str) -> tuple[Codes, pa.Array]:
        """Return codes and values of whole texts; -1 where null or not held."""
        if self._texts is None:
            return np.full(len(self), -1, dtype=np.int32), pa.array([], pa.string())
        values = _one(self._texts[name]).dictionary
        return self.kept(f"{_OF_TEXTS}{name}", lambda: self._aligned(name)), values

    def fullest(self, name: str) -> tuple[Codes, pa.Array]:
        """Return codes and values of whole texts, or of their beginnings where the whole text is not held."""
        codes, values = self.whole(name)
        starts = f"{name}_start"
        if starts not in self.table.column_names:
            return codes, values
        codes = np.where((codes < 0) & (self.codes(starts) >= 0), self.codes(starts) + len(values), codes)
        return codes.astype(np.int32), pa.concat_arrays([values, self.values(starts)])

    def _aligned(self, name: str) -> Codes:
        assert self._texts is not None
        codes, key = _codes(self._texts[name]), keys(self._texts)
        if np.array_equal(key, self.key):
            return codes
        at = np.minimum(np.searchsorted(key, self.key), max(0, len(key) - 1))
        return np.where(key[at] == self.key, codes[at], -1).astype(np.int32) if len(key) else np.full_like(self.gid, -1)

    def commonest(self, name: str, places: Places) -> str | None:
        """Return the commonest text of a column among some rows."""
        codes, times = np.unique(self.codes(name)[places], return_counts=True)
        code = int(codes[times.argmax()])
        return None if code < 0 else str(self.values(name)[code])

    def equal(self, name: str, value: str) -> Mask:
        """Return the mask of the rows with this text in a column."""
        code = pc.index(self.values(name), value).as_py()
        found: Mask = self.codes(name) == code if code >= 0 else np.zeros(len(self), dtype=bool)
        return found

    def sortable(self, name: str) -> Floats:
        """Return the sort key: a number for each row, nan: null."""
        if name == "right":
            return self.of_groups(name)[self.gid]
        if name in FIGURES or not pa.types.is_dictionary(self.table.schema.field(name).type):
            return self.number(name)
        return self.kept(f"rank {name}", lambda: self._rank(name))

    def _rank(self, name: str) -> Floats:
        values, codes = self.values(name), self.codes(name)
        rank = np.full(len(values) + 1, np.nan)  # the last one is that of -1
        rank[pc.array_sort_indices(values).to_numpy()] = np.arange(len(values))
        return rank[codes]

    def rows(self, places: NDArray[Any], names: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return some rows as JSON data: these columns, or all columns with the figures of their groups."""
        table = self.table.select(names or self.table.column_names).take(pa.array(places))
        columns = {name: table[name].to_pylist() for name in table.column_names}
        if not names:
            columns["prompt"], columns["text"] = columns.pop("prompt_start"), columns.pop("text_start")
            columns["side"] = [side or "" for side in columns["side"]]
            gid = self.gid[places]
            columns |= {name: plain(self.groups[name][gid], name) for name in OF_GROUPS}
        return _rows(columns)

    # -- groups --------------------------------------------------------------------------------------------------------

    @cached_property
    def gid(self) -> Codes:
        """The group of each row: those of a step with the same name and side, numbered in the order of their first rows."""
        part = np.repeat(np.arange(len(self.begins)), np.diff(np.append(self.begins, len(self))))
        group, side = (self.codes(name).astype(np.int64) + 1 for name in ("group", "side"))
        key = (part * (len(self.values("group")) + 1) + group) * (len(self.values("side")) + 1) + side
        begins = np.flatnonzero(np.diff(key, prepend=-1))
        sizes = np.diff(np.append(begins, len(key)))
        if _in_order(key[begins]):  # the order in which a run writes: group after group, each new to the dictionary
            return np.repeat(np.arange(len(begins), dtype=np.int32), sizes)
        _, first, inverse = np.unique(key[begins], return_index=True, return_inverse=True)
        order = np.empty(len(first), dtype=np.int32)
        order[np.argsort(first)] = np.arange(len(first))
        return np.repeat(order[inverse], sizes).astype(np.int32)

    @cached_property
    def _order(self) -> tuple[Places, Places]:
        """The rows sorted by group, and the place in them at which each group begins."""
        in_order = _in_order(self.gid)
        order = np.arange(len(self)) if in_order else np.argsort(self.gid, kind="stable")
        return order, np.flatnonzero(np.diff(self.gid[order], prepend=-1))

    @property
    def first_rows(self) -> Places:
        """The first row of each group."""
        order, begins = self._order
        return order[begins]

    def members(self, gid: int) -> Places:
        """Return the rows of a group."""
        order, begins = self._order
        return order[begins[gid] : begins[gid + 1] if gid + 1 < len(begins) else None]

    @cached_property
    def groups(self) -> dict[str, Floats]:
        """The FIGURES of each group."""
        order, begins = self._order
        if not len(begins):
            return {name: np.zeros(0) for name in FIGURES}

        def total(values: NDArray[Any]) -> Floats:
            return np.add.reduceat(values, begins, dtype=np.float64)

        counted = ~self.baseline[order]
        reward = np.where(counted, self.number("reward")[order], np.nan)
        known = np.isfinite(reward)  # a damaged record may hold infinity
        rows, n, valid = np.diff(np.append(begins, len(order))), total(counted), total(known)
        low, high = np.fmin.reduceat(reward, begins), np.fmax.reduceat(reward, begins)
        mean = np.where(low == high, low, total(np.where(known, reward, 0.0)) / _nonzero(valid))
        apart = np.where(known, np.where(known, reward, 0.0) - np.repeat(mean, rows), 0.0)
        return {
            "n": n,
            "valid": valid,
            "right_n": total(self.right[order] & counted),
            "mean": mean,
            "sd": np.sqrt(total(apart * apart) / _nonzero(valid)),
            "low": low,
            "high": high,
            "replies": self._distinct(len(begins)),
            "first": np.minimum.reduceat(self.number("index")[order], begins),
            "length": total(np.where(counted, self.number("length")[order], 0.0)) / _nonzero(n),
        }

    def of_groups(self, name: str) -> Floats:
        """Return a number for each group: one of FIGURES, the share of successes, or the first row's value of a
        column.
        """
        if name == "right":
            return self.groups["right_n"] / _nonzero(self.groups["valid"])
        return self.groups[name] if name in FIGURES else self.sortable(name)[self.first_rows]

    def _distinct(self, count: int) -> Floats:
        """Count each group's distinct replies, by whole texts as far as they are held, else by their beginnings."""
        codes, values = self.fullest("text") if self.long else (self.codes("text_start"), self.values("text_start"))
        many = len(values) + 1
        pairs = sorted_within(self.gid.astype(np.int64) * many + codes + 1, self.begins)
        pairs = pairs[np.diff(pairs, prepend=-1) != 0]
        pairs = pairs[pairs % many != 0]  # null
        return np.bincount(pairs // many, minlength=count).astype(np.float64)

    @cached_property
    def _task(self) -> NDArray[np.int64]:
        """The task of each group, as a number that is the same in all steps."""
        at = self.first_rows
        key = self.flag("held_out")[at].astype(np.int64)
        for name in ("kind", "task", "side"):
            key = key * (len(self.values(name)) + 1) + self.codes(name)[at] + 1
        return np.unique(key, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def last_visits(self) -> tuple[Mask, Floats, Floats]:
        """For each group: whether it is the last visit to its task; success shares of the task's best visit and of
        this one.

        Groups without any reward do not count as visits.
        """
        task, valid, share = self._task, np.flatnonzero(self.groups["valid"]), self.of_groups("right")
        last, best = np.full(task.max(initial=-1) + 1, -1), np.full(task.max(initial=-1) + 1, -1.0)
        last[task[valid]] = valid  # groups are in the order of steps: the last one stays
        np.maximum.at(best, task[valid], share[valid])
        return last[task] == np.arange(len(task)), best[task], share

    def visits(self, gid: int) -> Places:
        """Return the groups of the same task as group `gid`."""
        return np.flatnonzero(self._task == self._task[gid])

    def groups_as(self, gids: NDArray[Any]) -> list[dict[str, Any]]:
        """Return some groups as JSON data."""
        names = ("step", "held_out", "kind", "group", "side", "task", "epoch")
        table = self.table.select(names).take(pa.array(self.first_rows[gids]))
        columns = {name: table[name].to_pylist() for name in names}
        columns["side"] = [side or "" for side in columns["side"]]
        columns |= {"gid": gids.tolist()} | {name: plain(self.groups[name][gids], name) for name in FIGURES}
        return _rows(columns)

    # -- cached answers ------------------------------------------------------------------------------------------------

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a column, computed once and cached under `name`."""
        if name not in self._columns:
            self._columns[name] = make()
        return self._columns[name]

    def remembered(self, question: Any, answer: Callable[[], Any]) -> Any:
        """Return an answer, cached for an equal question."""
        found = self._answers.get(question)
        if found is None:
            found = self._answers[question] = answer()
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        return found


def first(values: Floats, down: bool, count: int) -> Places:
    """Return the places of the `count` first values in order, nulls last; of equal values the earlier is first."""
    own = -values if down else values
    if count >= len(own):
        return np.argsort(own, kind="stable")
    limit = np.fmin.reduce(own)
    if (own == limit).sum() < count:  # a partition is slow where many values are equal
        limit = np.partition(own, count - 1)[count - 1]
    equal = np.isnan(own) if np.isnan(limit) else own == limit
    before = np.flatnonzero(~equal if np.isnan(limit) else own < limit)
    before = before[np.argsort(own[before], kind="stable")]
    return np.concatenate([before, np.flatnonzero(equal)[: count - len(before)]])


def plain(values: NDArray[Any], name: str = "") -> list[Any]:
    """Return the values as JSON data: None for nan, int for counts."""
    known = np.isfinite(values)
    whole = name in _WHOLE
    return [
        None if not there else int(value) if whole else value
        for value, there in zip(values.tolist(), known.tolist(), strict=True)
    ]


def counts(rows: RolloutColumns, name: str, chosen: Places | None = None) -> Mapping[str | None, int]:
    """Count the rows of each text of a column."""
    codes = rows.codes(name) if chosen is None else rows.codes(name)[chosen]
    found = np.bincount(codes + 1, minlength=1).tolist()
    values = [None, *rows.values(name).to_pylist()]
    return {value: n for value, n in zip(values, found, strict=False) if n}


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _one(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    assert column.num_chunks == 0
    return pa.array([], column.type)


def _numbers(column: pa.ChunkedArray) -> Floats:
    found: Floats = _one(column).to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
    return found


def _plain(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return integers or booleans; null becomes 0 or False."""
    if column.num_chunks > 1:
        return np.concatenate([_plain(pa.chunked_array([chunk])) for chunk in column.chunks])
    array = _one(column)
    found: NDArray[Any] = array.fill_null(False if pa.types.is_boolean(array.type) else 0).to_numpy(
        zero_copy_only=False
    )
    return found


def _codes(column: pa.ChunkedArray) -> Codes:
    indices = _one(column).indices
    found: Codes = (indices.fill_null(-1) if indices.null_count else indices).to_numpy(zero_copy_only=False)
    return found


def _nonzero(values: Floats) -> Floats:
    """Replace 0 by nan, so that dividing by it gives nan."""
    return np.where(values == 0, np.nan, values)
