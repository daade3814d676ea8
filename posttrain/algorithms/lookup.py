"""Finds a row by its name: one of a table, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from posttrain.algorithms.row import Row
from posttrain.algorithms.settings import AnyRow, check_parts
from posttrain.core.messages import near, short
from posttrain.core.types import UserError
from posttrain.system.user_code import load_named


def lookup(name: str, table: Mapping[str, AnyRow], kinds: Mapping[type[AnyRow], str]) -> AnyRow:
    """The row of that name, or the user's own "my.py:row". Raises UserError with the list of rows.

    `kinds`: the classes of which a row of one's own may be made, and where each is imported from.
    """
    if name in table:
        return table[name]
    if ":" in name:
        row = load_named(name)
        if not isinstance(row, tuple(kinds)):
            made = " or ".join(f"{_article(kind)}(...) of {module}" for kind, module in kinds.items())
            raise UserError(f"{name} is {short(row)}, not a row: make it {made}")
        assert isinstance(row, Row)
        check_parts(row)
        return cast(AnyRow, row)
    from posttrain.algorithms.all_algorithms import EVERY, verb_of  # which looks its own rows up here

    if name in EVERY:
        raise UserError(f"{name} is a row of posttrain {verb_of(EVERY[name])}; here there are {', '.join(table)}")
    raise UserError(
        f"unknown algorithm {name!r}{near(name.lower(), table).rstrip('?')}; "
        f"there are {', '.join(table)}; your own is my.py:row"
    )


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
