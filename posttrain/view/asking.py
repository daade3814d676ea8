"""What a person asks of all rollouts: filters, ready questions, orders, histograms; each as one SELECT that is shown.

The question that runs and the one that is shown say the same. The one that runs knows where texts are kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.types import Fate, StopReason, UserError
from posttrain.view.naming import by_name, listed_part, named, named_part, quoted
from posttrain.view.store import Store

PAGE = 100  # rows that are handed out at once
BINS = 32
MEANT = 4  # parts of the reward whose means are told
_HELD = ("b.held_out", "not b.held_out")
NUMBERS = ("reward", "advantage", "length", "sampled", "epoch", "shaping", "penalty", "used", "version")
SORTS = {
    **{name: f"b.{name}" for name in (*NUMBERS, "step", "index", "fate", "stop", "member", "kind")},
    "index": 'b."index"',
    "group": 'g."group"',
    "task": "g.task",
    "epoch": "g.epoch",
    "mean": "g.mean",
    "sd": "g.sd",
    "right": "g.right_n / g.valid",
    "replies": "g.replies",
    "prompt": "p.value",
    "text": "t.value",
    "n": "g.n",
    "first": "g.first",
}
"""Column of the table -> what sorts by it."""
PLAIN = (*NUMBERS, "step", "index", "fate", "stop", "member", "kind", "group", "task", "prompt", "text")
"""Those of them that the table of rollouts has itself."""
GROUP_SORTS = {
    **{
        name: f"g.{name}" for name in ("step", "task", "epoch", "mean", "sd", "replies", "n", "first", "length", "kind")
    },
    "group": 'g."group"',
    "prompt": "g.task",
    "right": "g.right_n / g.valid",
}
"""The same where a row is a group."""

_LAST = "(task, step) in (select (task, max(step)) from rollouts group by task)"
QUESTIONS: dict[str, tuple[str, str, str, str, str]] = {
    "wrong": (
        "wrong every time",
        "tasks whose last visit was wrong throughout",
        "g.valid > 1 and g.right_n = 0 and g.gid in (select last_gid from tasks)",
        f"""{_LAST} and "group" in (select "group" from rollouts group by "group" having max(reward) < $)""",
        "-step",
    ),
    "once": (
        "right once in its group",
        "the rare successes that teach most",
        "g.right_n = 1 and g.valid > 1 and b.reward >= $",
        """reward >= $ and "group" in (select "group" from rollouts group by "group"
        having count(*) filter (reward >= $) = 1 and count(reward) > 1)""",
        "",
    ),
    "lost": (
        "solved before, lost since",
        "all right at some visit, less than half at the last",
        "g.gid in (select last_gid from tasks where best_right = 1 and last_right < 0.5)",
        f"""{_LAST} and task in (select task from rollouts group by task, "group" having min(reward) >= $)
        and "group" in (select "group" from rollouts group by "group" having avg((reward >= $)::int) < 0.5)""",
        "-step",
    ),
    "longest": ("longest", "", "", "", "-length"),
    "best": ("highest reward, read these first", "a loophole in the reward stands at the top", "", "", "-reward"),
    "cut": ("cut off", "", "b.truncated", "truncated", ""),
    "idle": (
        "taught nothing",
        "no weight was moved by their advantage",
        "(b.fate <> 'trained' or b.advantage = 0)",
        "(fate <> 'trained' or advantage = 0)",
        "",
    ),
    "moved": (
        "moved though A = 0",
        "by a KL, an entropy term or a critic",
        "b.advantage = 0 and len(b.flags) > 0",
        "advantage = 0 and len(flags) > 0",
        "",
    ),
}
"""Ready questions: what the button says, what it means, the condition, the same of `posttrain query`, the order.

$ stands for the reward from which on a reply is right."""
_GROUPED = "base b join groups g using (gid)"
_ROW = """
b.step, b.held_out, b."index", b.kind, b.member, g."group", g.task, g.side, g.epoch, b.reward, b.invalid, b.advantage,
b.fate, b.why, b.flags, b.stop, b.truncated, b.replayed, b.length, b.sampled, b.version, b.shaping, b.penalty, b.used,
g.mean, g.sd, g.n, g.right_n, p.value as prompt, t.value as text"""


@dataclass
class Question:
    """What is asked, read from the address of the page."""

    where: list[str] = field(default_factory=list)  # conditions over base b, groups g, strings
    shown: list[str] = field(default_factory=list)  # the same over the columns of rollouts
    order: str = ""  # "reward" or "-reward"
    groups: bool = False  # one row a group
    held: bool = False  # of the evaluations
    mark: int | None = None  # of the rollouts that a condition on tokens has found, in the table marked
    note: str = ""  # what the answer leaves out

    @classmethod
    def of(cls, query: Mapping[str, str], store: Store) -> Question:
        """Raises UserError for what cannot be read."""
        asked = cls(order=query.get("sort", ""), groups=query.get("as") == "groups")
        held = query.get("held") or ("0" if any(not part.held_out for part in store.files) else "1")
        if held in ("0", "1"):  # anything else: both
            asked.held = held == "1"
            asked.where.append("b.held_out" if asked.held else "not b.held_out")
        for name, value in query.items():
            asked._take(name, value, store)
        if query.get("token"):
            asked._tokens(query["token"], store)
        ready = QUESTIONS.get(query.get("ask", ""))
        if ready is not None:
            limit = repr(store.limit)
            if ready[2]:
                asked.where.append(ready[2].replace("$", limit))
                asked.shown.append(" ".join(ready[3].replace("$", limit).split()))
            asked.order = asked.order or ready[4]
        return asked

    def _both(self, condition: str) -> None:
        self.where.append(condition)
        self.shown.append(re.sub(r"\b[bg]\.", "", condition))

    def _take(self, name: str, value: str, store: Store) -> None:
        if value == "" and name not in ("side",):
            return
        if name in NUMBERS or name == "step" or name.startswith("part.") or name in ("mean", "sd"):
            self._range(name, value, store)
        elif name in ("fate", "stop", "kind", "invalid_kind"):
            self._choice(name, value)
        elif name in ("task", "group", "side"):
            self._both(f"g.{named(name)} = {quoted(value)}")
        elif name == "replayed":
            if value not in ("0", "1"):
                raise UserError(f"replayed is 0 or 1, not {value[:40]!r}")
            self._both("b.replayed" if value == "1" else "not b.replayed")
        elif name == "flag":
            self._both(f"list_contains(b.flags, {quoted(value)})")
        elif name == "q":
            self.where.append(_found(value, store))
            self.shown.append(
                f"(contains(lower(prompt), {quoted(value.lower())}) or contains(lower(text), {quoted(value.lower())}))"
            )
        elif name.startswith("col."):
            self._column(name[4:], value)
        elif name == "where":
            held = by_name(value, store.parts, named_part)
            store.check_condition(held)
            self.where.append(f"b.row in (select row from rollouts where ({held}\n))")
            self.shown.append(f"({by_name(value, store.parts, listed_part)})")

    def _tokens(self, condition: str, store: Store) -> None:
        """Rollouts with such a token, in the steps that the other filters name."""
        steps = [part for part in self.where if part in _HELD or re.match(r"b\.step (=|>=|<=) ", part)]
        self.mark, found = store.mark(condition, " and ".join(steps) or "true")
        self.where.append(f"b.row in (select row from marked where mark = {self.mark})")
        within = ["held_out"] if self.held else ["not held_out"] if _HELD[1] in self.where else []
        if not found.whole:
            first = min(part.step for part in found.parts)
            within.append(f"step >= {first}")
            self.note = (
                f"tokens were looked at from step {first} on: earlier ones hold too many at once, name their steps"
            )
        meant = " and ".join([*within, f"({condition})"])
        self.shown.append(f'(step, "index") in (select (step, "index") from tokens where {meant})')

    def _column(self, name: str, value: str) -> None:
        """A column of the task, as JSON has it or as its text."""
        path = "$." + '"' + name.replace('"', "") + '"'
        inside = f"json_extract_string(value, {quoted(path)}) = {quoted(value)}"
        self.where.append(
            "b.row in (select row from full_texts where columns in "
            f"(select id from strings where left(value, 1) = '{{' and json_valid(value) and {inside}))"
        )
        self.shown.append(inside.replace("(value,", "(columns,"))

    def _range(self, name: str, value: str, store: Store) -> None:
        """ "0.5", "0..1", "0..", "..1"; "none" for null."""
        if name.startswith("part.") and name[5:] not in store.parts:
            raise UserError(f"no part of the reward is named {name[5:]!r}")
        column = f"g.{name}" if name in ("epoch", "mean", "sd") else f"b.{named(name) if '.' in name else name}"
        low, dots, high = value.partition("..")
        conditions = ["is null"] if value == "none" else [] if dots else [f"= {_number(low, name)}"]
        conditions += [f">= {_number(low, name)}"] if dots and low else []
        conditions += [f"<= {_number(high, name)}"] if dots and high else []
        for condition in conditions:
            self.where.append(f"{column} {condition}")
            self.shown.append(f"{listed_part(name[5:]) if name.startswith('part.') else name} {condition}")

    def _choice(self, name: str, value: str) -> None:
        known = {"fate": Fate, "stop": StopReason}.get(name)
        chosen = value.split("|")
        wrong = [one for one in chosen if known is not None and one != "none" and one not in list(known)]
        if wrong:
            raise UserError(f"{name} is never {wrong[0]!r}: one of {', '.join(known or ())}")
        names = ", ".join(quoted(one) for one in chosen if one != "none")
        said = [f"b.{name} in ({names})"] if names else []
        said += [f"b.{name} is null"] if "none" in chosen else []
        self._both(f"({' or '.join(said)})" if len(said) > 1 else said[0])

    # -- as SQL --------------------------------------------------------------------------------------------------------

    def sql(self) -> str:
        """What a person may copy: a question of `posttrain query`."""
        table = "evals" if self.held else "rollouts"
        where = f" where {' and '.join(self.shown)}".replace("from rollouts", f"from {table}") if self.shown else ""
        name, down = self.order.lstrip("-"), " desc" if self.order.startswith("-") else ""
        if self.groups:
            return (
                f'select step, "group", count(*), avg(reward) from {table}{where} group by step, "group" order by all'
            )
        order = f" order by {named(name)}{down}" if name in PLAIN else ""
        return f'select step, "index", prompt, text, reward, advantage, fate from {table}{where}{order}'

    def _clause(self) -> str:
        return f" where {' and '.join(self.where)}" if self.where else ""

    def _order(self, store: Store) -> str:
        name, down = self.order.lstrip("-"), " desc" if self.order.startswith("-") else ""
        if self.groups:
            column, place = GROUP_SORTS.get(name, ""), "g.step, g.first"
        else:
            part = name.startswith("part.") and name[5:] in store.parts
            column, place = f"b.{named(name)}" if part else SORTS.get(name, ""), 'b.step, b.held_out, b."index"'
        return f" order by {column}{down} nulls last, {place}" if column else f" order by {place}"

    def page(self, store: Store, offset: int, limit: int = PAGE) -> dict[str, Any]:
        """Rows of the table, and how many there are in all."""
        with store.limited() as cursor:
            count = "count(distinct b.gid)" if self.groups else "count(*)"
            source = _GROUPED if "g." in self._clause() else "base b"
            total = cursor.execute(f"select {count} from {source}{self._clause()}").fetchone()[0]
            found = cursor.execute(
                self._groups(store, offset, limit) if self.groups else self._rows(store, offset, limit)
            )
            names = [column[0] for column in found.description]
            rows = [dict(zip(names, map(_plain, row), strict=True)) for row in found.fetchall()]
        return {"rows": rows, "count": total, "sql": self.sql(), "note": self.note}

    def _rows(self, store: Store, offset: int, limit: int) -> str:
        """Texts are looked up for the rows of a page alone, unless they are what it is sorted by."""
        order, clause = self._order(store), self._clause()
        texts = {"p": " left join strings p on p.id = b.prompt", "t": " left join strings t on t.id = b.text"}
        early = "".join(join for alias, join in texts.items() if f"{alias}.value" in order)
        source = _GROUPED if "g." in clause + order else "base b"
        parts = "".join(f", b.{named('part.' + name)}" for name in store.parts)
        mark = f" left join marked m on m.row = b.row and m.mark = {self.mark}" if self.mark else ""
        parts += ", m.place as at, m.times" if self.mark else ""
        return f"""select {_ROW}{parts} from {_GROUPED}{"".join(texts.values())}{mark}
                where b.row in (select b.row from {source}{early}{clause}{order} limit {limit} offset {offset}){order}"""

    def _groups(self, store: Store, offset: int, limit: int) -> str:
        """Groups of which any rollout is meant, with the prompt and the reply that comes up most."""
        order, source = self._order(store), _GROUPED if "g." in self._clause() else "base b"
        return f"""
            with meant as (select b.gid, count(*) as matched from {source}{self._clause()} group by b.gid),
                 page as (select g.* from groups g join meant using (gid){order} limit {limit} offset {offset}),
                 texts as (select gid, any_value(prompt) as prompt, mode(text) as text from base
                           where gid in (select gid from page) group by gid)
            select g.* exclude gid, meant.matched, p.value as prompt, t.value as text
            from page g join meant using (gid) join texts using (gid) left join strings p on p.id = texts.prompt
            left join strings t on t.id = texts.text{order}"""

    def means(self, store: Store) -> dict[str, Any]:
        """Of the rollouts that are meant and of all others, training or held out alike: how many, and their means.

        {"these": {"n", "reward", ...}, "others": the same}. Nothing to compare where either is empty: {}.
        """
        every, own = [part for part in self.where if part in _HELD], [part for part in self.where if part not in _HELD]
        if not own:
            return {}
        parts = "".join(f", avg(b.{named('part.' + name)}) as {named('part.' + name)}" for name in store.parts[:MEANT])
        condition = " and ".join(own)
        source = _GROUPED if "g." in condition else "base b"
        with store.limited() as cursor:
            found = cursor.execute(
                f"""select coalesce({condition}, false) as these, count(*) as n, avg(b.reward) as reward,
                           avg((b.reward >= {store.limit!r})::int) as right,
                           avg(if(b.sampled > 0, b.sampled, b.scored)) as tokens,
                           avg((b.fate = 'trained')::int) as trained, avg(b.truncated::int) as "cut off",
                           avg((b.reward is null)::int) as invalid, avg(b.advantage) as advantage{parts}
                    from {source}{" where " + " and ".join(every) if every else ""} group by 1"""
            )
            names = [column[0] for column in found.description]
            rows = [dict(zip(names, map(_plain, row), strict=True)) for row in found.fetchall()]
        sides = {"these" if row.pop("these") else "others": row for row in rows}
        if len(sides) < 2:
            return {}
        if store.success is None:
            for row in rows:
                del row["right"]
        return sides

    def histograms(self, store: Store, names: list[str]) -> dict[str, Any]:
        """Of each column: bins of all rollouts that are meant, and how many have none; of choices, their counts."""
        found: dict[str, Any] = {}
        known = [n for n in names if n in NUMBERS or (n.startswith("part.") and n[5:] in store.parts)]
        source = _GROUPED if "g." in self._clause() else "base b"
        with store.limited() as cursor:
            for name in known:
                found[name] = self._bins(cursor, name)
            for name in ("fate", "stop", "kind", "replayed"):
                found[name] = cursor.execute(
                    f"select b.{name}, count(*) from {source}{self._clause()} group by 1 order by 2 desc"
                ).fetchall()
        return found

    def _bins(self, cursor: Any, name: str) -> dict[str, Any]:
        """Bins as [number, count], the first of which begins at `low`."""
        clause, column = self._clause(), "g.epoch" if name == "epoch" else f"b.{named(name)}"
        source = _GROUPED if "g." in clause + column else "base b"
        low, high, count, null = cursor.execute(
            f"select min({column}), max({column}), count({column}), count(*) - count({column}) from {source}{clause}"
        ).fetchone()
        found = {"low": low, "high": high, "least": low, "count": count, "none": null, "bins": []}
        if low is None or not math.isfinite(high - low):
            return found
        width = _width(float(low), float(high))
        begin = math.floor(low / width) * width
        number = f"cast(floor(({column} - {begin!r}) / {width!r} + 1e-9) as integer)"
        bins = cursor.execute(
            f"select {number}, count(*) from {source}{clause} group by 1 having {number} is not null order by 1"
        )
        return {**found, "low": begin, "width": width, "bins": bins.fetchall()}


def _width(low: float, high: float) -> float:
    """Of a bin: a round number, so that at most BINS of them reach from end to end."""
    if high <= low:
        return 1.0
    rough = (high - low) / BINS
    power = 10 ** math.floor(math.log10(rough))
    return float(next(power * step for step in (1, 2, 2.5, 5, 10, 20) if power * step >= rough))


def _number(text: str, name: str) -> str:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{name} is a number or a range such as 0..0.5, not {text[:40]!r}") from None
    if not math.isfinite(value):
        raise UserError(f"{name} is a number or a range such as 0..0.5, not {text[:40]!r}")
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _found(text: str, store: Store) -> str:
    """Rows whose prompt or reply has this text, whatever its case."""
    inside = f"(select id from strings where contains(lower(value), {quoted(text.lower())}))"
    starts = f"b.text in {inside} or b.prompt in {inside}"
    longer = f" or b.row in (select row from full_texts where longer and (text in {inside} or prompt in {inside}))"
    return f"({starts}{longer if store.longer else ''})"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
