"""Options that name services: reward models, judges, retrievers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from posttrain.core.types import UserError

LABELLERS = ("reward-model", "judge")
"""Services that label."""

SCORERS = ("reward_model", "judge")
"""Options that name services which say how good a reply is."""

SERVICES = (*SCORERS, "retriever")
"""Options that name services."""


def named_services(values: Sequence[str], kind: str) -> list[tuple[str, str]]:
    """(name, file or folder) of each service of an option: "NAME=FOLDER", or "FOLDER" for the one called as its
    kind."""
    found = [re.fullmatch(r"(?:([A-Za-z][\w-]*)=)?(.+)", value) for value in values]
    if any(match is None for match in found):
        raise UserError(f"--{kind} is empty: leave it out, or give a file or folder")
    return [(match[1] or kind, match[2]) for match in found if match]


def play_the_only_service(config: Any) -> None:
    """Without an environment, a reward model or a judge alone is one."""
    given = [(kind.replace("_", "-"), value) for kind in SCORERS for value in getattr(config, kind)]
    if not config.env and len(given) == 1:
        [(kind, value)] = given
        [(name, _)] = named_services([value], kind)
        if name == kind:
            object.__setattr__(config, "env", kind)
