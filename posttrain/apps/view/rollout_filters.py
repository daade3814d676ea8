"""Queries over all rollouts: filters, ready questions, orders, histograms.

Each runs on columns in memory, and is shown to the user as an equivalent SELECT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from posttrain.apps.view.column_table import Floats, Mask, Places, RolloutColumns, counts, first
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.rollout_store import Store
from posttrain.apps.view.sql_text import by_name, listed_part, named, named_part, quoted
from posttrain.core.json_text import json_text, parsed
from posttrain.core.rollouts import Fate
from posttrain.core.types import OUTCOME, StopReason, UserError

PAGE = 100  # rows of a page
BINS = 32
MEANT = 4  # most parts of the reward whose means are shown
NUMBERS = ("reward", "advantage", "length", "total", "sampled", "epoch", "shaping", "penalty", "used", "version")
PLAIN = (*NUMBERS, "step", "index", "fate", "stop", "member", "kind", "group", "task", "prompt", "text")
"""Columns that a user can sort by, and that the table of rollouts has itself."""
SORTS = {
    **{name: name for name in (*PLAIN, "mean", "sd", "right", "replies", "n", "first")},
    "prompt": "prompt_start",
    "text": "text_start",
}
"""Sort order -> its column."""
GROUP_SORTS = (
    "step",
    "task",
    "epoch",
    "mean",
    "sd",
    "replies",
    "n",
    "first",
    "length",
    "kind",
    "group",
    "prompt",
    "right",
)
"""The sort orders of a table of groups."""

_LAST = "(task, step) in (select (task, max(step)) from rollouts group by task)"
QUESTIONS: dict[str, tuple[str, str, str, str]] = {
    "wrong": (
        "wrong every time",
        "tasks whose last visit was wrong throughout",
        f"""{_LAST} and "group" in (select "group" from rollouts group by "group" having max(reward) < $)""",
        "-step",
    ),
    "once": (
        "right once in its group",
        "the rare successes that teach most",
        """reward >= $ and "group" in (select "group" from rollouts group by "group"
        having count(*) filter (reward >= $) = 1 and count(reward) > 1)""",
        "",
    ),
    "lost": (
        "solved before, lost since",
        "all right at some visit, less than half at the last",
        f"""{_LAST} and task in (select task from rollouts group by task, "group" having min(reward) >= $)
        and "group" in (select "group" from rollouts group by "group" having avg((reward >= $)::int) < 0.5)""",
        "-step",
    ),
    "longest": ("longest", "", "", "-length"),
    "best": ("highest reward, read these first", "a loophole in the reward is at the top", "", "-reward"),
    "cut": ("cut off", "", "truncated", ""),
    "idle": ("taught nothing", "no weight was moved by their advantage", "(fate <> 'trained' or advantage = 0)", ""),
    "moved": (
        "moved though A = 0",
        "by a KL, an entropy term or a critic",
        "advantage = 0 and len(flags) > 0",
        "",
    ),
}
"""Ready questions: label of the button, meaning, condition of `posttrain query`, sort order.
$ is replaced by the reward from which on a reply succeeds. `_READY` selects the same rows in memory.
"""


def _of_outcomes(condition: str, rows: RolloutColumns) -> str:
    """Return a condition of `QUESTIONS` with the run's success threshold, and with the number that it applies to."""
    number = f'coalesce("part.{OUTCOME}", reward)' if OUTCOME in rows.parts else "reward"
    if rows.baseline.any():
        number = f"case when fate = '{Fate.BASELINE}' then null else {number} end"
    return re.sub(r"\breward\b", lambda found: number, condition).replace("$", repr(rows.limit))


def _wrong(rows: RolloutColumns) -> Mask:
    last, _, _ = rows.last_visits
    return (last & (rows.groups["valid"] > 1) & (rows.groups["right_n"] == 0))[rows.gid]


def _once(rows: RolloutColumns) -> Mask:
    groups = (rows.groups["valid"] > 1) & (rows.groups["right_n"] == 1)
    return groups[rows.gid] & rows.right & ~rows.baseline


def _lost(rows: RolloutColumns) -> Mask:
    last, best, share = rows.last_visits
    return (last & (best == 1) & (share < 0.5))[rows.gid]


def _idle(rows: RolloutColumns) -> Mask:
    other = ~rows.equal("fate", Fate.TRAINED) & (rows.codes("fate") >= 0)
    return other | (rows.number("advantage") == 0)


def _moved(rows: RolloutColumns) -> Mask:
    return (rows.number("advantage") == 0) & (flags_of(rows) > 0)


_READY: dict[str, Callable[[RolloutColumns], Mask]] = {
    "wrong": _wrong,
    "once": _once,
    "lost": _lost,
    "cut": lambda rows: rows.flag("truncated"),
    "idle": _idle,
    "moved": _moved,
}


@dataclass
class ViewQuestion:
    """A query of a page: the filters, the order and the form of its table, read from the page's address."""

    store: Store
    rows: RolloutColumns  # snapshot at the time of the query
    filters: dict[str, Callable[[], Mask]] = field(default_factory=dict)  # text of the filter -> mask of its rows
    shown: list[str] = field(default_factory=list)  # the filters as conditions of `posttrain query`
    order: str = ""  # "reward" or "-reward"
    groups: bool = False  # whether a row is a group
    held: bool = False  # whether it selects evaluations
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> (first matching token, count)
    note: str = ""  # what the result leaves out, in words

    @classmethod
    def of(cls, query: Mapping[str, str], store: Store) -> ViewQuestion:
        """Read the query from an address. Raises UserError for invalid values."""
        asked = cls(store, store.rows, order=query.get("sort", ""), groups=query.get("as") == "groups")
        held = query.get("held") or ("0" if any(not part.held_out for part in store.files) else "1")
        if held in ("0", "1"):  # anything else: both
            asked.held = held == "1"
            asked.filters[f"held {held}"] = lambda: asked.rows.flag("held_out") == asked.held
        for name, value in query.items():
            if value != "" or name == "side":
                asked._take(name, value)
        if query.get("token"):
            asked._tokens(query["token"])
        ready = QUESTIONS.get(query.get("ask", ""))
        if ready is not None:
            _, _, shown, order = ready
            if shown:
                asked._filter(f"ask {query['ask']}", lambda: _READY[query["ask"]](asked.rows))
                asked.shown.append(" ".join(_of_outcomes(shown, asked.rows).split()))
            asked.order = asked.order or order
        return asked

    def _filter(self, says: str, mask: Callable[[], Mask], shown: str = "") -> None:
        self.filters[says] = mask
        if shown:
            self.shown.append(shown)

    def _take(self, name: str, value: str) -> None:
        rows = self.rows
        if name in NUMBERS or name in ("step", "mean", "sd") or name.startswith("part."):
            self._range(name, value)
        elif name in ("fate", "stop", "kind", "invalid_kind"):
            self._choice(name, value)
        elif name in ("task", "group"):
            self._filter(f"{name} {value}", lambda: rows.equal(name, value), f"{named(name)} = {quoted(value)}")
        elif name == "side":
            none = rows.codes("side") == -1 if value == "" else False
            self._filter(
                f"side {value}", lambda: rows.equal("side", value) | none, f"coalesce(side, '') = {quoted(value)}"
            )
        elif name == "replayed":
            if value not in ("0", "1"):
                raise UserError(f"replayed is 0 or 1, not {value[:40]!r}")
            again = value == "1"
            self._filter(
                f"replayed {value}", lambda: rows.flag("replayed") == again, ("" if again else "not ") + "replayed"
            )
        elif name == "flag":
            self._filter(f"flag {value}", lambda: flags_of(rows, value) > 0, f"list_contains(flags, {quoted(value)})")
        elif name == "q":
            low = quoted(value.lower())
            shown = f"(contains(lower(prompt), {low}) or contains(lower(text), {low}))"
            self._filter(f"q {value}", lambda: _found(rows, value), shown)
        elif name.startswith("col."):
            path = "$." + '"' + name[4:].replace('"', "") + '"'
            shown = f"json_extract_string(columns, {quoted(path)}) = {quoted(value)}"
            self._filter(f"{name} {value}", lambda: _column(rows, name[4:], value), shown)
        elif name == "where":
            held = by_name(value, rows.parts, named_part)
            self._filter(f"where {value}", lambda: _at(rows, self.store.meant(rows, held)))
            self.shown.append(f"({by_name(value, rows.parts, listed_part)})")

    def _tokens(self, condition: str) -> None:
        """Select the rollouts with a token for which `condition` holds, in the steps that the other filters select."""
        rows, mask = self.rows, np.ones(len(self.rows), dtype=bool)
        for says, one in self.filters.items():
            if says.startswith(("held ", "step ")):
                mask &= one()
        keys, at = np.unique(rows.key[mask] >> 32, return_inverse=True)
        tokens = np.bincount(at, np.nan_to_num(rows.number("total")[mask]), len(keys))
        sizes = {
            RolloutPart(int(k >> 1), bool(k & 1)): int(n) for k, n in zip(keys.tolist(), tokens.tolist(), strict=True)
        }
        found = self.store.marked(rows, condition, sizes)
        for step, held_out, index, place, times in found.rows:
            row = rows.place(RolloutPart(step, held_out), index)
            if row is not None:
                self.marks[row] = place, times
        within = (
            ["held_out" if self.held else "not held_out"] if any(f.startswith("held ") for f in self.filters) else []
        )
        if not found.whole:
            first_step = min(part.step for part in found.parts)
            within.append(f"step >= {first_step}")
            self.note = (
                f"tokens were looked at from step {first_step} on: earlier ones hold too many at once, name their steps"
            )
        places = np.fromiter(self.marks, dtype=np.int64, count=len(self.marks))
        meant = " and ".join([*within, f"({condition})"])
        self._filter(
            f"token {condition}",
            lambda: _at(rows, places),
            f'(step, "index") in (select (step, "index") from tokens where {meant})',
        )

    def _range(self, name: str, value: str) -> None:
        """Filter by "0.5", "0..1", "0..", "..1", or "none" for null."""
        if name.startswith("part.") and name[5:] not in self.rows.parts:
            raise UserError(f"no part of the reward is named {name[5:]!r}")
        shown = listed_part(name[5:]) if name.startswith("part.") else name
        if value == "none":
            self._filter(f"{name} none", lambda: np.isnan(self.rows.number(name)), f"{shown} is null")
            return
        low, dots, high = value.partition("..")
        if not dots:
            exact = _number(low, name)
            self._filter(f"{name} {exact}", lambda: self.rows.number(name) == exact, f"{shown} = {exact!r}")
        if dots and low:
            least = _number(low, name)
            self._filter(f"{name} from {least}", lambda: self.rows.number(name) >= least, f"{shown} >= {least!r}")
        if dots and high:
            most = _number(high, name)
            self._filter(f"{name} to {most}", lambda: self.rows.number(name) <= most, f"{shown} <= {most!r}")

    def _choice(self, name: str, value: str) -> None:
        known = {"fate": Fate, "stop": StopReason}.get(name)
        chosen = value.split("|")
        wrong = [one for one in chosen if known is not None and one != "none" and one not in list(known)]
        if wrong:
            raise UserError(f"{name} is never {wrong[0]!r}: one of {', '.join(known or ())}")
        some = [one for one in chosen if one != "none"]
        said = [f"{name} in ({', '.join(map(quoted, some))})"] if some else []
        said += [f"{name} is null"] if "none" in chosen else []

        def mask() -> Mask:
            codes = [pc.index(self.rows.values(name), one).as_py() for one in some]
            codes = [code for code in codes if code >= 0] + ([-1] if "none" in chosen else [])
            return np.isin(self.rows.codes(name), codes)

        self._filter(f"{name} {value}", mask, f"({' or '.join(said)})" if len(said) > 1 else said[0])

    # -- answers -------------------------------------------------------------------------------------------------------

    def sql(self) -> str:
        """Return the query as SQL for `posttrain query`."""
        table = "evals" if self.held else "rollouts"
        where = f" where {' and '.join(self.shown)}".replace("from rollouts", f"from {table}") if self.shown else ""
        name, down = self.order.lstrip("-"), " desc" if self.order.startswith("-") else ""
        if self.groups:
            return (
                f'select step, "group", count(*), avg(reward) from {table}{where} group by step, "group" order by all'
            )
        order = f" order by {named(name)}{down}" if name in PLAIN else ""
        return f'select step, "index", prompt, text, reward, advantage, fate from {table}{where}{order}'

    @property
    def meant(self) -> Places:
        """Numbers of the selected rows, in order."""

        def all_of_them() -> Places:
            mask = np.ones(len(self.rows), dtype=bool)
            for one in self.filters.values():
                mask &= one()
            return np.flatnonzero(mask)

        found: Places = self.rows.remembered(tuple(self.filters), all_of_them)
        return found

    def page(self, offset: int, limit: int = PAGE) -> dict[str, Any]:
        """Return a page of the table, and the number of all rows."""
        count, rows = self._groups(offset, limit) if self.groups else self._rows(offset, limit)
        return {"rows": rows, "count": count, "sql": self.sql(), "note": self.note}

    def _rows(self, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
        rows, meant, name = self.rows, self.meant, self.order.lstrip("-")
        column = name if name.startswith("part.") and name[5:] in rows.parts else SORTS.get(name)
        if column is None:
            places = meant[offset : offset + limit]
        else:
            order = first(rows.sortable(column)[meant], self.order.startswith("-"), offset + limit)
            places = meant[order[offset : offset + limit]]
        found = rows.rows(places)
        for row, place in zip(found, places.tolist(), strict=True):
            if place in self.marks:
                row["at"], row["times"] = self.marks[place]
        return len(meant), found

    def _groups(self, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of groups with a selected rollout, and a page of them, each with its commonest prompt and
        reply.
        """
        rows, name = self.rows, self.order.lstrip("-")
        matched = np.bincount(rows.gid[self.meant], minlength=len(rows.first_rows))
        gids = np.flatnonzero(matched)
        if name in GROUP_SORTS:
            values = rows.of_groups("task" if name == "prompt" else name)[gids]
            shown = gids[first(values, self.order.startswith("-"), offset + limit)[offset : offset + limit]]
        else:
            shown = gids[offset : offset + limit]
        found = rows.groups_as(shown)
        for row, gid in zip(found, shown.tolist(), strict=True):
            own = rows.members(gid)
            row["matched"] = int(matched[gid])
            row["prompt"], row["text"] = (rows.commonest(name, own) for name in ("prompt_start", "text_start"))
        return len(gids), found

    def means(self) -> dict[str, Any]:
        """Return counts and means of the selected rollouts and of all others, training or held out as selected.

        {"these": {"n", "reward", ...}, "others": the same}; {} where either side is empty.
        """
        rows = self.rows
        every = np.ones(len(rows), dtype=bool)
        for says, one in self.filters.items():
            if says.startswith("held "):
                every &= one()
        these = _at(rows, self.meant)
        sides = {"these": np.flatnonzero(every & these), "others": np.flatnonzero(every & ~these)}
        if not all(map(len, sides.values())):
            return {}
        return {name: self._mean(places) for name, places in sides.items()}

    def _mean(self, places: Places) -> dict[str, Any]:
        rows = self.rows
        reward = rows.number("reward")[places]
        known = ~np.isnan(reward)
        columns: dict[str, Floats | Mask] = {
            "reward": reward,
            "tokens": rows.number("length")[places],
            "cut off": rows.flag("truncated")[places],
            "invalid": ~known,
            "advantage": rows.number("advantage")[places],
            **{f"part.{name}": rows.number(f"part.{name}")[places] for name in rows.parts[:MEANT]},
        }
        if self.store.success is not None:
            columns["right"] = np.where(known, rows.right[places], np.nan)
        if (rows.codes("fate")[places] >= 0).any():
            columns["trained"] = rows.equal("fate", Fate.TRAINED)[places]
        found: dict[str, Any] = {"n": len(places)}
        for name, values in columns.items():
            finite = values[np.isfinite(values)]
            found[name] = float(finite.mean()) if len(finite) else None
        return found

    def histograms(self, names: Sequence[str]) -> dict[str, Any]:
        """Return bins of each column over the selected rollouts, with the number of nulls; for choices, counts by
        value.
        """
        rows, meant = self.rows, self.meant
        known = [n for n in names if n in NUMBERS or (n.startswith("part.") and n[5:] in rows.parts)]
        key = (*self.filters, "histograms", *known)

        def all_of_them() -> dict[str, Any]:
            found: dict[str, Any] = {name: _bins(rows.number(name)[meant]) for name in known}
            for name in ("fate", "stop", "kind"):
                found[name] = sorted(counts(rows, name, meant).items(), key=lambda pair: -pair[1])
            again = int(rows.flag("replayed")[meant].sum())
            found["replayed"] = [[flag, n] for flag, n in ((False, len(meant) - again), (True, again)) if n]
            return found

        answer: dict[str, Any] = rows.remembered(key, all_of_them)
        return answer


def flags_of(rows: RolloutColumns, flag: str | None = None) -> NDArray[np.int64]:
    """Return how many flags each row has, or how often it has this flag."""
    lists = rows.table["flags"].combine_chunks()
    parents = pc.list_parent_indices(lists).to_numpy()
    if flag is not None:
        parents = parents[pc.fill_null(pc.equal(lists.flatten(), flag), False).to_numpy(zero_copy_only=False)]
    return np.bincount(parents, minlength=len(rows))


def _at(rows: RolloutColumns, places: Places) -> Mask:
    mask = np.zeros(len(rows), dtype=bool)
    mask[places] = True
    return mask


def _found(rows: RolloutColumns, text: str) -> Mask:
    """Return the rows whose prompt or reply contains a text, ignoring case.

    Beginnings are searched where no more is held.
    """
    mask = np.zeros(len(rows), dtype=bool)
    for name in ("prompt", "text"):
        codes, values = rows.fullest(name)
        has = pc.match_substring(values, text, ignore_case=True).to_numpy(zero_copy_only=False)
        mask |= np.append(has, False)[codes]  # code -1 takes the last value
    return mask


def _column(rows: RolloutColumns, name: str, value: str) -> Mask:
    """Return the rows whose task has this value, as text or as JSON, in one of its own columns."""

    def fits(text: str) -> bool:
        columns = parsed(text)
        found = columns.get(name) if isinstance(columns, dict) else None
        return found is not None and value == (found if isinstance(found, str) else json_text(found))

    codes, values = rows.whole("columns")
    has = [fits(text) for text in values.to_pylist()]
    return np.array([*has, False])[codes]


def _bins(values: Floats) -> dict[str, Any]:
    """Return a histogram: bins as [number, count], of which number 0 begins at `low`."""
    none = np.isnan(values)
    missing = int(none.sum())
    known = values[~none] if missing else values
    count = len(known)
    low, high = (float(known.min()), float(known.max())) if count else (None, None)
    found: dict[str, Any] = {"low": low, "high": high, "least": low, "count": count, "none": missing, "bins": []}
    if low is None or high is None or not math.isfinite(high - low):
        return found
    width = _width(low, high)
    begin = math.floor(low / width) * width
    bins = np.bincount(np.clip((known - begin) / width + 1e-9, 0, 2 * BINS).astype(np.int64))  # rounding, far from 0
    return {**found, "low": begin, "width": width, "bins": [[i, n] for i, n in enumerate(bins.tolist()) if n]}


def _width(low: float, high: float) -> float:
    """Return a round bin width with which at most BINS bins cover the range."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-280):
        return 1.0
    rough = (high - low) / BINS
    power = 10 ** math.floor(math.log10(rough))
    return float(next(power * step for step in (1, 2, 2.5, 5, 10, 20) if power * step >= rough))


def _number(text: str, name: str) -> int | float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{name} is a number or a range such as 0..0.5, not {text[:40]!r}") from None
    if not math.isfinite(value):
        raise UserError(f"{name} is a number or a range such as 0..0.5, not {text[:40]!r}")
    return int(value) if value == int(value) and abs(value) < 1e15 else value
