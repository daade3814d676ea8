"""The pictures that a run has kept, by their hashes."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.core import user_files
from posttrain.core.pictures import FOLDER

MOST = 64 << 20  # bytes of a picture: a larger file is none
_KINDS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"BM": "image/bmp"}


def picture(run: Path, digest: str, most: int = MOST) -> tuple[bytes, str] | None:
    """Return the bytes of a run's picture with this hash, up to a limit, and its kind. Links are not followed."""
    file = run / FOLDER / digest
    try:
        if not re.fullmatch("[0-9a-f]{64}", digest) or file.is_symlink() or not file.is_file():
            return None
        data = user_files.content(file, most)
    except OSError:
        return None
    return data, next((kind for begin, kind in _KINDS.items() if data.startswith(begin)), "image/webp")
