"""Decides whether a reply contains JSON, and whether that JSON satisfies a schema.

Validation runs in a process with limits: a pattern in the schema may be catastrophic, and a reference may never end.
References to other documents are refused before anything runs, and nothing is ever fetched.

Only a fault of the schema makes a verdict Invalid. With a valid schema, any reply is right or wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.core.types import Invalid
from posttrain.verify.fenced import fenced, without_thoughts
from posttrain.verify.limited_process import CheckFailed, limited

LONGEST = 2**20  # most characters searched in a reply
TRIES = 1000  # most opening brackets of a reply that begin no JSON
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
VALUES = ("const", "enum", "default", "examples")  # keywords whose content is data, not schemas

_NOTHING: Any = object()
_OPENING = re.compile(r"[\[{]")


def find_json(reply: str) -> Any | None:
    """Return the JSON value (RFC 8259) in a reply; None if there is none. The value null is None too.

    It is the last fenced block that is JSON or names no language, else the whole reply, else the last object or array
    in it. Thoughts before </think> do not count; NaN and Infinity, which Python accepts, are not JSON.

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

    The draft is that of the schema's "$schema", else 2020-12. `timeout`: seconds of processor time for one validation.
    Invalid if the schema is not valid, refers to another document, or cannot validate the value null in time.

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
    """Import the library once per server, so that its children do not have to."""
    import jsonschema  # noqa: F401


def validate(schema: Any, value: Any) -> bool | str:
    """Return whether the value satisfies the schema, or the schema's error as text. Runs in a process with limits."""
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    validator = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        return str(error.message)[:200]
    nothing_is_fetched: Registry[Any] = Registry()  # without it, jsonschema would fetch remote references
    return bool(validator(schema, registry=nothing_is_fetched).is_valid(value))


def _outside(schema: Any) -> Iterator[str]:
    """Yield the references of a schema that point outside it."""
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

    It is bounded, because any opening bracket may be followed by a megabyte without an end: it gives up after `TRIES`
    openings that begin no JSON, or after reading ten times the length of the text.
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
