"""A run of another trainer as it is read: the options that are given, and the values that only its script could compute."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

ENVIRONMENT = ("WANDB_PROJECT", "WANDB_NAME")
"""Environment variables that are read like options."""
LARGEST = 1 << 18  # bytes of a file that is read: a command has some thousands
MOST_VALUES = 50_000  # of a configuration or an expression, each counted as often as anchors or names repeat it
DEEPEST = 20  # levels of brackets and mappings in a value

_KEY = re.compile(r"\w+|'\w+'|\"\w+\"")
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")


class Unresolved(NamedTuple):
    """A value that only running the script would give, as it is written there."""

    text: str


@dataclass
class ForeignRun:
    """The options of a run of another trainer, by their own names, dots included, in the order given.

    devices   processes that share a batch, where the command names them; None: it does not.
    notes     what a reader of the recipe must check, as the end of a sentence that begins with "Check".
    first     what has to be put right before the first run.
    later     options that a script sets after it has read its command.
    names     options that the file gives under another name -> that name.
    defaults  those in place of the trainer's own.
    files     what has to be beside the recipe -> its content.
    home      file with the functions that a script names.
    """

    framework: str  # "TRL", "verl" or "OpenRLHF"
    trainer: str  # as it names it: main_ppo, GRPOTrainer, train_dpo ...
    options: dict[str, Any] = field(default_factory=dict)
    devices: int | None = None
    notes: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    later: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    home: str = ""


def is_known(value: Any) -> bool:
    """Return whether no part of a value is one that only a script could compute."""
    if isinstance(value, (list, tuple, dict)) and not isinstance(value, Unresolved):
        return all(map(is_known, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, Unresolved)


def yaml_of(text: str) -> Any:
    """Return the content of YAML. Raises yaml.YAMLError, ValueError, or RecursionError where it is nested too deeply."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        values, levels = _extent(node, {})
        if levels > DEEPEST:
            raise RecursionError
        if values > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES} values, where anchors repeat some")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _extent(node: Any, known: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Return the values and the levels below a node of YAML, in time that does not depend on how often anchors repeat."""
    if id(node) not in known:
        known[id(node)] = math.inf, math.inf  # of an anchor that holds itself
        inside = node.value if isinstance(node.value, list) else []
        parts = [part for own in inside for part in (own if isinstance(own, tuple) else (own,))]
        sizes = [_extent(part, known) for part in parts]
        known[id(node)] = 1 + sum(s for s, _ in sizes), 1 + max((d for _, d in sizes), default=0)
    return known[id(node)]


def value_of(text: str) -> Any:
    """Return the value of a text as Hydra, YAML and argparse read it: a number, a truth value, nothing, a list, or text."""
    word = text.strip()
    if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    lowered = word.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if word in ("null", "None", "~"):  # "none" is a choice of some options
        return None
    if _INTEGER.fullmatch(word):
        return int(word)
    if _NUMBER.fullmatch(word):
        return float(word)
    if word.startswith(("[", "{")) and max(accumulate((c in "[{") - (c in "]}") for c in word)) > DEEPEST:
        return text
    if word.startswith("[") and word.endswith("]"):
        return [value_of(part) for part in _parts(word[1:-1])]
    if word.startswith("{") and word.endswith("}"):
        try:
            read = json.loads(word)
        except (ValueError, RecursionError):  # perhaps Hydra's {a:1,b:c}
            pairs = [part.partition(":") for part in _parts(word[1:-1])]
            if not all(colon and _KEY.fullmatch(key.strip()) for key, colon, _ in pairs):
                return text
            read = {key.strip().strip("'\""): value_of(value) for key, _, value in pairs}
        return read if isinstance(read, dict) else text
    if "$" in word or "`" in word:
        return Unresolved(word)
    return text


def _parts(inside: str) -> list[str]:
    """Split the inside of a list at its commas, not at those within quotes or brackets."""
    parts, depth, quote = [""], 0, ""
    for character in inside:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
    if len(parts) > 10_000 or depth:
        return [inside]
    return [part for part in parts if part.strip()]


def flat(options: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted names; what is nested deeper than any option stays as it is."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict) and value and depth < 2 and len(found) < 1000:
            found |= flat(value, f"{prefix}{name}.", depth + 1)
        else:
            found[f"{prefix}{name}"] = value
    return found


def shown(value: Any, depth: int = 0) -> str:
    """Return a value as a comment shows it: short, whatever its size."""
    if isinstance(value, Unresolved):
        return value.text[:80]
    if isinstance(value, (list, tuple, dict)):
        if depth > 1:
            return "..."
        parts = [shown(part, depth + 1) for part in list(value)[:6]]
        return f"[{', '.join([*parts, *(['...'] if len(value) > 6 else [])])}]"
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)[:120]
