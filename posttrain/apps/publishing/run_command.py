"""The command of a run, from the options that it recorded: as somebody else can type it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.apps.publishing.private_text import without_folders
from posttrain.runs.run_options import changed, typed

TEXTS = ("system", "stop", "step_delimiter", "prompt_template", "response_template")
"""Options whose values are not paths, even if they look like paths."""


def options(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that differ from their defaults, by name, without folders of this machine."""
    return {name: value if name in TEXTS else without_folders(value) for name, value in changed(about).items()}


def command(about: Mapping[str, Any]) -> str:
    """Return the command of a run, one option a line."""
    return " \\\n    ".join([f"posttrain {about['verb']}", *typed(about, options(about))])
