"""An index on disk, written atomically. An index that does not match its sources is refused.

An index is written to a draft next to its place, and renamed when all of it is on disk. `index.json` records its
sources and the size and checksum of each file. A draft in use is locked; the next build removes drafts of killed
builds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.runs.run_files import replace, sync

FORM = 1  # version of the files: an index with another version must be rebuilt
MANIFEST, LOCK = "index.json", "lock"
LEFT = "passages.jsonl"  # file that every index has
_MADE = re.compile(r"(passages|bm25|words|vectors)\.[\w.]+|index\.json|lock")
"""Names of the files in an index."""
CHECKED = 1 << 30  # bytes: smaller indices are compared with all checksums, larger ones only with the sizes
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # number and size of the samples in the fingerprint of a large file
AGAIN = "build it again: posttrain retriever build --passages {} --out {} --overwrite"


@dataclass(frozen=True)
class Manifest:
    """Metadata of an index."""

    kind: str  # bm25 or dense
    count: int  # passages
    passages: str  # digest of all passages
    settings: dict[str, Any]
    source: dict[str, Any] = field(default_factory=dict)  # of the passages' file: path, size, time of change, content
    encoder: dict[str, Any] = field(default_factory=dict)  # of the encoder: name, fingerprint, settings
    files: dict[str, list[int]] = field(default_factory=dict)  # name -> [bytes, CRC-32]
    made_by: dict[str, str] = field(default_factory=dict)  # library -> version
    form: int = FORM

    @property
    def fingerprint(self) -> str:
        """A hash that differs if passages, vectors or settings differ, and so searches may."""
        told = [self.form, self.kind, self.passages, self.settings, self.encoder]
        return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest. Raises UserError if the folder has no index, a damaged one, or one of another version."""
        try:
            content = json.loads(user_files.content(folder / MANIFEST))
        except (FileNotFoundError, NotADirectoryError):
            if (folder / LEFT).exists():
                raise UserError(
                    f"the index in {folder} is damaged (it has no {MANIFEST}): delete the folder, then posttrain retriever "
                    f"build --passages FILE --out {folder}"
                ) from None
            raise UserError(
                f"there is no index in {folder}: posttrain retriever build --passages FILE --out {folder}"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise _damaged(folder, f"{MANIFEST}: {one_line(error)}") from None
        if not isinstance(content, dict) or content.get("form") != FORM:
            raise UserError(f"the index in {folder} is not of this version: {again(folder)}")
        kinds = {
            "kind": str,
            "count": int,
            "passages": str,
            "settings": dict,
            "source": dict,
            "encoder": dict,
            "files": dict,
        }
        whole = content.keys() == cls.__dataclass_fields__.keys()
        whole = whole and all(type(content[name]) is kind for name, kind in kinds.items())
        whole = whole and all(_MADE.fullmatch(name) and _is_size(known) for name, known in content["files"].items())
        if not whole or not (content["source"] == {} or _is_source(content["source"])):
            raise _damaged(folder, MANIFEST)
        return cls(**content)


def _is_size(known: object) -> bool:
    return isinstance(known, list) and len(known) == 2 and all(type(number) is int for number in known)


def _is_source(known: dict[str, Any]) -> bool:
    kinds = {"path": str, "size": int, "time": int, "content": str}
    return {name: type(value) for name, value in known.items()} == kinds and "\0" not in known["path"]


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(f"the index in {folder} is damaged ({what}): {again(folder)}")


def again(folder: Path) -> str:
    """Return the command that rebuilds the index from its source, if its manifest is still readable."""
    made_of = "FILE"
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        made_of = str(json.loads(user_files.content(folder / MANIFEST))["source"]["path"])
    return AGAIN.format(made_of, folder)


# -- building ----------------------------------------------------------------------------------------------------------


@contextmanager
def drafted(place: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a draft folder to fill; the index is at its place after the block, and does not exist if the block raises.

    Raises UserError if the place has other content that may not be replaced, or if nothing can be written.
    """
    if not place.name:
        raise UserError(f"{place} cannot hold an index: name a folder, such as runs/index")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _alone(place.parent):
            _clear(place)
        may_be_at(place, overwrite)
        draft, lock = _new_draft(place)
    except UserError:  # a subclass of ValueError
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to {str(place.parent)!r:.100}: {one_line(error)}") from error
    try:
        yield draft
        _move(draft, place, overwrite)
    except OSError as error:
        raise UserError(f"cannot write to {place}: {one_line(error)}") from error
    finally:
        os.close(lock)
        shutil.rmtree(draft, ignore_errors=True)


def _new_draft(place: Path) -> tuple[Path, int]:
    """Create a folder, and return it with the descriptor of its lock. It is renamed to a draft only when locked, so
    that it is never deleted as abandoned.
    """
    unlocked = place.with_name(f".{place.name}.{os.getpid()}-{os.urandom(4).hex()}.new")
    unlocked.mkdir()
    lock = os.open(unlocked / LOCK, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return unlocked.rename(unlocked.with_suffix(".draft")), lock


def finish(draft: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, after the files are on disk."""
    files = {}
    for path in sorted(draft.iterdir()):
        if path.name != LOCK:
            sync(path)
            files[path.name] = [path.stat().st_size, _checksum(path)]
    whole = asdict(Manifest(**manifest, files=files))
    replace(draft / MANIFEST, (json.dumps(whole, indent=1) + "\n").encode())


def may_be_at(place: Path, overwrite: bool) -> None:
    """Raise UserError if no index may be written there."""
    if not os.path.lexists(place) or (place.is_dir() and not place.is_symlink() and not any(place.iterdir())):
        return
    if not (place / MANIFEST).is_file() or place.is_symlink():
        raise UserError(f"{place} holds files that are not an index: choose another --out")
    if strange := sorted(path.name for path in place.iterdir() if not _MADE.fullmatch(path.name)):
        raise UserError(f"{place} holds {strange[0]} beside an index: move it away, or choose another --out")
    if not overwrite:
        raise UserError(f"{place} already has an index: replace it with --overwrite, or choose another --out")


def _move(draft: Path, place: Path, overwrite: bool) -> None:
    """Replace the folder: the old one is first moved aside, then deleted, so that it never exists in part."""
    sync(draft)
    old = draft.with_suffix(".old")
    with _alone(place.parent):
        may_be_at(place, overwrite)  # another build may have finished first
        if place.exists():
            place.rename(old)
        draft.rename(place)
        (place / LOCK).unlink()
        sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the parent folder against other builds. On a file system without locks, one of two builds that end at the
    same moment may fail.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _clear(place: Path) -> None:
    """Delete the drafts of killed builds, and restore an index that one of them moved aside."""
    name = re.compile(rf"\.{re.escape(place.name)}\.\d+-[0-9a-f]{{8}}\.(draft|old)")
    left = [(path, match[1]) for path in sorted(place.parent.iterdir()) if (match := name.fullmatch(path.name))]
    for path in (path for path, kind in left if kind == "old"):
        if os.path.lexists(place):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(place)
    for path in (path for path, kind in left if kind == "draft"):
        with suppress(OSError):
            held = os.open(path / LOCK, os.O_RDWR | os.O_NONBLOCK)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(held)
            shutil.rmtree(path, ignore_errors=True)


# -- opening -----------------------------------------------------------------------------------------------------------


def check(folder: Path, manifest: Manifest) -> None:
    """Raise UserError if a file of an index is missing or damaged, or its passages have changed since."""
    small = sum(size for size, _ in manifest.files.values()) <= CHECKED
    for name, (size, checksum) in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
            right = found == size and (not small or _checksum(folder / name) == checksum)
        except OSError as error:
            raise _damaged(folder, f"{name}: {one_line(error)}") from None
        if not right:
            what = f"{found:,} bytes, not {size:,}" if found != size else "another checksum"
            raise _damaged(folder, f"{name} has {what}")
    if manifest.source and not is_fresh(manifest.source):
        path = manifest.source["path"]
        raise UserError(f"{path} has changed since the index in {folder} was made of it: {again(folder)}")


@contextmanager
def consistent_files(folder: Path) -> Iterator[None]:
    """Context manager that turns errors about inconsistent files of an index into a UserError."""
    try:
        yield
    except UserError:  # a subclass of ValueError
        raise
    except (OSError, ValueError, KeyError, IndexError, EOFError, TypeError) as error:
        raise _damaged(folder, one_line(error)) from error


def _checksum(path: Path) -> int:
    checksum = 0
    with user_files.opened(path) as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


# -- sources and their fingerprints ------------------------------------------------------------------------------------


def described(path: Path) -> dict[str, Any]:
    """Describe a file, so that changes can be detected."""
    known = path.stat()
    return {
        "path": str(path.resolve()), "size": known.st_size, "time": known.st_mtime_ns, "content": _digest(path)
    }  # fmt: skip


def is_fresh(source: Mapping[str, Any]) -> bool:
    """Return whether a `described` file is unchanged. A missing one counts as unchanged, as indices may be moved."""
    path = Path(source["path"])
    try:
        known = path.stat()
        if (known.st_size, known.st_mtime_ns) == (source["size"], source["time"]):
            return True
        return known.st_size == source["size"] and _digest(path) == source["content"]
    except OSError:
        return True


def _digest(path: Path) -> str:
    with user_files.opened(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sampled(path: Path) -> str:
    """Return a fingerprint of a file's size and of samples from its whole content, as weights may be gigabytes."""
    size = path.stat().st_size
    content = hashlib.blake2b(str(size).encode(), digest_size=16)
    with user_files.opened(path) as file:
        for sample in range(SAMPLES):
            file.seek(sample * max(SAMPLE_BYTES, size // SAMPLES))
            content.update(file.read(SAMPLE_BYTES))
    return content.hexdigest()
