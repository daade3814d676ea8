"""The pictures that a run has kept, by their hashes."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.core.pictures import FOLDER

MOST = 64 << 20  # bytes of a picture: whatever is larger is none
_KINDS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"BM": "image/bmp"}


def picture(run: Path, digest: str, most: int = MOST) -> tuple[bytes, str] | None:
    """What a run has kept under this hash, of at most so many bytes, and its kind. Nothing that a link leads to."""
    file = run / FOLDER / digest
    try:
        if not re.fullmatch("[0-9a-f]{64}", digest) or file.is_symlink() or not file.is_file():
            return None
        data = file.read_bytes() if file.stat().st_size <= most else None
    except OSError:
        return None
    if data is None:
        return None
    return data, next((kind for begin, kind in _KINDS.items() if data.startswith(begin)), "image/webp")
