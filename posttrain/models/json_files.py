"""Reads the JSON files of a checkpoint and validates them: each error is one line that names the file and the key.

Checkpoints come from anywhere and are often edited by hand. Every value is checked for its type and range when it is
read, so that a mistake is reported where it was made and not where it is first used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.core import user_files
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.models.gguf.gguf_config import described
from posttrain.models.gguf.gguf_file import is_gguf

MISSING: Any = object()  # no default: the key is required


class Fields(Mapping[str, Any]):
    """The object in a JSON file, or a nested object, whose values are checked when they are read.

    Every method raises UserError for a value of another type or out of range. A key that is absent or null gives the
    default, and raises UserError if there is none.
    """

    def __init__(self, file: Path, values: Mapping[str, Any], inside: str = "") -> None:
        """Create a view of an object. `inside`: the keys that lead to it in its file, such as "rope_scaling."."""
        self.file, self._values, self._inside = file, values, inside

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def refuse(self, key: str, expected: str) -> UserError:
        """Return the error that shows the value of a key, and the expected value."""
        if self._values.get(key) is None:
            return UserError(f"{self.file} lacks {self._inside}{key}: it must be {expected}")
        return UserError(f"{self.file}: {self._inside}{key} is {shown(self._values[key])}; it must be {expected}")

    def whole(self, key: str, low: int, high: int, default: Any = MISSING) -> Any:
        """Read an integer within [low, high]."""
        return self._checked(key, default, lambda value: is_whole(value, low, high), whole_range(low, high))

    def number(self, key: str, low: float, high: float, default: Any = MISSING) -> Any:
        """Read a finite number within [low, high], as a float."""

        def right(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

        found = self._checked(key, default, right, f"a number from {low:g} to {high:g}")
        return found if found is default else float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        found: bool = self._checked(key, default, lambda value: isinstance(value, bool), "true or false")
        return found

    def text(self, key: str, default: Any = MISSING) -> Any:
        return self._checked(key, default, lambda value: isinstance(value, str), "a string")

    def table(self, key: str) -> Fields:
        """Read the object at a key; an empty one if there is none."""
        found = self._checked(key, {}, lambda value: isinstance(value, Mapping), "an object")
        return Fields(self.file, found, f"{self._inside}{key}.")

    def _checked(self, key: str, default: Any, right: Any, expected: str) -> Any:
        value = self._values.get(key)
        if value is None and default is not MISSING:
            return default
        if not right(value):
            raise self.refuse(key, expected)
        return value


def is_whole(value: Any, low: int, high: int) -> bool:
    """Return whether a JSON value is an integer within [low, high]; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def whole_range(low: int, high: int) -> str:
    return f"a whole number from {low} to {high:,}"


def shown(value: Any) -> str:
    """Format a JSON value for a message: short, and in JSON's syntax."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:61])
    return text if len(text) <= 60 else text[:60] + "..."


def read_text(path: Path) -> str:
    """Read a text file. Raises UserError if it is absent, cannot be read or is not UTF-8."""
    try:
        return user_files.text(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: give a Hugging Face checkpoint folder") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged, copy it again: byte {error.start} is not UTF-8") from None


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """Read the object in a JSON file; {} for an absent one if it is optional. Raises UserError if absent or damaged.

    For a path within a GGUF file, return the same content built from the metadata of that file.
    """
    if is_gguf(path.parent) and (found := described(path.parent, path.name)) is not None:
        return found
    if optional and not path.exists() and not path.is_symlink():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged, copy it again: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged, copy it again: it should hold a JSON object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_bytes(text.encode("utf-8", "backslashreplace"))  # a lone surrogate is written as its JSON escape
