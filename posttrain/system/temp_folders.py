"""Temporary folders and files; those of a killed process are removed by the next process that creates one.

Each folder contains a file locked by its owner (flock), and a log file is itself locked. The system releases these
locks however a process ends. Creating a folder or file first deletes those without an owner.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "posttrain-"
OWNER = ".owner"  # the locked file of a folder
YOUNG_SECONDS = 60.0  # seconds: a younger one may not be locked yet


class TempFolder(tempfile.TemporaryDirectory[str]):
    """A new folder, posttrain-KIND-...: deleted by `cleanup` or at the end of a `with` statement, or later by another
    process if this one is killed.
    """

    def __init__(self, kind: str) -> None:
        sweep()
        super().__init__(prefix=f"{PREFIX}{kind}-", ignore_cleanup_errors=True)
        self._owner = os.open(Path(self.name, OWNER), os.O_RDWR | os.O_CREAT, 0o600)
        _lock(self._owner)

    def cleanup(self) -> None:
        """Delete the folder. May be called twice."""
        super().cleanup()
        owner, self._owner = self._owner, -1
        if owner >= 0:
            os.close(owner)

    def __exit__(self, *error: object) -> None:
        self.cleanup()


def temp_log(kind: str) -> tuple[int, str]:
    """Create a file, posttrain-KIND-....log, locked while any process has it open. Return (descriptor, path)."""
    sweep()
    descriptor, name = tempfile.mkstemp(prefix=f"{PREFIX}{kind}-", suffix=".log")
    _lock(descriptor)
    return descriptor, name


def sweep() -> None:
    """Delete this user's temporary files and folders whose processes have ended."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with suppress(OSError):
                    _sweep(entry)


def _sweep(entry: os.DirEntry[str]) -> None:
    about = entry.stat(follow_symlinks=False)
    folder = stat.S_ISDIR(about.st_mode)
    log = stat.S_ISREG(about.st_mode) and entry.name.endswith(".log")
    if about.st_uid != os.geteuid() or time.time() - about.st_mtime < YOUNG_SECONDS or not (folder or log):
        return
    descriptor = os.open(Path(entry.path, OWNER) if folder else entry.path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if not _lock(descriptor):
            return
        if folder:
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process owns it, or this file system has no locks
        return False
    return True
