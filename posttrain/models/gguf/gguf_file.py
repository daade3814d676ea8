"""Reads the header of a GGUF file: its metadata, and the position of each tensor.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, number of tensors, number of
entries; the entries (key, type, value); for each tensor its name, dimensions, type and offset; then, aligned, the data.
Files are untrusted: every length is compared with the remaining bytes before it is used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.core import user_files
from posttrain.core.extras import install, installed
from posttrain.core.types import UserError

SUFFIX = ".gguf"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of an entry that are one number, and how `struct` names them."""
STRING, ARRAY = 8, 9
LIST_MOST = 2**24  # maximum of values in a list: more than any vocabulary
HEADER_MOST = 2**27  # maximum of bytes before the data
DIMENSIONS_MOST = 4
SPLIT = "split.count"


class StoredTensor(NamedTuple):
    """Type, shape and position of a tensor in the file."""

    kind: int  # ggml's number of its type
    shape: tuple[int, ...]  # in torch's order
    begin: int  # byte of the file at which it begins


@dataclass(frozen=True)
class GgufFile:
    """The validated header of a file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    size: int  # bytes of the whole file

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """Return an entry that is text. Raises UserError if it is of another type, or absent without a default."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "text")
        return value

    def refuse(self, key: str, expected: str) -> UserError:
        value = self.metadata.get(key)
        found = "is missing" if value is None else f"is {value!r:.60}"
        return UserError(f"{self.path}: {key} {found}; it must be {expected}: convert the model to GGUF again")


def is_gguf(path: Path) -> bool:
    """Return whether a path is an existing GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def require_package(path: Path) -> None:
    """Raise UserError if the gguf package, which dequantizes tensors, is not installed."""
    if not installed("gguf"):
        raise UserError(f"{path} is a GGUF file, and gguf is not installed: {install('gguf')}")


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file; it is cached until the file changes. Raises UserError if it is damaged or no GGUF."""
    told = path.stat()
    return _read(path, told.st_size, told.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, size: int, changed: int) -> GgufFile:
    try:
        with user_files.opened(path) as file:
            if file.read(4) != b"GGUF":
                raise UserError(
                    f"{path} is not a GGUF file (it does not begin with GGUF): give one, or a checkpoint folder"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found = _Header(path, data).read()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    parts = found.metadata.get(SPLIT, 1)
    if parts not in (0, 1):
        raise UserError(
            f"{path} is one of {parts} parts of a model: join them with llama.cpp's "
            "`llama-gguf-split --merge FIRST_PART OUT.gguf`, and give OUT.gguf"
        )
    return found


class _Header:
    """Reads a header from its beginning to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 4
        self.end = min(len(data), HEADER_MOST)

    def read(self) -> GgufFile:
        version = self.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "is stored for big-endian machines" if swapped else f"has version {version} of the format"
            raise UserError(
                f"{self.path} {what}; posttrain reads versions 2 and 3, little-endian: convert the model again"
            )
        tensors, entries = self.number("Q"), self.number("Q")
        self.expect(entries * 13 + tensors * 24, f"{entries:,} entries and {tensors:,} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self.string()
            if key in metadata:
                raise self.damaged(f"{key!r:.80} occurs twice")
            metadata[key] = self.value(self.number("I"))
        described = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment is {alignment!r:.40}, where a power of two from 8 is expected")
        begin = -(-self.at // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for name, kind, shape, offset in described:
            if name in found:
                raise self.damaged(f"tensor {name!r:.80} occurs twice")
            if offset % alignment:
                raise self.damaged(f"tensor {name!r:.80} begins at {offset:,}, not a multiple of {alignment}")
            found[name] = StoredTensor(kind, shape, begin + offset)
        return GgufFile(self.path, metadata, found, len(self.data))

    def damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is damaged or incomplete, copy it again: {what}")

    def expect(self, count: int, what: str) -> None:
        """Raise UserError if fewer than `count` bytes are left for `what`."""
        if count > self.end - self.at:
            raise self.damaged(f"it announces {what} at byte {self.at:,}, and {len(self.data):,} bytes are left")

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        self.expect(count * struct.calcsize(f"<{code}"), f"{count:,} numbers")
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def string(self) -> str:
        length = self.number("Q")
        self.expect(length, f"a text of {length:,} bytes")
        content = self.data[self.at : self.at + length]
        self.at += length
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"the text at byte {self.at - length:,} is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """Read `count` texts: `string`, inlined because a vocabulary has 100,000 of them."""
        found, data, at, end, length_at = [], self.data, self.at, self.end - 8, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                if at > end:
                    break
                begin = at + 8
                at = begin + length_at(data, at)[0]
                if at > self.end:  # before it is copied
                    break
                found.append(data[begin:at].decode("utf-8"))
        except UnicodeDecodeError:
            raise self.damaged(f"the text at byte {begin:,} is not UTF-8") from None
        if len(found) < count or at > self.end:
            raise self.damaged(f"the list at byte {self.at:,} announces {count:,} texts, and the file ends before")
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.damaged(f"an entry before byte {self.at:,} has the type {kind}, which does not exist")
        inner, count = self.number("I"), self.number("Q")
        if count > LIST_MOST or inner not in (*SCALARS, STRING):
            raise self.damaged(f"the list at byte {self.at:,} has {count:,} values of type {inner}")
        if inner == STRING:
            self.expect(8 * count, f"{count:,} texts")
            return self.strings(count)
        return list(self.numbers(SCALARS[inner], count))

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Return name, type, shape and offset of the next tensor."""
        name, dimensions = self.string(), self.number("I")
        if not 1 <= dimensions <= DIMENSIONS_MOST:
            raise self.damaged(f"tensor {name!r:.80} has {dimensions} dimensions")
        shape = self.numbers("Q", dimensions)
        return name, self.number("I"), tuple(reversed(shape)), self.number("Q")
