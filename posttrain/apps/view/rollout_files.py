"""Reads the rollout files of a run for `view`.

A *part* is the content of one file: the rollouts of a step, or of a held-out evaluation after it. Scalar columns are
read at once, from the index where it is up to date; texts and tokens only when a page needs them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import parquet

from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_index import short
from posttrain.runs.record.rollout_reading import checked_schema, read_file
from posttrain.runs.record.schema import INDEX, ROLLOUTS
from posttrain.runs.run_files import step_of

FOLDERS = {"rollouts": False, "evals": True}
"""Folder -> whether its rollouts are held out."""
_PIECE = re.compile(r"(\d{6,})-(\d{6,})\.parquet")
MADE_OF = b"posttrain.made_of"  # metadata key of the index, see posttrain.runs.record.rollout_index


class RolloutPart(NamedTuple):
    """The rollouts of a step, or of the held-out evaluation after it."""

    step: int
    held_out: bool

    @property
    def name(self) -> str:
        """The part's name in addresses: "12", or "12e" for an evaluation."""
        return f"{self.step}{'e' if self.held_out else ''}"

    @classmethod
    def of(cls, name: str) -> RolloutPart | None:
        found = re.fullmatch(r"(\d{1,9})(e?)", name)
        return cls(int(found[1]), bool(found[2])) if found else None


@dataclass(frozen=True)
class File:
    """The file of a part, with a stamp that changes when the file does."""

    path: Path
    stamp: tuple[int, int]  # time of the last change in nanoseconds, size in bytes


def parts_of(folder: Path) -> dict[RolloutPart, File]:
    """Return the parts of a run with their files, in order. Files that disappear meanwhile are left out."""
    found: dict[RolloutPart, File] = {}
    for name, held_out in FOLDERS.items():
        inside = folder / name
        if not inside.is_dir():
            continue
        with os.scandir(inside) as entries:
            for entry in entries:
                stem, _, form = entry.name.partition(".")
                step = step_of(stem) if form == "parquet" else None
                try:
                    if step is None or not entry.is_file():
                        continue
                    seen = entry.stat()
                except OSError:  # deleted meanwhile, or a broken link
                    continue
                found[RolloutPart(step, held_out)] = File(Path(entry.path), (seen.st_mtime_ns, seen.st_size))
    return dict(sorted(found.items()))


def scalars(folder: Path, files: dict[RolloutPart, File]) -> Iterator[tuple[list[RolloutPart], pa.Table | UserError]]:
    """Yield (parts, table of the index's columns), in some order: from the index where it is fresh, else from the
    part's file.

    The second is a UserError for a part that cannot be read.
    """
    left = dict(files)
    for path, begin, end in _pieces(folder):
        own = {part: file for part, file in left.items() if begin <= part.step <= end}
        if not own or (table := _fresh(path, own)) is None:
            continue
        yield list(own), table
        for part in own:
            del left[part]
    for part, file in left.items():
        yield [part], _scalars_of(part, file)


def _scalars_of(part: RolloutPart, file: File) -> pa.Table | UserError:
    try:
        table = short(_checked(file.path, [n for n in ROLLOUTS.names if n in _WANTED]), part.held_out)
        if pc.any(pc.not_equal(table["step"], part.step)).as_py():
            raise UserError(f"{file.path} holds rollouts of another step: put the right file there")
        return table
    except UserError as error:
        return error
    except (pa.ArrowException, LookupError):
        return UserError(f"{file.path} holds no rollouts of this posttrain: open it with what wrote it")


UNUSED = {"step_rewards", "versions", "media", "branch_of", "branch_turns", "branch_taken"}
"""Columns of the index that are not needed here."""
_WANTED = {*INDEX.names, "prompt", "asked", "text"}


def _pieces(folder: Path) -> list[tuple[Path, int, int]]:
    inside = folder / "index"
    found = [(path, _PIECE.fullmatch(path.name)) for path in (inside.iterdir() if inside.is_dir() else ())]
    return sorted((path, int(match[1]), int(match[2])) for path, match in found if match)


def _fresh(path: Path, files: dict[RolloutPart, File]) -> pa.Table | None:
    """Return a piece of the index, if it was made from these files as they are now; else None."""
    wanted = {f"{file.path.parent.name}/{file.path.name}": file.stamp[1] for file in files.values()}
    try:
        made_of = (parquet.read_schema(user_files.readable(path)).metadata or {}).get(MADE_OF, b"null")
        if json.loads(made_of) != wanted:
            return None
        names = [name for name in INDEX.names if name not in UNUSED]
        texts = [name for name in names if INDEX.field(name).type == pa.string()]
        table = _checked(path, names, texts)
        if not _belongs(table, files):
            return None
        plain = pa.schema([(f.name, pa.string() if f.name in texts else f.type) for f in table.schema])
        return table if plain.equals(pa.schema([INDEX.field(name) for name in names])) else None
    except (OSError, ValueError, pa.ArrowException, UserError):
        return None


def _belongs(table: pa.Table, parts: Iterable[RolloutPart]) -> bool:
    """Return whether all rows belong to these parts, and no row is there twice."""
    step, held_out, index = (table[name].to_numpy().astype(np.int64) for name in ("step", "held_out", "index"))
    key = (step << 1 | held_out) << 32 | index
    begins = np.flatnonzero(np.diff(key >> 32, prepend=-1))
    there = key[begins] >> 32
    if not np.isin(there, [(part.step << 1) | part.held_out for part in parts]).all():
        return False
    rising = key[1:] > key[:-1]
    rising[begins[1:] - 1] = True
    if rising.all() and len(np.unique(there)) == len(there):  # the order in which a run writes: part after part
        return True
    return len(np.unique(key)) == len(key)


def _checked(path: Path, names: Sequence[str], texts: Sequence[str] = ()) -> pa.Table:
    """Return some columns of a file, `texts` as dictionaries.

    Raises UserError if it is damaged, or of another version.
    """
    try:
        file = parquet.ParquetFile(
            user_files.readable(path), read_dictionary=list(texts), page_checksum_verification=True
        )
        known = checked_schema(path, file).names
        return file.read([name for name in names if name in known], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())[:120]}): put a copy of it back") from error


def rows(file: File, indices: Sequence[int] | None = None, names: Sequence[str] = ROLLOUTS.names) -> pa.Table:
    """Return the rows of a part with these columns: all rows, or those with these indices."""
    wanted = [*names, *(name for name in ("learner", "why") if "before" in names and name not in names)]
    table = read_file(file.path, wanted, None if indices is None else sorted(set(indices)))
    if {"spans", "tokens"} <= set(names):
        _check_spans(file.path, table)
    return _before(table).select([name for name in table.column_names if name in names]) if "before" in names else table


def positions(spans: Iterable[Mapping[str, Any]]) -> NDArray[np.int64]:
    """Return the positions of the tokens of some spans, in order."""
    runs = [np.arange(s["start"], s["start"] + s["length"]) for s in spans]
    return np.concatenate([np.zeros(0, dtype=np.int64), *runs])


def _before(table: pa.Table) -> pa.Table:
    """Fill the learner's log-probabilities before the step where they were not written, because no update came before.

    Rollouts of a step with several updates list in `why` the updates that learned from them. Unless only the first one
    did, `before` stays null.
    """
    why = pc.fill_null(table["why"], "")
    later = pc.and_(pc.starts_with(why, "in update"), pc.invert(pc.starts_with(why, "in update 1 of")))
    same = pc.and_(pc.is_null(table["before"]), pc.invert(later))
    filled = pc.if_else(same, table["learner"], table["before"])
    return table.set_column(table.column_names.index("before"), table.schema.field("before"), filled)


def _check_spans(path: Path, table: pa.Table) -> None:
    """Raise UserError unless spans are within their tokens, in order and disjoint: later code allocates by these
    numbers.
    """
    lists, tokens = (table[name].combine_chunks() for name in ("spans", "tokens"))
    spans, row = lists.flatten(), pc.list_parent_indices(lists).to_numpy()
    start, length = (
        spans.field(name).to_numpy(zero_copy_only=False).astype(np.float64) for name in ("start", "length")
    )
    known = pc.fill_null(pc.list_value_length(tokens), 0).to_numpy(zero_copy_only=False)[row]
    behind = np.append(True, (start[1:] >= start[:-1] + length[:-1]) | (row[1:] != row[:-1]))[: len(row)]
    wrong = np.flatnonzero(~((start >= 0) & (length >= 0) & (start + length <= known) & behind))  # nan: null
    if len(wrong):
        place = wrong[0]
        said = f"a span of {length[place]:,.0f} tokens from {start[place]:,.0f} on, of {known[place]:,}"
        raise UserError(f"{path} is damaged (rollout {row[place]} of those read has {said}): put a copy of it back")
