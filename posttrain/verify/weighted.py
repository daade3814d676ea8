"""Combines verifiers: a weighted sum whose components are all logged, with gates between components."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.types import Invalid, InvalidKind, Task, UserError

Judge = Callable[[Task, str], "float | bool | Invalid"]
"""(task, reply) -> a number or Invalid."""


@dataclass(frozen=True)
class Weighted:
    """A reward: the weighted sum of components. Each is logged without its weight, as `reward/NAME`.

        reward = Weighted(
            {"correct": (1.0, correct), "format": (0.2, format), "short": (0.1, short)},
            gates={"short": "correct"},
        )

    `parts`: name -> (weight, function of task and reply). `gates`: part -> its gate, another part, or (gate,
    threshold). A part is called and counts only if its gate reaches the threshold (by default 1.0); otherwise it is 0.0
    (the conditioned reward of GDPO, arXiv 2601.05242). A gate that was not called is 0.0 too.

    Invalid as soon as a part is, with that part's name before the reason. The constructor raises UserError for invalid
    weights, names and gates.
    """

    parts: Mapping[str, tuple[float, Judge]]
    gates: Mapping[str, str | tuple[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parts:
            raise UserError("Weighted needs a part, such as {'correct': (1.0, correct)}")
        for name, part in self.parts.items():
            fine = isinstance(part, tuple) and len(part) == 2 and callable(part[1]) and _number(part[0]) is not None
            if not fine:
                raise UserError(
                    f"Weighted: part {name!r} must be (weight, function of task and reply), not {part!r:.80}"
                )
            if name == "reward":
                raise UserError("Weighted: 'reward' is the name of the sum: call the part something else")
        for name, gate in self.gates.items():
            pair = (gate, 1.0) if isinstance(gate, str) else gate
            if not isinstance(pair, tuple) or len(pair) != 2 or _number(pair[1]) is None:
                raise UserError(f"Weighted: the gate of {name!r} must be a part or (part, threshold), not {gate!r:.80}")
            for one in (name, self._gate(name)[0]):
                if one not in self.parts:
                    raise UserError(f"Weighted: gates names {one!r}; the parts are {', '.join(self.parts)}")
        for name in self.gates:
            self._refuse_a_circle(name)

    def __call__(self, task: Task, reply: str) -> dict[str, float] | Invalid:
        """Return {"reward": the sum, and each component}, components in their order."""
        found: dict[str, float] = {}
        for name in self._order():
            if name in self.gates:
                gate, threshold = self._gate(name)
                if not found[gate] >= threshold - 1e-9:
                    found[name] = 0.0
                    continue
            value = self.parts[name][1](task, reply)
            if isinstance(value, Invalid):
                return Invalid(f"{name}: {value.reason}", value.kind)
            number = _number(value)
            if number is None:
                return Invalid(f"{name}: gave {value!r:.80}, not a finite number", InvalidKind.UNREADABLE)
            found[name] = number
        total = math.fsum(weight * found[name] for name, (weight, _) in self.parts.items())
        return {"reward": total, **{name: found[name] for name in self.parts}}

    def _gate(self, name: str) -> tuple[str, float]:
        gate = self.gates[name]
        return (gate, 1.0) if isinstance(gate, str) else gate

    def _order(self) -> list[str]:
        """Return the components, each after its gate."""
        order: dict[str, None] = {}

        def add(name: str) -> None:
            if name in self.gates:
                add(self._gate(name)[0])
            order.setdefault(name)

        for name in self.parts:
            add(name)
        return list(order)

    def _refuse_a_circle(self, name: str) -> None:
        seen, place = {name}, name
        while place in self.gates:
            place = self._gate(place)[0]
            if place in seen:
                raise UserError(f"Weighted: {name!r} waits for itself, by way of its gates")
            seen.add(place)


def _number(value: Any) -> float | None:
    """Return a finite number as float, also from numpy and torch types; None for other values."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except Exception:  # a user's type may have any methods
        return None
    return number if math.isfinite(number) else None
