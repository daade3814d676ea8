"""Cache on disk: rows as memory-mapped Arrow files, and arrays computed from rows.

A file's name is a hash of everything it was made from, so a changed source never finds an old file. Files are in the
user's cache folder (posttrain/rows in $XDG_CACHE_HOME or ~/.cache), which may be emptied at any time; a file that was
not used for 30 days is removed when the next is written. Without such a folder, rows stay in memory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.system.cache_folders import cache_folder

if TYPE_CHECKING:
    import pyarrow as pa

UNUSED_SECONDS = 30 * 86_400
SLOW_SECONDS = 0.5  # results that take less time are not cached
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # bytes of a file's content that are sampled for its fingerprint

Arrays = dict[str, np.ndarray]
T = TypeVar("T")


class Table:
    """An Arrow table, memory-mapped if it is in a file: only the rows that are read take memory."""

    def __init__(self, whole: pa.Table, path: Path | None = None) -> None:
        import pyarrow as pa

        self.whole = whole
        # kept open: the folder may be emptied during a run
        self._file = pa.OSFile(str(user_files.readable(path))) if path else None

    def batches(self, size: int) -> Iterator[pa.RecordBatch]:
        """Yield all rows in order, read instead of mapped, so that iteration takes the memory of one batch."""
        import pyarrow as pa

        if self._file is None:
            yield from self.whole.to_batches(max_chunksize=size)
            return
        reader = pa.ipc.open_file(self._file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def digest(*parts: object) -> str:
    """Return a hash of the parts, as a name for data made from them."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def fingerprint(path: Path) -> str:
    """Return a hash that changes whenever a file does: path, size, modification time, and samples from the whole
    content.
    """
    known = path.stat()
    content = hashlib.blake2b(digest_size=16)
    with user_files.opened(path) as file:
        for sample in range(SAMPLES):
            file.seek(sample * max(SAMPLE_BYTES, known.st_size // SAMPLES))
            content.update(file.read(SAMPLE_BYTES))
    return digest(path.resolve(), known.st_size, known.st_mtime_ns, content.hexdigest())


def keep_table(name: str, schema: pa.Schema, batches: Callable[[], Iterable[pa.RecordBatch]]) -> Table:
    """Return the table with that name, from the cache or newly made of `batches()`."""
    import pyarrow as pa

    def write(sink: Any) -> None:
        with pa.ipc.new_file(sink, schema) as writer:
            for batch in batches():
                writer.write_batch(batch)

    def read(path: Path) -> Table:
        return Table(pa.ipc.open_file(pa.memory_map(str(user_files.readable(path)))).read_all(), path)

    file = f"{name}.arrow"
    found = _find(file, read)
    if found is None and (path := _write(file, write)):
        found = read(path)
    if found is None:
        memory = pa.BufferOutputStream()
        write(memory)
        found = Table(pa.ipc.open_file(memory.getvalue()).read_all())
    return found


def keep_arrays(name: str | None, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays with that name, from the cache or newly made."""

    def read(path: Path) -> Arrays:
        with np.load(user_files.readable(path), allow_pickle=False) as stored:
            return dict(stored)

    file = f"{name}.npz"
    if name and (found := _find(file, read)):
        return found
    begin = time.perf_counter()
    made = make()
    if name and time.perf_counter() - begin > SLOW_SECONDS:
        _write(file, lambda sink: np.savez(sink, allow_pickle=False, **made))
    return made


def _find(file: str, read: Callable[[Path], T]) -> T | None:
    """Read a file of the cache; None if it cannot be read and must be made again."""
    folder = cache_folder("rows")
    if folder is None or not (path := folder / file).exists():
        return None
    try:
        os.utime(path)
        return read(path)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):  # ValueError: ArrowInvalid is a subclass
        return None


def _write(file: str, write: Callable[[IO[bytes]], None]) -> Path | None:
    """Write a file completely or not at all; None where there is no cache folder. Raises UserError if the disk
    is full.
    """
    folder = cache_folder("rows")
    if folder is None:
        return None
    for old in folder.iterdir():
        with suppress(OSError):  # another process was faster
            if old.stat().st_mtime < time.time() - UNUSED_SECONDS:
                old.unlink()
    descriptor, draft = tempfile.mkstemp(dir=folder, prefix="draft-")
    try:
        with os.fdopen(descriptor, "wb") as sink:
            write(sink)
        os.replace(draft, folder / file)
    except OSError as error:
        raise UserError(
            f"cannot keep rows in {folder}: {error.strerror}; make room there, or name another folder: XDG_CACHE_HOME=DIR"
        ) from error
    finally:
        Path(draft).unlink(missing_ok=True)
    return folder / file
