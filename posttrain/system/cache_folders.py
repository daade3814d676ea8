"""Cache folders of the user, for data that can be computed again. Compiled code has its own, stricter one."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Return posttrain/NAME in $XDG_CACHE_HOME or ~/.cache; None where no private folder is possible."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain"
        folder = home / name
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        known = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    private = known.st_uid == os.getuid() and not known.st_mode & 0o022
    return folder if private and os.access(folder, os.W_OK) else None
