"""Parsers of the parts of a tool call: marks, JSON, names and arguments, all with bounds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from posttrain.core.messages import short
from posttrain.core.types import ToolCall

DEEPEST = 32  # maximal nesting of an argument
WORD = re.compile(r"[\w.-]{1,200}")
"""The name of a tool."""
SPACE = re.compile(r"\s*")


def _refuse(problem: str) -> Any:
    raise ValueError(problem)


DECODER = json.JSONDecoder(parse_constant=lambda word: _refuse(f"{word} is no JSON"))


def find_mark(text: str, mark: str, start: int) -> int:
    return text.find(mark, start) if mark else -1


def skip_mark(text: str, mark: str, place: int) -> int:
    """Return the position behind white space and the mark, or `place` if the mark does not follow."""
    end = SPACE.match(text, place).end()  # type: ignore[union-attr]
    return end + len(mark) if text.startswith(mark, end) else place


def json_at(text: str, place: int) -> tuple[Any, int]:
    """Parse the JSON value at a position, behind white space. Return (value, its end). Raises ValueError."""
    start = SPACE.match(text, place).end()  # type: ignore[union-attr]
    try:
        return DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos - start + 1}") from None


def whole_json(text: str) -> Any:
    """Parse a text that is one JSON value. Raises ValueError."""
    value, end = json_at(text, 0)
    if rest := text[end:].strip():
        raise ValueError(f"not JSON: behind it stands {short(rest)}")
    return value


def bounded(call: ToolCall) -> ToolCall:
    """Return the call, or a malformed one if its arguments cannot be passed on and stored."""
    try:
        _check(call.arguments, 0)
    except ValueError as problem:
        return replace(call, arguments={}, problem=f"the arguments {problem}")
    return call


def _check(value: Any, depth: int) -> None:
    """Raise ValueError for an infinite number, a lone surrogate, or too deep nesting in a parsed value."""
    if depth > DEEPEST:
        raise ValueError(f"are nested more than {DEEPEST} levels deep")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"hold the key {short(key)}, which is no text")
            _check(key, depth)
            _check(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("hold a number that is too large")
    elif isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        raise ValueError("hold half a surrogate pair, which is no character")


def call_of(name: Any, arguments: Any, end: int, id: Any = "") -> ToolCall:
    if not isinstance(name, str) or not WORD.fullmatch(name):
        return ToolCall("", {}, end, f"the name of the tool is {short(name)}")
    if isinstance(arguments, str):  # the text of a JSON object, as in OpenAI's format
        try:
            arguments = whole_json(arguments)
        except ValueError as problem:
            return ToolCall(name, {}, end, f"the arguments are {problem}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, end, f"the arguments are {short(arguments)}, not an object")
    plain = isinstance(id, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", id)
    return ToolCall(name, arguments, end, id=id if plain else "")
