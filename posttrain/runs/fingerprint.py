"""Fingerprints of a run's inputs, a few bytes each: a resumed run compares them to detect changes.

They depend on the content of files, not on their age. For a file of more than `WHOLE` bytes, the size and samples from
the whole content are compared, so that a model of a hundred gigabytes takes no longer than one of one; then the time of
the last change is stored as well.
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
"""Endings of files with rows or models; logs and notes in a folder are ignored."""
WHOLE = 256 << 20  # bytes: half a second to read
SAMPLES, SAMPLE_BYTES = 256, 1 << 16  # for larger files: 16 MiB in all
ROWS = 1000  # rows sampled evenly from rows in memory

Print = dict[str, Any]
"""{"digest": ...; for messages "bytes", "files" or "rows"; "written", in nanoseconds, if only samples were read}."""


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


def path_digest(path: Path) -> str:
    """Return the digest of a file or folder; its path if there is none."""
    known = of_path(path)
    return str(known["digest"]) if known else str(path)


def code_digest(code: str | Callable[..., Any] | None) -> str | None:
    """Return the digest of the file of "my.py:name" or of a function; None without one, see `of_code`."""
    known = of_code(code) if code else None
    return known["digest"] if known else None


def of_rows(rows: Sequence[Any]) -> Print:
    """Return the fingerprint of rows in memory. Values without a JSON form are represented by their type."""
    chosen = range(0, len(rows), max(1, len(rows) // ROWS))
    return {"digest": _digest([rows[i] for i in chosen]), "rows": len(rows)}


def of_code(code: str | Callable[..., Any]) -> Print | None:
    """Return the fingerprint of the file of "my.py:name" or of a function; None for code of an installed package.

    For a sum, it covers the files of all terms.
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
    """Return the names of inputs that existed before, exist now, and differ in content."""
    both = [(n, then, now.get(n)) for n, then in before.items() if isinstance(then, Mapping)]
    return [name for name, then, present in both if present and then.get("digest") != present["digest"]]


def rewritten(before: Mapping[str, Any], now: Mapping[str, Print | None]) -> list[str]:
    """Return the names of large files that were rewritten with the same size and the same samples of content."""
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
    except (ValueError, RecursionError):  # a row that contains itself
        text = ""
    return hashlib.sha256(text.encode()).hexdigest()
