"""The index of a run: the short columns of all rollouts, a file per 50 steps, so that millions can be read at once.

It is a cache. A file of the index, a piece, lists the names and sizes of the files that it was made from. If these have
changed, or the piece is missing, the reader makes it again.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.runs import run_files
from posttrain.runs.record.rollout_reading import read_file
from posttrain.runs.record.schema import INDEX, PIECE, START
from posttrain.runs.record.table_writer import write_table
from posttrain.runs.run_files import Folder, kept_file
from posttrain.runs.run_reading import rollout_steps
from posttrain.system.temp_folders import TempFolder

_MADE_OF = b"posttrain.made_of"
_PICTURE = r"\[sha256:[0-9a-f]{64}\]"  # a picture in a prompt: nearly as long as the part of a text that is kept
_READ = [
    name for name in (*INDEX.names, "prompt", "asked", "text") if name not in ("prompt_start", "text_start", "held_out")
]


Source = tuple[bool, Path]
"""(whether rollouts are of held-out tasks, their file)."""


class RolloutIndex:
    """The index in the process that writes the run: a piece is written when its steps are complete, or the run ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[Path, pa.Table] = {}  # tables of the incomplete piece
        self._piece = -1

    def written(self, path: Path, table: pa.Table, step: int, held_out: bool) -> None:
        """Record that the rollouts of a step have been written to a file."""
        if self._held and self._piece != step // PIECE:
            self.close()
        self._piece = step // PIECE
        self._held[path] = short(table, held_out)

    def forget(self, step: int) -> None:
        """Delete pieces with later steps than this."""
        for path in (self._folder / run_files.INDEX).glob("*.parquet*"):
            _, _, last = path.name.partition(".")[0].partition("-")
            if not last.isdecimal() or int(last) > step:
                path.unlink()

    def close(self) -> None:
        """Write the piece of the last steps."""
        sources = _sources(self._folder).get(self._piece) if self._held else None
        if sources:
            with suppress(OSError):  # no room: its reader makes it again
                _write(piece_file(self._folder, self._piece), sources, self._held)
        self._held = {}


def piece_file(folder: Path, piece: int) -> Path:
    return folder / run_files.INDEX / f"{piece * PIECE:06d}-{(piece + 1) * PIECE - 1:06d}.parquet"


def open_index(folder: Folder) -> list[Path]:
    """Return the files of the complete index. Pieces that are missing or older than the rollouts are made now.

    If the folder is not writable, they are made in another one, for this process.
    """
    path, found = Path(folder), []
    for piece, sources in sorted(_sources(path).items()):
        file = piece_file(path, piece)
        if _made_of(file) != _mark(sources):
            try:
                _write(file, sources)
            except OSError:
                file = _elsewhere(path.resolve()) / file.name
                _write(file, sources)
        found.append(file)
    return found


def left_out(folder: Folder, index: Sequence[Path]) -> list[Path]:
    """Return the damaged rollout files that a newly opened index had to leave out."""
    held = {name for piece in index for name in json.loads(_made_of(piece) or b"{}")}
    sources = [path for _, sources in sorted(_sources(Path(folder)).items()) for _, path in sources]
    return [path for path in sources if f"{path.parent.name}/{path.name}" not in held]


@cache
def _elsewhere(run: Path) -> Path:
    """Return a folder of this process for a run that it cannot write to. It is deleted at the end."""
    made = TempFolder("index")
    atexit.register(made.cleanup)
    return Path(made.name)


def _write(path: Path, sources: list[Source], known: Mapping[Path, pa.Table] = MappingProxyType({})) -> None:
    """Write a piece. `known`: tables that are already in memory.

    Damaged rollout files are left out (see `left_out`), and the piece is made again the next time.
    """
    tables, read = [], []
    for held_out, source in sources:
        with suppress(UserError):
            tables.append(known[source] if source in known else short(read_file(source, _READ), held_out))
            read.append((held_out, source))
    table = pa.concat_tables(tables) if tables else pa.schema(list(INDEX)).empty_table()
    table = table.combine_chunks().replace_schema_metadata({**(INDEX.metadata or {}), _MADE_OF: _mark(read)})
    path.parent.mkdir(exist_ok=True)
    write_table(path, table, f".{os.getpid()}.tmp")  # other processes may write it too


def short(table: pa.Table, held_out: bool) -> pa.Table:
    """Return the index's columns of a table of rollouts."""
    found = {name: table[name] for name in table.column_names if name in INDEX.names}
    shown = {"prompt": pc.coalesce(table["asked"], table["prompt"]), "text": table["text"]}
    for name, texts in shown.items():
        readable = pc.replace_substring_regex(texts, pattern=_PICTURE, replacement="▣ ")
        found[f"{name}_start"] = pc.utf8_slice_codeunits(readable, 0, START)
    found["held_out"] = pa.array([held_out] * table.num_rows, pa.bool_())
    return pa.table([found[name] for name in INDEX.names], schema=pa.schema(list(INDEX)))


def _made_of(path: Path) -> bytes | None:
    try:
        return (parquet.read_schema(user_files.readable(path)).metadata or {}).get(_MADE_OF)
    except (OSError, pa.ArrowException):
        return None


def _sources(folder: Path) -> dict[int, list[Source]]:
    """Return the sources of each piece."""
    found: dict[int, list[Source]] = {}
    for held_out, kind in ((False, run_files.ROLLOUTS), (True, run_files.EVALS)):
        for step in rollout_steps(folder, held_out):
            path = kept_file(folder, kind, step)
            if path is not None:
                found.setdefault(step // PIECE, []).append((held_out, path))
    return found


def _mark(sources: list[Source]) -> bytes:
    """Return the list of a piece's source files, which is stored in the piece."""
    return json.dumps({f"{path.parent.name}/{path.name}": os.stat(path).st_size for _, path in sources}).encode()
