"""Pictures stored in a run's folder, by their hashes."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.core import user_files
from posttrain.core.pictures import FOLDER

MOST = 64 << 20  # most bytes of a picture; larger files are ignored
_KINDS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"BM": "image/bmp"}


def picture(run: Path, digest: str, most: int = MOST) -> tuple[bytes, str] | None:
    """Return (bytes, media type) of the run's picture with this hash; None if absent or too large.

    Links are not followed.
    """
    file = run / FOLDER / digest
    try:
        if not re.fullmatch("[0-9a-f]{64}", digest) or file.is_symlink() or not file.is_file():
            return None
        data = user_files.content(file, most)
    except OSError:
        return None
    return data, next((kind for begin, kind in _KINDS.items() if data.startswith(begin)), "image/webp")
