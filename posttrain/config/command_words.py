"""Options as the words of a command line: the reverse of reading them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from posttrain.config.resolve import as_dict


def command_words(config: Any, leaving: Set[str] = frozenset()) -> list[str]:
    """Return the words after the verb from which the command line reads these options. Options at their defaults, and those
    in `leaving`, are left out.
    """
    default = as_dict(type(config)())
    words: list[str] = []
    for name, value in as_dict(config).items():
        if value == default[name] or name in leaving:
            continue
        if name == "settings":
            words += [word for place, own in value.items() for word in ("--set", f"{place}={_text(own)}")]
        else:
            words += _words_of(name.rstrip("_").replace("_", "-"), value)
    return words


def _words_of(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [word for key, own in value.items() for word in _entry(f"{name}.{key}", own)]
    if value is True:
        return [f"--{name}"]
    if value is False or value is None or value == []:
        return [f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(_text, value)]
    text = _text(value)
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def _entry(name: str, value: Any) -> list[str]:
    """Return the words of an entry of a table, which may be a table too."""
    if isinstance(value, Mapping):
        return [word for key, own in value.items() for word in _entry(f"{name}.{key}", own)]
    return [f"--{name}={_text(value)}"]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
