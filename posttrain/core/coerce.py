"""Conversion of a user's text or value to the type of a setting. Errors name the setting and the accepted values."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

from posttrain.core.messages import near
from posttrain.core.types import UserError

TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")


def convert(value: Any, hint: Any, name: str) -> Any:
    """Convert the value to a type of settings: bool, int, float, str, Literal, tuple of these, or any of them or None.

    Text is parsed ("0.2", "none", "1,2"). Other values must have the type already, but a whole number is valid for a
    float. Raises UserError with the name and the accepted values.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        nothing = value is None or (isinstance(value, str) and value.lower() == "none")
        if nothing and type(None) in inner:
            return None
        return convert(value, next(x for x in inner if x is not type(None)), name)
    if origin is Literal:
        if value in inner:
            return value
        raise UserError(f"{name} is one of {', '.join(map(str, inner))}, not {value!r}{_like(value, inner)}")
    if origin is tuple:
        return _tuple(value, inner, name)
    if hint is bool and isinstance(value, str) and value.lower() in (*TRUE, *FALSE):
        return value.lower() in TRUE
    if hint in (int, float) and isinstance(value, str):
        value = _number(value, hint)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() >= sys.float_info.max_exp:
            raise UserError(f"{name} is too large a number")
        return float(value)
    if hint in (bool, int, float, str) and type(value) is hint:
        return value
    raise UserError(f"{name} is {type_in_words(hint)}, not {value!r}")


def read_variable(value: Any) -> Any:
    """Return the value of a KEY=VALUE: JSON text is parsed ("false", "3"), anything else is kept.

    JSON strings (text in quotes) are kept as well, so that a second call changes nothing.
    """
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value.lower() if value in ("True", "False") else value)
    except (ValueError, RecursionError):
        return value
    return value if isinstance(found, str) else found


def fits(value: Any, hint: Any) -> bool:
    """Return whether the value has this type without conversion: a type that `convert` accepts, a dict, or any
    class.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        kinds = inner[:1] * len(value) if isinstance(value, tuple) and inner[-1] is ... else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, inner[1]) for one in value.values())
    if hint is float:
        return type(value) in (int, float)
    if hint in (bool, int, str):  # isinstance treats True as an int
        return type(value) is hint
    return isinstance(value, origin or hint)


def type_in_words(hint: Any) -> str:
    """Return a type in words."""
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(hint, str(hint))


def _like(value: Any, inner: Iterable[Any]) -> str:
    return near(value, map(str, inner)) if isinstance(value, str) else ""


def _number(text: str, hint: type) -> Any:
    try:
        return hint(text)
    except ValueError:
        return text


def _tuple(value: Any, inner: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(items, (tuple, list)):
        raise UserError(f"{name} is a list of values, not {value!r}")
    if inner[-1] is Ellipsis:
        return tuple(convert(x, inner[0], name) for x in items)
    if len(items) != len(inner):
        raise UserError(f"{name} takes {len(inner)} values, not {len(items)}")
    return tuple(convert(x, kind, name) for x, kind in zip(items, inner, strict=True))


def has_wide_integer(value: Any, seen: set[int] | None = None) -> bool:
    """Return whether a value is or holds an integer of more than 64 bits: TOML has none, and Python prints no very long
    one.
    """
    if isinstance(value, int):
        return value.bit_length() > 64
    seen = set() if seen is None else seen
    if not isinstance(value, (list, tuple, dict)) or id(value) in seen:  # YAML's anchors may form a circle
        return False
    seen.add(id(value))
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return any(has_wide_integer(part, seen) for part in parts)
