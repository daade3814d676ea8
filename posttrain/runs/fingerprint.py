"""Fingerprints of the inputs of a run, in a few bytes: a resumed run compares them to notice changes.

Decides what counts as changed: the content of files, not their age. Of a file of more than `WHOLE` bytes, size and samples
from all over it are compared, so that a model of a hundred gigabytes takes no longer than one of one; for such a file
the time of its last change is kept as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core import user_files
from posttrain.core.json_text import known
from posttrain.core.types import UserError
from posttrain.envs.play.env_options import split_options
from posttrain.envs.reward_sums import is_sum, own_name, terms_of
from posttrain.system.user_code import source_file

READ = {".json", ".jsonl", ".csv", ".tsv", ".gz", ".parquet", ".arrow", ".safetensors", ".jinja", ".model"}
"""Endings of the files of a folder that rows or a model are read from: logs and notes may be beside them."""
WHOLE = 256 << 20  # bytes: half a second to read
SAMPLES, SAMPLE_BYTES = 256, 1 << 16  # of larger ones: 16 MiB
ROWS = 1000  # of rows in memory, from all over them

Print = dict[str, Any]
"""{"digest": ..., and for people: "bytes", "files" or "rows"; "written", in nanoseconds, where only samples were read}."""


def of_path(path: Path) -> Print | None:
    """Return the fingerprint of a file, or of the data and weights in a folder; None if there is neither."""
    try:
        if path.is_file():
            files, found = [path], Print(digest=_content(path))
        elif path.is_dir():
            inside = ("*", "*/*") if (path / "dataset_dict.json").is_file() else ("*",)
            files = sorted(f for pattern in inside for f in path.glob(pattern) if f.suffix in READ and f.is_file())
            inside_them = [(str(f.relative_to(path)), _content(f)) for f in files]
            found = Print(digest=_digest(inside_them), files=len(files))
        else:
            return None
        known = [file.stat() for file in files]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    sampled = [k.st_mtime_ns for k in known if k.st_size > WHOLE]
    return {**found, "bytes": sum(k.st_size for k in known), **({"written": max(sampled)} if sampled else {})}


def of_rows(rows: Sequence[Any]) -> Print:
    """Return the fingerprint of rows in memory. Values without a form in JSON count by their type."""
    chosen = range(0, len(rows), max(1, len(rows) // ROWS))
    return {"digest": _digest([rows[i] for i in chosen]), "rows": len(rows)}


def of_code(code: str | Callable[..., Any]) -> Print | None:
    """Return that of the file of "my.py:name", or of a function; None for one of an installed package.

    Of a sum it is that of the files of all terms.
    """
    if isinstance(code, str) and is_sum(code):
        found = [_of_file(split_options(own_name(term.spec))[0].rpartition(":")[0]) for term in terms_of(code)]
        known = [one for one in found if one is not None]
        if len(known) > 1:
            return {"digest": _digest([one["digest"] for one in known]), "bytes": sum(one["bytes"] for one in known)}
        return known[0] if known else None
    return _of_file(split_options(code)[0].rpartition(":")[0] if isinstance(code, str) else source_file(code))


def _of_file(file: str | None) -> Print | None:
    return of_path(Path(file)) if file and file.endswith(".py") and Path(file).is_file() else None


def changed(before: Mapping[str, Any], now: Mapping[str, Print | None]) -> list[str]:
    """Return the names of inputs that were there before, are there now, and have another content."""
    both = [(n, then, now.get(n)) for n, then in before.items() if isinstance(then, Mapping)]
    return [name for name, then, present in both if present and then.get("digest") != present["digest"]]


def rewritten(before: Mapping[str, Any], now: Mapping[str, Print | None]) -> list[str]:
    """The names of large files that were written since, though their size and the samples of their content are the same."""
    both = [(n, then, now.get(n)) for n, then in before.items() if n not in changed(before, now)]
    return [name for name, then, present in both if present and then and then.get("written") != present.get("written")]


def _content(path: Path) -> str:
    size, content = path.stat().st_size, hashlib.sha256()
    with user_files.opened(path) as file:
        if size <= WHOLE:
            while chunk := file.read(1 << 20):
                content.update(chunk)
            return content.hexdigest()
        content.update(str(size).encode())
        for place in range(SAMPLES):
            file.seek(place * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            content.update(file.read(SAMPLE_BYTES))
    return content.hexdigest()


def _digest(value: Any) -> str:
    try:
        text = json.dumps(value, default=lambda odd: known(odd, type(odd).__name__), skipkeys=True)
    except (ValueError, RecursionError):  # a row that holds itself
        text = ""
    return hashlib.sha256(text.encode()).hexdigest()
