"""The options that a run recorded: those that are not defaults, as they are typed, and those in which two runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Any

from posttrain.config.verbs import VERBS
from posttrain.core.messages import dashed

LEFT = ("resume", "overwrite", "accept_changes", "quiet", "engine_url")
"""Options of a single start of the command, or of the user's machine."""
UNCOMPARED = {"out", "resume", "overwrite", "quiet", "accept_changes"}


def changed(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that differ from their defaults, by name, and its algorithm. An environment that follows
    from others is none of them.
    """
    from posttrain.config.resolve import as_dict  # which loads every algorithm: a table of runs needs no options
    from posttrain.config.service_options import implying

    follows = ("env",) if implying(about["config"]) else ()
    default = as_dict(VERBS[about["verb"]].options()) if about["verb"] in VERBS else {}
    return {
        name: value
        for name, value in about["config"].items()
        if name not in (*LEFT, *follows) and (name not in default or value != default[name] or name == "algorithm")
    }


def typed(about: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Return these options of a run as they are typed, each with its value."""
    flags = VERBS[about["verb"]].options.flags() if about["verb"] in VERBS else {}
    return [word for name, value in options.items() for word in _words(name, value, flags)]


def differing(about: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options in which two runs differ."""
    a, b = flat(about["config"]), flat(other["config"])
    return [
        {"name": name, "a": a.get(name), "b": b.get(name)}
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name) and name not in UNCOMPARED
    ]


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by path: {"settings.kl": 0.1}."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[above + name] = value
    return found


def _words(name: str, value: Any, flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield an option as it is typed."""
    flag = dashed(name)
    if name == "settings":
        for place, setting in value.items():
            yield from (
                _words(place, setting, flags) if place in flags else [f"--set {quote(f'{place}={_text(setting)}')}"]
            )
    elif isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
    elif isinstance(value, dict):
        for inner, own in value.items():
            yield from _words(f"{name}.{inner}", own, flags)
    elif isinstance(value, list):
        if value:
            yield f"{flag} {' '.join(quote(_text(one)) for one in value)}"
    elif value is not None:
        text = _text(value)
        yield f"{flag}={quote(text)}" if text.startswith("-") or not text else f"{flag} {quote(text)}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
