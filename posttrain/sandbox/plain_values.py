"""Values passed in and out of the sandbox: plain data as JSON, rebuilt only from Python's own types.

None, booleans, text, floats and small integers are JSON's own; a list is an array. Any other value is an object with
one key that names its type: {"tuple": [1, 2]}, {"set": [...]}, {"dict": [[key, value], ...]}, {"int": "-1f"} in
hexadecimal. An instance of a subclass is passed as its base type, so no value from the sandbox has methods of its own:
an equality overridden inside has no effect outside. A value that is not plain data becomes a reference, {"ref": 7}, or
cannot be passed.
"""

from __future__ import annotations

import datetime
import importlib
import math
import numbers
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Set
from decimal import Decimal
from fractions import Fraction
from typing import Any

SMALL = 1 << 62  # smaller integers are JSON numbers
MOST_DIGITS = 1000  # of a decimal or fraction that is compared outside: arithmetic with more digits can take long
NAMED = ("builtins", "operator", "math", "functools", "itertools", "string")
"""Modules whose functions and types are passed by name."""


class NotPlain(ValueError):
    """A value that cannot be passed, or an invalid form."""


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Encode a value for JSON. `refer`: encodes values that are not plain data. Raises NotPlain."""
    try:
        return _encode(value, refer)
    except RecursionError:
        raise NotPlain("nested too deep, or in a circle") from None


def _encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else {"int": f"{value:x}"}
    if kind is list:
        return [_encode(item, refer) for item in value]
    for known, name in _SEQUENCES:
        if isinstance(value, known):
            items = [_encode(item, refer) for item in value]
            return {name: items} if name else items
    if isinstance(value, dict):
        name = "Counter" if isinstance(value, Counter) else "OrderedDict" if isinstance(value, OrderedDict) else "dict"
        return {name: [[_encode(k, refer), _encode(v, refer)] for k, v in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": bytes(value).hex()}
    return _encode_scalar(value, refer)


def _encode_scalar(value: Any, refer: Callable[[Any], Any]) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Decimal):
        return {"Decimal": str(value)}
    if isinstance(value, Fraction):
        return {"Fraction": [f"{value.numerator:x}", f"{value.denominator:x}"]}
    if isinstance(value, range):
        return {"range": [_encode(x, refer) for x in (value.start, value.stop, value.step)]}
    for known in (datetime.datetime, datetime.date, datetime.time):
        if isinstance(value, known):
            return {known.__name__: value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, numbers.Integral):
        return _encode(int(value), refer)
    if isinstance(value, numbers.Real):
        return float(value)
    return refer(value)


_SEQUENCES: list[tuple[Any, str]] = [
    (list, ""), (tuple, "tuple"), (frozenset, "frozenset"), (Set, "set"), (deque, "deque"),
]  # fmt: skip


def named(value: Any) -> str | None:
    """Return "module.name" of a function or type of `NAMED`, equal in every interpreter; None for other values."""
    for module in NAMED:
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(importlib.import_module(module), name, None) is value:
            return f"{module}.{name}"
    return None


def decode(form: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """Decode a form. `resolve(kind, content)`: returns the object of a reference or a name. Raises NotPlain for other
    forms.
    """
    try:
        return _decode(form, resolve)
    except NotPlain:
        raise
    except (ValueError, TypeError, ArithmeticError, RecursionError, KeyError) as error:
        raise NotPlain(f"a malformed value: {type(error).__name__}") from None


def _decode(form: Any, resolve: Callable[[str, Any], Any]) -> Any:
    if not isinstance(form, (list, dict)):
        return form
    if isinstance(form, list):
        return [_decode(item, resolve) for item in form]
    [(kind, content)] = form.items()
    if kind in ("ref", "callback", "name"):
        return resolve(kind, content)
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](_decode(item, resolve) for item in _typed(content, list))
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((_decode(k, resolve), _decode(v, resolve)) for k, v in _typed(content, list))
    return _SCALARS[kind](content)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise NotPlain(f"{type(value).__name__} where {kind.__name__} should be")
    return value


def _range(content: Any) -> range:
    return range(*(_decode(x, _no_references) for x in _typed(content, list)))


def _fraction(content: Any) -> Fraction:
    numerator, denominator = (int(_typed(x, str), 16) for x in _typed(content, list))
    return Fraction(numerator, denominator)


def _no_references(kind: str, content: Any) -> Any:
    raise NotPlain("a reference")


_COLLECTIONS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict, "OrderedDict": OrderedDict, "Counter": lambda pairs: Counter(dict(pairs)),
}  # fmt: skip
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(_typed(text, str), 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*(_typed(x, float) for x in _typed(parts, list))),
    "Decimal": lambda text: Decimal(_typed(text, str)),
    "Fraction": _fraction,
    "range": _range,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*(_typed(x, int) for x in _typed(parts, list))),
}


# -- comparison, where the expected value is ---------------------------------------------------------------------------


def equals(form: Any, expected: Any) -> bool:
    """Return whether a form from the sandbox equals `expected`, a Python literal, by the rules of ==.

    The time is proportional to the size of `expected`: sizes are compared before any lookup, so that a program gains
    nothing by returning large values, or keys whose hashes collide.
    """
    try:
        return _equals(form, expected)
    except Exception:  # an invalid form may cause any exception
        return False


def _equals(form: Any, expected: Any) -> bool:
    kind = type(expected)
    if kind is list:
        return type(form) is list and len(form) == len(expected) and all(map(_equals, form, expected))
    if kind is tuple:
        items = _content(form, "tuple")
        return len(items) == len(expected) and all(map(_equals, items, expected))
    if kind in (set, frozenset):
        items = _content(form, "set", "frozenset")
        if len(items) != len(expected):
            return False
        keys = {_key(item) for item in items}
        return len(keys) == len(expected) and keys == expected
    if kind is dict:
        pairs = _content(form, *_MAPPINGS)
        if len(pairs) != len(expected):
            return False
        found = {_key(k): v for k, v in pairs}
        return found.keys() == expected.keys() and all(_equals(found[k], expected[k]) for k in expected)
    return bool(_key(form) == expected)


def _content(form: Any, *kinds: str) -> list[Any]:
    """Return the content of a form of one of these kinds. Raises NotPlain for another kind."""
    if type(form) is dict and len(form) == 1:
        [(kind, content)] = form.items()
        if kind in kinds:
            found: list[Any] = _typed(content, list)
            return found
    raise NotPlain("of another kind")


def _key(form: Any) -> Any:
    """Return a scalar or a key. Raises NotPlain for anything else, and for values that make arithmetic slow."""
    if isinstance(form, list):
        raise NotPlain("a list, which is no key")
    if not isinstance(form, dict):
        return form
    [(kind, content)] = form.items()
    if kind in ("tuple", "frozenset"):
        return _COLLECTIONS[kind]([_key(item) for item in _typed(content, list)])
    if kind in ("Decimal", "Fraction") and len(str(content)) > MOST_DIGITS:
        raise NotPlain("too long")
    found = _SCALARS[kind](content) if kind in _SCALARS else _no_references(kind, content)
    return found if kind != "Decimal" or math.isfinite(found) else float(found)
