"""Reads the YAML of Hydra that a command of verl names: its `defaults` list, and references to other values of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from posttrain.apps.migration.foreign_run import LARGEST, Unresolved, flat, value_of, yaml_of
from posttrain.core import user_files
from posttrain.core.messages import one_line

_MOST_FILES = 50  # of a configuration: a list of defaults may name itself
_LONGEST = 10_000  # characters of a value whose references are replaced
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_VERL = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer")
"""verl's own configurations, whose values are the defaults that the importer knows."""


def configured(named: dict[str, str], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a configuration, dotted, and what a reader of the recipe must check.

    Parameters
    ----------
    named
        Its "name" and "path", as the command gives them; none: nothing is read.
    folder
        That of the command. A file is looked for in `path` there, and in `path` under the folder of this process.
    """
    if "name" not in named:
        return {}, []
    name, path = named["name"].removesuffix(".yaml"), named.get("path", "")
    for base in dict.fromkeys((folder / path, Path(path))):
        reading = _Reading(base)
        if reading.add(name):
            return _resolved(reading.options, reading.notes), reading.notes
    decides = "which decides too: its options are not read; add those that differ to the command"
    return {}, [] if name in _VERL else [f"{name}.yaml, {decides}"]


class _Reading:
    """The options of a file and of those in its `defaults`, in Hydra's order: later ones win."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.options: dict[str, Any] = {}
        self.notes: list[str] = []
        self._files = 0

    def add(self, name: str, package: str = "") -> bool:
        """Add a file's options below `package`; False, and perhaps a note, if it cannot be read."""
        import yaml

        self._files += 1
        try:
            content = yaml_of(user_files.text(self.base / f"{name}.yaml", LARGEST))
        except OSError:
            return False
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self.notes.append(f"{name}.yaml, which is not valid YAML: {one_line(error)}")
            return True
        if not isinstance(content, dict):
            return True
        defaults = content.pop("defaults", None)
        content.pop("hydra", None)
        parts = list(defaults) if isinstance(defaults, list) else []
        if "_self_" not in parts:
            parts.append("_self_")
        for part in parts:
            if part == "_self_":
                self.options |= _flat(content, package)
            else:
                self._of_default(part, Path(name).parent, package)
        return True

    def _of_default(self, part: Any, group: Path, package: str) -> None:
        """Add an element of a list of defaults: a name, or {group: name}, perhaps with @package."""
        key, name = next(iter(part.items()), ("", None)) if isinstance(part, dict) else ("", part)
        if name is None or str(key).removeprefix("override ").startswith("hydra/") or self._files >= _MOST_FILES:
            return
        place, _, target = str(key).removeprefix("optional ").removeprefix("override ").partition("@")
        below = target.removeprefix("_global_") if target else place.strip("/").replace("/", ".")
        below = ".".join(filter(None, (package, "" if below == "_here_" else below)))
        file = str(name).removesuffix(".yaml").strip("/")
        place = f"{place.strip('/')}/" if place else ""
        file = str(group / f"{place}{file}") if not str(key).startswith("/") else f"{place}{file}"
        if not self.add(file, below) and Path(file).name not in _VERL:
            self.notes.append(f"{file}.yaml of the defaults, which is not there: add those that differ to the command")


def _flat(content: dict[Any, Any], package: str) -> dict[str, Any]:
    """Return nested mappings as dotted names, the numbers that YAML calls text as numbers."""
    plain = (bool, int, float, str, list, dict, type(None))
    found = flat({package: content} if package else {str(name): value for name, value in content.items()}, depth=-4)
    return {
        name: value_of(value) if isinstance(value, str) and "${" not in value else value
        for name, value in found.items()
        if isinstance(value, plain)
    }


def _resolved(options: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Replace ${name} by the value of this name; other interpolations are left out and noted."""

    def looked_up(value: Any, depth: int = 0) -> Any:
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _REFERENCE.fullmatch(value)
        if depth > 10 or not all(name in options for name in _REFERENCE.findall(value)):
            return Unresolved(value[:200])
        if whole:
            return looked_up(options[whole[1]], depth + 1)
        text = _REFERENCE.sub(lambda found: str(looked_up(options[found[1]], depth + 1)), value)[:_LONGEST]
        return Unresolved(value[:200]) if "${" in text else value_of(text)

    found = {name: looked_up(value) for name, value in options.items()}
    for name in [name for name, value in found.items() if isinstance(value, Unresolved)]:
        notes.append(f"{name} = {found.pop(name).text}, which only Hydra resolves: set it")
    return found
