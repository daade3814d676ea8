"""Files of a user: of data, of checkpoints, of runs. Opening never blocks, whatever kind of file the path names.

Reading a pipe would wait, a device may have no end, and a sparse file of a terabyte would fill the memory. So only a
regular file, or a link to one, is opened, and whole files are read only up to a size limit. Anything else raises
OSError, as a missing file does: the caller adds the fix.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from io import BufferedIOBase, BufferedRandom
from pathlib import Path
from typing import cast

MOST = 1 << 30  # most bytes of a file that is read whole; of a line, in a file that is read line by line

_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}  # fmt: skip

Name = str | os.PathLike[str]


def opened(path: Name, mode: str = "rb") -> BufferedRandom:
    """Open a file as `open` does, for reading or writing, without ever waiting for it."""
    return cast(BufferedRandom, open(named(path), mode, opener=_opener))  # its methods depend on the mode


def content(path: Name, most: int = MOST) -> bytes:
    """Return a file's whole content."""
    with opened(path) as file:
        large = os.fstat(file.fileno()).st_size > most
        data = b"" if large else file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
        if large or len(data) > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
        return data


def text(path: Name, most: int = MOST) -> str:
    """Return a file's content as text, without a byte order mark. Raises UnicodeDecodeError if it is not UTF-8."""
    return content(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def lines(file: BufferedIOBase, most: int = MOST) -> Iterator[bytes]:
    """Yield the lines, with ends. OSError beyond `most` bytes."""
    while line := file.readline(most + 1):
        if len(line) > most:
            raise OSError(errno.EFBIG, f"a line of it has more than {most:,} bytes")
        yield line


def readable(path: Name) -> Path:
    """Return the path of a file that a library opens itself, after checking that it can be opened."""
    opened(path).close()
    return Path(path)


def writable(path: Name) -> Path:
    """Return the path of a file that a library writes, once it can be written; creates it."""
    opened(path, "ab").close()
    return Path(path)


def creatable(path: Name) -> Path:
    """Return the path of a file that is written later, once it can be; creates its folder, and not the file."""
    place = Path(named(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        opened(place, "r+b").close()
    except FileNotFoundError:
        tempfile.TemporaryFile(dir=place.parent).close()
    return place


def readable_folder(folder: Name) -> Path:
    """Return a folder from which a library chooses and reads files, after checking that none of them blocks."""
    for path in sorted(Path(named(folder)).iterdir()):
        try:
            kind = stat.S_IFMT(path.stat().st_mode)
        except OSError:  # a broken link: the library refuses it if it needs it
            continue
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise _strange(path, kind)
    return Path(folder)


def real(path: Name) -> Path:
    """Return the path without links; for links in a circle, one of them, where `Path.resolve` raises."""
    return Path(os.path.realpath(named(path)))


def named(path: Name) -> Name:
    """Return the path. Raises OSError for one that the system does not accept."""
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "its name has a character of code 0", os.fspath(path).replace("\0", "\\0"))
    return path


def _opener(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe without a reader
            raise _strange(Path(path), stat.S_IFMT(os.stat(path).st_mode)) from None
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise _strange(Path(path), kind)
    return descriptor


def _strange(path: Path, kind: int) -> OSError:
    number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
    return OSError(number, f"it is {_KINDS.get(kind, 'something else')}, not a file", str(path))
