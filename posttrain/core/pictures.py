"""Pictures by the hash of their content: tasks, turns and transcripts hold the name, and the bytes are stored once.

This module decides the accepted forms of a picture (a path, the bytes of a file, a PIL image), the refusal of files
before they are decoded, and the place where pictures are stored: in memory until a run has its folder, and from then on
in that folder. A name means the same picture in every process and every run, so a process has a single store.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core import user_files
from posttrain.core.messages import inline, message_of, short
from posttrain.core.types import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

FOLDER = "pictures"  # of a run
MOST_BYTES = 16 << 20  # of a picture's file
MOST_PIXELS = 50_000_000  # of a picture: 150 MB as an array; read from its header before decoding
MOST_OF_A_TURN = 64  # pictures
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # few: each decoder is code that untrusted bytes reach
_NAME = re.compile(r"sha256:([0-9a-f]{64})")


class PictureError(UserError):
    """A picture that cannot be shown. In an environment it ends the episode, not the run."""


class Pictures:
    """The store of pictures. A name is "sha256:" and the digest: the hash of the file's bytes in hexadecimal."""

    def __init__(self) -> None:
        self._held: dict[str, bytes | Path] = {}  # digest -> the content of the file, or its path
        self._new: set[str] = set()  # digests of pictures of this run that are not yet in its folder
        self._folder: Path | None = None
        self._others: list[Path] = []  # further folders that are searched
        self._lock = threading.RLock()  # steps may be sampled in a thread beside the learner's

    def put(self, image: Any) -> str:
        """Return the name of a picture: a path, the bytes of a file, a PIL image, or a name.

        Raises PictureError for a file that is missing, damaged at its beginning, too large, or of another format.
        """
        if is_name(image):
            return str.__str__(image)  # whether the store has it is checked when it is read
        path = Path(image) if isinstance(image, str | os.PathLike) else None
        data = _read(path) if path is not None else _encoded(image)
        check(data, "the picture" if path is None else str(path))
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            if self._folder is not None:
                self._held[digest] = _written(self._folder, digest, data)
            else:
                self._new.add(digest)
                held = self._held.get(digest)
                if held is None or (isinstance(held, Path) and not held.is_file()):
                    self._held[digest] = data if path is None else path.absolute()
        return f"sha256:{digest}"

    def hold(self, data: bytes) -> str:
        """Store a picture that belongs to no run, and return its digest."""
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            self._held[digest] = data
        return digest

    def read(self, digest: str) -> bytes:
        """Return the bytes of the file. Raises PictureError if the file is missing or its content has changed."""
        with self._lock:
            held = self._held.get(digest)
            places = [held, *(folder / digest for folder in self._others)]
        if isinstance(held, bytes):
            return held
        there = [place for place in places if isinstance(place, Path) and place.is_file()]
        for place in there:
            if hashlib.sha256(data := _read(place)).hexdigest() == digest:
                return data
        if there:
            raise PictureError(f"{there[0]} has changed since its hash was taken: put the original back")
        raise PictureError(f"there is no picture sha256:{digest[:12]}...: give its file, or put the run's folder back")

    def take(self, name: str) -> bytes | None:
        """Return the bytes of a picture that was put here as bytes, and remove it: for a process that sends it to
        another one.
        """
        digest = name.removeprefix("sha256:")
        with self._lock:
            held = self._held.pop(digest, None)
        return None if held is None else held if isinstance(held, bytes) else _read(held)

    def begin(self, folder: Path) -> None:
        """Begin a run with this folder, which may hold pictures of an earlier attempt."""
        with self._lock:
            self._new.clear()
        self.look(folder)

    def look(self, folder: Path) -> None:
        """Search this folder for pictures as well."""
        with self._lock:
            if folder not in self._others:
                self._others.append(folder)

    def keep(self, folder: Path) -> None:
        """Write the run's pictures into its folder, now that the folder exists, and write further ones there at
        once.
        """
        with self._lock:
            for digest in sorted(self._new):
                self._held[digest] = _written(folder, digest, self.read(digest))
            self._new.clear()
            self._folder = folder

    def end(self) -> None:
        """End the run."""
        with self._lock:
            self._folder = None


PICTURES = Pictures()


def check(data: bytes, what: str) -> None:
    """Raise PictureError for data that are not a picture, or one of too many pixels. Only the header is read."""
    opened(data, what).close()


def opened(data: bytes, what: str = "the picture") -> Image:
    """Return the PIL image, of which only the header is read. Raises PictureError."""
    from PIL import Image

    if len(data) > MOST_BYTES:
        raise PictureError(f"{what} has {len(data):,} bytes, at most {MOST_BYTES:,} are allowed: make it smaller")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError:
            raise PictureError(f"{what} has more than {MOST_PIXELS:,} pixels: make it smaller") from None
        except Exception as error:  # decoders raise any exception on damaged bytes
            raise PictureError(
                f"{what} is not a readable picture ({', '.join(FORMATS)}): {_error_text(error)}"
            ) from None
    width, height = image.size
    if width * height > MOST_PIXELS or not width * height:
        raise PictureError(
            f"{what} has {width:,} x {height:,} pixels, at most {MOST_PIXELS:,} are allowed: make it smaller"
        )
    return image


def decoded(data: bytes, what: str = "the picture") -> Image:
    """Return the PIL image in RGB, upright, its first frame. Raises PictureError."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(opened(data, what)).convert("RGB")
    except PictureError:
        raise
    except Exception as error:
        raise PictureError(f"{what} is damaged: {_error_text(error)}; copy it again, or leave it out") from None


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return the PNG file of an RGB picture, uint8 [height, width, 3]."""
    from PIL import Image

    into = io.BytesIO()
    Image.fromarray(pixels).save(into, format="PNG")
    return into.getvalue()


def parts(content: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the parts of a message's content, with each picture stored and replaced by its name.

    Raises PictureError for a part that is neither text nor a picture.
    """
    found: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": str.__str__(part["text"])})
        elif kind == "image" and part.get("image") is not None:
            found.append({"type": "image", "image": PICTURES.put(part["image"])})
        elif isinstance(kind, str) and kind not in ("text", "image"):
            raise PictureError(f"a message has a part of the type {short(kind)}: use text or image")
        else:
            raise PictureError(
                f'a message has the part {short(part)}; expected {{"type": "text", "text": ...}} or '
                '{"type": "image", "image": path, bytes or PIL image}'
            )
    if sum(part["type"] == "image" for part in found) > MOST_OF_A_TURN:
        raise PictureError(f"a message has more than {MOST_OF_A_TURN} pictures")
    return found


def has_parts(content: Any) -> bool:
    """Return whether a message's content is a list that contains more than text."""
    kinds = (
        (isinstance(part, Mapping) and part.get("type") for part in content)
        if isinstance(content, list | tuple)
        else ()
    )
    return any(isinstance(kind, str) and kind != "text" for kind in kinds)


def is_name(image: Any) -> bool:
    return isinstance(image, str) and _NAME.fullmatch(image) is not None


def digests(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the hashes of the pictures in these messages, in order."""
    contents = [message.get("content") for message in messages]
    pieces = [part for content in contents if isinstance(content, list) for part in content]
    return [
        str(p["image"]).removeprefix("sha256:") for p in pieces if isinstance(p, Mapping) and p.get("type") == "image"
    ]


def _error_text(error: BaseException) -> str:
    return inline(re.sub(r"(image file )?<_io\.BytesIO[^>]*>", "it", message_of(error))) or type(error).__name__


def _read(path: Path) -> bytes:
    """Return the bytes of a picture's file."""
    try:
        return user_files.content(path, MOST_BYTES)
    except OSError as error:
        raise PictureError(
            f"the picture {str(path)[:80]} cannot be read: {error.strerror}: give the path of a picture's file"
        ) from None


def _encoded(image: Any) -> bytes:
    """Return a picture as the bytes of a file. A PIL image becomes a PNG."""
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if not callable(getattr(image, "save", None)) or not hasattr(image, "size"):
        raise PictureError(f"an image is {short(image)}; expected a path, the bytes of a file, or a PIL image")
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise PictureError(
            f"the picture has {width:,} x {height:,} pixels, at most {MOST_PIXELS:,} are allowed: make it smaller"
        )
    into = io.BytesIO()
    try:
        image.convert("RGB").save(into, format="PNG")
    except Exception as error:
        raise PictureError(f"an image cannot be written as PNG: {_error_text(error)}") from None
    return into.getvalue()


def _written(folder: Path, digest: str, data: bytes) -> Path:
    """Write the file completely or not at all: other processes of the run may write the same one."""
    path = folder / digest
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{digest}.{os.getpid()}.tmp"
        user_files.writable(draft).write_bytes(data)
        draft.replace(path)
    return path
