"""The command of a run, from the options that it recorded: as somebody else can type it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Any

from posttrain.apps.publishing.private_text import without_folders
from posttrain.config.resolve import as_dict
from posttrain.config.verbs import VERBS

LEFT = ("resume", "overwrite", "accept_changes", "quiet", "engine_url")
"""Options of a single start of the command, or of the user's machine."""
TEXTS = ("system", "stop", "step_delimiter", "prompt_template", "response_template")
"""Options whose values are not paths, even if they look like paths."""


def options(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that differ from their defaults, by name, without folders of this machine."""
    default = as_dict(VERBS[about["verb"]].options()) if about["verb"] in VERBS else {}
    return {
        name: value if name in TEXTS else without_folders(value)
        for name, value in about["config"].items()
        if name not in LEFT and (name not in default or value != default[name] or name == "algorithm")
    }


def command(about: Mapping[str, Any]) -> str:
    """Return the command of a run, one option a line."""
    flags = VERBS[about["verb"]].options.flags() if about["verb"] in VERBS else {}
    words = [word for name, value in options(about).items() for word in _words(name, value, flags)]
    return " \\\n    ".join([f"posttrain {about['verb']}", *words])


def _words(name: str, value: Any, flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield an option as it is typed."""
    flag = f"--{name.replace('_', '-')}"
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
