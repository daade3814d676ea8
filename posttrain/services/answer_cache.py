"""Cache on disk of endpoints' answers, for all runs of a user: one small file each, named after endpoint and request.

The folder is posttrain/answers in $XDG_CACHE_HOME or ~/.cache. It may be emptied at any time; without a usable folder,
nothing is cached. Only valid answers are cached, so the cache never repeats a failure.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from posttrain.core import user_files
from posttrain.system.cache_folders import cache_folder


class AnswerCache:
    """Answers by endpoint and request."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder("answers")

    def get(self, endpoint: str, body: bytes) -> str | None:
        """Return the cached answer to this request, or None."""
        if self.folder is None:
            return None
        try:
            return user_files.text(self._file(endpoint, body))
        except (OSError, UnicodeDecodeError):
            return None

    def put(self, endpoint: str, body: bytes, text: str) -> None:
        """Store an answer, completely or not at all. A full disk stores nothing and does not end the run."""
        if self.folder is None:
            return
        file = self._file(endpoint, body)
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(dir=file.parent)
            try:
                with open(descriptor, "wb") as opened:
                    opened.write(text.encode("utf-8", "replace"))
                os.replace(draft, file)
            except OSError:
                Path(draft).unlink(missing_ok=True)
        except OSError:
            return

    def _file(self, endpoint: str, body: bytes) -> Path:
        name = hashlib.sha256(endpoint.encode() + b"\0" + body).hexdigest()
        assert self.folder is not None
        return self.folder / name[:2] / f"{name}.txt"
