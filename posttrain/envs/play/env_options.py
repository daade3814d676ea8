"""Options of an environment, written after its name: "search-qa,topk=5,searches=2"."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, get_type_hints

from posttrain.core.coerce import convert
from posttrain.core.messages import near_or_all
from posttrain.core.types import UserError
from posttrain.system.user_code import unwrapped

_WITH_OPTIONS = re.compile(r"([^,]+)((?:,\w+(?:=[^,]*)?)+)")


def split_options(spec: str) -> tuple[str, dict[str, str | None]]:
    """Return name and options: "search-qa,topk=5" -> ("search-qa", {"topk": "5"}); None: the value is missing."""
    found = _WITH_OPTIONS.fullmatch(spec)
    if found is None:
        return spec, {}
    pairs = [option.partition("=") for option in found[2].split(",")[1:]]
    return found[1], {name: value if equals else None for name, equals, value in pairs}


def read_options(
    function: Callable[..., Any],
    name: str,
    options: Mapping[str, str | None],
    own: Mapping[str, inspect.Parameter],
    module: ModuleType,
) -> dict[str, Any]:
    """Return the values of these options. `own`: the parameters that are options. Raises UserError for invalid ones."""
    if unknown := next((option for option in options if option not in own), None):
        has = near_or_all(unknown, list(own)) if own else "; it has none (options are the parameters after a *)"
        raise UserError(f"--env {name}: no option {unknown!r}{has}")
    if empty := next((option for option, text in options.items() if text is None), None):
        example = "VALUE" if own[empty].default in (own[empty].empty, None, "") else own[empty].default
        raise UserError(f"--env {name}: the option {empty} has no value: write {name},{empty}={example}")
    try:
        hints = get_type_hints(unwrapped(function))
    except Exception:  # annotations with unknown names
        hints = {}
    values = {
        option: convert(text, hints.get(option, _kind(own[option].default)), f"--env {name}: {option}")
        for option, text in options.items()
    }
    if callable(refuse := getattr(module, "check_options", None)):
        defaults = {n: p.default for n, p in own.items() if p.default is not p.empty}
        try:
            refuse(**{**defaults, **values})
        except (UserError, ValueError) as error:
            raise UserError(f"--env {name}: {error}") from None
    return values


def _kind(default: Any) -> type:
    """Return the type of an option without an annotation: that of its default, if it is a number or a flag."""
    return type(default) if isinstance(default, bool | int | float) else str
