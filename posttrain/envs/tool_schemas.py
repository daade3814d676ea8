"""The JSON schema of a function that a model may call, from its type hints and its docstring.

The form is that of `transformers.utils.get_json_schema`, with which chat templates are trained; a test compares the
two. That function is not used because importing transformers takes more than a second, in every worker.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Union

from posttrain.core.messages import short
from posttrain.core.types import UserError

SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
SEQUENCES = (list, set, frozenset, Sequence, typing.Sequence)
NO_HINT = inspect.Parameter.empty


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return {"type": "function", "function": {...}} of a function.

    Every parameter needs a type hint, and a line under "Args:" of the docstring; choices may be listed there, as in
    `(choices: ["a", "b"])`. Raises UserError with the missing part.
    """
    try:
        return _schema(function)
    except TypeError:  # an unhashable callable
        return _schema.__wrapped__(function)


@lru_cache(maxsize=256)
def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    import docstring_parser

    name = getattr(function, "__name__", "")
    if not re.fullmatch(r"[\w.-]{1,64}", name) or name == "<lambda>":
        raise UserError(f"{short(function)} has no name for calls: give a function written with def")
    parsed = docstring_parser.parse(inspect.getdoc(function) or "")
    said = {part.arg_name: " ".join((part.description or "").split()) for part in parsed.params}
    about = "\n\n".join(part for part in (parsed.short_description, parsed.long_description) if part)
    if parsed.short_description and parsed.long_description and not parsed.blank_after_short_description:
        about = f"{parsed.short_description}\n{parsed.long_description}"
    if not about:
        raise UserError(f"{name} has no docstring: describe the function in one, as the model reads it")
    hints = _hints(function, name)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"{name} takes {parameter}: a model calls it only with named parameters")
        if parameter.name not in hints:
            raise UserError(f"{name}: the parameter {parameter.name!r} needs a type hint")
        if not said.get(parameter.name):
            raise UserError(f'{name}: the docstring needs a line on {parameter.name!r} under "Args:"')
        properties[parameter.name] = _described(hints[parameter.name], said[parameter.name], name)
        if parameter.default is NO_HINT:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    found: dict[str, Any] = {"name": name, "description": about, "parameters": parameters}
    if "return" in hints:
        result = " ".join((parsed.returns.description or "").split()) if parsed.returns else ""
        found["return"] = {**_of_hint(hints["return"], name), **({"description": result} if result else {})}
    return {"type": "function", "function": found}


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:  # evaluating a hint may raise anything
        raise UserError(f"{name}: a type hint cannot be read: {type(error).__name__}: {error}") from error


def _described(hint: Any, text: str, name: str) -> dict[str, Any]:
    found = _of_hint(hint, name)
    if choices := re.search(r"\(choices:\s*(\[.*?\])\)\s*$", text, re.IGNORECASE):
        try:
            found["enum"] = json.loads(choices[1])
        except ValueError:
            raise UserError(f"{name}: {choices[1]} are not choices: write them as JSON, in double quotes") from None
        text = text[: choices.start()].strip()
    return {**found, "description": text}


def _of_hint(hint: Any, name: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if hint in SEQUENCES or hint is tuple:
        return {"type": "array"}
    if hint in (dict, Mapping, typing.Mapping):
        return {"type": "object"}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _of_hint(Literal[tuple(member.value for member in hint)], name)
    if origin in (Union, types.UnionType):
        return _of_union(args, name)
    if origin is Literal:
        kinds = {SIMPLE.get(type(value)) for value in args}
        if None in kinds:
            raise UserError(f"{name}: {hint} has values other than text and numbers")
        listed = sorted(map(str, kinds))
        return {"type": listed[0] if len(listed) == 1 else listed, "enum": list(args)}
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": _of_hint(args[0], name)}
        return {"type": "array", "prefixItems": [_of_hint(arg, name) for arg in args]}
    if (origin is not None and origin in (list, set, frozenset)) or origin in SEQUENCES or _is_sequence(origin):
        return {"type": "array", "items": _of_hint(args[0], name)}
    if origin is dict or _is_mapping(origin):
        found: dict[str, Any] = {"type": "object"}
        return {**found, "additionalProperties": _of_hint(args[1], name)}
    if origin is typing.Annotated:
        return _of_hint(args[0], name)
    raise UserError(f"{name}: {short(hint)} is not a type of JSON: use str, int, float, bool, list, dict, Literal")


def _is_sequence(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _of_union(args: Sequence[Any], name: str) -> dict[str, Any]:
    kinds = [_of_hint(arg, name) for arg in args if arg is not type(None)]
    if len(kinds) == 1:
        found = kinds[0]
    elif all(kind.keys() == {"type"} and isinstance(kind["type"], str) for kind in kinds):
        found = {"type": sorted(kind["type"] for kind in kinds)}
    else:
        found = {"anyOf": kinds}
    return {**found, "nullable": True} if type(None) in args else found


def validator_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that validates arguments: no further properties, and null where a property is nullable."""
    closed = {"additionalProperties": False} if "properties" in parameters else {}
    strict: dict[str, Any] = _strict({**closed, **parameters})
    return strict


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    if found.get("nullable") is not True:  # a parameter may have this name, too
        return found
    del found["nullable"]
    return {"anyOf": [{"type": "null"}, found]}
