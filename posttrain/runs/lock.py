"""The lock on a run's folder: one process at a time writes to it, and an owner that has ended loses it.

The operating system locks the file `lock` in the folder (flock), and releases it however the process ends; child
processes do not inherit it. The folder itself is locked too, where its file system supports that, so that a second
owner is excluded even if a user deletes the file. The file's content and modification time are for cases in which that
does not suffice:

* another machine shares the folder and its kernel does not see our locks: the owner touches the file every
  `BEAT_SECONDS`, and counts as ended if it did not for `SILENT_SECONDS` or its machine was restarted;
* the file system has no locks: on the same machine, the process itself is searched for.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.core.types import UserError
from posttrain.runs.provenance import now

NAME = "lock"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
DYING_SECONDS = 2.0  # for a killed process to disappear

FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # not inheritable, as for all files that Python opens

_held: set[int] = set()  # descriptors, for `_forget`


@dataclass(frozen=True)
class Owner:
    """The process that writes a run."""

    pid: int
    host: str
    boot: str  # boot id of its kernel; "" if the system has none
    born: str  # start time of the process, by the kernel's count; "" if it has none
    since: str  # when the process took the lock

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lock:
    """The right to write into a folder, from `Lock(folder)` to `release()`.

    Raises UserError if another process has it, or another run in this process.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._descriptor: int | None = None
        self._folder: int | None = None  # open and locked, where that is possible
        end = time.monotonic() + DYING_SECONDS
        while (found := self._take()) is not None:
            if time.monotonic() > end:
                raise UserError(f"{folder} is in use by {found}: let it finish, end it, or choose another --out")
            time.sleep(0.05)
        self._write(_ourselves())
        self._released = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._beating.start()

    def release(self) -> None:
        """Release the folder. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or descriptor not in _held:  # already released, or a forked child's copy
            return
        self._released.set()
        self._beating.join()
        with suppress(OSError):  # the folder may have been deleted
            if _same_file(descriptor, self._path):
                self._path.unlink()
        _let_go(descriptor, self._folder)

    def _take(self) -> str | None:
        """Try to become the owner. Return a description of another owner, or None."""
        try:
            descriptor = os.open(self._path, FLAGS, 0o644)
        except OSError as error:
            raise UserError(f"cannot lock {self._path.parent}: {self._path}: {error.strerror}") from error
        found: str | None = "another process"
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            exclusive = _lock(descriptor) if _lock(folder) is not False else False
            owner = _read(descriptor)
            if exclusive is False:
                found = str(owner) if owner else found
            elif not _same_file(descriptor, self._path):
                pass  # the previous owner has just removed it: try again
            elif owner is None or not (seen := _alive(owner, descriptor, self._path.parent, bool(exclusive))):
                found, self._descriptor, self._folder = None, descriptor, folder
                _held.update((descriptor, folder))
            else:
                found = f"{owner}{seen}"
        finally:
            if self._descriptor is None:
                os.close(descriptor)
                os.close(folder)
        return found

    def _write(self, owner: Owner) -> None:
        assert self._descriptor is not None
        content = json.dumps(asdict(owner)).encode() + b"\n"
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)
            os.fsync(self._descriptor)
        except OSError as error:
            _let_go(self._descriptor, self._folder)
            raise UserError(f"cannot write to {self._path}: {error.strerror}") from error

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            if (descriptor := self._descriptor) is not None:
                with suppress(OSError):
                    os.utime(descriptor)


def _let_go(*descriptors: int | None) -> None:
    for held in descriptors:
        if held is not None:
            _held.discard(held)
            os.close(held)


def in_use(folder: Path) -> bool:
    """Return whether a process is writing a run, by its lock. Changes nothing."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return _is_locked(folder)
    try:
        free = _lock(descriptor, fcntl.LOCK_SH)
        owner = _read(descriptor)
        if free is False or owner is None:
            return free is False
        ourselves = _ourselves()
        if ourselves.boot in ("", owner.boot) or owner.host == ourselves.host:
            return free is None and _runs(owner)
        return time.time() - os.fstat(descriptor).st_mtime < SILENT_SECONDS  # touched from another machine
    finally:
        os.close(descriptor)


def _is_locked(folder: Path) -> bool:
    """Return whether a process has locked the folder itself, for the case of a deleted file."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        return _lock(descriptor, fcntl.LOCK_SH) is False
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Return whether this process now owns the file's lock; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(descriptor: int) -> Owner | None:
    """Return the owner named in the file; None if it cannot be parsed."""
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
        return Owner(int(content.pop("pid")), **{name: str(value) for name, value in content.items()})
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None


def _alive(owner: Owner, descriptor: int, folder: Path, exclusive: bool) -> str:
    """Return evidence that an owner without a lock here is alive; "" if it has ended."""
    ourselves = _ourselves()
    if (owner.host, owner.boot) == (ourselves.host, ourselves.boot) or (owner.boot and owner.boot == ourselves.boot):
        return " (this file system has no locks)" if not exclusive and _runs(owner) else ""
    if owner.host == ourselves.host:
        return ""  # the machine was restarted since
    silent = max(0.0, _clock(folder) - os.fstat(descriptor).st_mtime)
    if silent >= SILENT_SECONDS:
        return ""
    return f", seen {silent:.0f} s ago (it counts as gone once it has not been seen for {SILENT_SECONDS:.0f} s)"


def _clock(folder: Path) -> float:
    """Return the time by the clock of the folder's file server."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        return os.fstat(file.fileno()).st_mtime


def _runs(owner: Owner) -> bool:
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the file belongs to another user
    return owner.born in ("", _born(owner.pid))


def _ourselves() -> Owner:
    return Owner(os.getpid(), platform.node(), _boot(), _born(os.getpid()), now())


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _born(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, LookupError):
        return ""


def _same_file(descriptor: int, path: Path) -> bool:
    """Return whether the path still refers to the open file: a process that releases a folder removes the file."""
    try:
        there, ours = path.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _forget() -> None:
    """Drop the locks in a forked child: they belong to the parent and must not outlive it."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
