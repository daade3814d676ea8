"""JSON as this package writes it: strict, in UTF-8, of any value of a row or a setting.

Dates become ISO 8601, bytes base64, decimals and all other values without a JSON form their text. NaN becomes null, and
infinity text. A lone half of a surrogate pair becomes its escape.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np


def plain(value: Any, of_bytes: Callable[[bytes], str] = lambda value: base64.b64encode(value).decode()) -> Any:
    """Return the value as JSON data."""
    if value is None or isinstance(value, (bool, int, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, of_bytes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, of_bytes) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return of_bytes(bytes(value))
    return plain(known(value, str(value)), of_bytes)


def known(value: Any, otherwise: Any) -> Any:
    """Return the JSON form, equal in every process, of a value without one of its own; `otherwise` for other
    classes.
    """
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, date | time):  # or datetime
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | timedelta) else otherwise


def number(value: float) -> float | None:
    """Return the number as JSON data; None for infinity and NaN, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def parsed(text: str | None) -> Any:
    """Return the data of JSON text; None where there is no text, or it cannot be read."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_text(value: Any) -> str:
    """Return one-line JSON."""
    return _COMPACT.encode(plain(value))


def json_line(row: Any) -> bytes:
    """Return a line of JSONL."""
    return (json_text(row) + "\n").encode("utf-8", "backslashreplace")  # half a surrogate pair: as its JSON escape


def json_document(content: Mapping[str, Any]) -> bytes:
    """Return indented JSON."""
    text = json.dumps(plain(content), ensure_ascii=False, allow_nan=False, indent=2)
    return (text + "\n").encode("utf-8", "backslashreplace")


_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
