"""All advantages by name: the choices of --advantage."""

from __future__ import annotations

from posttrain.algorithms.credit import (
    GAE,
    Advantage,
    Baselined,
    Decoupled,
    Earned,
    KStep,
    PassAtK,
    StepRewards,
    ToGo,
    Unrewarded,
)
from posttrain.algorithms.turn_groups import TurnGroups, TurnHistories

ADVANTAGES: dict[str, Advantage] = {
    "baselined": Baselined(),
    "to-go": ToGo(),
    "process": StepRewards(),
    "turns": TurnGroups(),
    "turn-histories": TurnHistories(),
    "decoupled": Decoupled(),
    "pass-at-k": PassAtK(),
    "gae": GAE(whiten=True),
    "k-step": KStep(),
    "earned": Earned(),
    "none": Unrewarded(),
}
