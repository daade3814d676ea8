"""Base class of the algorithms of every table: a name, a paper, and components with settings.

Code that accesses settings by their place, or reads the needs of an algorithm, depends only on this class.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from posttrain.core.component import Component, Need, RunLimits


@dataclass(frozen=True)
class AlgorithmBase:
    """Entry of a table of algorithms. Its fields are components, settings, and labels (see `settings.LABELS`)."""

    name: str
    paper: str

    @property
    def components(self) -> list[tuple[str, Component]]:
        """Return all components of the algorithm, each with the name of its field."""
        found = []
        for f in fields(self):
            value = getattr(self, f.name)
            every = value if isinstance(value, tuple) else (value,)
            found += [(f.name, part) for part in every if isinstance(part, Component)]
        return found

    def needing(self, need: Need) -> list[str]:
        """Return the names of the fields whose components have this need."""
        return [name for name, part in self.components if need in part.needs]

    @property
    def needs(self) -> frozenset[Need]:
        """Requirements of the algorithm before the first update of a step."""
        return frozenset[Need]().union(*(part.needs for _, part in self.components))

    @property
    def wants(self) -> frozenset[str]:
        """Fields of `Outputs` that the loss reads, besides logp."""
        return frozenset[str]().union(*(part.wants for _, part in self.components))

    def configured(self, limits: RunLimits) -> Self:
        """Return the algorithm with the values that its components take from the run filled in."""

        def filled(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(filled(x) for x in value)
            return value.configured(limits) if isinstance(value, Component) else value

        return replace(self, **{f.name: filled(getattr(self, f.name)) for f in fields(self)})
