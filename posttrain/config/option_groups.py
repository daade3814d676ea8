"""Groups of options: the headings of --help, the options under each, and the help text of an option.

An option is a field of a dataclass. The class that declares it gives its group, or the field does; the string below the
field is its help text, of which --help shows only the first sentence.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, get_type_hints

from posttrain.core.component import OnResume, OptionShown

GROUPS = (
    "data",
    "environment",
    "model",
    "sampling",
    "search",
    "labels",
    "algorithm",
    "optimisation",
    "evaluation",
    "scale",
    "record",
)
"""Headings of --help, in the order shown."""


class OptionGroup:
    """Base of classes of options. `class Hardware(OptionGroup, group="scale")` puts its fields under that heading."""

    heading: ClassVar[str] = ""

    def __init_subclass__(cls, group: str = "", **words: Any) -> None:
        super().__init_subclass__(**words)
        cls.heading = group  # a class without one does not inherit that of its base

    def __post_init__(self) -> None:
        """Fill in what follows from other options. A group that overrides it also calls that of the next one."""


@dataclass(frozen=True)
class DescribedOption:
    """An option as --help, types for editors and documents show it."""

    name: str  # of the field
    group: str
    first_hour: bool
    value: str  # a word for its value; "": by its type
    help: str  # in one line
    type: Any
    default: Any
    on_resume: OnResume


def options_of(kind: type[Any]) -> list[DescribedOption]:
    """The options of a class, those of the classes that it extends included, in the order of their groups."""
    hints = get_type_hints(kind)
    found = [_described(kind, f, hints[f.name]) for f in fields(kind)]
    return sorted(found, key=lambda option: GROUPS.index(option.group) if option.group in GROUPS else len(GROUPS))


def _described(kind: type[Any], f: Any, hint: Any) -> DescribedOption:
    shown = [
        own.metadata.get("shown", OptionShown())
        for owner in kind.__mro__
        if (own := owner.__dict__.get("__dataclass_fields__", {}).get(f.name)) is not None
    ]
    default = f.default if f.default_factory is MISSING else f.default_factory()
    return DescribedOption(
        f.name,
        next((s.group for s in shown if s.group), "") or _group_of(kind, f.name),
        next((s.first_hour for s in shown if s.first_hour is not None), False),
        next((s.value for s in shown if s.value), ""),
        help_of(kind, f.name),
        hint,
        default,
        next((s.on_resume for s in shown if s.on_resume), "fixed"),
    )


def on_resume(kind: type[Any], what: OnResume) -> set[str]:
    """The options of a class that a resumed run treats so."""
    return {option.name for option in options_of(kind) if option.on_resume == what}


def _group_of(kind: type[Any], name: str) -> str:
    """Return the group of the class that declares the option; a class that only changes its default gives none."""
    owners = [owner for owner in kind.__mro__ if name in inspect.get_annotations(owner)]
    return next((owner.heading for owner in owners if issubclass(owner, OptionGroup) and owner.heading), "")


def help_of(kind: type[Any], name: str) -> str:
    """The help text of an option: the string below the field in the nearest class that has one, in one line."""
    return next((text for owner in kind.__mro__ if (text := _documented(owner).get(name))), "")


@functools.cache
def _documented(owner: type[Any]) -> dict[str, str]:
    """Field -> the string below it."""
    if not inspect.get_annotations(owner):
        return {}
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except (OSError, TypeError, ValueError):  # made while the program runs
        return {}
    found: dict[str, str] = {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for before, after in pairwise(body):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            said = getattr(after.value, "value", None)
            found |= {before.target.id: " ".join(said.split())} if isinstance(said, str) else {}
    return found
