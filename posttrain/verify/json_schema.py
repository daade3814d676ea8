"""Decides whether a reply contains JSON, and whether that JSON satisfies a schema.

The schema is validated in a process with limits: a pattern in it may be catastrophic, and a reference may never end.
References to anything outside of the schema are refused before anything runs, and nothing is ever fetched.

A verdict is Invalid for what is wrong with the schema alone. What a reply makes of a sound schema is right or wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.core.types import Invalid
from posttrain.verify.fenced import fenced, without_thoughts
from posttrain.verify.limited_process import CheckFailed, limited

LONGEST = 2**20  # characters of a reply that are looked at
TRIES = 1000  # openings of a reply that begin no JSON
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
VALUES = ("const", "enum", "default", "examples")  # keywords whose content is data, not schemas

_NOTHING: Any = object()
_OPENING = re.compile(r"[\[{]")


def find_json(reply: str) -> Any | None:
    """The JSON value (RFC 8259) that a reply gives; None if there is none. The value null is none either.

    It is the last fenced block that is JSON or names no language, else the whole reply, else the last object or array
    in it. Thoughts before </think> do not count; NaN and Infinity, which Python would take, are no JSON.

    >>> find_json('Sure! {"a": [1, 2]} Anything else?')
    {'a': [1, 2]}
    """
    reply = without_thoughts(reply[:LONGEST])
    block = fenced(reply, ("json",))
    for text in (reply,) if block is None else (block, reply):
        value = _read(text)
        if value is not _NOTHING:
            return value
    return _last_inside(reply)


def matches_schema(reply: str, schema: Mapping[str, Any] | bool, *, timeout: float = 1.0) -> float | Invalid:
    """1.0 if the JSON of the reply (see `find_json`) satisfies the JSON schema, else 0.0.

    The draft is the one that the schema names in "$schema", else 2020-12. `timeout` seconds of processor time bound one
    validation. Invalid if the schema is none, refers to something outside of itself, or does not come to an end on the
    value null.

    >>> matches_schema('{"age": 7}', {"required": ["age"], "properties": {"age": {"type": "integer"}}})
    1.0
    """
    try:
        json.dumps(schema)
        outside = next(_outside(schema), None)
    except (TypeError, ValueError, RecursionError) as error:
        return Invalid(f"the schema is not JSON: {error}")
    if outside is not None:
        return Invalid(f"the schema refers to {outside!r}: put what it refers to into its own $defs")
    value = find_json(reply)
    found = limited("posttrain.verify.json_schema:validate", schema, value, seconds=timeout)
    if isinstance(found, CheckFailed):  # is the schema at fault?
        found = limited("posttrain.verify.json_schema:validate", schema, None, seconds=timeout)
        if isinstance(found, CheckFailed):
            return Invalid(f"the schema cannot be used: {found.reason}")
        value = None  # the schema works: the reply causes the failure
    if isinstance(found, Invalid):
        return found
    if isinstance(found, str):
        return Invalid(f"the schema cannot be used: {found}")
    return float(found and value is not None)


def prepare() -> None:
    """Import the library, once in each server, so that no child has to."""
    import jsonschema  # noqa: F401


def validate(schema: Any, value: Any) -> bool | str:
    """Return whether the value satisfies the schema, or an error of the schema. Runs in a process with limits."""
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    validator = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        return str(error.message)[:200]
    nothing_is_fetched: Registry[Any] = Registry()  # without it, jsonschema would load remote references
    return bool(validator(schema, registry=nothing_is_fetched).is_valid(value))


def _outside(schema: Any) -> Iterator[str]:
    """Yield the references of a schema that are not to a place in itself."""
    if isinstance(schema, Mapping):
        for name, inner in schema.items():
            if name in REFERENCES and isinstance(inner, str):
                if not inner.startswith("#"):
                    yield inner
            elif name not in VALUES or isinstance(inner, Mapping):  # "default" may also be a property's name
                yield from _outside(inner)
    elif isinstance(schema, (list, tuple)):
        for inner in schema:
            yield from _outside(inner)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _read(text: str) -> Any:
    try:
        return _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return _NOTHING


def _last_inside(text: str) -> Any | None:
    """Return the last object or array in a text that is not inside another one.

    Bounded, because any opening may be followed by a megabyte that ends in nothing: it gives up behind `TRIES` openings
    that begin no JSON, or when it has read ten times the text.
    """
    found, place, tries, spent = None, 0, 0, 0
    while (opening := _OPENING.search(text, place)) is not None and tries < TRIES and spent <= 10 * len(text):
        start = opening.start()
        try:
            found, place = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            known = isinstance(error, json.JSONDecodeError) and not error.msg.startswith("Unterminated")
            spent += (error.pos if known else len(text)) - start  # type: ignore[union-attr]
            tries, place = tries + 1, start + 1
    return found
