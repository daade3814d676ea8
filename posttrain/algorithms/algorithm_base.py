"""What the rows of every table are: a name, where it comes from, and parts with settings.

What reaches settings by their place, or reads what a row needs, knows this class alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from posttrain.core.component import Component, Need, RunLimits


@dataclass(frozen=True)
class AlgorithmBase:
    """A row of a table. Its fields are parts, settings, and labels (see `settings.LABELS`)."""

    name: str
    paper: str

    @property
    def parts(self) -> list[tuple[str, Component]]:
        """All parts that the row has, each with the field that it stands in."""
        found = []
        for f in fields(self):
            value = getattr(self, f.name)
            every = value if isinstance(value, tuple) else (value,)
            found += [(f.name, part) for part in every if isinstance(part, Component)]
        return found

    def needing(self, need: Need) -> list[str]:
        """The fields whose parts need this."""
        return [name for name, part in self.parts if need in part.needs]

    @property
    def needs(self) -> frozenset[Need]:
        """What the row needs of a run before the first update of a step."""
        return frozenset[Need]().union(*(part.needs for _, part in self.parts))

    @property
    def wants(self) -> frozenset[str]:
        """Fields of `Outputs` that the loss reads, besides logp."""
        return frozenset[str]().union(*(part.wants for _, part in self.parts))

    def configured(self, limits: RunLimits) -> Self:
        """The row as a run has it: what its parts leave open is filled in."""

        def filled(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(filled(x) for x in value)
            return value.configured(limits) if isinstance(value, Component) else value

        return replace(self, **{f.name: filled(getattr(self, f.name)) for f in fields(self)})
