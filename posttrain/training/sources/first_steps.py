"""Looks whether what the options name occurs in the first steps: the delimiter of steps, and requests to services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.core.reply_steps import REPLY, SPANS
from posttrain.core.rollouts import Rollout
from posttrain.core.types import UserError
from posttrain.system.bounded_places import bounded_places

LOOKED = 3  # steps of training


@dataclass
class FirstSteps:
    """Reports once what did not occur in the first steps.

    delimiter   of steps, of which each reply without it is one; "": none
    services    name -> the option that names it, of services that episodes may ask
    """

    delimiter: str
    services: dict[str, str]
    say: Callable[[str], None]
    _rollouts: int = 0
    _steps: int = 0
    _undelimited: bool = field(init=False)
    _unasked: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._undelimited = self.delimiter not in ("", REPLY, SPANS)
        self._unasked = dict(self.services)

    def look(self, rollouts: Sequence[Rollout]) -> None:
        """Look at the rollouts of a training step, unless the first steps are over."""
        if self._steps == LOOKED:
            return
        self._steps += 1
        self._rollouts += len(rollouts)
        self._undelimited = self._undelimited and not any(map(self._delimited, rollouts))
        asked = {name for rollout in rollouts for name, _ in rollout.answers}
        self._unasked = {name: option for name, option in self._unasked.items() if name not in asked}
        if self._steps == LOOKED and self._rollouts:
            self._report()

    def _delimited(self, rollout: Rollout) -> bool:
        try:
            return bool(bounded_places(self.delimiter, rollout.text))
        except UserError as slow:
            self.say(str(slow))
            return True  # nobody can tell, and one such message is enough

    def _report(self) -> None:
        if self._undelimited:
            self.say(
                f"--step-delimiter {self.delimiter!r} is in none of the {self._rollouts:,} replies of {LOOKED} steps, so "
                "each reply is one step: compare it with replies (posttrain rollouts), ask for it in the prompt, or "
                "give reply"
            )
        why = ": does the environment ask it?"
        if self.delimiter == SPANS:
            why = ": no reward names where steps end (SpanReward), as --step-delimiter spans needs"
        for option in self._unasked.values():
            self.say(f"{option} was asked in none of the {self._rollouts:,} rollouts of {LOOKED} steps{why}")
