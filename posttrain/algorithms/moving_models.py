"""Frozen models that move to the policy while it learns: a reference, and a teacher."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.component import Component, setting


def moved(model: str, every: int, rate: float) -> str:
    """Describe how the weights of a frozen model move."""
    mixed = "" if rate == 1 else f"{1 - rate:g} {model} + {rate:g} "
    return f"{model} = {mixed}policy, after every {f'{every} steps' if every > 1 else 'step'}"


@dataclass(frozen=True)
class MovingReference(Component):
    """Updates the reference from the policy: to the policy's weights (rate 1), or part of the way (below 1)."""

    every: int = setting(
        1, "reference-every", "Steps between updates of the reference to the policy (0: never).", least=0, absent=0
    )
    rate: float = setting(
        1.0,
        "reference-update-rate",
        "Share of the way to the policy's weights that an update of the reference goes (1: it becomes the policy).",
        above=0,
        most=1,
    )

    @property
    def formula(self) -> str:
        return moved("reference", self.every, self.rate)

    @property
    def source(self) -> str:
        if self.rate < 1:
            return "TR-DPO, arXiv 2404.09656, soft update"
        return "DeepSeekMath, arXiv 2402.03300, algorithm 1; TR-DPO, arXiv 2404.09656, hard update"
